"""Money moves between two sources through SQLAlchemy, in whichever protocol the address names."""

import sys

from sqlalchemy import MetaData, Table, Column, Integer, create_engine, func, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

engine = create_engine(sys.argv[1], isolation_level=None)
accounts = Table(
    "accounts", MetaData(), Column("id", Integer, primary_key=True), Column("balance", Integer)
)


def balances(connection):
    rows = connection.execute(
        select(accounts.c.id, accounts.c.balance).where(accounts.c.id.in_([1, 101])).order_by(accounts.c.id)
    )
    return [tuple(row) for row in rows]


def add(connection, account, amount):
    done = connection.execute(
        update(accounts).where(accounts.c.id == account).values(balance=accounts.c.balance + amount)
    )
    assert done.rowcount == 1, done.rowcount


with engine.begin() as connection:
    before = balances(connection)
    add(connection, 1, -5)
    add(connection, 101, 5)
with engine.connect() as connection:
    (_, a), (_, b) = balances(connection)
    assert [(1, a + 5), (101, b - 5)] == before, (before, a, b)
    connection.rollback()
    # Nothing of a transaction that is rolled back stays.
    add(connection, 1, -100)
    add(connection, 101, 100)
    connection.rollback()
    assert balances(connection) == [(1, a), (101, b)]
    total = connection.execute(select(func.sum(accounts.c.balance))).scalar_one()
    connection.rollback()

# An error at one source undoes the other's part, and the connection goes on.
with engine.connect() as connection:
    try:
        with connection.begin():
            add(connection, 1, -100)
            connection.execute(accounts.insert().values(id=101, balance=1))
        raise SystemExit("a duplicate was taken")
    except IntegrityError:
        pass
    with connection.begin():
        assert balances(connection) == [(1, a), (101, b)]

# Two that lock the same rows in opposite order: one is told to try again, and does.
import threading

tries = []
meet = threading.Barrier(2)


def transfer(first, second):
    attempt = 0
    while True:
        attempt += 1
        try:
            with engine.begin() as connection:
                add(connection, first, -1)
                if attempt == 1:
                    meet.wait()
                add(connection, second, 1)
            tries.append(attempt)
            return
        except DBAPIError as error:
            state = getattr(error.orig, "pgcode", None) or error.orig.args[0]
            assert state in ("40001", "40P01", "55P03", 1213, 1205), error
            assert attempt < 20, error


threads = [threading.Thread(target=transfer, args=pair) for pair in ((1, 101), (101, 1))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(tries) == 2 and max(tries) > 1, tries
with engine.connect() as connection:
    assert connection.execute(select(func.sum(accounts.c.balance))).scalar_one() == total
    assert balances(connection) == [(1, a), (101, b)]
    assert connection.execute(text("SELECT count(*) FROM accounts WHERE id = :id"), {"id": 1}).scalar_one() == 1

if engine.dialect.name == "mysql":
    # Pools hand connections from one user to another: COM_CHANGE_USER, which begins a session anew.
    import struct

    from pymysql import _auth, err

    raw = engine.raw_connection().driver_connection
    user, password = engine.url.username, engine.url.password

    def change_user(secret):
        order = user.encode() + b"\0\0bank\0" + struct.pack("<H", 45) + b"mysql_native_password\0"
        raw._execute_command(17, order)
        packet = raw._read_packet()
        assert packet.is_auth_switch_request()
        packet.read_uint8()
        assert packet.read_string() == b"mysql_native_password"
        nonce = packet.read_all()[:20]
        raw.write_packet(_auth.scramble_native_password(secret.encode(), nonce))
        return raw._read_packet()

    cursor = raw.cursor()
    cursor.execute("UPDATE accounts SET balance = 0 WHERE id = 1")
    assert change_user(password).is_ok_packet()
    # What was open is rolled back.
    cursor.execute("SELECT balance FROM accounts WHERE id = 1")
    assert cursor.fetchall() == ((a,),)
    try:
        change_user("wrong")
        raise SystemExit("a wrong password was taken")
    except err.OperationalError as error:
        assert error.args[0] == 1045, error
print("ok", engine.dialect.name)
