"""Limits and threads for calls that an event loop waits for."""

import asyncio
import heapq
import inspect
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PriorityLimit:
    """Limit on how many bodies run at the same time; the smallest priority continues first.

    So requests for old rollouts overtake requests for new ones. All methods run in one event loop.
    """

    def __init__(self, max_concurrent: int | None) -> None:
        """Allow this many bodies at a time; None has no limit."""
        self._max_concurrent = max_concurrent
        self._num_active = 0
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def acquire(self, priority: tuple[int, int]) -> AsyncIterator[None]:
        """Run the body when it is its turn."""
        if self.is_free:
            self._num_active += 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._release()

    def resize(self, max_concurrent: int) -> None:
        """Allow another number of bodies from now on; those that run are not stopped."""
        self._max_concurrent = max_concurrent
        self._admit()

    @property
    def is_free(self) -> bool:
        """True if a body would run at once."""
        return self._has_free and not self._waiting

    @property
    def _has_free(self) -> bool:
        return self._max_concurrent is None or self._num_active < self._max_concurrent

    async def _wait(self, priority: tuple[int, int]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The number keeps equal priorities in their order, and futures from being compared.
        heapq.heappush(self._waiting, (priority, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()  # it was its turn, which it passes on
            raise

    def _release(self) -> None:
        self._num_active -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_free:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self._num_active += 1
                future.set_result(None)


_Task = Callable[[], Callable[[], None]]
"""Calls a function, and returns what hands over its result."""


class DaemonThreads:
    """Threads for blocking calls; as many as there are open calls, which callers limit.

    They are daemons and not a ThreadPoolExecutor, because a call that hangs must not keep the
    process from exiting. A thread whose call hangs is not used again.
    """

    def __init__(self, name: str) -> None:
        """Start no thread yet; their names begin with `name`."""
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Call a function in a thread; from any thread."""
        future: Future[T] = Future()

        def run() -> Callable[[], None]:
            """Call the function; return what hands over its result."""
            if not future.set_running_or_notify_cancel():
                return lambda: None
            try:
                result = function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                return partial(_settle, future, error=error)
            # An event loop would end when a task raises SystemExit or KeyboardInterrupt.
            except BaseException as error:  # noqa: BLE001
                failure = RuntimeError(f"{type(error).__name__} in a thread: {error}")
                return partial(_settle, future, error=failure)
            return partial(_settle, future, result=result)

        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(
                target=self._work, daemon=True, name=f"{self._name}_{len(self._threads)}"
            )
            self._threads.append(thread)
            thread.start()
        self._tasks.put(run)
        return future

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread and wait for its result."""
        return await asyncio.wrap_future(self.start(function, *args, **kwargs))

    async def call_or_await(
        self, function: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Await a coroutine function, or call another function in a thread.

        A wrapper or a callable object is no coroutine function, but may return a coroutine, which
        is then awaited here.
        """
        if inspect.iscoroutinefunction(function):
            awaited: T = await function(*args, **kwargs)
            return awaited
        returned = await self.call(function, *args, **kwargs)
        return await returned if inspect.isawaitable(returned) else returned

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End idle threads at once, busy ones when their call returns; wait up to `timeout_s`."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            settle = task()
            # Idle before the result is known, so that the next call of its waiter comes here.
            self._idle.release()
            settle()


@contextmanager
def convert_exits() -> Iterator[None]:
    """Raise RuntimeError in place of what would end the current task or its event loop.

    A coroutine of the user may raise SystemExit, or await a task that a library has cancelled. If
    the current task itself is cancelled, as by a timeout, CancelledError passes.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        reason = f"{type(error).__name__} in a coroutine: {error}".removesuffix(": ")
        raise RuntimeError(reason) from error


async def gather_or_cancel(coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return the results in order; cancel the rest after an error or if cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _settle(
    future: "Future[Any]", *, result: object = None, error: Exception | None = None
) -> None:
    """Complete a future, whose waiter may have cancelled it meanwhile."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        return
