"""Names of transactions, and what a client already knows. Both are safe to use from several threads."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from .v1 import api_pb2 as api
from .values import INITIAL, Op, Read, TxnId

#: The largest number of keys that a session remembers, and their largest total length in bytes.
KEYS_MAX = 4096
BYTES_MAX = 1 << 20


class _Live:
    """While it exists, the cluster keeps the outcome of this counter."""

    def __init__(self, counter: int, ended: deque[int]) -> None:
        self.counter = counter
        self.is_resolved = False
        self._ended = ended

    def __del__(self) -> None:
        # It may run in any thread at any moment, so it takes no lock.
        self._ended.append(self.counter)


class Names:
    """Assigns the names of one client: those for one gateway, which registered it."""

    def __init__(self, client: int) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._next = 1
        self._live: list[int] = []
        self._over: set[int] = set()
        self._ended: deque[int] = deque()

    def take(self) -> Name:
        """A new name."""
        return Name(self)

    def _counter(self) -> _Live:
        with self._lock:
            counter = self._next
            self._next += 1
            # Counters grow, so the heap only appends here.
            heapq.heappush(self._live, counter)
        return _Live(counter, self._ended)

    def acknowledged_below(self) -> int:
        """All transactions below this counter have ended, and nobody will ask for their outcomes."""
        with self._lock:
            while self._ended:
                self._over.add(self._ended.popleft())
            while self._live and self._live[0] in self._over:
                self._over.discard(heapq.heappop(self._live))
            return self._live[0] if self._live else self._next


class Name:
    """The name of one attempt at a transaction."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._live = names._counter()
        self._attempt = 0
        self._home: int | None = None

    @property
    def id(self) -> TxnId:
        return TxnId(self._names.client, self._live.counter, self._attempt)

    @property
    def message(self) -> api.TxnId:
        return api.TxnId(client=self._names.client, counter=self._live.counter, attempt=self._attempt)

    def begin_at(self, names: Names, home: int) -> None:
        """Names an attempt that begins in region `home`, at the gateway that takes `names`. All attempts at a transaction
        begin at one gateway, so at another one the work continues as a new transaction. The earlier attempts are known
        to have had no effect."""
        if self._names is not names or (self._home is not None and self._home != home):
            self._names = names
            self._renew()
        self._home = home

    def was_resolved(self) -> None:
        """Another request than the one that began the attempt asks for its outcome. The gateway may not know the outcome,
        and then refuses the next attempt."""
        self._live.is_resolved = True

    def retry(self) -> None:
        """Names the next attempt; the last one is known to have had no effect."""
        if self._live.is_resolved:
            self._renew()
        else:
            self._attempt += 1

    def _renew(self) -> None:
        self._live = self._names._counter()
        self._attempt = 0

    def keep(self) -> Name:
        """The same name, which stays as it is when this one changes."""
        kept = object.__new__(Name)
        kept.__dict__.update(self.__dict__)
        return kept


class Session:
    """The newest versions that a client has seen, by key: (timestamp, is a deletion). Later reads must not be older."""

    def __init__(self, keys_max: int = KEYS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._lock = threading.Lock()
        self._floors: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()
        self._bytes = 0
        self._keys_max = keys_max
        self._bytes_max = bytes_max

    def read(self, reads: Mapping[bytes, Read]) -> None:
        """A transaction with these reads committed."""
        with self._lock:
            for key, read in reads.items():
                self._raise(key, read.version.timestamp, read.value is None)

    def wrote(self, timestamp: int, writes: Mapping[bytes, bytes | None]) -> None:
        """A transaction with these writes committed."""
        with self._lock:
            for key, value in writes.items():
                self._raise(key, timestamp, value is None)

    def ran(self, timestamp: int, ops: Iterable[Op]) -> None:
        """A procedure with these operations committed."""
        # The value that a stored procedure wrote is not known here.
        deletions = {key: op._may_delete for op in ops for key in op._writes}
        with self._lock:
            for key, may_delete in deletions.items():
                self._raise(key, timestamp, may_delete)

    def _raise(self, key: bytes, timestamp: int, is_deletion: bool) -> None:
        if timestamp == 0:
            return
        floor = self._floors.get(key)
        if floor is None:
            self._bytes += len(key)
        if floor is None or floor[0] < timestamp:
            self._floors[key] = (timestamp, is_deletion)
        self._floors.move_to_end(key)
        while len(self._floors) > self._keys_max or self._bytes > self._bytes_max:
            oldest, _ = self._floors.popitem(last=False)
            self._bytes -= len(oldest)

    def known(self, keys: Iterable[bytes]) -> list[api.KnownKey]:
        """What the client knows of these keys."""
        known = []
        with self._lock:
            for key in sorted(set(keys)):
                floor = self._floors.get(key)
                if floor is not None:
                    known.append(api.KnownKey(key=key, timestamp=floor[0], deleted=floor[1]))
        return known

    def is_ahead_of(self, reads: Mapping[bytes, Read], at: int = -1) -> bool:
        """True if one of these reads is older than what the client knows. If they are those of a transaction that
        committed at `at`, an absent key was deleted since the client knew a value of it."""
        with self._lock:
            for key, read in reads.items():
                timestamp, is_deletion = self._floors.get(key, (0, False))
                # Servers drop old deletions, so an absent key is not older than a deletion.
                is_unwritten = read.value is None and read.version.writer == INITIAL.writer
                is_absent = is_unwritten and (is_deletion or at >= timestamp)
                if read.version.timestamp < timestamp and not is_absent:
                    return True
        return False
