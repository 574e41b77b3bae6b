"""Weights in transit: full tensors by Hugging Face name, and checks that a set is complete."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from temper_engine_api.checksums import RunningChecksum
from temper_engine_api.errors import CheckpointError, EngineStateError, WeightError


class NamedWeight(NamedTuple):
    """One full tensor under its Hugging Face name.

    Example:
        >>> weight = NamedWeight("model.norm.weight", torch.ones(64, dtype=torch.bfloat16))
        >>> weight.tensor.shape
        torch.Size([64])
    """

    name: str
    """Hugging Face name, as in the model's safetensors index."""
    tensor: Tensor
    """Full tensor; stays valid after the stream advances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Portable training state of one parameter, in float32 and full shape.

    Example:
        A norm before its first update:

        >>> state = TrainingState(
        ...     name="model.norm.weight",
        ...     master=torch.ones(64),
        ...     first_moment=torch.zeros(64),
        ...     second_moment=torch.zeros(64),
        ...     update_count=0,
        ... )
        >>> state.master.shape
        torch.Size([64])
    """

    name: str
    """Name in the files of the Hugging Face model."""
    master: Tensor
    first_moment: Tensor
    """Adam's first moment; zeros before the first update."""
    second_moment: Tensor
    """Adam's second moment; zeros before the first update."""
    update_count: int
    """Number of Adam updates so far for this parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """Name, shape and dtype of one expected tensor.

    Example:
        >>> entry = WeightEntry(name="lm_head.weight", shape=(1000, 64), dtype=torch.bfloat16)
        >>> entry.dtype.itemsize * entry.shape[0] * entry.shape[1]
        128000
    """

    name: str
    """Name in the files of the Hugging Face model."""
    shape: tuple[int, ...]
    """Full shape, not a shard's."""
    dtype: torch.dtype
    """Dtype used to send the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Weight version, with every name, shape and dtype.

    Example:
        >>> norm = WeightEntry(name="model.norm.weight", shape=(64,), dtype=torch.bfloat16)
        >>> manifest = WeightManifest(version=3, entries=(norm,))
        >>> manifest.entries[0].name
        'model.norm.weight'
    """

    version: int
    """Weight version, one higher per weight sync."""
    entries: tuple[WeightEntry, ...]
    """Entries in stream order."""


class WeightStream:
    """Iterator over named weights; use it as a context manager.

    Iterating outside the context raises EngineStateError, because weights may be offloaded there.

    Example:
        >>> weights = [NamedWeight("model.norm.weight", torch.ones(64))]
        >>> with WeightStream(iter(weights)) as stream:
        ...     print([name for name, _ in stream])
        ['model.norm.weight']
    """

    def __init__(
        self, source: Iterator[NamedWeight], *, scope: AbstractContextManager[object] | None = None
    ) -> None:
        """Make a stream that can be entered once.

        Args:
            source: The weights.
            scope: Context that is entered and left together with the stream. If the stream was not
                read to its end, the context gets the body's exception, because other ranks then
                wait for the rest of the stream.
        """
        self._source: Iterator[NamedWeight] | None = source
        self._scope: AbstractContextManager[object] = nullcontext() if scope is None else scope
        self._is_open = self._is_complete = False

    def __enter__(self) -> "WeightStream":
        if self._source is None:
            raise EngineStateError(
                "this weight stream was already used: call export_weights() again."
            )
        self._scope.__enter__()
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open, self._source = False, None
        if self._is_complete:
            self._scope.__exit__(None, None, None)
        else:
            self._scope.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[NamedWeight]:
        return self

    def __next__(self) -> NamedWeight:
        if not self._is_open or self._source is None:
            raise EngineStateError(
                "weights can be read only inside `with engine.export_weights() as stream`."
            )
        try:
            return next(self._source)
        except StopIteration:
            self._is_complete = True
            raise


