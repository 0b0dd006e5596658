"""The values that calls take and return."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from .v1 import api_pb2 as api

#: A key or a value. Text is stored as UTF-8.
Data = Union[str, bytes, bytearray, memoryview]


def to_bytes(data: Data, what: str) -> bytes:
    """The bytes of a key or a value; `what` names it in errors."""
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise TypeError(f"{what} must be str or bytes, not {type(data).__name__}: {data!r}")


def to_keys(keys: Iterable[Data], what: str) -> list[bytes]:
    """Distinct keys, in order."""
    if isinstance(keys, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{what} must be a list of keys, not one key: use [{keys!r}]")
    return sorted({to_bytes(key, f"{what}: a key") for key in keys})


class Priority(enum.Enum):
    """The priority of a transaction."""

    LOW = 0
    HIGH = 1


class TxnId(NamedTuple):
    """The name of one attempt at a transaction."""

    client: int
    counter: int
    attempt: int

    def __str__(self) -> str:
        return f"c{self.client}.{self.counter}" + (f"#{self.attempt}" if self.attempt else "")


class Version(NamedTuple):
    """The write that a read saw."""

    #: Commit timestamp of the writer in nanoseconds. If the writer is client 0, no transaction wrote the key, or its
    #: deletion has been forgotten: all versions up to this timestamp had been deleted again.
    timestamp: int
    writer: TxnId


INITIAL = Version(0, TxnId(0, 0, 0))


class Read(NamedTuple):
    """What a key held."""

    #: None if the key was absent.
    value: bytes | None
    version: Version

    @property
    def compared(self) -> Version:
        """The version by which two reads are compared. All absent keys are alike, because servers forget deletions."""
        return INITIAL if self.value is None else self.version


class Reads(Mapping[Data, "bytes | None"]):
    """The values that a transaction read, by key. `reads[key]` is None if the key was absent, and raises `KeyError`
    if it was not read."""

    def __init__(self, reads: Mapping[bytes, Read]) -> None:
        self._reads = dict(sorted(reads.items()))

    def __getitem__(self, key: Data) -> bytes | None:
        return self._reads[to_bytes(key, "key")].value

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)

    def __repr__(self) -> str:
        return f"Reads({ {key: read.value for key, read in self._reads.items()} })"

    def text(self, key: Data) -> str | None:
        """The value as text; None if the key was absent."""
        value = self[key]
        return None if value is None else value.decode()

    def version(self, key: Data) -> Version:
        """The version that was read."""
        return self._reads[to_bytes(key, "key")].version


@dataclass(frozen=True)
class Committed:
    """A transaction that committed."""

    #: Its position in the serial order: nanoseconds since 1970 by the cluster's clocks.
    timestamp: int
    #: What it read. None if the answer was lost and only the outcome could be asked for again, or if the values
    #: were larger than an answer may be.
    reads: Reads | None


@dataclass(frozen=True)
class Snapshot:
    """The values of keys at one moment."""

    timestamp: int
    reads: Reads


@dataclass(frozen=True)
class KeyRange:
    """The keys from `start` on, up to and without `end`; without `end`, up to the last key."""

    start: bytes = b""
    end: bytes | None = None

    @staticmethod
    def prefix(prefix: Data) -> KeyRange:
        """All keys that begin with `prefix`."""
        start = to_bytes(prefix, "prefix")
        head = start.rstrip(b"\xff")
        return KeyRange(start, head[:-1] + bytes([head[-1] + 1]) if head else None)


@dataclass(frozen=True)
class Page:
    """The keys of a range, or of its first part, at one moment."""

    timestamp: int
    #: The keys that have a value, in order, with their values; the values are None in a scan of keys only. It may be
    #: empty although more keys follow.
    rows: tuple[tuple[bytes, bytes | None], ...]
    #: The rest of the range, if it may have more keys: scan that for the next page, at a later moment.
    rest: KeyRange | None


@dataclass(frozen=True)
class Change:
    """One change of one key."""

    key: bytes
    #: The new value. None if the key was deleted, and always None in a watch of keys only.
    value: bytes | None
    #: The transaction that made the change, and its commit timestamp.
    version: Version


@dataclass(frozen=True)
class Changes:
    """The next changes of a watch."""

    #: In the order of their commit timestamps; those of one transaction are together. There may be none.
    changes: tuple[Change, ...]
    #: The watch has returned everything up to this timestamp. To continue later, in another process too, watch the range
    #: `after` this timestamp.
    through: int


class Op:
    """One operation of a procedure. Operations run in order; each sees the effects of those before it."""

    def __init__(self, message: api.Op, writes: tuple[bytes, ...], *, may_delete: bool = False) -> None:
        self._message = message
        self._writes = writes
        self._may_delete = may_delete

    def __repr__(self) -> str:
        return f"Op({str(self._message).strip()})"

    @staticmethod
    def get(key: Data) -> Op:
        """Reads the key."""
        return Op(api.Op(key=to_bytes(key, "key"), get=api.Get()), ())

    @staticmethod
    def compare(key: Data, expected: Data | None) -> Op:
        """Aborts the transaction (`GuardFailed`) unless the key holds exactly this; None: unless it is absent."""
        guard = api.Compare()
        if expected is not None:
            guard.expected = to_bytes(expected, "expected")
        return Op(api.Op(key=to_bytes(key, "key"), compare=guard), ())

    @staticmethod
    def put(key: Data, value: Data) -> Op:
        """Sets the key."""
        name = to_bytes(key, "key")
        return Op(api.Op(key=name, put=to_bytes(value, "value")), (name,))

    @staticmethod
    def add(key: Data, amount: int) -> Op:
        """Adds to the key, a decimal 64-bit integer. An absent key counts as 0. Aborts (`GuardFailed`) if the value
        is no such integer, and on overflow."""
        if not -(2**63) <= amount < 2**63:
            raise ValueError(f"amount: {amount} does not fit in 64 bits")
        name = to_bytes(key, "key")
        return Op(api.Op(key=name, add=amount), (name,))

    @staticmethod
    def append(key: Data, value: Data) -> Op:
        """Appends to the key's value. An absent key counts as empty."""
        name = to_bytes(key, "key")
        return Op(api.Op(key=name, append=to_bytes(value, "value")), (name,))

    @staticmethod
    def delete(key: Data) -> Op:
        """Removes the key."""
        name = to_bytes(key, "key")
        return Op(api.Op(key=name, delete=api.Delete()), (name,), may_delete=True)

    @staticmethod
    def call(procedure: str, reads: Iterable[Data], writes: Iterable[Data], arguments: Data = b"") -> Op:
        """Calls a stored procedure that the servers were built with. It gets the values of `reads`, in their order,
        and sets or deletes every key of `writes`, or aborts (`GuardFailed`)."""
        names = tuple(to_bytes(key, "writes: a key") for key in writes)
        call = api.Call(
            procedure=procedure,
            reads=[to_bytes(key, "reads: a key") for key in reads],
            writes=names,
            arguments=to_bytes(arguments, "arguments"),
        )
        return Op(api.Op(call=call), names, may_delete=True)


