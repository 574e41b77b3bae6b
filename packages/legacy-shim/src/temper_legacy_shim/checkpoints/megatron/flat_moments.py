"""Moments of Megatron's per-rank optimizer files (``optim/distrib_optim_pp0_tp0.pt``).

Each buffer has one vector, which is flat and padded and has no names.

A buffer holds a chunk's parameters in reverse order, each beginning at a multiple of 64 elements,
its buckets end to end without their own padding. Experts that are divided over ranks have an
optimizer and buffers of their own, in a list with the other. Which elements are whose follows from
the model file of the same rank, and is believed only if the lengths fit and every float32 master,
rounded, is the weight that lies next to it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.lazy import Cast, LazyTensor, Rows, Unflattened
from temper_legacy_shim.checkpoints.files.tensors import TensorReader
from temper_legacy_shim.checkpoints.fsdp_moments import OldMoments, OldOptimizer, is_buffer
from temper_legacy_shim.checkpoints.megatron import parameter_names, ranks
from temper_legacy_shim.checkpoints.megatron.parameter_names import Geometry
from temper_legacy_shim.checkpoints.megatron.ranks import Chunks, Position
from temper_legacy_shim.checkpoints.model import OldModel
from temper_legacy_shim.errors import DamagedFileError, LayoutError

_FILE = re.compile(r"distrib_optim_pp(\d{1,4})_tp(\d{1,4})(?:_cp(\d{1,4})_dp(\d{1,4}))?\.pt")
KINDS = ("param", "exp_avg", "exp_avg_sq")
# Megatron starts every parameter at a multiple of 128 bytes, counted in elements of 16 bits, also
# in buffers of float32 (`_ParamAndGradBuffer` in
# megatron/core/distributed/param_and_grad_buffer.py).
ALIGNMENT = 64
"""Elements, of which each parameter begins at a multiple in its bucket."""
_OVERWRITTEN = (
    "before 0.4.0 several expert ranks wrote one file, so that each overwrote the last; otherwise "
    "copy every rank's file into optim/"
)
_SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Weights that two stages share have separate buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """One flat vector for each kind."""

    vectors: Mapping[str, LazyTensor]
    path: Path

    @property
    def length(self) -> int:
        return self.vectors["param"].shape[0]


def has_flat_optimizer(model: OldModel) -> bool:
    """Check if the folder has such files."""
    return any(True for _ in _files(model.role.path / "optim"))


def read_flat_optimizer(model: OldModel, *, num_updates: int | None) -> OldOptimizer:
    """Return the masters and moments under Hugging Face names.

    Args:
        model: of per-rank files.
        num_updates: that the optimizer had made; the files don't say it.

    Raises:
        LayoutError: they can't be told apart, or no one says how many updates were made; for the
            receipt.
        DamagedFileError: a file is damaged.
    """
    chunks = ranks.read_chunks(model.role.rank_files, where=model.role.path / "model")
    files: dict[tuple[int, int], list[Path]] = {}
    for position, path in _files(model.role.path / "optim"):
        files.setdefault(position, []).append(path)
    absent = sorted({(pp, tp) for pp, _, tp in chunks} - set(files))
    if absent:
        raise LayoutError(
            f"the optimizer file of stage {absent[0][0]}, tensor rank {absent[0][1]} is missing "
            "from optim/"
        )
    if num_updates is None:
        raise LayoutError(
            "Megatron's per-rank optimizer files do not say how many updates were made, without "
            "which moments mislead: give --num-updates"
        )
    states = {position: [_optimizers(path) for path in paths] for position, paths in files.items()}
    named = {
        position: _named(states[position[0], position[2]], of_rank, position=position)
        for position, of_rank in chunks.items()
    }
    assert model.config is not None, "Megatron's weights were read with it"
    geometry = Geometry.of(model.config, source="config.json")
    master, first, second = (_full(named, kind, geometry, where=model.role.path) for kind in KINDS)
    moments = {
        name: OldMoments(first=first[name], second=second[name], update_count=num_updates)
        for name in first
    }
    return OldOptimizer(moments=moments, masters=master)


def _files(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """Yield (stage, tensor rank) and file, by context- and data-parallel rank."""
    # The first file holds the shared part.
    paths = folder.glob("distrib_optim_*.pt") if folder.is_dir() else ()
    matches = ((match, path) for path in paths if (match := _FILE.fullmatch(path.name)))
    for (pp, tp, *_), path in sorted(
        (tuple(int(number or 0) for number in match.groups()), path) for match, path in matches
    ):
        yield (pp, tp), path


def _full(
    named: Mapping[Position, Sequence[Mapping[str, Mapping[str, LazyTensor]]]],
    kind: str,
    geometry: Geometry,
    *,
    where: Path,
) -> dict[str, LazyTensor]:
    of_kind: Chunks = {
        position: [{name: kinds[kind] for name, kinds in chunk.items()} for chunk in of_rank]
        for position, of_rank in named.items()
    }
    return parameter_names.to_hf(ranks.merge_chunks(of_kind, where=where), geometry, where=where)


def _named(
    states: Sequence[Sequence[list[_Buffer] | None]],
    chunks: Sequence[Mapping[str, LazyTensor]],
    *,
    position: Position,
) -> list[dict[str, dict[str, LazyTensor]]]:
    """Return one rank's tensors by chunk, name and kind, with those of distributed experts."""
    shared = next((state[0] for state in states if state and state[0] is not None), None)
    if shared is None:
        raise LayoutError(
            f"no optimizer file of stage {position[0]}, tensor rank {position[2]} holds what its "
            f"data-parallel ranks share: {_OVERWRITTEN}"
        )
    if all(len(state) == 1 for state in states):
        return _cut_all(shared, chunks)
    with_experts = [
        {name: tensor for name, tensor in chunk.items() if ranks.is_of_expert(name)}
        for chunk in chunks
    ]
    without = [
        {name: tensor for name, tensor in chunk.items() if not ranks.is_of_expert(name)}
        for chunk in chunks
    ]
    result = _cut_all(shared, without)
    positions = [number for number, chunk in enumerate(with_experts) if chunk]
    own = _experts(
        [state[1] for state in states if len(state) > 1],
        [with_experts[number] for number in positions],
        position=position,
    )
    for number, kinds in zip(positions, own, strict=True):
        result[number] |= kinds
    return result


