"""Report an exception in the public methods of `BaseEngine` to the other ranks.

The methods are enclosed where a class is defined, because a method that does not report its
exceptions lets the other ranks wait until their timeout.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from temper_engine_api.distributed.rank_failures import RankFailures
from temper_engine_api.specs import EngineConfig

UNREPORTED_CALLS = frozenset({"init_model", "require", "close"})
"""Methods that are not enclosed.

`init_model` reports by itself, as its groups do not exist yet. `require` only asks about the
engine's class. `close` also ends an engine whose process group is broken.
"""
WAITING_CALLS = frozenset({"finish_part", "finish_saving"})
"""Methods that wait for a thread of this rank. Ranks exchange the thread's error themselves, and
`close` calls `finish_saving`."""
LOCAL_CALLS = frozenset({"lr_scheduler_step", "set_loss_fn", "shard_data"})
"""Methods without communication. No rank waits for one that raises in them, so they report nothing
and are not counted. In a broken group they raise RankFailedError, as all others do."""
CHECKPOINT_CALLS = frozenset({"write_part", "read_part"})
"""Methods after which ranks exchange their errors, such as that of a full disk."""


_ENCLOSED = "_temper_enclosed"
"""Attribute that marks an enclosed method. Its value is that method, because `functools.wraps`
copies the attribute to other functions, which are not enclosed."""


class ReportedCalls:
    """Encloses the public methods of `BaseEngine`, also where an engine overrides them.

    For a context manager, its body is enclosed too.
    """

    config: EngineConfig
    _rank_failures: RankFailures | None
    _contract: ClassVar[dict[str, bool]]
    """Names of the methods to enclose; True for context managers."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # An engine's own methods are not enclosed: they need not be collective.
        if ReportedCalls in cls.__bases__:
            cls._contract = {
                name: inspect.isgeneratorfunction(inspect.unwrap(method))
                for name, method in vars(cls).items()
                if inspect.isfunction(method)
                and not name.startswith("_")
                and name not in UNREPORTED_CALLS
            }
        for name, is_context in cls._contract.items():
            # The method may come from a class that is no engine.
            method = inspect.getattr_static(cls, name)
            if inspect.isfunction(method) and getattr(method, _ENCLOSED, None) is not method:
                setattr(cls, name, _enclose(method, name=name, is_context=is_context))

    def _report_call(self, name: str) -> AbstractContextManager[None]:
        """Report exceptions of a call with this name; refuse the call in a broken group."""
        failures, call = self._rank_failures, f"{name}()"
        if failures is None:
            return nullcontext()
        if name in LOCAL_CALLS:
            failures.check()
            return nullcontext()
        if name in WAITING_CALLS:
            return failures.report_interrupt(call)
        if name in CHECKPOINT_CALLS:
            return failures.report_unfinished(call, timeout_s=self.config.collective_timeout_s)
        return failures.report_failure(call)

    @contextmanager
    def _report_once(self, name: str) -> Iterator[None]:
        """Report exceptions once, also if an override calls the original method.

        If both were counted, a rank whose override raises before it calls the original would have
        counted fewer calls than the others.
        """
        active: set[str] = self.__dict__.setdefault("_active_calls", set())
        if name in active:
            yield
            return
        active.add(name)
        try:
            with self._report_call(name):
                yield
        finally:
            active.discard(name)


def _enclose(method: Callable[..., Any], *, name: str, is_context: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: ReportedCalls, *arguments: Any, **options: Any) -> Any:
        with self._report_once(name):
            return method(self, *arguments, **options)

    @contextmanager
    @functools.wraps(method)
    def enter(self: ReportedCalls, *arguments: Any, **options: Any) -> Iterator[Any]:
        with self._report_once(name), method(self, *arguments, **options) as entered:
            yield entered

    enclosed = enter if is_context else call
    setattr(enclosed, _ENCLOSED, enclosed)
    return enclosed