#: The shortest and the longest time for which a lease is granted, in seconds: the longest is 366 days.
TTL_MIN = 1
TTL_MAX = 366 * 24 * 60 * 60

_LEASE_ID = re.compile("([1-9][0-9]{3,10})-[0-9a-f]{16}")


@dataclass(frozen=True)
class Lease:
    """A lease: when it ends, the keys that are attached to it are deleted. `Client.grant_lease` grants it. Other clients
    may use it, too: `Lease(id)`."""

    #: Such as `30000-9f86d081884c7d65`: the time in milliseconds for which it is granted, and a random number.
    id: str

    def __post_init__(self) -> None:
        found = _LEASE_ID.fullmatch(self.id)
        if found is None or not TTL_MIN * 1000 <= int(found[1]) <= TTL_MAX * 1000:
            example = "an id looks like 30000-9f86d081884c7d65, as the grant returned it"
            raise ValueError(f"{self.id[:64]!r} is not the id of a lease; {example}")

    def __str__(self) -> str:
        return self.id

    @property
    def ttl(self) -> float:
        """The number of seconds that it lives after its grant and after each renewal."""
        return int(self.id.partition("-")[0]) / 1000

    @property
    def record(self) -> bytes:
        """The key that exists as long as the lease lives. A transaction that attaches keys reads it."""
        return f"orthodrome/lease/{{{self.id}}}".encode()

    def attachment(self, key: Data) -> bytes:
        """The key that attaches `key`. The transaction that writes `key` writes it, too."""
        return self.record + b"/key/" + to_bytes(key, "key")

    def writes(self, key: Data) -> list[bytes]:
        """The keys that a transaction declares in `write` to call `put_attached` for `key`. In `read` it declares
        `record`."""
        return [to_bytes(key, "key"), self.attachment(key)]

    def put(self, key: Data, value: Data) -> list[Op]:
        """The operations that set a key and attach it. They abort the transaction (`GuardFailed`) if the lease has
        ended."""
        return [Op.compare(self.record, b""), Op.put(key, value), Op.put(self.attachment(key), b"")]


