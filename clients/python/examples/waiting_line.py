"""A queue whose first place one key names: `python waiting_line.py localhost:7400 ada bob` lets both join, and serves all.

With asyncio. The key to read next depends on the value read before, so the transactions declare no keys."""

import asyncio
import sys

import orthodrome.aio


async def join(db: orthodrome.aio.Client, name: str) -> None:
    @db.transactional()
    async def enter(txn: orthodrome.aio.Transaction, name: str) -> None:
        last = await txn.get_text("queue/last")
        txn.put("queue/first" if last is None else f"queue/after/{last}", name)
        txn.put("queue/last", name)

    await enter(name)


async def serve(db: orthodrome.aio.Client) -> str | None:
    """Takes the first out of the queue; None if nobody waits."""

    async def take(txn: orthodrome.aio.Transaction) -> str | None:
        first = await txn.get_text("queue/first")
        if first is None:
            return None
        after = await txn.get_text(f"queue/after/{first}")
        if after is None:
            txn.delete("queue/first")
            txn.delete("queue/last")
        else:
            txn.put("queue/first", after)
            txn.delete(f"queue/after/{first}")
        return first

    return await db.run(take)


async def main() -> None:
    endpoint, *names = sys.argv[1:]
    async with await orthodrome.aio.connect(endpoint) as db:
        await asyncio.gather(*(join(db, name) for name in names))
        while (served := await serve(db)) is not None:
            print(served)


if __name__ == "__main__":
    asyncio.run(main())
