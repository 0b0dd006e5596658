"""What PostgreSQL's extended protocol and MySQL's prepared statements do, through a proxy over PostgreSQL (ids below 100)
and MariaDB. The last argument is the port of the PostgreSQL source."""

import sys
import time

import psycopg
import psycopg2
import pymysql
from psycopg import pq

user, password, postgresql, mysql, source = sys.argv[1:]


def connect(port, user, password):
    text = f"host=127.0.0.1 port={port} user={user} password={password} dbname=bank"
    connection = pq.PGconn.connect(text.encode())
    assert connection.status == pq.ConnStatus.OK, connection.error_message
    return connection


proxy = connect(postgresql, user, password)
# The password of the servers of the tests is in the last argument.
port, own_user, own_password = source.split(",")
direct = connect(port, own_user, own_password)


def run(connection, text, values=(), form=0):
    values = [None if value is None else str(value).encode() for value in values]
    return connection.exec_params(text.encode(), values, result_format=form)


def rows(result):
    assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message.decode()
    return [
        [result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)
    ]


def code(result):
    return result.error_field(pq.DiagnosticField.SQLSTATE)


def binary():
    values = [
        "'1 year 2 mons 3 days 04:05:06.789'::interval",
        "'-1 mons +2 days -03:04:05.000001'::interval",
        "'0'::interval",
        "ARRAY[1, 2, NULL]::int[]",
        "'[0:1][2:3]={{1,2},{3,4}}'::int8[]",
        "'{}'::text[]",
        """ARRAY['a', '', 'b,c', 'NULL', NULL, '"', 'd\\e', '{f}']::text[]""",
        "ARRAY['\\x00ff'::bytea, '\\x']",
        "ARRAY[1.5, 'NaN', -0.001]::numeric[]",
        "ARRAY[true, false]",
        "ARRAY['2024-01-02'::date, 'infinity']",
        "ARRAY['1 day'::interval]",
        "ARRAY['(1,2),(0,0)'::box, '(3,4),(1,1)']",
        "'-12.34'::money",
        "'123456.78'::money",
        """'{"a": [1, null, "b"]}'::jsonb""",
        "'[1]'::json",
        "ARRAY['{}'::jsonb]",
        "'$.a'::jsonpath",
        "4294967295::oid",
        "ARRAY[1, 2]::oid[]",
        "'7'::xid",
        "'7'::cid",
        "'7'::xid8",
        "'(1,2)'::tid",
        "'16/B374D848'::pg_lsn",
        "'x'::\"char\"",
        "'name'::name",
        "'infinity'::date",
        "'-infinity'::date",
        "'0044-03-15 BC'::date",
        "'12024-03-15'::date",
        "'infinity'::timestamp",
        "'-infinity'::timestamptz",
        "'0044-03-15 12:00:00 BC'::timestamptz",
        "'2024-03-15 12:00:00.123456+05:30'::timestamptz",
        "'04:05:06.7'::time",
        "'24:00'::time",
        "'04:05:06.7-03:30'::timetz",
        "'NaN'::numeric",
        "'Infinity'::numeric",
        "'-Infinity'::numeric",
        "12345.678::numeric",
        "0.00001::numeric",
        "10000::numeric",
        "'NaN'::float8",
        "'-Infinity'::float4",
        "0.1::float4",
        "'192.168.1.5/24'::inet",
        "'192.168.1.0/24'::cidr",
        "'::1'::inet",
        "'08:00:2b:01:02:03'::macaddr",
        "'08:00:2b:01:02:03:04:05'::macaddr8",
        "B'10110000111'",
        "''::varbit",
        "'(1.5,-2)'::point",
        "'[(1,2),(3,4)]'::lseg",
        "'(1,2),(0,0)'::box",
        "'[(1,2),(3,4)]'::path",
        "'((1,2),(3,4))'::path",
        "'((1,2),(3,4),(5,6))'::polygon",
        "'{1,2,3}'::line",
        "'<(1,2),3>'::circle",
        "int4range(1, 5)",
        "'empty'::int8range",
        "numrange(NULL, 5.5, '[]')",
        "tsrange('2024-01-01', '2024-01-02')",
        "tstzrange('2024-01-01+00', NULL)",
        "daterange('2024-01-01', NULL)",
        "ARRAY[int4range(1, 5)]",
        "'1 2 3'::int2vector",
        "'1 2 3'::oidvector",
        "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid",
        "ARRAY['a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid]",
        "'<a/>'::xml",
        "'mild'::mood",
        "\'\\x00ff'::bytea",
        "NULL::int[]",
    ]
    wrong = []
    for value in values:
        expected = run(direct, f"SELECT {value}", form=1)
        wanted = rows(expected)
        for text in [f"SELECT {value}", f"SELECT {value} FROM accounts WHERE id = 1"]:
            result = run(proxy, text, form=1)
            if result.status != pq.ExecStatus.TUPLES_OK:
                wrong.append((text, result.error_message))
            elif rows(result) != wanted or result.ftype(0) != expected.ftype(0):
                wrong.append((text, rows(result), wanted))
    assert not wrong, wrong
    # What the proxy cannot convert, it refuses, and the connection goes on.
    for value in ["ROW(1, 2)", "'a & b'::tsquery", "'accounts'::regclass"]:
        assert code(run(proxy, f"SELECT {value} FROM accounts WHERE id = 1", form=1)) == b"0A000", value
    # Both kinds of sources.
    [[count]] = rows(run(proxy, "SELECT count(*) FROM accounts", form=1))
    assert int.from_bytes(count, "big") == 40


