"""What psycopg2 and PyMySQL set, copy and send, through a proxy over PostgreSQL (ids below 100) and MariaDB."""

import io
import sys
import time

import psycopg2
import psycopg2.extensions
import pymysql

user, password, postgresql, mysql = sys.argv[1:]
EVERY_BYTE = bytes(range(256)) + b"'\\\"" + b"\xff\xfe\x00"


def connect(**more):
    return psycopg2.connect(
        host="127.0.0.1", port=postgresql, user=user, password=password, dbname="bank", **more
    )


def one(cursor, text, values=None):
    cursor.execute(text, values)
    return cursor.fetchone()[0]


# Settings of the connection, and those that frameworks make next.
connection = connect(
    client_encoding="utf-8", application_name="test", options="-c TimeZone=UTC -c statement_timeout=20s"
)
assert connection.encoding == "UTF8", connection.encoding
assert connection.get_parameter_status("application_name") == "test"
cursor = connection.cursor()
assert one(cursor, "SHOW statement_timeout") == "20s"
connection.rollback()
connection.set_client_encoding("UTF8")
connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
assert one(cursor, "SHOW transaction_isolation") == "repeatable read"
try:
    cursor.execute("UPDATE accounts SET balance = 0 WHERE id = 1")
    raise SystemExit("a read-only transaction has written")
except psycopg2.errors.ReadOnlySqlTransaction:
    connection.rollback()
connection.set_session(isolation_level="DEFAULT", readonly=False)
cursor.execute("SELECT set_config('TimeZone', %s, false)", ["<+01:00>-01:00"])
connection.commit()
assert connection.get_parameter_status("TimeZone") == "<+01:00>-01:00"
try:
    connection.set_client_encoding("LATIN1")
    raise SystemExit("LATIN1 was taken")
except psycopg2.Error as error:
    assert "UTF-8" in str(error), error
connection.rollback()
try:
    connect(client_encoding="LATIN1")
    raise SystemExit("LATIN1 was taken")
except psycopg2.OperationalError as error:
    assert "UTF-8" in str(error), error

# Rows in bulk, to both sources and back.
rows = "".join(f"{id}\t{id * 10}\t\\N\n" for id in (1, 2, 101, 102))
cursor.copy_from(io.StringIO(rows), "accounts", columns=("id", "balance", "note"))
cursor.copy_from(io.StringIO("3|30\n103|1030\n"), "accounts", sep="|", columns=("id", "balance"))
cursor.copy_expert(
    "COPY accounts (id, balance) FROM STDIN WITH (FORMAT csv, HEADER)",
    io.StringIO('id,balance\n4,"40"\n104,1040\n'),
)
connection.commit()
out = io.StringIO()
# Reads by key wait for rows that were committed a moment ago.
IDS = (1, 2, 3, 4, 101, 102, 103, 104)
keys = ", ".join(str(id) for id in IDS)
cursor.copy_expert(
    f"COPY (SELECT id, balance FROM accounts WHERE id IN ({keys}) ORDER BY id) TO STDOUT CSV", out
)
expected = [(id, id * 10) for id in IDS]
assert out.getvalue() == "".join(f"{id},{balance}\n" for id, balance in expected), out.getvalue()
out = io.StringIO()
cursor.copy_to(out, "accounts", columns=("id", "note"), null="-")
assert sorted(out.getvalue().split("\n"))[1:3] == ["1\t-", "101\t-"], out.getvalue()
connection.commit()
for text, bad in [
    ("COPY accounts (id, balance) FROM STDIN", b"5\tx\xffy\n"),
    ("COPY accounts (id, balance) FROM STDIN", b"5\n"),
    ("COPY accounts FROM STDIN WITH BINARY", b"x"),
    ("COPY accounts (id, balance) FROM STDIN", b"1\t1\n"),
    # The last row is there already, at one source or the other: none of the rows stays.
    ("COPY accounts (id, balance) FROM STDIN", b"5\t1\n105\t1\n1\t1\n"),
    ("COPY accounts (id, balance) FROM STDIN", b"5\t1\n105\t1\n101\t1\n"),
    ("COPY accounts (id, balance) FROM STDIN WITH (FORMAT csv)", b"105,1\n5,1\n104,1\n"),
    ("COPY accounts (id, balance) FROM STDIN WITH (FORMAT csv)", b'105,1\n5,1\n6,"1\n'),
]:
    try:
        cursor.copy_expert(text, io.BytesIO(bad))
        raise SystemExit(f"{bad!r} was copied")
    except psycopg2.Error:
        connection.rollback()
    assert one(cursor, "SELECT count(*) FROM accounts") == 8, bad
    connection.rollback()

