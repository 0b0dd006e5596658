"""What a call raises.

Three families, and a program usually needs no more than these:

- `Aborted`: the transaction had no effect. `reason` says why.
- `OutcomeUnknown`: the transaction may have committed, or may still commit. `resolve` asks again.
  Never treat it as an abort.
- every other `OrthodromeError`: nothing was committed, and nothing will be. Calls about leases are the exception: they
  may still take effect, and may be repeated.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable

from .values import Committed, TxnId


class AbortReason(enum.Enum):
    """Why a transaction aborted."""

    #: A newer server sent a reason that this version does not know.
    OTHER = 0
    #: It conflicted with another transaction.
    CONFLICT = 1
    #: A value that it read was overwritten before it could commit.
    STALE_READ = 2
    #: Its caller gave up.
    CLIENT = 3
    #: A guard of its procedure failed, or an operand had the wrong form.
    GUARD = 4
    #: Recovery found it unfinished and ended it.
    RECOVERY = 5
    #: Its lease ran out.
    ABANDONED = 6
    #: The cluster was too busy.
    OVERLOAD = 7
    #: It is invalid and can never succeed.
    INVALID = 8
    #: An append would have made a value longer than 1 MiB, or the transaction is too large.
    TOO_LARGE = 9

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class OrthodromeError(Exception):
    """Any error of this package."""


class ConfigError(OrthodromeError):
    """The arguments of `connect` cannot be used. The message names the one to correct."""


class UnreachableError(OrthodromeError):
    """No gateway could be reached in time. Check the endpoints and the network, or try later."""


class BusyError(OrthodromeError):
    """The gateways were too busy until the deadline. Try later."""


class DeadlineError(OrthodromeError):
    """The deadline passed, and nothing was committed. Try again, or allow more time."""


class UnauthenticatedError(OrthodromeError):
    """The token or certificate was not accepted."""


class PermissionDeniedError(OrthodromeError):
    """The role of this client does not allow the call."""


class InvalidError(OrthodromeError):
    """The request breaks a rule or a bound. The message names the field."""


class UnsupportedError(OrthodromeError):
    """The cluster does not have this call."""


class ForgottenError(OrthodromeError):
    """The servers have forgotten changes that a watch should have returned. Begin a new watch, and then scan the
    range."""


class LeaseEndedError(OrthodromeError):
    """The lease has ended, and the keys that are attached to it are deleted or soon will be. A `KeptLease` also raises this
    if it could not renew the lease for so long that the lease may have ended."""


class UnexpectedError(OrthodromeError):
    """This package does not understand the gateway's answer. One of the two is too old, or has a defect."""


class ClosedError(OrthodromeError):
    """The client or the transaction was used after its end."""


class Aborted(OrthodromeError):
    """The transaction had no effect."""

    def __init__(self, reason: AbortReason, *, retryable: bool) -> None:
        super().__init__(f"the transaction was aborted: {reason}")
        #: Why it aborted.
        self.reason = reason
        #: True if the same transaction may succeed on a retry. Calls that retry have already retried until their deadline.
        self.retryable = retryable


class GuardFailed(Aborted):
    """A guard of a procedure failed: a compared key held another value, or an operand had the wrong form."""


class TooLarge(Aborted):
    """An append would have made a value longer than 1 MiB, or the transaction is too large."""


class OutcomeUnknown(OrthodromeError):
    """The transaction may have committed, or may still commit: the answer was lost, and no gateway knew the
    outcome before the deadline."""

    def __init__(
        self,
        txn: TxnId,
        trouble: str,
        *,
        resolve: Callable[[float | None], Committed] | None = None,
        resolve_async: Callable[[float | None], Awaitable[Committed]] | None = None,
    ) -> None:
        super().__init__(f"the outcome of {txn} is unknown: {trouble}")
        #: The transaction's name.
        self.txn = txn
        #: Why its outcome could not be learned.
        self.trouble = trouble
        self._resolve = resolve
        self._resolve_async = resolve_async

    def resolve(self, timeout: float | None = None) -> Committed:
        """Asks one gateway after the other again, for `timeout` seconds (the client's default if None). This ends a
        transaction that is still pending. Its outcome is decided only once, however often you ask.

        Raises `Aborted` if it had no effect, and `OutcomeUnknown` if still nobody knows."""
        if self._resolve is None:
            raise RuntimeError("this error comes from orthodrome.aio: use `await error.resolve_async()`")
        return self._resolve(timeout)

    async def resolve_async(self, timeout: float | None = None) -> Committed:
        """As `resolve`, for errors of `orthodrome.aio`."""
        if self._resolve_async is None:
            raise RuntimeError("this error comes from a blocking client: use `error.resolve()`")
        return await self._resolve_async(timeout)


def aborted(number: int, *, retryable: bool) -> Aborted:
    """The error for a reason of the API."""
    try:
        reason = AbortReason(number)
    except ValueError:
        reason = AbortReason.OTHER
    kind = {AbortReason.GUARD: GuardFailed, AbortReason.TOO_LARGE: TooLarge}.get(reason, Aborted)
    return kind(reason, retryable=retryable)