def many():
    for first, sign in [(-1, -1), (1000, 1)]:
        count = 17_000
        numbers = [first + sign * at for at in range(count)]
        places = ", ".join(f"(${2 * at + 1}, ${2 * at + 2})" for at in range(count))
        values = [value for number in numbers for value in (number, 0)]
        result = run(proxy, f"INSERT INTO accounts (id, balance) VALUES {places}", values)
        assert result.status == pq.ExecStatus.COMMAND_OK, result.error_message.decode()
        assert result.command_tuples == count
    [[total]] = rows(run(proxy, "SELECT count(*) FROM accounts"))
    assert int(total) == 40 + 34_000
    assert run(proxy, "DELETE FROM accounts WHERE balance = 0").status == pq.ExecStatus.COMMAND_OK
    # The most that the protocol has.
    run(proxy, "BEGIN ISOLATION LEVEL READ COMMITTED")
    places = ", ".join(f"${at + 1}" for at in range(65_535))
    [[found]] = rows(run(proxy, f"SELECT count(*) FROM accounts WHERE id IN ({places})", range(65_535)))
    assert int(found) == 40
    run(proxy, "COMMIT")


def pipeline():
    change = b"UPDATE accounts SET balance = balance + $1::int - $1::int + length($2) * 0 + 1 WHERE id = 1"
    piece = b"x" * (1 << 20)
    # What a Flush has executed waits no more.
    for count, flushes_after, is_taken, wanted in [
        (3, 100, True, b"1003"),
        (70, 10, True, b"1073"),
        (70, 100, False, b"1073"),
    ]:
        proxy.nonblocking = 1
        proxy.enter_pipeline_mode()
        for number in range(count):
            proxy.send_query_params(change, [b"1", piece])
            if number % flushes_after == flushes_after - 1:
                proxy.send_flush_request()
            while proxy.flush():
                proxy.consume_input()
                time.sleep(0.001)
        if not is_taken:
            # The error comes before Sync.
            until = time.monotonic() + 60
            while proxy.is_busy():
                assert time.monotonic() < until, "no error before Sync"
                proxy.consume_input()
                time.sleep(0.001)
        proxy.pipeline_sync()
        while proxy.flush():
            proxy.consume_input()
            time.sleep(0.001)
        proxy.nonblocking = 0
        codes, synced = set(), False
        while not synced:
            result = proxy.get_result()
            if result is None:
                continue
            synced = result.status == pq.ExecStatus.PIPELINE_SYNC
            if result.status == pq.ExecStatus.FATAL_ERROR:
                codes.add(code(result))
        proxy.exit_pipeline_mode()
        assert codes == (set() if is_taken else {b"54000"}), codes
        [[balance]] = rows(run(proxy, "SELECT balance FROM accounts WHERE id = 1"))
        assert balance == wanted, balance
    run(proxy, "UPDATE accounts SET balance = 1000 WHERE id = 1")