def _experts(
    states: Sequence[list[_Buffer] | None],
    chunks: Sequence[Mapping[str, LazyTensor]],
    *,
    position: Position,
) -> list[dict[str, dict[str, LazyTensor]]]:
    """Return an expert rank's, from the file whose masters round to its weights."""
    # The file names contain only the data-parallel rank.
    if not chunks:
        return []
    for state in states:
        try:
            if state is not None:
                return _cut_all(state, chunks)
        except LayoutError:
            continue
    raise LayoutError(
        f"no optimizer file of stage {position[0]}, tensor rank {position[2]} holds masters of the "
        f"experts of expert rank {position[1]}: " + _OVERWRITTEN
    )


def _cut_all(
    buffers: Sequence[_Buffer], chunks: Sequence[Mapping[str, LazyTensor]]
) -> list[dict[str, dict[str, LazyTensor]]]:
    if len(buffers) != len(chunks):
        raise LayoutError(
            f"an optimizer file has {len(buffers)} buffers, but one for each of {len(chunks)} "
            "chunks of layers is expected"
        )
    return [_cut(buffer, chunk) for buffer, chunk in zip(buffers, chunks, strict=True)]


def _optimizers(path: Path) -> list[list[_Buffer] | None]:
    """Return each optimizer's buffers; None if a different rank wrote its state."""
    archive = Archive(path)
    reader = TensorReader(archive)
    value = archive.value()
    return [
        None if state is None else _buffers(state, reader, path=path)
        for state in (value if isinstance(value, list) else [value])
    ]


