"""Public methods of an engine are enclosed once per call, wherever a class takes them from."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from temper_engine_api.distributed.rank_failures import RankFailures
from temper_engine_api.errors import RankFailedError

from .conftest import BigramConfig, BigramEngine


class RecordingEngine(BigramEngine):
    """Records which calls are enclosed, in the order of their beginning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(BigramConfig(), **options)
        self.enclosed: list[str] = []
        self.num_open = 0

    @contextmanager
    def _report_call(self, name: str) -> Iterator[None]:  # type: ignore[override]
        self.enclosed.append(name)
        self.num_open += 1
        try:
            with super()._report_call(name):
                yield
        finally:
            self.num_open -= 1


class Moves:
    """A plain class with a method of the contract."""

    def to(self, device: str, **_options: object) -> None:
        """Leave the model where it is."""


class MovesByMixin(Moves, RecordingEngine):
    """Takes `to` from a class that is no engine."""


def compute_twice(method: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*arguments: Any, **options: Any) -> Any:
        method(*arguments, **options)
        return method(*arguments, **options)

    return compute


class NamesMethodsOtherwise(RecordingEngine):
    """Its methods have another `__name__` than the attributes."""

    @compute_twice
    def gather_objects(self, item: Any) -> Any:
        return [item]

    def move(self, device: str, **_options: object) -> None:
        """Leave the model where it is."""

    to = move  # type: ignore[assignment]

    @functools.wraps(BigramEngine.export_adapter)
    def export_adapter(self) -> Any:
        return {}, {}


@pytest.mark.parametrize(
    ("engine_class", "name", "arguments"),
    [
        (MovesByMixin, "to", ("cpu",)),
        (NamesMethodsOtherwise, "to", ("cpu",)),
        (NamesMethodsOtherwise, "gather_objects", (1,)),
        (NamesMethodsOtherwise, "export_adapter", ()),
    ],
)
def test_call_is_enclosed_by_its_attribute_name(
    engine_class: type[RecordingEngine], name: str, arguments: tuple[object, ...]
) -> None:
    engine = engine_class()
    getattr(engine, name)(*arguments)
    assert engine.enclosed == [name]


class FailsBeforeSuper(RecordingEngine):
    """Overrides a method and calls the original."""

    def gather_objects(self, item: Any) -> Any:
        return super().gather_objects(item)


def test_override_that_calls_the_original_is_enclosed_once() -> None:
    engine = FailsBeforeSuper()
    engine.gather_objects(1)
    engine.gather_objects(1)
    assert engine.enclosed == ["gather_objects", "gather_objects"]


class HasOwnMethod(RecordingEngine):
    def count_tokens(self) -> int:
        return 1


class OverridesOwnMethod(HasOwnMethod):
    def count_tokens(self) -> int:
        return 2


@pytest.mark.parametrize("engine_class", [HasOwnMethod, OverridesOwnMethod])
def test_methods_outside_of_the_contract_are_not_enclosed(
    engine_class: type[HasOwnMethod],
) -> None:
    engine = engine_class()
    engine.count_tokens()
    assert engine.enclosed == []


class ReturnsAContext(RecordingEngine):
    """Overrides a context manager by a function that is no generator."""

    def eval_mode(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_body_of_a_context_is_enclosed_if_the_override_is_no_generator() -> None:
    engine = ReturnsAContext()
    with engine.eval_mode():
        assert engine.num_open == 1
    assert engine.num_open == 0


class Generates(RecordingEngine):
    """Overrides a plain method by a generator."""

    def gather_objects(self, item: Any) -> Any:
        yield item


def test_generator_in_place_of_a_plain_method_stays_a_generator() -> None:
    assert list(Generates().gather_objects(1)) == [1]


def test_local_methods_neither_count_nor_report(tmp_path: Path) -> None:
    engine = BigramEngine(BigramConfig())
    engine.init_model()
    store = dist.HashStore()
    engine._rank_failures = failures = RankFailures(store, rank=0, world_size=2)
    # The other rank does not raise: this returns at once only if nothing is reported.
    with pytest.raises(AttributeError):
        engine.shard_data(None)  # type: ignore[arg-type]
    engine.lr_scheduler_step()
    engine.set_loss_fn(lambda *_: None)  # type: ignore[arg-type]
    failures.check()
    other = RankFailures(store, rank=1, world_size=2)
    report, other_report = (each._make_report(ValueError(), where="") for each in (failures, other))
    assert report.call_numbers == other_report.call_numbers
    failures._leave_broken_group("rank 1 raised")
    with pytest.raises(RankFailedError):
        engine.lr_scheduler_step()
