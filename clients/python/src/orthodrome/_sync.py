"""The client for programs with threads. A client may be used by several threads at once, a transaction by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, TypeVar

from ._engine import Attempt, Engine, Renewal, Run, Watching, declare
from ._runtime import Blocking, drive
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


def connect(
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
    transaction takes. Without TLS, a token is sent only to a loopback address.

    After a fork, the child must connect anew."""
    work = Engine.connect(
        Blocking(), endpoints, token=token, tls=tls, timeout=timeout, attempt_timeout=attempt_timeout, is_blocking=True
    )
    return Client(drive(work))


class Transaction:
    """A transaction inside its `with` block or function. It sees its own writes."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def get(self, key: Data) -> bytes | None:
        """The value of the key; None if it is absent."""
        return self.get_all([key])[0]

    def get_text(self, key: Data) -> str | None:
        """The value of the key as text; None if it is absent."""
        value = self.get(key)
        return None if value is None else value.decode()

    def get_all(self, keys: Iterable[Data]) -> list[bytes | None]:
        """The values of several keys, in their order, in one round."""
        return drive(self._attempt.get_all(keys))

    def put(self, key: Data, value: Data) -> None:
        """Sets the key when the transaction commits."""
        self._attempt.write(key, value)

    def delete(self, key: Data) -> None:
        """Removes the key when the transaction commits."""
        self._attempt.write(key, None)

    def put_attached(self, lease: Lease, key: Data, value: Data) -> None:
        """Sets the key and attaches it to the lease when the transaction commits. Raises `LeaseEndedError` if the lease has
        ended; that aborts the transaction, unless the caller catches it.

        A transaction that declares its keys names `lease.record` in `read` and `lease.writes(key)` in `write`."""
        drive(self._attempt.put_attached(lease, key, value))

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

    def __enter__(self) -> Transaction:
        drive(self._attempt.begin())
        return Transaction(self._attempt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            drive(self._attempt.commit())
        else:
            drive(self._attempt.give_up(wait=isinstance(error, Exception)))
        return False


class Watch:
    """The changes of a range, batch after batch: iterate over it. `Client.watch` makes it.

    The first batch comes once the watch has begun: every transaction that begins afterwards will be shown. While nothing
    changes, a batch without changes comes about once a second and says how far the watch has come. If the gateway fails,
    the watch goes on at another one; then, too, nothing is missing, and nothing comes twice.

    Iteration raises `ForgottenError` if the servers do not remember all changes, and other errors as a scan does. After an
    error that passes, iterate again to go on after the last batch. One thread iterates;
    any thread may call `close`."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Changes:
        changes = drive(self._watching.next())
        if changes is None:
            raise StopIteration
        return changes

    def close(self) -> None:
        """Ends the watch, and the iteration of another thread."""
        self._watching.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KeptLease:
    """A lease that is renewed in the background. `Client.keep_lease` and `Client.leased` make it.

    If the lease could not be renewed for so long that it may have ended, `check` and `wait` raise as if it had. Its owner
    must then stop what it needs the lease for. Any thread may use this."""

    def __init__(self, renewal: Renewal) -> None:
        self._renewal = renewal

    @property
    def lease(self) -> Lease:
        """The lease."""
        return self._renewal.lease

    def check(self) -> None:
        """Raises `LeaseEndedError` if the lease has ended, or may have ended. It asks no gateway."""
        self._renewal.check()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the lease has ended or may have ended, and raises `LeaseEndedError`. Returns after `timeout` seconds,
        or when this is closed."""
        drive(self._renewal.wait(timeout))

    def close(self) -> None:
        """Stops renewing. The lease lives on for its time, unless it is revoked."""
        drive(self._renewal.close())

    def __enter__(self) -> KeptLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """A client of one cluster. `connect` makes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def id(self) -> int:
        """The first part of the names of this client's transactions."""
        return self._engine.names.client

    def close(self) -> None:
        """Ends the connections. Transactions that are open end with their leases."""
        drive(self._engine.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(
        self,
        *,
        read: Iterable[Data] | None = None,
        write: Iterable[Data] | None = None,
        priority: Priority = Priority.LOW,
        timeout: float | None = None,
    ) -> _Block:
        """A transaction as a `with` block. It commits at the end of the block, and is aborted if the block raises.

        Without `read` and `write` the block may read and write any keys. With them it declares its keys, which takes fewer
        round trips. `timeout` holds for each call. The block runs once: `Aborted` is raised at its end, or by a read. Use
        `run` to retry."""
        options = self._engine.options(priority, timeout)
        return _Block(Attempt(self._engine, self._engine.names.take(), declare(read, write), options, None))

    def run(
        self,
        function: Callable[[Transaction], T],
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
            attempt = drive(run.begin())
            try:
                result = function(Transaction(attempt))
            except BaseException as error:
                drive(run.failed(attempt, error))
                continue
            if drive(run.commit(attempt)):
                return result

    def transactional(
        self, *, priority: Priority = Priority.LOW, timeout: float | None = None
    ) -> Callable[[Callable[Concatenate[Transaction, P], T]], Callable[P, T]]:
        """A decorator: calls of the function run it as by `run`, with the transaction as its first argument."""

        def decorate(function: Callable[Concatenate[Transaction, P], T]) -> Callable[P, T]:
            @functools.wraps(function)
            def call(*args: P.args, **kwargs: P.kwargs) -> T:
                return self.run(lambda txn: function(txn, *args, **kwargs), priority=priority, timeout=timeout)

            return call

        return decorate

    def execute(
        self, ops: Iterable[Op], *, priority: Priority = Priority.LOW, timeout: float | None = None
    ) -> Committed:
        """Runs guarded operations as one transaction, in one call. Retries temporary aborts until the deadline. Raises
        `GuardFailed` if a comparison failed."""
        return drive(self._engine.execute(ops, self._engine.options(priority, timeout)))

    def read(
        self,
        keys: Iterable[Data],
        *,
        stale: bool = False,
        priority: Priority = Priority.LOW,
        timeout: float | None = None,
    ) -> Snapshot:
        """The values of keys at one moment. With `stale`, any consistent state, however old, that is not older than what
        this client knows."""
        return drive(self._engine.read(keys, self._engine.options(priority, timeout), is_stale=stale))

    def scan(
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
        return drive(self._engine.scan(span, options, limit=limit, backwards=backwards, keys_only=keys_only))

    def watch(
        self, span: KeyRange, *, after: int | None = None, keys_only: bool = False, timeout: float | None = None
    ) -> Watch:
        """Watches a range of keys: returns all changes, in the order of their commit timestamps, until it is closed.

        It begins after the timestamp `after`: the last `through` of another watch; None: from now on. For all keys and all
        that follows, take the first batch, and then scan the range. Servers remember changes for some time only. `keys_only` leaves the values out; a deletion cannot be
        told from a new value then. `timeout` is how many seconds the watch looks for a gateway before it raises.

            with db.watch(KeyRange.prefix("stock/")) as watch:
                for batch in watch:
                    for change in batch.changes:
                        print(change.key, change.value)
        """
        options = self._engine.options(Priority.LOW, timeout)
        return Watch(Watching(self._engine, span, after, keys_only, options))

    def grant_lease(self, ttl: float, *, timeout: float | None = None) -> Lease:
        """Grants a lease. It ends when nobody has renewed it for `ttl` seconds, at least 1 and at most 366 days; then the
        keys that are attached to it are deleted. If this raises, a lease may have been granted; it ends by itself.

            lease = db.grant_lease(10)
            # Takes the lock if it is free. The lock becomes free when this process is gone.
            db.execute([Op.compare("lock", None), *lease.put("lock", "me")])
        """
        return drive(self._engine.grant_lease(ttl, self._engine.options(Priority.LOW, timeout)))

    def renew_lease(self, lease: Lease, *, timeout: float | None = None) -> None:
        """Renews a lease: from now on it lives for the time for which it was granted. Raises `LeaseEndedError` if it has
        ended. After any other error it may have been renewed, or be renewed later."""
        drive(self._engine.renew_lease(lease, self._engine.options(Priority.LOW, timeout)))

    def revoke_lease(self, lease: Lease, *, timeout: float | None = None) -> int:
        """Revokes a lease, and deletes the keys that are still attached to it. Returns the number of keys that this call
        has deleted: 0 if the lease had ended before. After an error it may have ended, or end later."""
        return drive(self._engine.revoke_lease(lease, self._engine.options(Priority.LOW, timeout)))

    def lease(self, lease: Lease, *, timeout: float | None = None) -> LeaseInfo:
        """How long a lease lives, and which keys are attached to it. Raises `LeaseEndedError` if it has ended."""
        return drive(self._engine.lease(lease, self._engine.options(Priority.LOW, timeout)))

    def keep_lease(self, lease: Lease, *, timeout: float | None = None) -> KeptLease:
        """Renews a lease now, and then in the background, three times within its time, until the result or the client is
        closed. Raises as `renew_lease`.

            with db.keep_lease(lease) as kept:
                ...
                kept.check()  # raises `LeaseEndedError`
        """
        renewal = Renewal(self._engine, lease)
        drive(renewal.begin(self._engine.options(Priority.LOW, timeout)))
        return KeptLease(renewal)

    @contextmanager
    def leased(self, ttl: float) -> Iterator[KeptLease]:
        """Grants a lease, keeps it during the `with` block, and revokes it at the end. If the revocation fails, the
        lease ends by itself."""
        lease = self.grant_lease(ttl)
        try:
            with self.keep_lease(lease) as kept:
                yield kept
        finally:
            with suppress(OrthodromeError):
                self.revoke_lease(lease)

    def get(self, key: Data) -> bytes | None:
        """The value of one key; None if it is absent."""
        return self.read([key]).reads[key]

    def put(self, key: Data, value: Data) -> Committed:
        """Sets one key."""
        return self.execute([Op.put(key, value)])

    def delete(self, key: Data) -> Committed:
        """Removes one key."""
        return self.execute([Op.delete(key)])

    def describe(self, *, timeout: float | None = None) -> ClusterInfo:
        """Describes the cluster, as the gateway in use sees it."""
        return drive(self._engine.describe(self._engine.options(Priority.LOW, timeout)))

    def status(self, *, timeout: float | None = None) -> Status:
        """The status of the gateway in use."""
        return drive(self._engine.status(self._engine.options(Priority.LOW, timeout)))
