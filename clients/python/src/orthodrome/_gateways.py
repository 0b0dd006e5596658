"""The gateways of a cluster: how to connect, which one to use, and what their errors mean."""

from __future__ import annotations

import enum
import ipaddress
import os
import random
import time
from collections.abc import Iterable
from typing import Any, TypeVar

import grpc

from . import errors
from ._runtime import Method, Options, Runtime, Silence, Stream
from .v1 import api_pb2 as api
from .values import Tls

Answer = TypeVar("Answer")

REGISTER = Method("Register", api.RegisterResponse.FromString)
BEGIN = Method("Begin", api.BeginResponse.FromString)
READ_ROUND = Method("ReadRound", api.ReadRoundResponse.FromString)
COMMIT = Method("Commit", api.CommitResponse.FromString)
ABORT = Method("Abort", api.AbortResponse.FromString)
KEEP_ALIVE = Method("KeepAlive", api.KeepAliveResponse.FromString)
EXECUTE = Method("Execute", api.ExecuteResponse.FromString)
READ = Method("Read", api.ReadResponse.FromString)
SCAN = Method("Scan", api.ScanResponse.FromString)
RESOLVE = Method("Resolve", api.ResolveResponse.FromString)
DESCRIBE = Method("Describe", api.DescribeResponse.FromString)
STATUS = Method("Status", api.StatusResponse.FromString)
WATCH = Method("Watch", api.WatchResponse.FromString)
GRANT_LEASE = Method("GrantLease", api.GrantLeaseResponse.FromString)
RENEW_LEASE = Method("RenewLease", api.RenewLeaseResponse.FromString)
REVOKE_LEASE = Method("RevokeLease", api.RevokeLeaseResponse.FromString)
DESCRIBE_LEASE = Method("DescribeLease", api.DescribeLeaseResponse.FromString)

PAUSE_MIN = 0.004
PAUSE_MAX = 1.0
#: A time-out without end has the same effect.
YEAR = 365 * 24 * 3600.0


class Kind(enum.Enum):
    """What a failed request means."""

    #: It had no effect and never will. A retry may succeed after a pause.
    BUSY = enum.auto()
    #: It had no effect and never will. Another gateway may accept it.
    UNAVAILABLE = enum.auto()
    #: It had no effect: the transaction is not open at this gateway in the required state, or the lease has ended.
    NOT_OPEN = enum.auto()
    #: It had no effect: this gateway did not register the client, or has started again since.
    UNREGISTERED = enum.auto()
    #: It had no effect, and a retry would not help.
    NEVER = enum.auto()
    #: It may have had any effect.
    LOST = enum.auto()


