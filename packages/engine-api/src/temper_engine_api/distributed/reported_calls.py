"""Report an exception in any public method of an engine to the other ranks.

The methods are enclosed where a class is defined, because a method that does not report its
exceptions lets the other ranks wait until their timeout.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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
CHECKPOINT_CALLS = frozenset({"write_part", "read_part"})
"""Methods after which ranks exchange their errors, such as that of a full disk."""


class ReportedCalls:
    """Encloses the public methods of `BaseEngine`, also where an engine overrides them.

    For a context manager, its body is enclosed too.
    """

    config: EngineConfig
    _rank_failures: RankFailures | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            is_public = inspect.isfunction(method) and not name.startswith("_")
            # An engine's own methods are unknown here: they need not be collective.
            is_contract = ReportedCalls in cls.__bases__ or hasattr(super(cls, cls), name)
            if is_public and is_contract and name not in UNREPORTED_CALLS:
                setattr(cls, name, _enclose(method))

    def _report_call(self, name: str) -> AbstractContextManager[None]:
        """Report exceptions of a call with this name; refuse the call in a broken group."""
        failures, call = self._rank_failures, f"{name}()"
        if failures is None:
            return nullcontext()
        if name in WAITING_CALLS:
            return failures.report_interrupt(call)
        if name in CHECKPOINT_CALLS:
            return failures.report_unfinished(call, timeout_s=self.config.collective_timeout_s)
        return failures.report_failure(call)


def _enclose(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    def call(self: ReportedCalls, *arguments: Any, **options: Any) -> Any:
        with self._report_call(name):
            return method(self, *arguments, **options)

    @contextmanager
    @functools.wraps(method)
    def enter(self: ReportedCalls, *arguments: Any, **options: Any) -> Iterator[Any]:
        with self._report_call(name), method(self, *arguments, **options) as entered:
            yield entered

    # contextlib.contextmanager makes a function of a generator function.
    return enter if inspect.isgeneratorfunction(inspect.unwrap(method)) else call
