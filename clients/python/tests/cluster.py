"""The client on a real cluster of three nodes, of which the first fails. Prints `done`.

    python cluster.py ENDPOINTS PROCESS

PROCESS is the process id of the first node. `cli/tests/python.rs` starts the cluster."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import orthodrome
import orthodrome.aio
from orthodrome import Op

ACCOUNTS = [f"account/{number}" for number in range(4)]
MONEY = 100 * len(ACCOUNTS)


def check(found: Any, expected: Any) -> None:
    assert found == expected, f"{found!r} instead of {expected!r}"


def calls(db: orthodrome.Client) -> None:
    about = db.describe()
    check(len(about.regions), 3)
    check(db.status().trouble, "")
    check(db.get("none"), None)
    db.put("text", "größe")
    check(db.read(["text", "none"]).reads.text("text"), "größe")
    check(db.read([b"text"], stale=True).reads["text"], "größe".encode())
    done = db.execute([Op.get("n"), Op.add("n", 2), Op.append("text", "!"), Op.put("empty", b"")])
    assert done.reads is not None
    check(done.reads["n"], None)
    check(dict(db.read(["n", "empty"]).reads), {b"n": b"2", b"empty": b""})
    try:
        db.execute([Op.compare("n", "3"), Op.put("n", "4")])
        raise AssertionError("the guard holds 2")
    except orthodrome.GuardFailed as error:
        check(error.reason, orthodrome.AbortReason.GUARD)
    try:
        db.execute([Op.put("long", b"x" * 900_000), Op.append("long", b"x" * 900_000)])
        raise AssertionError("values have at most 1 MiB")
    except orthodrome.TooLarge as error:
        check(error.retryable, False)
    try:
        db.put("", "v")
        raise AssertionError("the empty key is refused")
    except orthodrome.InvalidError as error:
        assert "key" in str(error), error
    db.delete("n")
    check(db.get("n"), None)
    db.execute([Op.put(f"row/{number}", str(number)) for number in range(5)])
    rows = orthodrome.KeyRange.prefix("row/")
    page = db.scan(rows)
    check(page.rows, tuple((f"row/{number}".encode(), str(number).encode()) for number in range(5)))
    check(page.rest, None)
    page = db.scan(rows, limit=2, backwards=True, keys_only=True)
    check(page.rows, ((b"row/4", None), (b"row/3", None)))
    assert page.rest is not None
    check([key for key, _ in db.scan(page.rest, backwards=True).rows], [b"row/2", b"row/1", b"row/0"])
    check(db.scan(orthodrome.KeyRange(b"row/3", b"row/4")).rows, ((b"row/3", b"3"),))


def transactions(db: orthodrome.Client) -> None:
    for declared in ({}, {"read": ["a"], "write": ["a", "b"]}):
        db.execute([Op.put("a", "1"), Op.delete("b")])
        with db.transaction(**declared) as txn:
            check(txn.get_text("a"), "1")
            txn.put("a", "2")
            check(txn.get("a"), b"2")
            txn.put("b", "3")
        assert txn.committed is not None and txn.committed.timestamp > 0
        check(dict(db.read(["a", "b"]).reads), {b"a": b"2", b"b": b"3"})
        try:
            with db.transaction(**declared) as txn:
                txn.get("a")
                txn.put("a", "4")
                raise KeyError("mine")
        except KeyError:
            check(db.get("a"), b"2")
        # Another client writes what the transaction has read.
        try:
            with db.transaction(**declared) as txn:
                txn.get("a")
                thread = threading.Thread(target=db.put, args=("a", "other"))
                thread.start()
                thread.join(0.5)
                txn.put("a", "own")
        except orthodrome.Aborted as error:
            assert error.retryable, error
        thread.join()
        check(db.get("a"), b"other")
    with db.transaction() as txn:
        check(txn.get_all(["a", "none"]), [b"other", None])
    try:
        txn.get("a")
        raise AssertionError("the transaction has ended")
    except orthodrome.ClosedError:
        pass

    @db.transactional()
    def count(txn: orthodrome.Transaction, step: int) -> int:
        value = int(txn.get("counter") or 0) + step
        txn.put("counter", str(value))
        return value

    threads = [threading.Thread(target=count, args=(step,)) for step in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(count(step=0), 10)


async def asyncio_calls(endpoints: list[str]) -> None:
    async with await orthodrome.aio.connect(endpoints) as db:

        async def add(txn: orthodrome.aio.Transaction) -> None:
            txn.put("async", str(int(await txn.get("async") or 0) + 1))

        await asyncio.gather(*(db.run(add, timeout=60) for _ in range(8)))
        check(await db.get("async"), b"8")
        # A cancelled block is aborted, and blocks nobody.
        started = asyncio.Event()

        async def wait() -> None:
            async with db.transaction() as txn:
                await txn.get("async")
                txn.put("async", "0")
                started.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(wait())
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begin = time.monotonic()
        await db.run(add)
        check(await db.get("async"), b"9")
        assert time.monotonic() - begin < 5, "the cancelled transaction kept its locks"


def long_transaction(endpoint: str, errors: list[BaseException]) -> None:
    """Stays open for longer than its lease."""
    try:
        with orthodrome.connect(endpoint) as db:
            with db.transaction(read=["long/a"], write=["long/a"]) as txn:
                time.sleep(11)
                txn.put("long/a", "written")
            check(db.get("long/a"), b"written")
    except BaseException as error:
        errors.append(error)


def lost_answers(endpoints: list[str], process: int) -> None:
    """The only gateway stops answering, so nobody can tell; then it answers again."""
    with orthodrome.connect(endpoints[0], attempt_timeout=1) as db:
        db.put("lost", "0")
        os.kill(process, signal.SIGSTOP)
        try:
            db.execute([Op.add("lost", 1)], timeout=2)
            raise AssertionError("a stopped node does not answer")
        except orthodrome.OutcomeUnknown as error:
            doubt = error
        finally:
            os.kill(process, signal.SIGCONT)
        try:
            doubt.resolve(timeout=60)
            expected = b"1"
        except orthodrome.Aborted:
            expected = b"0"
        check(db.get("lost"), expected)


def transfers(endpoints: list[str], process: int) -> None:
    """Threads move money while the first node is killed. No money is lost or made, whatever is unknown meanwhile."""
    with orthodrome.connect(endpoints, attempt_timeout=2) as db:
        db.execute([Op.put(account, "100") for account in ACCOUNTS])
        stop = threading.Event()
        committed, failures = [0] * 4, []

        def work(number: int) -> None:
            rng = random.Random(number)
            try:
                while not stop.is_set():
                    source, target = rng.sample(ACCOUNTS, 2)

                    def move(txn: orthodrome.Transaction) -> None:
                        left, right = (int(value or 0) for value in txn.get_all([source, target]))
                        txn.put(source, str(left - 1))
                        txn.put(target, str(right + 1))

                    both = {"read": [source, target], "write": [source, target]}
                    try:
                        db.run(move, timeout=60, **(both if number % 2 else {}))
                    except orthodrome.OutcomeUnknown as doubt:
                        try:
                            doubt.resolve(timeout=60)
                        except orthodrome.Aborted:
                            continue
                    committed[number] += 1
            except BaseException as error:
                failures.append(error)

        def until_all_commit(more: int) -> None:
            aims = [count + more for count in committed]
            deadline = time.monotonic() + 90
            while any(count < aim for count, aim in zip(committed, aims)) and not failures:
                assert time.monotonic() < deadline, f"no progress: {committed}"
                time.sleep(0.05)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            until_all_commit(5)
            os.kill(process, signal.SIGKILL)
            until_all_commit(5)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures, failures
        reads = db.read(ACCOUNTS).reads
        check(sum(int(value or 0) for value in reads.values()), MONEY)


def main() -> None:
    endpoints, process = sys.argv[1].split(","), int(sys.argv[2])
    errors: list[BaseException] = []
    began = time.monotonic()

    def step(name: str) -> None:
        print(f"{time.monotonic() - began:.1f} s: {name}", file=sys.stderr)

    long = threading.Thread(target=long_transaction, args=(endpoints[1], errors))
    long.start()
    with orthodrome.connect(endpoints) as db:
        calls(db)
        step("calls")
        transactions(db)
        step("transactions")
    asyncio.run(asyncio_calls(endpoints))
    step("asyncio")
    long.join()
    assert not errors, errors
    lost_answers(endpoints, process)
    step("lost_answers")
    transfers(endpoints, process)
    step("transfers")
    print("done")


main()