class Failure(Exception):
    """A request without an answer, or a refusal."""

    def __init__(self, kind: Kind, text: str, error: errors.OrthodromeError | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self._error = error

    def to_error(self) -> errors.OrthodromeError:
        """The error of a call that ends with this failure and cannot have had an effect."""
        if self._error is not None:
            return self._error
        if self.kind is Kind.BUSY:
            return errors.BusyError(f"the cluster is busy: {self.text}")
        if self.kind in (Kind.UNAVAILABLE, Kind.UNREGISTERED):
            return errors.UnreachableError(f"no gateway could be reached: {self.text}")
        return errors.DeadlineError(f"the deadline passed: {self.text}")


class Pace:
    """The deadline of one call, and how often it has failed so far."""

    def __init__(self, runtime: Runtime, timeout: float) -> None:
        self._runtime = runtime
        self.deadline = time.monotonic() + min(timeout, YEAR)
        self._failures = 0

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    async def pause(self) -> bool:
        """Pauses after a failure: twice as long each time, up to a second, minus a random part, so that clients which
        failed together do not retry together. False if the deadline comes first."""
        span = min(PAUSE_MIN * 2 ** min(self._failures, 16), PAUSE_MAX)
        self._failures += 1
        span *= random.uniform(0.5, 1.0)
        if span >= self.left():
            return False
        await self._runtime.sleep(span)
        return True


class Gateways:
    """All gateways, in the order of the configuration."""

    def __init__(
        self,
        runtime: Runtime,
        endpoints: str | Iterable[str],
        token: str | None,
        tls: Tls | None,
        attempt_timeout: float,
    ) -> None:
        listed = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
        self.endpoints = [endpoint.strip() for endpoint in listed]
        if not self.endpoints or self.endpoints == [""]:
            raise errors.ConfigError("endpoints: use at least one, as host:port")
        for endpoint in self.endpoints:
            _check_endpoint(endpoint, needs_tls=token is not None and tls is None)
        if attempt_timeout <= 0:
            raise errors.ConfigError(f"attempt_timeout: {attempt_timeout} is not a positive number of seconds")
        self._metadata = () if token is None else (("authorization", f"Bearer {_checked_token(token)}"),)
        credentials = None if tls is None else _credentials(tls)
        options = _options(tls)
        self._runtime = runtime
        self._attempt_timeout = attempt_timeout
        self._channels = [runtime.channel(endpoint, credentials, options) for endpoint in self.endpoints]
        self._regions: list[int | None] = [None] * len(self.endpoints)
        self._cluster: str | None = None
        #: The index of the gateway to use now.
        self.current = 0

    def __len__(self) -> int:
        return len(self.endpoints)

    def after(self, at: int) -> int:
        """The index after `at`."""
        return (at + 1) % len(self)

    def leave(self, at: int) -> None:
        """Stops using `at`, unless somebody has already done so."""
        if self.current == at:
            self.current = self.after(at)

    async def region(self, at: int, deadline: float) -> int:
        """The region of gateway `at`. If it is not known yet, asks the gateway."""
        region = self._regions[at]
        if region is None:
            region = self.met(at, await self.send(at, deadline, DESCRIBE, api.DescribeRequest()))
        return region

    def met(self, at: int, about: api.DescribeResponse) -> int:
        """Stores how gateway `at` describes itself."""
        if self._cluster is None:
            self._cluster = about.cluster
        if self._cluster != about.cluster:
            text = (
                f"endpoint {self.endpoints[at]!r} belongs to cluster {about.cluster!r}, but the others to "
                f"{self._cluster!r}; use gateways of one cluster"
            )
            raise Failure(Kind.NEVER, text, errors.ConfigError(text))
        self._regions[at] = about.region
        return about.region

    async def send(self, at: int, deadline: float, method: Method[Answer], request: Any) -> Answer:
        """Sends one request to gateway `at`, and waits until the deadline or for one attempt's time-out."""
        timeout = self._timeout(deadline)
        try:
            return await self._runtime.unary(self._channels[at], method, request, timeout, self._metadata)
        except grpc.RpcError as error:
            raise failure(self.endpoints[at], error) from None

    async def stream(self, at: int, deadline: float, method: Method[Answer], request: Any) -> Stream[Answer]:
        """Begins a call with many answers at gateway `at`. Waits as `send` until the gateway has accepted the call."""
        timeout = self._timeout(deadline)
        try:
            return await self._runtime.stream(self._channels[at], method, request, timeout, self._metadata)
        except Silence:
            raise Failure(Kind.LOST, f"{self.endpoints[at]} did not answer in time") from None

    def _timeout(self, deadline: float) -> float:
        return min(max(deadline - time.monotonic(), 0.001), self._attempt_timeout)

    async def close(self) -> None:
        await self._runtime.close(self._channels)


def _check_endpoint(endpoint: str, *, needs_tls: bool) -> None:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or "//" in host or not port.isdecimal() or int(port) > 65535:
        raise errors.ConfigError(f"endpoint {endpoint!r}: use host:port")
    if needs_tls and not _is_loopback(host):
        raise errors.ConfigError(f"endpoint {endpoint!r}: without TLS the token would be sent unencrypted; configure TLS")


def _is_loopback(host: str) -> bool:
    host = host.strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_token(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable():
        raise errors.ConfigError("token: is empty or contains characters that a header cannot have; check the token file")
    return token


def _pem(part: bytes | os.PathLike[str], name: str) -> bytes:
    if isinstance(part, bytes):
        data = part
    else:
        try:
            with open(part, "rb") as file:
                data = file.read()
        except OSError as error:
            raise errors.ConfigError(f"tls.{name}: {os.fspath(part)}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise errors.ConfigError(f"tls.{name}: is not in PEM form; use the content of a PEM file, or its pathlib.Path")
    return data


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.certificate is None) != (tls.key is None):
        raise errors.ConfigError("tls: certificate and key belong together; set both or neither")
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(tls.authority, "authority"),
        private_key=None if tls.key is None else _pem(tls.key, "key"),
        certificate_chain=None if tls.certificate is None else _pem(tls.certificate, "certificate"),
    )


def _options(tls: Tls | None) -> Options:
    options: list[tuple[str, Any]] = [
        # The gateway bounds its answers itself (`Limits.response_bytes_max`).
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A node that was restarted is found again at once.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 5000),
        ("grpc.keepalive_timeout_ms", 5000),
        # The library decides what is sent again: a service could otherwise do so by its DNS records.
        ("grpc.service_config_disable_resolution", 1),
        # Clients share no connection and no back-off.
        ("grpc.use_local_subchannel_pool", 1),
        # Gateways are reached directly, as with the Rust library.
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


#: Messages of gRPC about a request that was never sent, because there was no connection.
_NEVER_SENT = ("failed to connect to all addresses", "DNS resolution failed", "Name resolution failure")


def failure(endpoint: str, error: Any) -> Failure:
    """The meaning of a status. A request is known to have had no effect only if the status has the gateway's mark, or if
    there was no connection."""
    code: grpc.StatusCode = error.code()
    details: str = error.details() or code.name
    text = f"{endpoint}: {details}"
    trailers = {key: value for key, value in (error.trailing_metadata() or ())}
    is_marked = trailers.get("orthodrome-effect") == "none"
    if not is_marked:
        if code is grpc.StatusCode.UNAVAILABLE and details.startswith(_NEVER_SENT):
            return Failure(Kind.UNAVAILABLE, text)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"{endpoint} did not answer in time"
        return Failure(Kind.LOST, text)
    codes = grpc.StatusCode
    if code is codes.RESOURCE_EXHAUSTED:
        return Failure(Kind.BUSY, text)
    if code is codes.UNAVAILABLE:
        return Failure(Kind.UNAVAILABLE, text)
    if "orthodrome-register" in trailers:
        return Failure(Kind.UNREGISTERED, text)
    if code in (codes.NOT_FOUND, codes.FAILED_PRECONDITION, codes.ALREADY_EXISTS):
        return Failure(Kind.NOT_OPEN, text)
    if code in (codes.INVALID_ARGUMENT, codes.OUT_OF_RANGE):
        return Failure(Kind.NEVER, text, errors.InvalidError(f"not a valid request: {text}"))
    if code is codes.UNAUTHENTICATED:
        return Failure(Kind.NEVER, text, errors.UnauthenticatedError(f"not authenticated: {text}"))
    if code is codes.PERMISSION_DENIED:
        return Failure(Kind.NEVER, text, errors.PermissionDeniedError(f"not permitted: {text}"))
    if code is codes.UNIMPLEMENTED:
        return Failure(Kind.NEVER, text, errors.UnsupportedError(f"not with this cluster: {text}"))
    return Failure(Kind.NEVER, text, errors.UnexpectedError(f"unexpected answer from the gateway: {text}"))
