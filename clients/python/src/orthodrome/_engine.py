"""One client incarnation, which the cluster knows by its id. It follows the rules of `docs/api.md` in the way of the Rust
library."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc

from . import errors
from ._gateways import (
    ABORT,
    BEGIN,
    COMMIT,
    DESCRIBE,
    DESCRIBE_LEASE,
    EXECUTE,
    GRANT_LEASE,
    KEEP_ALIVE,
    READ,
    READ_ROUND,
    REGISTER,
    RENEW_LEASE,
    RESOLVE,
    REVOKE_LEASE,
    SCAN,
    STATUS,
    WATCH,
    Failure,
    Gateways,
    Kind,
    Pace,
    failure,
)
from ._runtime import Cancelled, Runtime, Silence, Stream, drive
from ._session import Name, Names, Session
from .errors import Aborted, AbortReason, OutcomeUnknown
from .v1 import api_pb2 as api
from .values import (
    TTL_MAX,
    TTL_MIN,
    Change,
    Changes,
    ClusterInfo,
    Committed,
    Data,
    KeyRange,
    Keyspace,
    Lease,
    LeaseInfo,
    Node,
    Op,
    Page,
    Partition,
    Priority,
    Read,
    Reads,
    Region,
    Snapshot,
    Status,
    Tls,
    TxnId,
    Version,
    to_bytes,
    to_keys,
)

#: Seconds between checks whether the nearest gateway is reachable again.
FAILBACK_INTERVAL = 5.0
#: A watch goes to another gateway after this number of seconds without an answer. Gateways say every second how far they
#: have come.
SILENCE_MAX = 10.0
#: The shortest time in seconds between renewals of a lease.
RENEWAL_PAUSE_MIN = 0.05


class Unknown(Exception):
    """A gateway does not know the outcome, or was not reached."""

    def __init__(self, trouble: str, *, is_forgotten: bool = False) -> None:
        super().__init__(trouble)
        #: No gateway will ever know the outcome.
        self.is_forgotten = is_forgotten


def ended(outcome: api.Outcome) -> int:
    """The timestamp of a committed transaction. Raises `Aborted` or `Unknown`."""
    result = outcome.WhichOneof("result")
    if result == "committed":
        return outcome.committed.timestamp
    if result == "aborted":
        raise errors.aborted(outcome.aborted.reason, retryable=outcome.aborted.retryable)
    if result == "unknown":
        if outcome.unknown.is_forgotten:
            trouble = "the cluster has forgotten the outcome: look at the keys, which may have changed"
            raise Unknown(trouble, is_forgotten=True)
        raise Unknown("the gateway does not know the outcome yet")
    raise Unknown("the gateway's answer has no outcome")


def stale() -> Aborted:
    """A transaction whose reads were older than what its client knows, or have changed since."""
    return Aborted(AbortReason.STALE_READ, retryable=True)


def to_read(read: api.KeyRead) -> Read:
    writer = read.version.writer
    version = Version(read.version.timestamp, TxnId(writer.client, writer.counter, writer.attempt))
    return Read(read.value if read.HasField("value") else None, version)


def to_reads(reads: Iterable[api.KeyRead]) -> dict[bytes, Read]:
    return {read.key: to_read(read) for read in reads}


def check_range(span: KeyRange) -> None:
    if span.end is not None and span.end <= span.start:
        raise errors.InvalidError("the end of the range is not after its beginning, so no key can be in it")


def to_writes(writes: Mapping[bytes, bytes | None]) -> list[api.KeyWrite]:
    return [api.KeyWrite(key=key, value=value) for key, value in sorted(writes.items())]


def to_versions(reads: Mapping[bytes, Read]) -> list[api.KeyVersion]:
    def version(of: Version) -> api.Version:
        writer = api.TxnId(client=of.writer.client, counter=of.writer.counter, attempt=of.writer.attempt)
        return api.Version(timestamp=of.timestamp, writer=writer)

    return [api.KeyVersion(key=key, version=version(read.compared)) for key, read in sorted(reads.items())]


def same_versions(now: Mapping[bytes, Read], before: Mapping[bytes, Read]) -> bool:
    return all(key in now and now[key].compared == read.compared for key, read in before.items())


@dataclass(frozen=True)
class Options:
    """The options of one call."""

    priority: Priority
    timeout: float


class Engine:
    """The client behind both forms of the API."""

    def __init__(self, runtime: Runtime, gateways: Gateways, timeout: float) -> None:
        self.runtime = runtime
        self.gateways = gateways
        self.timeout = timeout
        self.limits = api.Limits()
        self.session = Session()
        #: The names that the first gateway takes which registered this client.
        self.names = Names(0)
        #: By gateway that registered this client: each takes only names that it gave.
        self._names: dict[int, Names] = {}
        self.runs_general = False
        self.is_closed = False
        #: True if errors resolve with `resolve()`, false if with `resolve_async()`.
        self.is_blocking = False
        self._lock = threading.Lock()
        self._probing = False
        #: Transactions that wait for their client, with their gateways: their leases are extended.
        self._open: dict[TxnId, int] = {}
        self._keeping = False
        #: Leases that are renewed in the background.
        self._renewals: set[Renewal] = set()

    @staticmethod
    async def connect(
        runtime: Runtime,
        endpoints: str | Iterable[str],
        *,
        token: str | None,
        tls: Tls | None,
        timeout: float,
        attempt_timeout: float,
        is_blocking: bool,
    ) -> Engine:
        """Registers at the first gateway that answers, in the order of the configuration."""
        if timeout <= 0:
            raise errors.ConfigError(f"timeout: {timeout} is not a positive number of seconds")
        gateways = Gateways(runtime, endpoints, token, tls, attempt_timeout)
        engine = Engine(runtime, gateways, timeout)
        engine.is_blocking = is_blocking
        try:
            await engine._register()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _register(self) -> None:
        pace, at = Pace(self.runtime, self.timeout), 0
        while True:
            try:
                answer = await self.gateways.send(at, pace.deadline, REGISTER, api.RegisterRequest())
                self.gateways.met(at, answer.cluster)
                break
            except Failure as failure:
                if failure.kind is Kind.NEVER:
                    raise failure.to_error() from None
                # Registering twice does no harm.
                if failure.kind in (Kind.LOST, Kind.NOT_OPEN, Kind.UNREGISTERED):
                    failure = Failure(Kind.UNAVAILABLE, failure.text)
                at = self.gateways.after(at)
                # Every gateway is tried before the first pause.
                if (at == 0 and not await pace.pause()) or pace.left() == 0:
                    raise failure.to_error() from None
        self.gateways.current = at
        self.limits = answer.limits
        self.names = self._names[at] = Names(answer.client)
        keyspaces = answer.cluster.keyspaces
        self.runs_general = bool(keyspaces) and keyspaces[0].general

    async def close(self) -> None:
        self.is_closed = True
        with self._lock:
            renewals = list(self._renewals)
        for renewal in renewals:
            renewal.stop()
        await self.gateways.close()

    def options(self, priority: Priority, timeout: float | None) -> Options:
        if self.is_closed:
            raise errors.ClosedError("the client is closed")
        if not isinstance(priority, Priority):
            raise TypeError(f"priority must be Priority.LOW or Priority.HIGH, not {priority!r}")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout: {timeout} is not a positive number of seconds")
        return Options(priority, self.timeout if timeout is None else timeout)

    def pace(self, timeout: float) -> Pace:
        return Pace(self.runtime, timeout)

    # ---- Gateways

    async def home(self, pace: Pace) -> tuple[int, int, Names]:
        """The gateway at which to begin a transaction, its region, and the names for it. Registers there, if this client
        has not done so."""
        self._look_for_nearest()
        while True:
            at = self.gateways.current
            try:
                return at, await self.gateways.region(at, pace.deadline), await self._names_at(at, pace.deadline)
            except Failure as failure:
                await self.after_failure(at, failure, pace)

    async def _names_at(self, at: int, deadline: float) -> Names:
        with self._lock:
            names = self._names.get(at)
        if names is None:
            answer = await self.gateways.send(at, deadline, REGISTER, api.RegisterRequest())
            # If two tasks register at once, both use what the first one got.
            with self._lock:
                names = self._names.setdefault(at, Names(answer.client))
        return names

    async def after_failure(self, at: int, failure: Failure, pace: Pace) -> None:
        """Handles a failure that had no effect: pauses, and changes the gateway if that can help."""
        if failure.kind is Kind.NEVER:
            raise failure.to_error() from None
        if failure.kind is Kind.UNREGISTERED:
            with self._lock:
                self._names.pop(at, None)
        elif failure.kind is not Kind.BUSY:
            self.gateways.leave(at)
        if self.is_closed:
            raise errors.ClosedError("the client was closed during the call") from None
        if not await pace.pause():
            raise failure.to_error() from None

    def _look_for_nearest(self) -> None:
        with self._lock:
            if self.gateways.current == 0 or self._probing:
                return
            self._probing = True
        self.runtime.spawn(self._probe_nearest())

    async def _probe_nearest(self) -> None:
        try:
            await self.runtime.sleep(FAILBACK_INTERVAL)
            if not self.is_closed:
                deadline = self.pace(FAILBACK_INTERVAL).deadline
                about = await self.gateways.send(0, deadline, DESCRIBE, api.DescribeRequest())
                self.gateways.met(0, about)
                self.gateways.current = 0
        except (Failure, ValueError):
            # It is still unreachable, or the client was closed meanwhile.
            pass
        finally:
            self._probing = False

    async def resolve(self, question: api.ResolveRequest, avoid: int | None, pace: Pace) -> int:
        """Asks one gateway after the other for a transaction's outcome, starting after gateway `avoid`, until one knows
        it. Raises `Aborted`, or `Unknown` if the cluster has forgotten it or the deadline passes. If the client has
        not decided, nobody asked to commit the transaction. Then it has no effect, even if no gateway knows it."""
        is_undecided = question.WhichOneof("begun") == "interactive" and question.WhichOneof("decision") is None
        at = self.gateways.current if avoid is None else self.gateways.after(avoid)
        asked = 0
        forgotten: Unknown | None = None
        while True:
            try:
                answer = await self.gateways.send(at, pace.deadline, RESOLVE, question)
                try:
                    return ended(answer.outcome)
                finally:
                    if answer.outcome.WhichOneof("result") in ("committed", "aborted"):
                        if avoid is not None and avoid == self.gateways.current:
                            self.gateways.current = at
            except Unknown as unknown:
                if is_undecided:
                    raise Aborted(AbortReason.RECOVERY, retryable=True) from None
                trouble = str(unknown)
                if unknown.is_forgotten:
                    forgotten = unknown
            except Failure as failure:
                trouble = failure.text
            at = self.gateways.after(at)
            asked += 1
            # Every gateway is asked before the first pause.
            all_asked = asked % len(self.gateways) == 0
            if all_asked and forgotten is not None:
                raise forgotten
            if (all_asked and not await pace.pause()) or pace.left() == 0 or self.is_closed:
                raise Unknown(trouble)

    def check_size(self, request: Any) -> None:
        """Refuses a request that is too large for the gateway to receive."""
        have, most = request.ByteSize(), self.limits.request_bytes_max
        if have > most:
            raise errors.InvalidError(f"the request takes {have} bytes; at most {most} are allowed")

    # ---- Unknown outcomes

    def in_doubt(
        self,
        name: Name,
        question: api.ResolveRequest,
        reads: Mapping[bytes, Read] | None,
        written: Mapping[bytes, bytes | None],
        ops: list[Op],
        trouble: str,
    ) -> OutcomeUnknown:
        """The error for a transaction whose outcome could not be learned in time. While it exists, the cluster keeps the
        outcome."""
        kept = name.keep()

        async def resolve_async(timeout: float | None) -> Committed:
            pace = self.pace(self.options(Priority.LOW, timeout).timeout)
            try:
                timestamp = await self.resolve(question, None, pace)
            except Unknown as unknown:
                raise self.in_doubt(kept, question, reads, written, ops, str(unknown)) from None
            self.session.wrote(timestamp, written)
            self.session.ran(timestamp, ops)
            self.session.read(reads or {})
            return Committed(timestamp, None if reads is None else Reads(reads))

        def resolve(timeout: float | None) -> Committed:
            return drive(resolve_async(timeout))

        if self.is_blocking:
            return OutcomeUnknown(kept.id, trouble, resolve=resolve)
        return OutcomeUnknown(kept.id, trouble, resolve_async=resolve_async)

    # ---- Procedures and reads

    async def execute(self, ops: Iterable[Op], options: Options) -> Committed:
        ops = list(ops)
        for op in ops:
            if not isinstance(op, Op):
                raise TypeError(f"ops: {op!r} is not an orthodrome.Op; use Op.get, Op.put and so on")
        pace, name = self.pace(options.timeout), self.names.take()
        priority = cast(api.Priority, options.priority.value)
        request = api.ExecuteRequest(ops=[op._message for op in ops], priority=priority)
        self.check_size(request)
        while True:
            at, home, names = await self.home(pace)
            name.begin_at(names, home)
            request.txn.CopyFrom(name.message)
            request.home_region = home
            request.acknowledged_below = names.acknowledged_below()
            question = api.ResolveRequest(procedure=request)
            try:
                try:
                    answer = await self.gateways.send(at, pace.deadline, EXECUTE, request)
                except Failure as failure:
                    if failure.kind not in (Kind.LOST, Kind.NOT_OPEN):
                        await self.after_failure(at, failure, pace)
                        continue
                    name.was_resolved()
                    timestamp, reads = await self.resolve(question, at, pace), None
                else:
                    try:
                        timestamp = ended(answer.outcome)
                        reads = None if answer.reads_omitted else to_reads(answer.reads)
                    except Unknown:
                        name.was_resolved()
                        timestamp, reads = await self.resolve(question, None, pace), None
            except Unknown as unknown:
                raise self.in_doubt(name, question, None, {}, ops, str(unknown)) from None
            except Aborted as aborted:
                if not aborted.retryable or not await pace.pause():
                    raise
                name.retry()
                continue
            self.session.ran(timestamp, ops)
            self.session.read(reads or {})
            return Committed(timestamp, None if reads is None else Reads(reads))

    async def read(self, keys: Iterable[Data], options: Options, *, is_stale: bool = False) -> Snapshot:
        timestamp, reads = await self.snapshot(to_keys(keys, "keys"), options, is_stale)
        return Snapshot(timestamp, Reads(reads))

    async def snapshot(self, keys: list[bytes], options: Options, is_stale: bool) -> tuple[int, dict[bytes, Read]]:
        pace, name = self.pace(options.timeout), self.names.take()
        priority = cast(api.Priority, options.priority.value)
        request = api.ReadRequest(stale=is_stale, keys=keys, priority=priority)
        self.check_size(request)
        while True:
            at, home, names = await self.home(pace)
            name.begin_at(names, home)
            request.txn.CopyFrom(name.message)
            request.home_region = home
            request.acknowledged_below = names.acknowledged_below()
            if is_stale:
                self._add_session(request, keys)
            try:
                answer = await self.gateways.send(at, pace.deadline, READ, request)
                timestamp = ended(answer.outcome)
                reads = to_reads(answer.reads)
                # The gateway does not compare reads with what clients know.
                if not self.session.is_ahead_of(reads, -1 if is_stale else timestamp):
                    self.session.read(reads)
                    return timestamp, reads
                raise stale()
            except Aborted as aborted:
                if not aborted.retryable or not await pace.pause():
                    raise
            except Unknown as unknown:
                await self.after_failure(at, Failure(Kind.LOST, str(unknown)), pace)
            except Failure as failure:
                await self.after_failure(at, failure, pace)
            # A read has no effect, so it may be retried after any failure, under the next name.
            name.retry()

    async def scan(self, span: KeyRange, options: Options, *, limit: int, backwards: bool, keys_only: bool) -> Page:
        check_range(span)
        pace = self.pace(options.timeout)
        request = api.ScanRequest(
            backwards=backwards, limit=limit, keys_only=keys_only, priority=cast(api.Priority, options.priority.value)
        )
        setattr(request, "from", span.start)
        if span.end is not None:
            request.until = span.end
        while True:
            at, *_ = await self.home(pace)
            try:
                answer = await self.gateways.send(at, pace.deadline, SCAN, request)
            except Failure as failure:
                # A scan has no effect, so it may be repeated after any failure.
                await self.after_failure(at, failure, pace)
                continue
            reads = to_reads(answer.rows)
            if not keys_only:
                if self.session.is_ahead_of(reads, answer.timestamp):
                    if not await pace.pause():
                        raise stale()
                    continue
                self.session.read(reads)
            rest = None
            if answer.HasField("rest"):
                end = answer.rest.until if answer.rest.HasField("until") else None
                rest = KeyRange(getattr(answer.rest, "from"), end)
            return Page(answer.timestamp, tuple((row.key, reads[row.key].value) for row in answer.rows), rest)

    def _add_session(self, request: api.BeginRequest | api.ReadRequest, keys: Iterable[bytes]) -> None:
        del request.session[:]
        request.session.extend(self.session.known(keys))
        if request.ByteSize() > self.limits.request_bytes_max:
            # The client checks in any case that nothing it reads is too old.
            del request.session[:]

    # ---- Interactive transactions

    async def open(self, name: Name, declared: api.BeginRequest, pace: Pace) -> Open:
        """Begins one attempt. Raises `Aborted`, or another error if it was not begun."""
        self.check_size(declared)
        while True:
            at, home, names = await self.home(pace)
            name.begin_at(names, home)
            begin = api.BeginRequest()
            begin.CopyFrom(declared)
            begin.txn.CopyFrom(name.message)
            begin.home_region = home
            begin.acknowledged_below = names.acknowledged_below()
            # A gateway that resolves the transaction later does not need what the client knew then.
            txn = Open(self, name.keep(), at, api.ResolveRequest(interactive=begin))
            self._add_session(begin, [*declared.read_keys, *declared.write_keys])
            try:
                answer = await self.gateways.send(at, pace.deadline, BEGIN, begin)
                if answer.WhichOneof("result") == "opened":
                    reads = to_reads(answer.opened.reads)
                    if self.session.is_ahead_of(reads):
                        # The gateway does not compare reads with what clients know.
                        await txn.abort()
                        raise stale()
                    txn.learn(reads)
                    self._keep_alive(txn)
                    return txn
                ended(answer.finished)
                self._committed_unasked(name.id)
            except Unknown:
                pass
            except Failure as failure:
                if failure.kind not in (Kind.LOST, Kind.NOT_OPEN):
                    await self.after_failure(at, failure, pace)
                    continue
            except (Aborted, errors.OrthodromeError):
                raise
            except BaseException:
                # The caller was interrupted.
                txn.abort_later()
                raise
            # Nobody asked to commit it, so it cannot commit; ending it releases its keys.
            await self.end_unasked(txn, at, pace)

    async def end_unasked(self, txn: Open, avoid: int, pace: Pace) -> NoReturn:
        """Ends a transaction that nobody asked to commit. Raises `Aborted`, or another error."""
        txn.name.was_resolved()
        try:
            await self.resolve(txn.question, avoid, pace)
        except Unknown as unknown:
            txn.abort_later()
            raise errors.DeadlineError(f"the deadline passed: {unknown}") from None
        self._committed_unasked(txn.name.id)

    @staticmethod
    def _committed_unasked(txn: TxnId) -> NoReturn:
        raise errors.UnexpectedError(f"{txn} committed without a request to commit")

    # ---- Leases of open transactions

    def _keep_alive(self, txn: Open) -> None:
        """Extends the lease of the transaction until `release`."""
        with self._lock:
            self._open[txn.name.id] = txn.at
            if self._keeping:
                return
            self._keeping = True
        self.runtime.spawn(self._keep_leases())

    def release(self, txn: Open) -> None:
        with self._lock:
            self._open.pop(txn.name.id, None)

    async def _keep_leases(self) -> None:
        """Extends all leases three times within a lease, until no transaction is open."""
        try:
            third = max(self.limits.lease_ms, 30) / 3000
            while True:
                await self.runtime.sleep(third)
                with self._lock:
                    if not self._open or self.is_closed:
                        self._keeping = False
                        return
                    gateways: dict[int, list[TxnId]] = {}
                    for txn, at in self._open.items():
                        gateways.setdefault(at, []).append(txn)
                for at, txns in gateways.items():
                    ids = [api.TxnId(client=txn.client, counter=txn.counter, attempt=txn.attempt) for txn in txns]
                    try:
                        request = api.KeepAliveRequest(txns=ids)
                        await self.gateways.send(at, self.pace(third).deadline, KEEP_ALIVE, request)
                    except (Failure, ValueError):
                        # A transaction that lost its lease has ended; its commit says so.
                        continue
        finally:
            self._keeping = False

    # ---- Leases of keys

    async def grant_lease(self, ttl: float, options: Options) -> Lease:
        if not TTL_MIN <= ttl <= TTL_MAX:
            raise ValueError(f"ttl: {ttl} is not between {TTL_MIN} and {TTL_MAX} seconds")
        answer = await self._ask(GRANT_LEASE, api.GrantLeaseRequest(ttl_ms=round(ttl * 1000)), options)
        try:
            lease = Lease(answer.lease)
        except ValueError as error:
            raise errors.UnexpectedError(f"the gateway granted a lease with an invalid id: {error}") from None
        # Later reads of this client find the lease.
        self.session.wrote(answer.timestamp, {lease.record: b""})
        return lease

    async def renew_lease(self, lease: Lease, options: Options) -> None:
        await self._ask(RENEW_LEASE, api.RenewLeaseRequest(lease=lease.id), options, is_of_lease=True)

    async def revoke_lease(self, lease: Lease, options: Options) -> int:
        request = api.RevokeLeaseRequest(lease=lease.id)
        answer = await self._ask(REVOKE_LEASE, request, options, is_of_lease=True)
        keys: int = answer.keys
        return keys

    async def lease(self, lease: Lease, options: Options) -> LeaseInfo:
        request = api.DescribeLeaseRequest(lease=lease.id)
        answer = await self._ask(DESCRIBE_LEASE, request, options, is_of_lease=True)
        return LeaseInfo(answer.left_ms / 1000, tuple(answer.keys), answer.has_more)

    # ---- The cluster

    async def describe(self, options: Options) -> ClusterInfo:
        about = await self._ask(DESCRIBE, api.DescribeRequest(), options)
        return ClusterInfo(
            cluster=about.cluster,
            epoch=about.epoch,
            region=about.region,
            regions=tuple(Region(one.name, tuple(rtt / 1e6 for rtt in one.rtt_us)) for one in about.regions),
            nodes=tuple(Node(one.id, one.region, one.role == api.NODE_ROLE_GATEWAY) for one in about.nodes),
            partitions=tuple(
                Partition(
                    one.id,
                    tuple(one.replicas),
                    tuple(one.voters),
                    tuple(one.learners),
                    one.leader if one.HasField("leader") else None,
                )
                for one in about.partitions
            ),
            keyspaces=tuple(Keyspace(one.name, one.protocol, one.guarantee, one.general) for one in about.keyspaces),
        )

    async def status(self, options: Options) -> Status:
        answer = await self._ask(STATUS, api.StatusRequest(), options)
        return Status(
            node=answer.node,
            trouble=answer.trouble,
            requests=answer.requests,
            txns_in_flight=answer.txns_in_flight,
            txns_open=answer.txns_open,
            committed=answer.committed,
            aborted=answer.aborted,
            unknown=answer.unknown,
            refused=answer.refused,
            leases_expired=answer.leases_expired,
            uptime=answer.uptime_ms / 1000,
        )

    async def _ask(self, method: Any, request: Any, options: Options, *, is_of_lease: bool = False) -> Any:
        """Sends a request that may be repeated after any failure, until a gateway answers."""
        pace = self.pace(options.timeout)
        while True:
            at = self.gateways.current
            try:
                return await self.gateways.send(at, pace.deadline, method, request)
            except Failure as failure:
                if is_of_lease and failure.kind is Kind.NOT_OPEN:
                    raise errors.LeaseEndedError(failure.text) from None
                await self.after_failure(at, failure, pace)


class Renewal:
    """A lease that is renewed in the background until `stop`, or until it has ended."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._engine = engine
        self.lease = lease
        #: The lease lives until then, by `time.monotonic`.
        self._ends = 0.0
        #: Why the last renewal failed.
        self._trouble = ""
        #: Why the lease has ended, or must be taken for ended.
        self._ended: str | None = None
        #: No renewal begins any more.
        self._stopped = engine.runtime.signal()
        #: No renewal is pending any more.
        self._finished = engine.runtime.signal()

    async def begin(self, options: Options) -> None:
        # Only a renewal tells until when the lease lives.
        await self._renew(options)
        engine = self._engine
        with engine._lock:
            engine._renewals.add(self)
        engine.runtime.spawn(self._run())

    async def _renew(self, options: Options) -> None:
        # The gateway counts the time from a later moment. After a lost answer, the call sends the request again; the first
        # request may be carried out last, so the time counts from the first one.
        asked = time.monotonic()
        await self._engine.renew_lease(self.lease, options)
        self._ends = asked + self.lease.ttl

    def _left(self) -> float:
        return self._ends - time.monotonic()

    async def _run(self) -> None:
        engine = self._engine
        try:
            while not engine.is_closed and not await self._stopped.wait(max(self._left() / 3, RENEWAL_PAUSE_MIN)):
                if self._has_ended():
                    return
                try:
                    timeout = min(max(self._left(), 0.001), engine.timeout)
                    await self._renew(Options(Priority.LOW, timeout))
                    self._trouble = ""
                except errors.LeaseEndedError as error:
                    self._ended = str(error)
                    return
                except (errors.OrthodromeError, ValueError) as error:
                    self._trouble = f": {error}"
        finally:
            with engine._lock:
                engine._renewals.discard(self)
            self._stopped.set()
            self._finished.set()

    def _has_ended(self) -> bool:
        if self._ended is None and self._left() <= 0:
            self._ended = f"the lease {self.lease} was not renewed in time{self._trouble}"
        return self._ended is not None

    def check(self) -> None:
        if self._has_ended():
            raise errors.LeaseEndedError(self._ended)

    async def wait(self, timeout: float | None) -> None:
        await self._stopped.wait(timeout)
        self.check()

    def stop(self) -> None:
        self._stopped.set()

    async def close(self) -> None:
        """Waits for a pending renewal, because a call that ends the lease must come after it."""
        self.stop()
        if not self._engine.is_closed:
            await self._finished.wait(self._engine.timeout)