def _buffers(state: object, reader: TensorReader, *, path: Path) -> list[_Buffer]:
    if not isinstance(state, dict) or state.get("buckets_coalesced") is not True:
        raise LayoutError(
            f"{path.name} is of a Megatron that wrote its buckets one by one, before 0.7"
        )
    result = []
    for number in sorted(key for key in state if isinstance(key, int)):
        by_dtype = state[number]
        if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
            raise DamagedFileError(
                f"{path}: buffer {number} is no mapping of one dtype to its vectors."
            )
        result.append(_buffer(next(iter(by_dtype.values())), reader, path=path, number=number))
    return result


def _buffer(node: object, reader: TensorReader, *, path: Path, number: int) -> _Buffer:
    if not isinstance(node, dict) or not set(KINDS) <= node.keys():
        raise DamagedFileError(f"{path}: buffer {number} lacks one of {', '.join(KINDS)}.")
    vectors = {kind: reader.plain(node[kind], key=f"{kind} of buffer {number}") for kind in KINDS}
    if any(
        len(vector.shape) != 1 or vector.shape != vectors["param"].shape
        for vector in vectors.values()
    ):
        raise DamagedFileError(
            f"{path}: the vectors of buffer {number} are not flat, or differ in length: copy the "
            "file again."
        )
    return _Buffer(vectors=vectors, path=path)


def _cut(buffer: _Buffer, chunk: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Find the first layout that fits a chunk, and return its tensors by name and kind."""
    parameters = {name: tensor for name, tensor in chunk.items() if not is_buffer(name)}
    # No file says whether embeddings are tied over two stages, so both layouts are tried.
    for own in (False, True):
        starts, length = _layout(parameters, has_own_buckets=own)
        if length != buffer.length:
            continue
        result = {
            name: _views(buffer, tensor, start=starts[name]) for name, tensor in parameters.items()
        }
        if all(is_master(kinds["param"], parameters[name]) for name, kinds in result.items()):
            return result
    raise LayoutError(
        f"{buffer.path.name} holds {buffer.length} elements in an order that is not known: no way "
        "of laying out the "
        f"{len(parameters)} parameters of its rank gives masters that round to the weights"
    )


def _layout(
    parameters: Mapping[str, LazyTensor], *, has_own_buckets: bool
) -> tuple[dict[str, int], int]:
    """Return the offset of each parameter, and the total length."""
    starts: dict[str, int] = {}
    begin = at = 0
    # Megatron fills a buffer from the last parameter to the first, roughly in the order in which
    # the backward pass completes gradients, so that full buckets can be reduced early.
    for name in reversed(list(parameters)):
        at += -at % ALIGNMENT
        # The first and the last stage must divide the optimizer state of tied embeddings over ranks
        # in the same way. Megatron therefore gives these weights a bucket of their own.
        is_single = has_own_buckets and name in _SHARED
        if is_single:
            begin, at = begin + at, 0
        starts[name] = begin + at
        at += prod(parameters[name].shape)
        if is_single:
            begin, at = begin + at, 0
    return starts, begin + at


def _views(buffer: _Buffer, tensor: LazyTensor, *, start: int) -> dict[str, LazyTensor]:
    stop = start + prod(tensor.shape)
    return {
        kind: Unflattened(Rows(vector, ((start, stop),)), tensor.shape)
        for kind, vector in buffer.vectors.items()
    }


def is_master(master: LazyTensor, weight: LazyTensor, *, num_rows: int | None = None) -> bool:
    """Check if the first and the last row agree, rounded to the weight's dtype.

    A shift by one element shows in either.

    Args:
        master: of the weight's shape.
        weight: the rounded weight to compare with.
        num_rows: number of known rows of the weight; None for all.
    """
    rounded = Cast(master, weight.dtype) if master.dtype != weight.dtype else master
    last = weight.shape[0] if num_rows is None else num_rows
    return all(
        rounded.read(start, stop).tobytes() == weight.read(start, stop).tobytes()
        for start, stop in pairwise(sorted({0, min(1, last), max(last - 1, 0), last}))
        if stop - start == 1
    )
