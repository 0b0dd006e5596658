"""The client on a real cluster of three nodes, of which the first fails. Prints `done`.

    python cluster.py ENDPOINTS PROCESS

PROCESS is the process id of the first node. `cli/tests/python.rs` starts the cluster."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orthodrome
import orthodrome.aio
from orthodrome import KeyRange, Op

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
    rows = KeyRange.prefix("row/")
    page = db.scan(rows)
    check(page.rows, tuple((f"row/{number}".encode(), str(number).encode()) for number in range(5)))
    check(page.rest, None)
    page = db.scan(rows, limit=2, backwards=True, keys_only=True)
    check(page.rows, ((b"row/4", None), (b"row/3", None)))
    assert page.rest is not None
    check([key for key, _ in db.scan(page.rest, backwards=True).rows], [b"row/2", b"row/1", b"row/0"])
    check(db.scan(KeyRange(b"row/3", b"row/4")).rows, ((b"row/3", b"3"),))


def next_changes(watch: orthodrome.Watch) -> orthodrome.Changes:
    """The next batch that has changes."""
    return next(batch for batch in watch if batch.changes)


def of(txn: int, batch: orthodrome.Changes) -> list[orthodrome.Change]:
    """The changes of one transaction."""
    return [change for change in batch.changes if change.version.timestamp == txn]


def watches(db: orthodrome.Client, endpoints: str) -> None:
    seen = KeyRange.prefix("seen/")
    db.put("seen/a", "old")
    with db.watch(seen) as watch:
        begun = next(watch)
        check(begun.changes, ())
        done = db.execute([Op.put("seen/b", "2"), Op.put("seen/a", "1"), Op.put("unseen", "3")])
        # The client sees its own transaction, as a whole. Earlier ones may be seen, too.
        batch = next(batch for batch in watch if batch.through >= done.timestamp)
        both = of(done.timestamp, batch)
        check([(change.key, change.value) for change in both], [(b"seen/a", b"1"), (b"seen/b", b"2")])
        check({change.version.writer.client for change in both}, {db.id})
        assert begun.through < done.timestamp, (begun, done)
        db.delete("seen/a")
        gone = next_changes(watch)
        check([(change.key, change.value) for change in gone.changes], [(b"seen/a", None)])
        # Without changes it says how far it has come.
        quiet = next(watch)
        check(quiet.changes, ())
        assert quiet.through >= gone.through
    check(list(watch), [])
    # From the same timestamp on, it shows the same changes again, perhaps after earlier ones.
    with db.watch(seen, after=begun.through) as watch:
        again: list[orthodrome.Change] = []
        while not again or again[-1] != gone.changes[-1]:
            again += next_changes(watch).changes
        check(again[-3:], [*both, *gone.changes])
    with db.watch(seen, after=done.timestamp - 1, keys_only=True) as watch:
        keys: list[tuple[bytes, bytes | None]] = []
        while len(keys) < 3:
            keys += [(change.key, change.value) for change in next_changes(watch).changes]
        check(keys, [(b"seen/a", None), (b"seen/b", None), (b"seen/a", None)])
    # Another thread may close it.
    watch = db.watch(seen)
    next(watch)
    threading.Timer(0.2, watch.close).start()
    assert all(not batch.changes for batch in watch)

    program = Path(__file__).parent.parent / "examples" / "follow.py"
    example = subprocess.Popen([sys.executable, program, endpoints, "seen/"], stdout=subprocess.PIPE, text=True)
    try:
        assert example.stdout is not None
        check(example.stdout.readline(), "seen/b = 2\n")
        db.put("seen/b", "3")
        check(example.stdout.readline(), "seen/b = 3\n")
        db.delete("seen/b")
        check(example.stdout.readline(), "seen/b was deleted\n")
        # Not SIGINT: programs that run in the background of a shell ignore it.
        example.terminate()
        check(example.wait(120), -signal.SIGTERM)
    finally:
        example.kill()
        example.wait()


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


def wait_until_absent(db: orthodrome.Client, key: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while db.get(key) is not None:
        assert time.monotonic() < deadline, f"{key} is still there after {seconds} s"
        time.sleep(0.1)


def leases(db: orthodrome.Client) -> None:
    lease = db.grant_lease(2)
    check(lease.ttl, 2.0)
    with db.keep_lease(lease) as kept:
        db.execute([Op.compare("leased/lock", None), *lease.put("leased/lock", "me")])
        with db.transaction(read=[lease.record], write=lease.writes("leased/declared")) as txn:
            txn.put_attached(lease, "leased/declared", "1")
        db.run(lambda txn: txn.put_attached(lease, "leased/found", "2"))
        # A later write without the lease detaches its key.
        db.execute(lease.put("leased/detached", "3"))
        db.put("leased/detached", "4")
        began = time.monotonic()
        kept.wait(4)
        assert time.monotonic() - began >= 4
        info = db.lease(lease)
        check((info.keys, info.has_more), ((b"leased/declared", b"leased/found", b"leased/lock"), False))
        # A lease may live an eighth longer than its time.
        assert 0 < info.left <= 2.25, info
        check(db.get("leased/lock"), b"me")
    wait_until_absent(db, "leased/lock", 20)
    left = db.scan(KeyRange.prefix("leased/")).rows
    check(left, ((b"leased/detached", b"4"),))
    check(db.revoke_lease(lease), 0)
    for call in (db.renew_lease, db.lease, db.keep_lease):
        try:
            call(lease)
            raise AssertionError(f"{call}: the lease has ended")
        except orthodrome.LeaseEndedError as error:
            assert lease.id in str(error), error
    try:
        db.execute(lease.put("leased/lock", "late"))
        raise AssertionError("the lease has ended")
    except orthodrome.GuardFailed:
        pass
    for declared in ({}, {"read": [lease.record], "write": lease.writes("leased/lock")}):
        try:
            db.run(lambda txn: txn.put_attached(lease, "leased/lock", "late"), **declared)
            raise AssertionError("the lease has ended")
        except orthodrome.LeaseEndedError:
            pass
    check(db.get("leased/lock"), None)
    try:
        db.renew_lease(orthodrome.Lease("1000-0000000000000000"))
        raise AssertionError("this lease was never granted")
    except orthodrome.LeaseEndedError:
        pass

    # The time would be long, but the revocation deletes at once.
    lease = db.grant_lease(3600)
    db.execute([*lease.put("leased/a", "1"), *lease.put("leased/b", "2")])
    check(db.revoke_lease(lease), 2)
    check(dict(db.read(["leased/a", "leased/b"]).reads), {b"leased/a": None, b"leased/b": None})
    with db.leased(3600) as kept:
        db.execute(kept.lease.put("leased/a", "3"))
    check(db.get("leased/a"), None)


async def asyncio_leases(endpoints: list[str]) -> None:
    async with await orthodrome.aio.connect(endpoints) as db:
        async with db.leased(2) as kept:
            lease = kept.lease

            async def attach(txn: orthodrome.aio.Transaction) -> None:
                await txn.put_attached(lease, "leased/async", "1")

            await db.run(attach)
            await kept.wait(4)
            check((await db.lease(lease)).keys, (b"leased/async",))
        check(await db.get("leased/async"), None)
        lease = await db.grant_lease(2)
        await db.execute(lease.put("leased/async", "2"))
        await db.renew_lease(lease)
        check(await db.revoke_lease(lease), 1)
        try:
            await db.keep_lease(lease)
            raise AssertionError("the lease has ended")
        except orthodrome.LeaseEndedError:
            pass


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
        async with db.watch(KeyRange.prefix("async")) as watch:
            await anext(watch)
            await db.put("async/watched", "1")
            changes: list[orthodrome.Change] = []
            while not changes:
                try:
                    changes += (await asyncio.wait_for(anext(watch), 0.01)).changes
                except asyncio.TimeoutError:
                    # The cancelled step loses nothing.
                    continue
            check([(change.key, change.value) for change in changes], [(b"async/watched", b"1")])
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


class Copy:
    """A copy of the accounts that only a watch keeps."""

    SPAN = KeyRange(b"account/0", b"account/4")

    def __init__(self, page: orthodrome.Page) -> None:
        self.after = page.timestamp
        self.through = page.timestamp
        self.last: tuple[Any, ...] = (page.timestamp,)
        self.values = {key: int(value or 0) for key, value in page.rows}
        self.count = 0

    def apply(self, batch: orthodrome.Changes) -> None:
        """Each transfer changes a balance by 1: if one were missing or came twice, it would show."""
        # A batch without changes may say that the watch is no further than before.
        assert batch.through > self.through or (batch.through == self.through and not batch.changes), batch
        for change in batch.changes:
            # Transactions without a common key may have the same timestamp.
            place = (*change.version, change.key)
            assert self.last < place and self.through < place[0] <= batch.through, (self.last, self.through, batch)
            assert change.value is not None
            step = int(change.value) - self.values[change.key]
            assert abs(step) == 1, f"{change} after {self.values}"
            self.values[change.key] += step
            self.last = place
            self.count += 1
        # Transactions are shown as a whole.
        check(sum(self.values.values()), MONEY)
        self.through = batch.through


class Mirrors:
    """Two copies, by a watch in a thread and by one with asyncio, while nodes fail."""

    def __init__(self, endpoints: list[str], page: orthodrome.Page) -> None:
        self._endpoints = endpoints
        self._copies = [Copy(page), Copy(page)]
        self._until: int | None = None
        self._errors: list[BaseException] = []
        targets = (lambda: self._keep(self._copies[0]), lambda: asyncio.run(self._keep_async(self._copies[1])))
        self._threads = [threading.Thread(target=self._guarded, args=(target,)) for target in targets]
        for thread in self._threads:
            thread.start()

    def _guarded(self, target: Any) -> None:
        try:
            target()
        except BaseException as error:
            self._errors.append(error)

    def _is_done(self, copy: Copy) -> bool:
        return self._until is not None and copy.through >= self._until

    def _keep(self, copy: Copy) -> None:
        with orthodrome.connect(self._endpoints, attempt_timeout=2) as db:
            with db.watch(Copy.SPAN, after=copy.after, timeout=60) as watch:
                while not self._is_done(copy):
                    copy.apply(next(watch))

    async def _keep_async(self, copy: Copy) -> None:
        async with await orthodrome.aio.connect(self._endpoints, attempt_timeout=2) as db:
            async with db.watch(Copy.SPAN, after=copy.after, timeout=60) as watch:
                while not self._is_done(copy):
                    copy.apply(await anext(watch))

    def finish(self, final: orthodrome.Snapshot) -> None:
        """Waits until the copies have come as far as this snapshot, and compares them."""
        self._until = final.timestamp
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a watch does not go on"
        assert not self._errors, self._errors
        for copy in self._copies:
            check(copy.values, {key: int(value or 0) for key, value in final.reads.items()})
            assert copy.count > 0


def transfers(endpoints: list[str], process: int) -> None:
    """Threads move money while the first node is killed. No money is lost or made, whatever is unknown meanwhile.
    Watches show every transfer once."""
    with orthodrome.connect(endpoints, attempt_timeout=2) as db:
        db.execute([Op.put(account, "100") for account in ACCOUNTS])
        mirrors = Mirrors(endpoints, db.scan(Copy.SPAN))
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
        final = db.read(ACCOUNTS)
        check(sum(int(value or 0) for value in final.reads.values()), MONEY)
        mirrors.finish(final)


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
        # An open transaction holds watches up.
        long.join()
        assert not errors, errors
        step("long_transaction")
        watches(db, sys.argv[1])
        step("watches")
        leases(db)
        step("leases")
    asyncio.run(asyncio_calls(endpoints))
    step("asyncio")
    asyncio.run(asyncio_leases(endpoints))
    step("asyncio_leases")
    lost_answers(endpoints, process)
    step("lost_answers")
    transfers(endpoints, process)
    step("transfers")
    print("done")


main()