class Watching:
    """A watch of a range, which goes on at another gateway if its own one fails."""

    def __init__(self, engine: Engine, span: KeyRange, after: int | None, keys_only: bool, options: Options) -> None:
        check_range(span)
        if after is not None and (not isinstance(after, int) or isinstance(after, bool)):
            raise TypeError(f"after must be a timestamp or None, not {after!r}")
        if after is not None and not 0 <= after < 2**64:
            raise ValueError(f"after: {after} is not a timestamp")
        self._engine = engine
        self._request = api.WatchRequest(after=after, keys_only=keys_only)
        setattr(self._request, "from", span.start)
        if span.end is not None:
            self._request.until = span.end
        self._timeout = options.timeout
        #: The gateway that answers, and its answers.
        self._at = 0
        self._stream: Stream[api.WatchResponse] | None = None
        #: The part of the next batch that has arrived.
        self._parts: list[api.KeyRead] = []
        #: The gateway that answers has sent a whole batch.
        self._has_batch = False
        self._is_closed = False

    async def next(self) -> Changes | None:
        """The next batch; None if the watch was closed."""
        engine, pace = self._engine, self._engine.pace(self._timeout)
        while not self._is_closed:
            if engine.is_closed:
                raise errors.ClosedError("the client is closed")
            try:
                stream = self._stream or await self._begin(pace)
                answer = await self._receive(stream)
            except Failure as failed:
                if self._has_batch:
                    # Until now the gateway was well, so the deadline of the search for another one begins now.
                    pace = engine.pace(self._timeout)
                self._drop()
                if not self._is_closed:
                    await engine.after_failure(self._at, failed, pace)
                continue
            except (Exception, KeyboardInterrupt, SystemExit):
                self._drop()
                raise
            self._parts.extend(answer.changes)
            # The parts of one batch are used only once all of them have come.
            if answer.through != 0:
                return self._batch(answer.through)
        return None

    async def _begin(self, pace: Pace) -> Stream[api.WatchResponse]:
        engine = self._engine
        engine.check_size(self._request)
        # `home` handles its own failures.
        self._at, *_ = await engine.home(pace)
        stream = await engine.gateways.stream(self._at, pace.deadline, WATCH, self._request)
        self._stream = stream
        if self._is_closed:
            # It was closed meanwhile, in another thread or task.
            stream.cancel()
        return stream

    async def _receive(self, stream: Stream[api.WatchResponse]) -> api.WatchResponse:
        """The next answer. Raises `ForgottenError`, or `Failure`."""
        endpoint = self._engine.gateways.endpoints[self._at]
        try:
            answer = await stream.next(SILENCE_MAX)
        except Silence:
            raise Failure(Kind.LOST, f"{endpoint} has said nothing for {SILENCE_MAX:.0f} s") from None
        except Cancelled:
            raise Failure(Kind.LOST, f"{endpoint}: the watch was cancelled") from None
        except grpc.RpcError as error:
            failed: Any = error
            if failed.code() is grpc.StatusCode.OUT_OF_RANGE:
                raise errors.ForgottenError(f"the watch cannot go on: {failed.details()}") from None
            raise failure(endpoint, error) from None
        if answer is None:
            raise Failure(Kind.UNAVAILABLE, f"{endpoint} ended the watch")
        return answer

    def _batch(self, through: int) -> Changes:
        parts, self._parts = self._parts, []
        self._has_batch = True
        self._request.after = through
        if not self._request.keys_only:
            # Later reads of this client are not older than what the watch has shown.
            self._engine.session.read(to_reads(parts))
        reads = ((part.key, to_read(part)) for part in parts)
        return Changes(tuple(Change(key, read.value, read.version) for key, read in reads), through)

    def _drop(self) -> None:
        """Ends the call at the gateway. The next one begins after the last whole batch."""
        stream, self._stream = self._stream, None
        self._parts, self._has_batch = [], False
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """May be called while `next` waits; that returns then."""
        self._is_closed = True
        stream = self._stream
        if stream is not None:
            stream.cancel()


