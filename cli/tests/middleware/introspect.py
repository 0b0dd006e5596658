"""asyncpg over tables of several sources. Nothing in it knows of the proxy.

It asks for the types of parameters, sends arrays in binary form, and waits for errors of a
statement's preparation before it sends Sync. Prisma's engine does the first two as well.
"""

import asyncio
import sys

import asyncpg


async def main() -> None:
    client = await asyncpg.connect(sys.argv[1], timeout=60, command_timeout=60)
    names = await client.fetch(
        "SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
        "WHERE n.nspname = ANY ( $1 ) AND c.relkind = ANY ('{r,p}')",
        ["public", 'of "no" \\ schema'],
    )
    names = {row["relname"] for row in names}
    assert {"items", "notes", "moved", "authors", "books"} <= names, names
    assert await client.fetch("SELECT relname FROM pg_class WHERE relname = ANY($1)", []) == []
    for text in ("SELECT nothing FROM nowhere", "SELEC 1", "SELECT relname FROM pg_class WHERE"):
        try:
            await client.fetch(text)
            raise AssertionError(f"{text}: no error")
        except asyncpg.PostgresError as error:
            assert error.sqlstate in ("42P01", "42601"), (text, error.sqlstate, error)
    assert await client.fetchval("SELECT 1") == 1
    await client.close()
    print("ok asyncpg")


asyncio.run(main())
