"""Client of Orthodrome, a geo-distributed transactional database.

    import orthodrome

    with orthodrome.connect(["near:7400", "far:7400"]) as db:
        with db.transaction() as txn:
            left = int(txn.get("stock/tea") or 0)
            txn.put("stock/tea", str(left - 1))

`orthodrome.aio` has the same for asyncio."""

from ._sync import Client, KeptLease, Transaction, Watch, connect
from .errors import (
    Aborted,
    AbortReason,
    BusyError,
    ClosedError,
    ConfigError,
    DeadlineError,
    ForgottenError,
    GuardFailed,
    InvalidError,
    LeaseEndedError,
    OrthodromeError,
    OutcomeUnknown,
    PermissionDeniedError,
    TooLarge,
    UnauthenticatedError,
    UnexpectedError,
    UnreachableError,
    UnsupportedError,
)
from .values import (
    Change,
    Changes,
    ClusterInfo,
    Committed,
    KeyRange,
    Keyspace,
    Lease,
    LeaseInfo,
    Node,
    Op,
    Page,
    Partition,
    Priority,
    Reads,
    Region,
    Snapshot,
    Status,
    Tls,
    TxnId,
    Version,
)

__all__ = [
    "AbortReason", "Aborted", "BusyError", "Change", "Changes", "Client", "ClosedError", "ClusterInfo", "Committed",
    "ConfigError", "DeadlineError", "ForgottenError", "GuardFailed", "InvalidError", "KeptLease", "KeyRange", "Keyspace",
    "Lease", "LeaseEndedError", "LeaseInfo", "Node", "Op", "OrthodromeError", "OutcomeUnknown", "Page", "Partition",
    "PermissionDeniedError", "Priority", "Reads", "Region", "Snapshot", "Status", "Tls", "TooLarge",
    "Transaction", "TxnId", "UnauthenticatedError", "UnexpectedError", "UnreachableError", "UnsupportedError", "Version",
    "Watch", "connect",
]