class Open:
    """A transaction that is open at a gateway."""

    def __init__(self, engine: Engine, name: Name, at: int, question: api.ResolveRequest) -> None:
        self._engine = engine
        self.name = name
        self.at = at
        self.reads: dict[bytes, Read] = {}
        #: What another gateway needs in order to resolve it, including the decision once it is made.
        self.question = question
        self._is_undecided = True

    def learn(self, reads: Mapping[bytes, Read]) -> None:
        self.reads.update(reads)
        del self.question.reads[:]
        self.question.reads.extend(to_versions(self.reads))

    async def read_round(self, keys: list[bytes], pace: Pace) -> None:
        """Reads more keys of a general transaction. If the answer is lost, the round is not sent again: it may still be
        pending, so the transaction is ended."""
        engine = self._engine
        request = api.ReadRoundRequest(txn=self.name.message, keys=keys)
        engine.check_size(request)
        while True:
            try:
                answer = await engine.gateways.send(self.at, pace.deadline, READ_ROUND, request)
            except Failure as failure:
                if failure.kind in (Kind.BUSY, Kind.NEVER):
                    await engine.after_failure(self.at, failure, pace)
                    continue
                break
            if answer.WhichOneof("result") == "opened":
                reads = to_reads(answer.opened.reads)
                if engine.session.is_ahead_of(reads):
                    # The caller does not see this round.
                    raise stale()
                self.learn(reads)
                return
            try:
                ended(answer.finished)
                engine._committed_unasked(self.name.id)
            except Unknown:
                break
            except Aborted:
                self._is_undecided = False
                raise
        # Nobody asked to commit it, so it cannot commit; ending it releases its keys.
        await engine.end_unasked(self, self.at, pace)

    async def commit(self, writes: Mapping[bytes, bytes | None], pace: Pace) -> Committed:
        """Writes and commits. Raises `Aborted` or `OutcomeUnknown`; after any other error nothing was committed."""
        engine = self._engine
        listed = to_writes(writes)
        request = api.CommitRequest(txn=self.name.message, writes=listed)
        self.question.commit.CopyFrom(api.Writes(writes=listed))
        # The client may have to resolve the transaction, and that request is longer than this one.
        engine.check_size(self.question)
        try:
            timestamp = await self._ask_to_commit(request, pace)
        except Unknown as unknown:
            raise engine.in_doubt(self.name, self.question, self.reads, writes, [], str(unknown)) from None
        engine.session.wrote(timestamp, writes)
        engine.session.read(self.reads)
        return Committed(timestamp, Reads(self.reads))

    async def _ask_to_commit(self, request: api.CommitRequest, pace: Pace) -> int:
        engine = self._engine
        while True:
            # From here on, an interrupted caller does not abort the transaction.
            self._is_undecided = False
            avoid: int | None = None
            try:
                answer = await engine.gateways.send(self.at, pace.deadline, COMMIT, request)
                return ended(answer.outcome)
            except Unknown:
                pass
            except Failure as failure:
                if failure.kind in (Kind.BUSY, Kind.NEVER):
                    self._is_undecided = True
                    await self._retry_commit(failure, pace)
                    continue
                if failure.kind is not Kind.NOT_OPEN:
                    avoid = self.at
            self.name.was_resolved()
            return await engine.resolve(self.question, avoid, pace)

    async def _retry_commit(self, failure: Failure, pace: Pace) -> None:
        await self._engine.after_failure(self.at, failure, pace)

    async def abort(self) -> None:
        """Aborts the transaction unless it was decided, and waits for the gateway's answer. If the gateway cannot be
        reached, the lease ends the transaction."""
        self._engine.release(self)
        if not self._is_undecided:
            return
        self._is_undecided = False
        await self._send_abort()

    def abort_later(self) -> None:
        """Aborts the transaction in the background, unless it was decided."""
        self._engine.release(self)
        if self._is_undecided and not self._engine.is_closed:
            self._is_undecided = False
            self._engine.runtime.spawn(self._send_abort())

    async def _send_abort(self) -> None:
        engine = self._engine
        deadline = engine.pace(engine.timeout).deadline
        try:
            await engine.gateways.send(self.at, deadline, ABORT, api.AbortRequest(txn=self.name.message))
        except (Failure, ValueError):
            pass


