"""How the engine waits: in the calling thread, or on an event loop.

The engine is written once, as coroutines. With `Blocking` no coroutine ever suspends, so `drive` runs it to its end in
the calling thread."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

T = TypeVar("T")
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]


class Method(Generic[Answer]):
    """One call of the API."""

    def __init__(self, name: str, answer: Callable[[bytes], Answer]) -> None:
        self.path = f"/orthodrome.v1.Orthodrome/{name}"
        self.answer = answer


class Silence(Exception):
    """A stream had no answer in time. It was cancelled."""


class Cancelled(Exception):
    """This side has cancelled the stream, or closed its channel."""


class Stream(Protocol[Answer_co]):
    """The answers of one call."""

    async def next(self, timeout: float) -> Answer_co | None:
        """The next answer; None after the last one. Raises `Silence` after `timeout` seconds without an answer."""

    def cancel(self) -> None:
        """Ends the call, from any thread of a blocking client."""


class Signal(Protocol):
    """Something that happens once, and that several may wait for."""

    def set(self) -> None: ...

    async def wait(self, timeout: float | None) -> bool:
        """Waits until `set` was called: True. False after `timeout` seconds."""


class Runtime(Protocol):
    """What the engine needs from outside. `sleep` returns early once the runtime is closed."""

    def channel(self, endpoint: str, credentials: grpc.ChannelCredentials | None, options: Options) -> Any: ...

    async def unary(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Answer: ...

    async def stream(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Stream[Answer]:
        """Begins a call with many answers. Raises `Silence` if the server has not accepted it after `timeout` seconds.
        Other failures show at the first `next`."""

    async def sleep(self, seconds: float) -> None: ...

    def signal(self) -> Signal: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...

    async def close(self, channels: list[Any]) -> None: ...


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError("a blocking call was suspended; this is a defect of the package")


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


class _BlockingStream(Generic[Answer]):
    """gRPC for threads has no time-out for one answer, so a thread looks whether one is overdue."""

    #: The longest time in seconds between two looks, and so by how much `Silence` may be late.
    LOOK_INTERVAL = 1.0

    def __init__(self, call: Any) -> None:
        self._call = call
        #: The time at which the awaited answer is overdue; None if nobody waits.
        self._due: float | None = None
        self._is_silent = False
        self._ended = threading.Event()

    def begin(self, timeout: float) -> None:
        self._due = time.monotonic() + timeout
        arguments = (weakref.ref(self), self._ended, min(timeout, self.LOOK_INTERVAL))
        threading.Thread(target=_look_for_silence, args=arguments, name="orthodrome-watch", daemon=True).start()
        try:
            # It also returns if the call has failed.
            self._call.initial_metadata()
        finally:
            self._due = None
        if self._is_silent:
            raise Silence

    async def next(self, timeout: float) -> Answer | None:
        self._due = time.monotonic() + timeout
        try:
            answer: Answer = next(self._call)
            return answer
        except StopIteration:
            return None
        except grpc.RpcError:
            if self._is_silent:
                raise Silence from None
            if self._call.cancelled():
                raise Cancelled from None
            raise
        finally:
            self._due = None

    def look(self) -> float:
        """Cancels the call if an answer is overdue. Returns the number of seconds until the next look."""
        due = self._due
        left = self.LOOK_INTERVAL if due is None else due - time.monotonic()
        if left <= 0:
            self._is_silent = True
            self.cancel()
        return min(left, self.LOOK_INTERVAL)

    def cancel(self) -> None:
        self._ended.set()
        self._call.cancel()

    def __del__(self) -> None:
        # gRPC cancels a call that nobody refers to.
        self._ended.set()


def _look_for_silence(watched: weakref.ref[_BlockingStream[Any]], ended: threading.Event, interval: float) -> None:
    while not ended.wait(interval):
        stream = watched()
        if stream is None:
            return
        interval = stream.look()
        # The thread must not keep the stream alive.
        del stream


class _BlockingSignal:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout: float | None) -> bool:
        return self._event.wait(timeout)


class Blocking:
    """Waits in the calling thread. Background work has threads of its own."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def channel(self, endpoint: str, credentials: grpc.ChannelCredentials | None, options: Options) -> Any:
        if credentials is None:
            return grpc.insecure_channel(endpoint, options=options)
        return grpc.secure_channel(endpoint, credentials, options=options)

    async def unary(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Answer:
        call = channel.unary_unary(method.path, request_serializer=_serialize, response_deserializer=method.answer)
        answer: Answer = call(request, timeout=timeout, metadata=metadata)
        return answer

    async def stream(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Stream[Answer]:
        call = channel.unary_stream(method.path, request_serializer=_serialize, response_deserializer=method.answer)
        stream: _BlockingStream[Answer] = _BlockingStream(call(request, metadata=metadata))
        stream.begin(timeout)
        return stream

    async def sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def signal(self) -> Signal:
        return _BlockingSignal()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=drive, args=(work,), name="orthodrome", daemon=True).start()

    async def close(self, channels: list[Any]) -> None:
        self._closed.set()
        for channel in channels:
            channel.close()


class _LoopStream(Generic[Answer]):
    def __init__(self, call: Any) -> None:
        self._call = call
        #: Waits for the next answer. It goes on if the caller of `next` is cancelled.
        self._reading: asyncio.Task[Any] | None = None
        self._due = 0.0

    async def begin(self, timeout: float) -> None:
        try:
            # It also returns if the call has failed.
            await asyncio.wait_for(self._call.initial_metadata(), timeout)
        except asyncio.TimeoutError:
            self._call.cancel()
            raise Silence from None
        except BaseException:
            self._call.cancel()
            raise

    async def next(self, timeout: float) -> Answer | None:
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._call.read())
            self._due = time.monotonic() + timeout
        await asyncio.wait({self._reading}, timeout=max(0.0, self._due - time.monotonic()))
        if not self._reading.done():
            self.cancel()
            raise Silence
        reading, self._reading = self._reading, None
        if reading.cancelled():
            raise Cancelled
        answer: Any = reading.result()
        if answer is grpc.aio.EOF:
            return None
        received: Answer = answer
        return received

    def cancel(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()


class _LoopSignal:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout: float | None) -> bool:
        try:
            return await asyncio.wait_for(self._event.wait(), timeout)
        except asyncio.TimeoutError:
            return False


class Loop:
    """Waits on the running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def channel(self, endpoint: str, credentials: grpc.ChannelCredentials | None, options: Options) -> Any:
        if credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, credentials, options=options)

    async def unary(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Answer:
        call = channel.unary_unary(method.path, request_serializer=_serialize, response_deserializer=method.answer)
        answer: Answer = await call(request, timeout=timeout, metadata=metadata)
        return answer

    async def stream(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Stream[Answer]:
        call = channel.unary_stream(method.path, request_serializer=_serialize, response_deserializer=method.answer)
        stream: _LoopStream[Answer] = _LoopStream(call(request, metadata=metadata))
        await stream.begin(timeout)
        return stream

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def signal(self) -> Signal:
        return _LoopSignal()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # The loop itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, channels: list[Any]) -> None:
        for task in list(self._tasks):
            task.cancel()
        for channel in channels:
            await channel.close()
