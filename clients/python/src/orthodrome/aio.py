"""The client for asyncio.

    import orthodrome.aio

    async with await orthodrome.aio.connect("localhost:7400") as db:
        async with db.transaction() as txn:
            left = int(await txn.get("stock/tea") or 0)
            txn.put("stock/tea", str(left - 1))

A client belongs to the event loop in which it was made. Cancelling a call aborts its transaction, unless the client has
already asked to commit it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, TypeVar

from ._engine import Attempt, Engine, Renewal, Run, Watching, declare
from ._runtime import Loop
from .errors import OrthodromeError
from .values import (
    Changes,
    ClusterInfo,
    Committed,
    Data,
    KeyRange,
    Lease,
    LeaseInfo,
    Op,
    Page,
    Priority,
    Reads,
    Snapshot,
    Status,
    Tls,
)

T = TypeVar("T")
P = ParamSpec("P")


async def connect(
    endpoints: str | Iterable[str],
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout: float = 10.0,
    attempt_timeout: float = 5.0,
) -> Client:
    """Registers at the first gateway that answers.

    `endpoints` are gateways as `host:port`, the nearest first. If the one in use fails, the client uses the next, and
    returns to the nearest when it answers again. `timeout` is the default deadline of a call in seconds, retries included.
    `attempt_timeout` is how long to wait for one gateway before asking another; it must be longer than the slowest
    transaction takes. Without TLS, a token is sent only to a loopback address."""
    work = Engine.connect(
        Loop(), endpoints, token=token, tls=tls, timeout=timeout, attempt_timeout=attempt_timeout, is_blocking=False
    )
    return Client(await work)


class Transaction:
    """A transaction inside its `with` block or function. It sees its own writes."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def get(self, key: Data) -> bytes | None:
        """The value of the key; None if it is absent."""
        return (await self.get_all([key]))[0]

    async def get_text(self, key: Data) -> str | None:
        """The value of the key as text; None if it is absent."""
        value = await self.get(key)
        return None if value is None else value.decode()

    async def get_all(self, keys: Iterable[Data]) -> list[bytes | None]:
        """The values of several keys, in their order, in one round."""
        return await self._attempt.get_all(keys)

    def put(self, key: Data, value: Data) -> None:
        """Sets the key when the transaction commits."""
        self._attempt.write(key, value)

    def delete(self, key: Data) -> None:
        """Removes the key when the transaction commits."""
        self._attempt.write(key, None)

    async def put_attached(self, lease: Lease, key: Data, value: Data) -> None:
        """Sets the key and attaches it to the lease when the transaction commits. Raises `LeaseEndedError` if the lease has
        ended; that aborts the transaction, unless the caller catches it.

        A transaction that declares its keys names `lease.record` in `read` and `lease.writes(key)` in `write`."""
        await self._attempt.put_attached(lease, key, value)

    @property
    def reads(self) -> Reads:
        """What it has read."""
        return self._attempt.reads

    @property
    def committed(self) -> Committed | None:
        """Its place in the serial order, once it has committed."""
        return self._attempt.committed