@dataclass(frozen=True)
class Declared:
    """The keys that a transaction declares before it begins."""

    reads: tuple[bytes, ...]
    writes: frozenset[bytes]


def declare(read: Iterable[Data] | None, write: Iterable[Data] | None) -> Declared | None:
    """The declared keys; None if the transaction finds its keys while it reads."""
    if read is None and write is None:
        return None
    return Declared(tuple(to_keys(read or (), "read")), frozenset(to_keys(write or (), "write")))


class Attempt:
    """One attempt at a transaction: what `get`, `put` and the end of the `with` block do.

    A transaction that declares its keys begins with `begin`. Any other begins with its first read. If the protocol of the
    cluster does not run transactions in rounds, each round is a read-only transaction (reconnaissance), and the end
    declares every key that was seen and commits only if it reads the same versions. If it does not, the next attempt
    declares these keys (`seen`) at its start, so others cannot overtake it for ever."""

    def __init__(
        self,
        engine: Engine,
        name: Name,
        declared: Declared | None,
        options: Options,
        pace: Pace | None,
        seen: Declared | None = None,
    ) -> None:
        self._engine = engine
        self._name = name
        self._declared = declared
        self._seen = seen
        self._options = options
        #: The deadline of all attempts together; None if each call has its own.
        self._pace = pace
        self._txn: Open | None = None
        self._reads: dict[bytes, Read] = {}
        self._writes: dict[bytes, bytes | None] = {}
        #: With reconnaissance: the number of snapshots that the reads came from, and the timestamp of the last.
        self._snapshots = (0, 0)
        #: Why it cannot continue.
        self._stopped: errors.OrthodromeError | None = None
        self._is_over = False
        #: Set once it has committed.
        self.committed: Committed | None = None

    @property
    def reads(self) -> Reads:
        return Reads(self._reads)

    def _left(self) -> float:
        return self._options.timeout if self._pace is None else self._pace.left()

    def _must_be_open(self) -> None:
        if self._is_over:
            raise errors.ClosedError("the transaction has ended; use it only inside its `with` block or function")
        if self._stopped is not None:
            raise self._stopped

    @property
    def seen(self) -> Declared | None:
        """With reconnaissance: the keys that it has seen, for the next attempt to declare."""
        if self._declared is not None or self._engine.runs_general or not self._reads:
            return None
        return Declared(tuple(sorted(self._reads)), frozenset(self._writes))

    async def begin(self) -> None:
        """Begins a transaction that declares its keys, or the keys that an earlier attempt has seen."""
        declared = self._declared or self._seen
        if declared is None:
            return
        if self._declared is None:
            # Until it commits, nothing says that its reads held at one time.
            self._snapshots = (2, 0)
        pace = self._engine.pace(self._left())
        request = self._request()
        request.read_keys.extend(declared.reads)
        request.write_keys.extend(sorted(declared.writes))
        while True:
            try:
                self._txn = await self._engine.open(self._name, request, pace)
                if self._declared is not None:
                    self._reads = self._txn.reads
                return
            except Aborted as aborted:
                # The caller has not seen its reads, so it can be begun again.
                if aborted.reason is not AbortReason.STALE_READ or not await pace.pause():
                    raise
                self._name.retry()

    def _request(self) -> api.BeginRequest:
        return api.BeginRequest(priority=cast(api.Priority, self._options.priority.value))

    async def get_all(self, keys: Iterable[Data]) -> list[bytes | None]:
        self._must_be_open()
        if isinstance(keys, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"keys must be a list of keys, not one key: use [{keys!r}], or get")
        names = [to_bytes(key, "keys: a key") for key in keys]
        missing = sorted({key for key in names if key not in self._writes and key not in self._reads})
        if missing:
            if self._declared is not None:
                raise errors.InvalidError(f"key {missing[0]!r} is not declared: name it in `read`")
            try:
                await self._read(missing)
            except errors.OrthodromeError as error:
                self._stopped = error
                raise
        return [self._writes[key] if key in self._writes else self._reads[key].value for key in names]

    async def _read(self, keys: list[bytes]) -> None:
        engine = self._engine
        if not engine.runs_general:
            if self._txn is not None and all(key in self._txn.reads for key in keys):
                self._reads.update((key, self._txn.reads[key]) for key in keys)
                return
            # It needs a key that it has not declared.
            self._drop()
            options = Options(self._options.priority, self._left())
            timestamp, reads = await engine.snapshot(keys, options, False)
            self._reads.update(reads)
            self._snapshots = (self._snapshots[0] + 1, timestamp)
            return
        pace = engine.pace(self._left())
        if self._txn is None:
            await self._begin_general(keys, pace)
        else:
            await self._txn.read_round(keys, pace)

    async def _begin_general(self, keys: list[bytes], pace: Pace) -> Open:
        request = self._request()
        request.general = True
        request.read_keys.extend(keys)
        self._txn = await self._engine.open(self._name, request, pace)
        self._reads = self._txn.reads
        return self._txn

    def write(self, key: Data, value: Data | None) -> None:
        """Buffers a write; None deletes the key."""
        self._must_be_open()
        name = to_bytes(key, "key")
        if self._declared is not None and name not in self._declared.writes:
            raise errors.InvalidError(f"key {name!r} is not declared: name it in `write`")
        self._writes[name] = None if value is None else to_bytes(value, "value")

    async def put_attached(self, lease: Lease, key: Data, value: Data) -> None:
        """Buffers the write of a key, and of its attachment to a lease that lives."""
        if (await self.get_all([lease.record]))[0] is None:
            raise errors.LeaseEndedError(f"the lease {lease} has ended, or was never granted")
        # Without the key, an attachment has no effect.
        self.write(lease.attachment(key), b"")
        self.write(key, value)

    async def commit(self) -> Committed:
        """Commits the buffered writes. In every other case it raises."""
        self._is_over = True
        if self._stopped is not None:
            await self._release()
            raise self._stopped
        try:
            if self._seen is not None and not self._writes.keys() <= self._seen.writes:
                self._drop()
            if self._declared is None and not self._engine.runs_general and self._txn is None:
                self.committed = await self._end_ahead()
            else:
                pace = self._engine.pace(self._left())
                txn = self._txn or await self._begin_general([], pace)
                committed = await txn.commit(self._writes, pace)
                # A transaction that declared what an earlier attempt had read may have read more.
                self.committed = committed if self._seen is None else Committed(committed.timestamp, self.reads)
        finally:
            await self._release()
        return self.committed

    def _drop(self) -> None:
        """Goes on with reconnaissance: aborts the transaction that the attempt began with, in the background."""
        if self._txn is not None:
            self._txn.abort_later()
            self._txn = None

    async def _release(self) -> None:
        if self._txn is not None:
            await self._txn.abort()

    async def give_up(self, *, wait: bool) -> None:
        """Ends the transaction without effect. Raises a retryable `Aborted` if the caller may have given up because of
        reads that are inconsistent with each other."""
        self._is_over = True
        if self._txn is not None:
            if wait:
                await self._txn.abort()
            else:
                self._txn.abort_later()
        if wait and self._declared is None and not self._engine.runs_general and self._stopped is None:
            if await self._snapshot_at() is None:
                raise stale()

    async def _snapshot_at(self) -> int | None:
        """The timestamp at which all reads of reconnaissance held together, if there was one."""
        count, timestamp = self._snapshots
        if count <= 1:
            return timestamp
        options = Options(self._options.priority, self._left())
        now, reads = await self._engine.snapshot(sorted(self._reads), options, False)
        return now if same_versions(reads, self._reads) else None

    async def _end_ahead(self) -> Committed:
        """With reconnaissance: declares every key that was seen, reads them again, and compares."""
        if not self._writes:
            timestamp = await self._snapshot_at()
            if timestamp is None:
                raise stale()
            return Committed(timestamp, self.reads)
        engine = self._engine
        pace, name, request = engine.pace(self._left()), engine.names.take(), self._request()
        request.read_keys.extend(sorted(self._reads))
        request.write_keys.extend(sorted(self._writes))
        while True:
            try:
                txn = await engine.open(name, request, pace)
                try:
                    if same_versions(txn.reads, self._reads):
                        return await txn.commit(self._writes, pace)
                finally:
                    await txn.abort()
            except Aborted as aborted:
                if not aborted.retryable or not await pace.pause():
                    raise
                name.retry()
                continue
            raise stale()