class StateStream:
    """Iterator over the portable training state; use it as a context manager.

    It can also be iterated without the context. Then an exception of the loop's body is not known
    here, only that the stream was not read to its end.
    """

    def __init__(
        self,
        source: Iterator[TrainingState],
        *,
        scope: AbstractContextManager[object],
        report_abandoned: Callable[[], object] | None = None,
    ) -> None:
        """Make a stream that can be read once.

        Args:
            source: The states.
            scope: Context that reports an exception which ends the stream early.
            report_abandoned: Called if the stream is not read to its end outside of the context.
        """
        self._source = source
        self._scope = scope
        self._report_abandoned = report_abandoned
        self._items: Generator[TrainingState] | None = None
        self._is_complete = False

    def __enter__(self) -> "StateStream":
        if self._items is not None:
            raise EngineStateError("this stream was already used: call export_state() again.")
        self._scope.__enter__()
        self._items = self._read_in_context()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._items is not None, "the context was entered"
        try:
            # The source keeps tensors on the device until it is closed.
            self._items.close()
        finally:
            if self._is_complete:
                self._scope.__exit__(None, None, None)
            else:
                if error is None and self._report_abandoned is not None:
                    self._report_abandoned()
                self._scope.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[TrainingState]:
        if self._items is None:
            self._items = _read_without_context(self._source, self._scope, self._report_abandoned)
        return self._items

    def __next__(self) -> TrainingState:
        return next(iter(self))

    def _read_in_context(self) -> Generator[TrainingState]:
        yield from self._source
        self._is_complete = True


def _read_without_context(
    source: Iterator[TrainingState],
    scope: AbstractContextManager[object],
    report_abandoned: Callable[[], object] | None,
) -> Generator[TrainingState]:
    # No method of StateStream: only a loop would then refer to this generator, and close it at once
    # when its body raises.
    with scope:
        try:
            yield from source
        except GeneratorExit:
            if report_abandoned is not None:
                report_abandoned()
            raise


def check_weight_entries(expected: Iterable[WeightEntry], arrived: Sequence[WeightEntry]) -> None:
    """Check that exactly the expected tensors arrived, once each and with their shapes.

    Raises:
        WeightError: If a weight is missing, unexpected, repeated or has another shape; names up to
            five of them.
    """
    expected_shapes = {entry.name: entry.shape for entry in expected}
    shapes = {entry.name: entry.shape for entry in arrived}
    faults = [f"missing {name}" for name in expected_shapes.keys() - shapes.keys()] + [
        f"unexpected {name}" for name in shapes.keys() - expected_shapes.keys()
    ]
    faults += [
        f"{name}: shape {shapes[name]}, expected {expected_shapes[name]}"
        for name in expected_shapes.keys() & shapes.keys()
        if expected_shapes[name] != shapes[name]
    ]
    if len(arrived) != len(shapes):
        faults.append(f"{len(arrived) - len(shapes)} names came twice")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise WeightError(
            f"the weights do not match the model: {'; '.join(sorted(faults)[:5])}{more}. Nothing "
            "was loaded: load weights of the same model."
        )


def check_saved_entries(
    expected: Iterable[WeightEntry], saved: Sequence[WeightEntry], *, directory: str | Path
) -> None:
    """Check a checkpoint's entries; call it before the first tensor is read.

    Raises:
        CheckpointError: If another configuration wrote it; names up to five differences.
    """
    try:
        check_weight_entries(expected, saved)
    except WeightError as error:
        raise CheckpointError(
            f"the checkpoint in {directory} is that of another model or optimizer: {error} Resume "
            "with the configuration that wrote it."
        ) from error


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the BLAKE3 checksum of the tensors' bytes, in order, for any dtype."""
    checksum = RunningChecksum()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum.update(data.numpy().data)
    return str(checksum)


JOINED_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Matrices per expert in a joined tensor, in row order.

transformers joins the experts of a layer in memory, with gate above up. Files have one tensor per
matrix and expert.
"""


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor in memory into (name, tensor) as in the model's files.

    A joined tensor [experts, rows, columns] is split into views, one per expert and matrix. Any
    other tensor is yielded unchanged.
    """
    layer, _, kind = name.rpartition(".experts.")
    if kind not in JOINED_EXPERTS:
        yield name, tensor
        return
    matrices = JOINED_EXPERTS[kind]
    for number, expert in enumerate(tensor):
        for matrix_name, matrix in zip(matrices, expert.chunk(len(matrices)), strict=True):
            yield f"{layer}.experts.{number}.{matrix_name}.weight", matrix


def list_file_shapes(name: str, shape: Sequence[int]) -> list[tuple[str, torch.Size]]:
    """Return names and shapes of the tensors that files have for a tensor in memory."""
    return [
        (file_name, part.shape)
        for file_name, part in split_experts(name, torch.empty(tuple(shape), device="meta"))
    ]