@dataclass(frozen=True)
class LeaseInfo:
    """A lease that lives."""

    #: The number of seconds that it lives if nobody renews it.
    left: float
    #: Attached keys, in order.
    keys: tuple[bytes, ...]
    #: True if more keys are attached.
    has_more: bool


@dataclass(frozen=True)
class Tls:
    """TLS to the gateways. Each part is the content of a PEM file, or the path of one (`pathlib.Path`)."""

    #: The certificate of the authority that signed the gateways' certificates.
    authority: bytes | os.PathLike[str]
    #: The name in the gateways' certificates, if it differs from the host of the endpoint.
    server_name: str | None = None
    #: The certificate chain of this client, if it authenticates with one.
    certificate: bytes | os.PathLike[str] | None = None
    #: The private key for `certificate`.
    key: bytes | os.PathLike[str] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Region:
    """One region."""

    name: str
    #: Round trip to each region in seconds, in the order of the regions.
    rtt: tuple[float, ...]


@dataclass(frozen=True)
class Node:
    """One node."""

    id: int
    #: Index of its region.
    region: int
    is_gateway: bool


@dataclass(frozen=True)
class Partition:
    """One partition."""

    id: int
    #: Nodes with a replica, according to the cluster's configuration.
    replicas: tuple[int, ...]
    #: Members that vote now; empty if the gateway knows of no change since the configuration.
    voters: tuple[int, ...]
    #: Members that receive data but do not vote.
    learners: tuple[int, ...]
    #: The member that leads now, if the gateway knows.
    leader: int | None


@dataclass(frozen=True)
class Keyspace:
    """One keyspace."""

    name: str
    #: The protocol that commits its transactions.
    protocol: str
    #: `strict serializability`, or `serializability`.
    guarantee: str
    #: True if gateways run its transactions in rounds. Otherwise this package uses reconnaissance.
    general: bool


@dataclass(frozen=True)
class ClusterInfo:
    """A gateway's description of its cluster."""

    cluster: str
    #: The number of the placement; every change of the placement increases it.
    epoch: int
    #: The region of the gateway: an index into `regions`.
    region: int
    regions: tuple[Region, ...]
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    keyspaces: tuple[Keyspace, ...]


@dataclass(frozen=True)
class Status:
    """The status of a gateway, and its counters since its process started."""

    node: int
    #: Why it does not serve; empty if it serves.
    trouble: str
    requests: int
    txns_in_flight: int
    txns_open: int
    committed: int
    aborted: int
    unknown: int
    refused: int
    leases_expired: int
    #: Seconds since its process started.
    uptime: float