class Run:
    """A transaction that is run again until it commits, or its deadline passes."""

    def __init__(self, engine: Engine, declared: Declared | None, options: Options) -> None:
        self._engine = engine
        self._declared = declared
        self._options = options
        self._pace = engine.pace(options.timeout)
        self._name = engine.names.take()
        self._last: Aborted | None = None
        self._seen: Declared | None = None

    async def begin(self) -> Attempt:
        """The next attempt."""
        while True:
            attempt = Attempt(self._engine, self._name, self._declared, self._options, self._pace, self._seen)
            try:
                await attempt.begin()
                return attempt
            except Aborted as aborted:
                await self._before_retry(aborted)
            except errors.DeadlineError as error:
                raise self._last or error from None

    async def commit(self, attempt: Attempt) -> bool:
        """Commits. False: the function is to be called again."""
        try:
            await attempt.commit()
            return True
        except Aborted as aborted:
            self._seen = attempt.seen
            await self._before_retry(aborted)
            return False
        except errors.DeadlineError as error:
            raise self._last or error from None

    async def failed(self, attempt: Attempt, error: BaseException) -> None:
        """The function raised `error`. Returns if it is to be called again; otherwise the caller raises it again."""
        is_interrupted = not isinstance(error, Exception)
        self._seen = attempt.seen
        try:
            await attempt.give_up(wait=not is_interrupted)
        except Aborted as aborted:
            await self._before_retry(aborted)
            return
        stopped = attempt._stopped
        if isinstance(stopped, errors.DeadlineError) and self._last and not is_interrupted:
            raise self._last from None
        if is_interrupted or not isinstance(stopped, Aborted):
            raise error
        # The function failed because its transaction had aborted, whatever it raised then.
        await self._before_retry(stopped)

    async def _before_retry(self, aborted: Aborted) -> None:
        if not aborted.retryable or not await self._pace.pause():
            raise aborted
        # If the deadline passes in the middle of the next attempt, this abort says more about why.
        self._last = aborted
        self._name.retry()
