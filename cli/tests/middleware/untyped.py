"""Parameters to which a driver gives no type: asyncpg asks the server for each, and sends the binary form. Through a proxy
over PostgreSQL (ids below 100) and MariaDB."""

import asyncio
import datetime
import decimal
import sys
import uuid

import asyncpg
import psycopg

user, password, port = sys.argv[1:]


async def main():
    db = await asyncpg.connect(host="127.0.0.1", port=int(port), user=user, password=password, database="bank")
    # A row of each source, and of both.
    for ids in ([1], [101], [1, 101]):
        found = await db.fetch("SELECT id FROM accounts WHERE id = ANY($1) ORDER BY id LIMIT $2", ids, 10)
        assert [row["id"] for row in found] == ids, found
    for account in (2, 102):
        assert await db.fetchval("SELECT balance FROM accounts WHERE id = $1", account) == 1000
        assert await db.execute("UPDATE accounts SET balance = balance + $1 WHERE id = $2", 5, account) == "UPDATE 1"
        assert await db.fetchval("UPDATE accounts SET balance = balance - $1 WHERE id = $2 RETURNING balance", 5, 2)
        await db.execute("UPDATE accounts SET balance = 1000 WHERE id IN ($1, $2)", 2, account)
    assert await db.fetchval("SELECT $1::int + 1", 41) == 42
    await db.execute("DROP TABLE IF EXISTS typed")
    await db.execute(
        "CREATE TABLE typed (id int PRIMARY KEY, n numeric(12,4), d date, t time, ts timestamp, tz timestamptz, b bytea,"
        " u uuid, j jsonb, ok boolean, f float8, xs int[], big bigint, s varchar(20), i interval)"
    )
    day = datetime.datetime(2024, 2, 29, 12, 30, 1, 250_000)
    values = [
        1,
        decimal.Decimal("-1234.5678"),
        day.date(),
        day.time(),
        day,
        day.replace(tzinfo=datetime.timezone.utc),
        b"\x00\\x41",
        uuid.UUID(int=7),
        '{"a": 1}',
        True,
        0.1,
        [1, None, 3],
        2**60,
        "it's \\",
        datetime.timedelta(days=3, seconds=5),
    ]
    marks = ", ".join(f"${number + 1}" for number in range(len(values)))
    await db.execute(f"INSERT INTO typed VALUES ({marks})", *values)
    found = list(await db.fetchrow("SELECT * FROM typed WHERE ts = $1 AND n = $2", day, values[1]))
    assert found == values, (found, values)
    await db.execute("INSERT INTO typed (id, n) VALUES ($1, $2)", 2, None)
    assert await db.fetchval("SELECT count(*) FROM typed WHERE n IS NULL") == 1
    try:
        await db.fetch("SELECT * FROM nowhere WHERE id = $1", 1)
        raise AssertionError("there is no such table")
    except asyncpg.UndefinedTableError:
        pass
    await db.execute("DROP TABLE typed")
    await db.close()


def buffer():
    """node-postgres sends bytes in binary form, without a type."""
    text = f"host=127.0.0.1 port={port} user={user} password={password} dbname=bank"
    connection = psycopg.pq.PGconn.connect(text.encode())
    connection.exec_(b"CREATE TABLE buffers (id int PRIMARY KEY, b bytea)")
    for number, value in enumerate([b"\\x4142", b"a\\\\b", b"\x00\xff"]):
        query = b"INSERT INTO buffers VALUES ($1, $2) RETURNING b"
        result = connection.exec_params(
            query, [str(number).encode(), value], param_formats=[0, 1], result_format=1
        )
        assert result.ntuples == 1, result.error_message
        assert result.get_value(0, 0) == value, result.get_value(0, 0)
    connection.exec_(b"DROP TABLE buffers")


asyncio.run(main())
buffer()
print("ok")