# Bytes in bulk, at sources of both kinds.
digits = EVERY_BYTE.hex()
cursor.copy_from(io.StringIO(f"7\t1\t\\\\x{digits}\n107\t1\t\\\\x{digits}\n"), "accounts")
for id in (7, 107):
    assert bytes(one(cursor, "SELECT note FROM accounts WHERE id = %s", [id])) == EVERY_BYTE, id
out = io.StringIO()
cursor.copy_expert("COPY (SELECT note FROM accounts WHERE id IN (7, 107)) TO STDOUT", out)
assert out.getvalue() == f"\\\\x{digits}\n" * 2, out.getvalue()
connection.rollback()

# Bytes, at sources of both kinds.
for id in (1, 101):
    cursor.execute("UPDATE accounts SET note = %s WHERE id = %s", [psycopg2.Binary(EVERY_BYTE), id])
    assert cursor.rowcount == 1
    assert bytes(one(cursor, "SELECT note FROM accounts WHERE id = %s", [id])) == EVERY_BYTE, id
connection.commit()
try:
    cursor.execute(b"SELECT balance, 'x\xff' FROM accounts WHERE id = 1")
    raise SystemExit("a text that is not UTF-8 was taken")
except psycopg2.errors.CharacterNotInRepertoire:
    connection.rollback()
assert one(cursor, "SELECT balance FROM accounts WHERE id = 1") == 10
connection.close()

# The same in MySQL's protocol.
connection = pymysql.connect(
    host="127.0.0.1",
    port=int(mysql),
    user=user,
    password=password,
    database="bank",
    charset="utf8mb4",
    init_command="SET SESSION time_zone = '+00:00', sql_mode = CONCAT(@@sql_mode, ',NO_ZERO_DATE')",
    autocommit=False,
)
cursor = connection.cursor()
assert "NO_ZERO_DATE" in one(cursor, "SELECT @@sql_mode")
cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
assert one(cursor, "SELECT @@transaction_isolation") == "READ-COMMITTED"
cursor.execute("SET SQL_AUTO_IS_NULL = 0")
cursor.execute("SET NAMES utf8mb4 COLLATE utf8mb4_unicode_ci")
for id in (2, 102):
    # At this level another client's commit is seen once its source has it.
    until = time.monotonic() + 60
    while one(cursor, "SELECT note FROM accounts WHERE id = %s", [id - 1]) is None:
        assert time.monotonic() < until, f"the commit of {id - 1} is not seen"
    assert bytes(one(cursor, "SELECT note FROM accounts WHERE id = %s", [id - 1])) == EVERY_BYTE, id
    cursor.execute("UPDATE accounts SET note = %s WHERE id = %s", [EVERY_BYTE, id])
    assert bytes(one(cursor, "SELECT note FROM accounts WHERE id = %s", [id])) == EVERY_BYTE, id
connection.commit()
assert one(cursor, b"SELECT 'x\xff' FROM accounts WHERE id = 101") == b"x\xff"
connection.rollback()
try:
    cursor.execute(b"SELECT balance AS `x\xff` FROM accounts WHERE id = 1")
    raise SystemExit("a name that is not UTF-8 was taken")
except pymysql.Error as error:
    assert error.args[0] == 1300, error
connection.rollback()
cursor.execute("START TRANSACTION READ ONLY")
try:
    cursor.execute("DELETE FROM accounts WHERE id = 1")
    raise SystemExit("a read-only transaction has written")
except pymysql.Error as error:
    assert error.args[0] == 1792, error
connection.rollback()
connection.close()
print("ok")
