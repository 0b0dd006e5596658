"""How the engine waits: in the calling thread, or on an event loop.

The engine is written once, as coroutines. With `Blocking` no coroutine ever suspends, so `drive` runs it to its end in
the calling thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

T = TypeVar("T")
Answer = TypeVar("Answer")
Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]


class Method(Generic[Answer]):
    """One call of the API."""

    def __init__(self, name: str, answer: Callable[[bytes], Answer]) -> None:
        self.path = f"/orthodrome.v1.Orthodrome/{name}"
        self.answer = answer


class Runtime(Protocol):
    """What the engine needs from outside. `sleep` returns early once the runtime is closed."""

    def channel(self, endpoint: str, credentials: grpc.ChannelCredentials | None, options: Options) -> Any: ...

    async def unary(
        self, channel: Any, method: Method[Answer], request: Any, timeout: float, metadata: Metadata
    ) -> Answer: ...

    async def sleep(self, seconds: float) -> None: ...

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

    async def sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=drive, args=(work,), name="orthodrome", daemon=True).start()

    async def close(self, channels: list[Any]) -> None:
        self._closed.set()
        for channel in channels:
            channel.close()


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

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

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