def pieces():
    connection = pymysql.connect(host="127.0.0.1", port=int(mysql), user=user, password=password, database="bank")

    def prepare(text):
        connection._execute_command(0x16, text)
        packet = connection._read_packet()
        statement = int.from_bytes(packet._data[1:5], "little")
        columns = int.from_bytes(packet._data[5:7], "little")
        parameters = int.from_bytes(packet._data[7:9], "little")
        for count in (parameters, columns):
            for _ in range(count + 1 if count else 0):
                connection._read_packet()
        return statement.to_bytes(4, "little")

    def send(statement, count, length=8 << 20):
        for _ in range(count):
            connection._execute_command(0x18, statement + b"\0\0" + b"x" * length)

    def execute(statement):
        # One parameter: a BLOB that was sent before.
        connection._execute_command(0x17, statement + b"\0\1\0\0\0" + b"\0\1\xfc\0")
        packet = connection._read_packet()
        values = []
        if packet._data[0] > 0:
            for _ in range(packet._data[0] + 1):
                connection._read_packet()
            while True:
                packet = connection._read_packet()
                if packet._data[0] == 0xFE and len(packet._data) < 9:
                    return values
                values.append(packet._data)
        return values

    length = prepare("SELECT length(?) FROM accounts WHERE id = 101")
    other = prepare("SELECT length(?) FROM accounts WHERE id = 101")
    for _ in range(2):
        # All statements of a connection share one bound.
        send(other, 4)
        send(length, 5)
        try:
            execute(length)
            raise AssertionError("pieces without a bound")
        except pymysql.err.OperationalError as error:
            assert error.args[0] == 1153, error
        # What was too long is forgotten, and what was not is executed.
        send(length, 2, 1 << 20)
        [row] = execute(length)
        assert (2 << 20).to_bytes(4, "little") in row, row
        connection._execute_command(0x1A, other)
        connection._read_packet()
    with connection.cursor() as cursor:
        cursor.execute("SELECT balance FROM accounts WHERE id = 101")
        assert cursor.fetchone() == (1000,)


def functions():
    # psycopg describes a statement before it executes it.
    with psycopg.connect(
        f"host=127.0.0.1 port={postgresql} user={user} password={password} dbname=bank", autocommit=True
    ) as connection:
        for prepare in [False, True]:
            connection.execute("SELECT note(%s)", (1,), prepare=prepare)
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT note(%s)", (1,))


def old_calls():
    """A function call of the old protocol, which no Sync follows: libpq's large objects."""
    old = psycopg2.connect(host="127.0.0.1", port=postgresql, user=user, password=password, dbname="bank")
    try:
        old.lobject(0, "w")
        raise AssertionError("it was accepted")
    except psycopg2.Error as refused:
        assert "old protocol" in str(refused), refused
    old.rollback()
    with old.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)
    old.close()


def told():
    # A statement is described by one kind of source, and another kind computes its rows.
    for id in [1, 101]:
        for text, type, data in [
            ("SELECT sum(id) FROM accounts WHERE id = $1::int", 20, int(id).to_bytes(8, "big")),
            ("SELECT balance > 0 FROM accounts WHERE id = $1", 16, b"\1"),
        ]:
            assert proxy.prepare(b"told", text.encode()).status == pq.ExecStatus.COMMAND_OK
            described = proxy.describe_prepared(b"told").ftype(0)
            result = proxy.exec_prepared(b"told", [str(id).encode()], result_format=1)
            [[value]] = rows(result)
            assert (result.ftype(0), value) == (described, data), (text, result.ftype(0), value)
            assert described == type, (text, described)
            proxy.exec_(b"DEALLOCATE told")


def batches():
    flags = pymysql.constants.CLIENT.MULTI_STATEMENTS
    for flag in [0, flags]:
        connection = pymysql.connect(
            host="127.0.0.1", port=int(mysql), user=user, password=password, database="bank", client_flag=flag
        )
        with connection.cursor() as cursor:
            try:
                cursor.execute("SELECT 1; DELETE FROM accounts WHERE id = 0")
                assert flag, "a second statement was executed"
            except pymysql.err.ProgrammingError as error:
                assert not flag and error.args[0] == 1064, error
        connection.close()


def labels():
    connection = pymysql.connect(host="127.0.0.1", port=int(mysql), user=user, password=password, database="bank")
    with connection.cursor() as cursor:
        for id in [1, 101]:
            cursor.execute("SELECT COUNT(*), balance*2 FROM accounts WHERE id = %s GROUP BY id, balance", (id,))
            assert [column[0] for column in cursor.description] == ["COUNT(*)", "balance*2"], cursor.description
    for id in (5, 105):
        text = f"SELECT count(*), max(balance) AS Total, Id, id + 1, id::text FROM accounts WHERE id = {id} GROUP BY id"
        result = proxy.exec_(text.encode())
        names = [result.fname(at).decode() for at in range(result.nfields)]
        assert names == ["count", "total", "id", "?column?", "id"], (id, names)


binary()
told()
batches()
labels()
many()
pipeline()
pieces()
functions()
old_calls()
print("ok")