class _Block:
    """The context manager of `Client.transaction`."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def __aenter__(self) -> Transaction:
        await self._attempt.begin()
        return Transaction(self._attempt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            await self._attempt.commit()
        else:
            await self._attempt.give_up(wait=isinstance(error, Exception))
        return False


class Watch:
    """The changes of a range, batch after batch: iterate over it. `Client.watch` makes it.

    The first batch comes once the watch has begun: every transaction that begins afterwards will be shown. While nothing
    changes, a batch without changes comes about once a second and says how far the watch has come. If the gateway fails,
    the watch goes on at another one; then, too, nothing is missing, and nothing comes twice.

    Iteration raises `ForgottenError` if the servers do not remember all changes, and other errors as a scan does. After an
    error that passes, iterate again to go on after the last batch. One task iterates; a
    step that is cancelled, by `asyncio.wait_for` too, loses nothing."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes:
        changes = await self._watching.next()
        if changes is None:
            raise StopAsyncIteration
        return changes

    async def aclose(self) -> None:
        """Ends the watch, and the iteration of another task."""
        self._watching.close()

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class KeptLease:
    """A lease that is renewed in the background. `Client.keep_lease` and `Client.leased` make it.

    If the lease could not be renewed for so long that it may have ended, `check` and `wait` raise as if it had. Its owner
    must then stop what it needs the lease for."""

    def __init__(self, renewal: Renewal) -> None:
        self._renewal = renewal

    @property
    def lease(self) -> Lease:
        """The lease."""
        return self._renewal.lease

    def check(self) -> None:
        """Raises `LeaseEndedError` if the lease has ended, or may have ended. It asks no gateway."""
        self._renewal.check()

    async def wait(self, timeout: float | None = None) -> None:
        """Waits until the lease has ended or may have ended, and raises `LeaseEndedError`. Returns after `timeout` seconds,
        or when this is closed."""
        await self._renewal.wait(timeout)

    async def aclose(self) -> None:
        """Stops renewing. The lease lives on for its time, unless it is revoked."""
        await self._renewal.close()

    async def __aenter__(self) -> KeptLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Client:
    """A client of one cluster. `connect` makes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def id(self) -> int:
        """The first part of the names of this client's transactions."""
        return self._engine.names.client

    async def close(self) -> None:
        """Ends the connections. Transactions that are open end with their leases."""
        await self._engine.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def transaction(
        self,
        *,
        read: Iterable[Data] | None = None,
        write: Iterable[Data] | None = None,
        priority: Priority = Priority.LOW,
        timeout: float | None = None,
    ) -> _Block:
        """A transaction as an `async with` block. It commits at the end of the block, and is aborted if the block raises.

        Without `read` and `write` the block may read and write any keys. With them it declares its keys, which takes fewer
        round trips. `timeout` holds for each call. The block runs once: `Aborted` is raised at its end, or by a read. Use
        `run` to retry."""
        options = self._engine.options(priority, timeout)
        return _Block(Attempt(self._engine, self._engine.names.take(), declare(read, write), options, None))

    async def run(
        self,
        function: Callable[[Transaction], Awaitable[T]],
        *,
        read: Iterable[Data] | None = None,
        write: Iterable[Data] | None = None,
        priority: Priority = Priority.LOW,
        timeout: float | None = None,
    ) -> T:
        """Calls `function` with a transaction, commits, and returns its result. If the transaction aborts for a temporary
        reason, calls the function again until `timeout` seconds have passed. So the function must have no side effects.

        If the function raises, the transaction is aborted and the error is raised again. Where the cluster does not run
        transactions in rounds, a function may see values that were not current together; such a run never commits, and
        if the function raises in it, it is called again."""
        run = Run(self._engine, declare(read, write), self._engine.options(priority, timeout))
        while True:
            attempt = await run.begin()
            try:
                result = await function(Transaction(attempt))
            except BaseException as error:
                await run.failed(attempt, error)
                continue
            if await run.commit(attempt):
                return result

    def transactional(
        self, *, priority: Priority = Priority.LOW, timeout: float | None = None
    ) -> Callable[[Callable[Concatenate[Transaction, P], Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """A decorator: calls of the function run it as by `run`, with the transaction as its first argument."""

        def decorate(function: Callable[Concatenate[Transaction, P], Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            @functools.wraps(function)
            async def call(*args: P.args, **kwargs: P.kwargs) -> T:
                return await self.run(lambda txn: function(txn, *args, **kwargs), priority=priority, timeout=timeout)

            return call

        return decorate

    async def execute(
        self, ops: Iterable[Op], *, priority: Priority = Priority.LOW, timeout: float | None = None
    ) -> Committed:
        """Runs guarded operations as one transaction, in one call. Retries temporary aborts until the deadline. Raises
        `GuardFailed` if a comparison failed."""
        return await self._engine.execute(ops, self._engine.options(priority, timeout))

    async def read(
        self,
        keys: Iterable[Data],
        *,
        stale: bool = False,
        priority: Priority = Priority.LOW,
        timeout: float | None = None,
    ) -> Snapshot:
        """The values of keys at one moment. With `stale`, any consistent state, however old, that is not older than what
        this client knows."""
        return await self._engine.read(keys, self._engine.options(priority, timeout), is_stale=stale)

    async def scan(
        self,
        span: KeyRange,
        *,
        limit: int = 0,
        backwards: bool = False,
        keys_only: bool = False,
        priority: Priority = Priority.LOW,
        timeout: float | None = None,
    ) -> Page:
        """The keys of a range, in order, at one moment: at most `limit`, or as many as one transaction may read. The page
        has every key of its part of the range, up to its `rest`, and shows transactions as a whole or not at all.
        `KeyRange.prefix` is the range of all keys with a prefix, and `KeyRange()` has all keys."""
        options = self._engine.options(priority, timeout)
        return await self._engine.scan(span, options, limit=limit, backwards=backwards, keys_only=keys_only)

    def watch(
        self, span: KeyRange, *, after: int | None = None, keys_only: bool = False, timeout: float | None = None
    ) -> Watch:
        """Watches a range of keys: returns all changes, in the order of their commit timestamps, until it is closed.

        It begins after the timestamp `after`: the last `through` of another watch; None: from now on. For all keys and all
        that follows, take the first batch, and then scan the range. Servers remember changes for some time only. `keys_only` leaves the values out; a deletion cannot be
        told from a new value then. `timeout` is how many seconds the watch looks for a gateway before it raises.

            async with db.watch(KeyRange.prefix("stock/")) as watch:
                async for batch in watch:
                    for change in batch.changes:
                        print(change.key, change.value)
        """
        options = self._engine.options(Priority.LOW, timeout)
        return Watch(Watching(self._engine, span, after, keys_only, options))

    async def grant_lease(self, ttl: float, *, timeout: float | None = None) -> Lease:
        """Grants a lease. It ends when nobody has renewed it for `ttl` seconds, at least 1 and at most 366 days; then the
        keys that are attached to it are deleted. If this raises, a lease may have been granted; it ends by itself.

            lease = await db.grant_lease(10)
            # Takes the lock if it is free. The lock becomes free when this process is gone.
            await db.execute([Op.compare("lock", None), *lease.put("lock", "me")])
        """
        return await self._engine.grant_lease(ttl, self._engine.options(Priority.LOW, timeout))

    async def renew_lease(self, lease: Lease, *, timeout: float | None = None) -> None:
        """Renews a lease: from now on it lives for the time for which it was granted. Raises `LeaseEndedError` if it has
        ended. After any other error it may have been renewed, or be renewed later."""
        await self._engine.renew_lease(lease, self._engine.options(Priority.LOW, timeout))

    async def revoke_lease(self, lease: Lease, *, timeout: float | None = None) -> int:
        """Revokes a lease, and deletes the keys that are still attached to it. Returns the number of keys that this call
        has deleted: 0 if the lease had ended before. After an error it may have ended, or end later."""
        return await self._engine.revoke_lease(lease, self._engine.options(Priority.LOW, timeout))

    async def lease(self, lease: Lease, *, timeout: float | None = None) -> LeaseInfo:
        """How long a lease lives, and which keys are attached to it. Raises `LeaseEndedError` if it has ended."""
        return await self._engine.lease(lease, self._engine.options(Priority.LOW, timeout))

    async def keep_lease(self, lease: Lease, *, timeout: float | None = None) -> KeptLease:
        """Renews a lease now, and then in the background, three times within its time, until the result or the client is
        closed. Raises as `renew_lease`.

            async with await db.keep_lease(lease) as kept:
                ...
                kept.check()  # raises `LeaseEndedError`
        """
        renewal = Renewal(self._engine, lease)
        await renewal.begin(self._engine.options(Priority.LOW, timeout))
        return KeptLease(renewal)

    @asynccontextmanager
    async def leased(self, ttl: float) -> AsyncIterator[KeptLease]:
        """Grants a lease, keeps it during the `async with` block, and revokes it at the end. If the revocation fails, the
        lease ends by itself."""
        lease = await self.grant_lease(ttl)
        try:
            async with await self.keep_lease(lease) as kept:
                yield kept
        finally:
            with suppress(OrthodromeError):
                await self.revoke_lease(lease)

    async def get(self, key: Data) -> bytes | None:
        """The value of one key; None if it is absent."""
        return (await self.read([key])).reads[key]

    async def put(self, key: Data, value: Data) -> Committed:
        """Sets one key."""
        return await self.execute([Op.put(key, value)])

    async def delete(self, key: Data) -> Committed:
        """Removes one key."""
        return await self.execute([Op.delete(key)])

    async def describe(self, *, timeout: float | None = None) -> ClusterInfo:
        """Describes the cluster, as the gateway in use sees it."""
        return await self._engine.describe(self._engine.options(Priority.LOW, timeout))

    async def status(self, *, timeout: float | None = None) -> Status:
        """The status of the gateway in use."""
        return await self._engine.status(self._engine.options(Priority.LOW, timeout))
