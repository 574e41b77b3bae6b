"""Megatron's per-rank files, put together.

The parts of tensor-, pipeline-, virtual-pipeline- and expert-parallel ranks become full tensors.
These have Megatron's names with global layer and expert numbers; ``parameter_names`` converts them
to Hugging Face's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.lazy import Columns, LazyTensor, Rows, concatenated
from temper_legacy_shim.checkpoints.files.sharded import is_equal
from temper_legacy_shim.checkpoints.files.tensors import TensorReader
from temper_legacy_shim.checkpoints.layouts import RankFile
from temper_legacy_shim.errors import DamagedFileError, LayoutError

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")
_ADAPTER = re.compile(
    r".+\.(linear_qkv|linear_proj|linear_fc1|linear_fc2)\.adapter\.(?:adapter_\w+\.)?linear_(in|out)\.weight"
)
_COLUMNS = (
    "word_embeddings.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "output_layer.weight",
    "linear_fc1.bias",
)
_GATED = re.compile(r".+\.linear_fc1\.(?:weight\d*|bias)")
_TELLING_BYTES = 8
"""Different bytes that a row has to have before two that are equal count as copies."""
EMBEDDING = "embedding.word_embeddings.weight"
_NORMS = ("layernorm.weight", "layer_norm_weight")
_NORMS_OF_HEADS = ("q_layernorm.weight", "k_layernorm.weight")
"""Heads' norms drift apart in sound runs: older Megatron did not add their gradients."""
_ROWS = re.compile(r".+\.(?:linear_proj|linear_fc2)\.weight\d*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One chunk of layers: a virtual stage of a pipeline stage."""

    by_rank: Mapping[tuple[int, int], Mapping[str, LazyTensor]]
    """Tensors by (expert rank, tensor-parallel rank), with layer numbers local to the chunk."""
    num_layers: int


Position = tuple[int, int, int]
"""(stage, expert rank, tensor rank)."""
Chunks = Mapping[Position, Sequence[Mapping[str, LazyTensor]]]
"""One mapping per virtual stage by rank, with layer numbers local to it."""


def read_weights(files: Sequence[RankFile], *, where: Path) -> dict[str, LazyTensor]:
    """Return full tensors under Megatron's names with global numbers.

    Raises:
        LayoutError: a rank's file is missing.
        DamagedFileError: a file is damaged, or the files contradict each other.
    """
    return merge_chunks(read_chunks(files, where=where), where=where)


def read_chunks(files: Sequence[RankFile], *, where: Path) -> Chunks:
    """Return every rank's tensors, in the order of its model's modules.

    Raises:
        LayoutError: a rank's file is missing.
        DamagedFileError: a file is damaged.
    """
    chunks = _with_expert_ranks({(file.pp, file.ep, file.tp): _chunks(file.path) for file in files})
    _check_all_ranks(set(chunks), where=where)
    _check_no_copies(chunks, where=where)
    _check_stage_order(chunks, where=where)
    _check_norms(chunks, where=where)
    return chunks


def merge_chunks(chunks: Chunks, *, where: Path) -> dict[str, LazyTensor]:
    """Merge chunks into full tensors under Megatron's names with global numbers.

    Raises:
        DamagedFileError: the ranks contradict each other.
    """
    num_virtual = {len(of_rank) for of_rank in chunks.values()}
    if len(num_virtual) != 1:
        raise DamagedFileError(
            f"{where}: ranks hold {sorted(num_virtual)} virtual stages: the files are not of one "
            "save."
        )
    merged: dict[str, LazyTensor] = {}
    first_layer = 0
    # Layers go round the stages once per virtual stage.
    for virtual in range(num_virtual.pop()):
        for pp in sorted({key[0] for key in chunks}):
            by_rank = {
                (ep, tp): of_rank[virtual]
                for (stage, ep, tp), of_rank in chunks.items()
                if stage == pp
            }
            stage = _Stage(by_rank=by_rank, num_layers=_count_layers(next(iter(by_rank.values()))))
            for name, tensor in _merge_stage(stage, first_layer=first_layer, where=where).items():
                merged.setdefault(name, tensor)  # the last stage repeats tied embeddings
            first_layer += stage.num_layers
    return merged


def _chunks(path: Path) -> list[dict[str, LazyTensor]]:
    """Return a file's chunks, flat and without TransformerEngine's extra states."""
    archive = Archive(path)
    value = archive.value()
    # Adapter files of 0.7 have their tensors one level deeper.
    if isinstance(value, dict) and "adapter_state_dict" in value:
        value = value["adapter_state_dict"]
    # A list has one entry for each virtual stage.
    parts = value if isinstance(value, list) else [value]
    reader = TensorReader(archive)
    result = []
    for part in parts:
        if not isinstance(part, dict) or not part:
            raise DamagedFileError(
                f"{path} holds a {type(part).__name__} where a mapping of names to tensors should "
                "be."
            )
        tensors: dict[str, LazyTensor] = {}
        for key, node in part.items():
            if reader.is_tensor(node) and not str(key).endswith("_extra_state"):
                name = str(key).removeprefix("module.").replace(".to_wrap.", ".")
                tensors[name] = reader.plain(node, key=str(key))
        result.append(tensors)
    return result


def _with_expert_ranks(
    chunks: dict[tuple[int, int, int], list[dict[str, LazyTensor]]],
) -> dict[tuple[int, int, int], list[dict[str, LazyTensor]]]:
    """Treat stage suffixes as expert ranks if each has both the first and the last layer."""
    stages = {key[0] for key in chunks}
    # File names do not tell a stage from an expert rank if there is only one suffix.
    if len(stages) < 2 or any(key[1] for key in chunks):
        return chunks
    ends = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
    if all(all(end in of_rank[0] | of_rank[-1] for end in ends) for of_rank in chunks.values()):
        return {(0, pp, tp): of_rank for (pp, _, tp), of_rank in chunks.items()}
    return chunks


def is_of_expert(name: str) -> bool:
    """Check if a tensor belongs to an expert that other ranks may not have."""
    return _EXPERT.fullmatch(name) is not None


def _check_all_ranks(ranks: set[Position], *, where: Path) -> None:
    """Check that each stage has all tensor and expert ranks."""
    sizes = [max(rank[axis] for rank in ranks) + 1 for axis in range(3)]
    required = {
        (pp, ep, tp) for pp in range(sizes[0]) for ep in range(sizes[1]) for tp in range(sizes[2])
    }
    if sizes[2] % sizes[1] == 0 and ranks == {
        (pp, tp // (sizes[2] // sizes[1]), tp) for pp, _, tp in required
    }:
        return
    missing = sorted(required - ranks)
    if missing:
        pp, ep, tp = missing[0]
        raise LayoutError(
            f"{where} lacks the file of tensor rank {tp}, stage {pp}, expert rank {ep} (sizes "
            f"{sizes[2]}, {sizes[0]}, {sizes[1]}): copy every rank's folder here."
        )


def _check_no_copies(chunks: Chunks, *, where: Path) -> None:
    """Check that tensor ranks, which files do not name, hold different rows."""
    seen: dict[tuple[int, int, bytes], tuple[int, LazyTensor]] = {}
    for (pp, ep, tp), of_rank in sorted(chunks.items()):
        local = next(
            (
                tensor
                for chunk in of_rank
                for name, tensor in chunk.items()
                if name.endswith("linear_qkv.weight")
            ),
            None,
        )
        # The fused matrix of query, key and value is divided over tensor ranks in every model that
        # is known here, so two ranks with the same rows have the same file. The first row decides
        # which ranks are compared in full.
        row = b"" if local is None or not local.shape[0] else local.read(0, 1).tobytes()
        if local is None or len(set(row)) < _TELLING_BYTES:  # such as zeros
            continue
        other, same = seen.setdefault((pp, ep, row), (tp, local))
        if other != tp and is_equal(same, local):
            raise DamagedFileError(
                f"{where}: the files of tensor ranks {other} and {tp} of stage {pp} hold the same: "
                "one is a copy."
            )


def _check_stage_order(chunks: Chunks, *, where: Path) -> None:
    """Check that only the first stage embeds tokens and only the last one has the final norm."""
    last = max(pp for pp, _, _ in chunks)
    for (pp, _, tp), of_rank in sorted(chunks.items()):
        for name, expected, stage in (
            (EMBEDDING, "first", 0),
            ("decoder.final_layernorm.weight", "last", last),
        ):
            holds = any(name in chunk for chunk in of_rank)
            # The last stage repeats tied embeddings.
            if (
                holds
                and pp != stage
                and not (name == EMBEDDING and pp == last and EMBEDDING in chunks[0, 0, tp][0])
            ):
                raise DamagedFileError(
                    f"{where}: {name} is in stage {pp}, but belongs to the {expected}: are folders "
                    "of stages swapped? Copy them again."
                )


def _check_norms(chunks: Chunks, *, where: Path) -> None:
    """Check that norms agree on all ranks of a stage, which shows a rank of another step."""
    firsts: dict[tuple[int, int, str], tuple[int, LazyTensor]] = {}
    for (pp, ep, tp), of_rank in sorted(chunks.items()):
        for virtual, chunk in enumerate(of_rank):
            for name, tensor in chunk.items():
                if not name.endswith(_NORMS) or name.endswith(_NORMS_OF_HEADS):
                    continue
                first_tp, first = firsts.setdefault((pp, virtual, name), (tp, tensor))
                if not is_equal(first, tensor):
                    ranks = (
                        f"tensor ranks {first_tp} and {tp}"
                        if tp != first_tp
                        else f"expert ranks 0 and {ep}"
                    )
                    raise DamagedFileError(
                        f"{where}: {name} differs between {ranks} of stage {pp}: the files are not "
                        "of one save."
                    )


def _count_layers(tensors: Mapping[str, LazyTensor]) -> int:
    numbers = {int(match[2]) for name in tensors if (match := _LAYER.fullmatch(name))}
    return max(numbers) + 1 if numbers else 0


def _merge_stage(stage: _Stage, *, first_layer: int, where: Path) -> dict[str, LazyTensor]:
    """Merge a stage: experts from their tensor ranks, the rest from one file of each rank."""
    # In descending order, so that each tensor rank keeps the file of its lowest expert rank.
    shared = {tp: of_rank for (_, tp), of_rank in sorted(stage.by_rank.items(), reverse=True)}
    merged = _merge_ranks({tp: shared[tp] for tp in sorted(shared)}, experts=False, where=where)
    for ep in sorted({ep for ep, _ in stage.by_rank}):
        ranks = {tp: stage.by_rank[ep, tp] for tp in sorted(shared) if (ep, tp) in stage.by_rank}
        own = _merge_ranks(ranks, experts=True, where=where)
        # Expert ranks hold equally many experts with local numbers.
        num_local = 1 + max(
            (int(match[2]) for name in own if (match := _EXPERT.fullmatch(name))), default=-1
        )
        for name, tensor in own.items():
            expert = _EXPERT.fullmatch(name)
            assert expert is not None, "only experts were asked for"
            merged[f"{expert[1]}{int(expert[2]) + ep * num_local}{expert[3]}"] = tensor
    return {_split_layer_name(name, first_layer): tensor for name, tensor in merged.items()}


def _split_layer_name(name: str, first_layer: int) -> str:
    layer = _LAYER.fullmatch(name)
    return f"{layer[1]}{int(layer[2]) + first_layer}{layer[3]}" if layer else name


def _merge_ranks(
    ranks: Mapping[int, Mapping[str, LazyTensor]], *, experts: bool, where: Path
) -> dict[str, LazyTensor]:
    """Return the experts' tensors of these tensor ranks, or all others."""
    first_rank, first = next(iter(ranks.items()))
    merged: dict[str, LazyTensor] = {}
    for name in first:
        if is_of_expert(name) != experts:
            continue
        absent = next((tp for tp, of_rank in ranks.items() if name not in of_rank), None)
        if absent is not None:
            raise DamagedFileError(
                f"{where}: tensor rank {absent} has no {name}, which rank {first_rank} has: the "
                "files are not of one save."
            )
        merged[name] = merge_tensor_ranks(
            name, [of_rank[name] for of_rank in ranks.values()], where=where
        )
    return merged


def merge_tensor_ranks(name: str, parts: Sequence[LazyTensor], *, where: Path) -> LazyTensor:
    """Join the tensor-parallel parts of a tensor, by the layer type in the name.

    Raises:
        DamagedFileError: the parts do not fit.
    """
    if len(parts) == 1:
        return parts[0]
    dims = {len(part.shape) for part in parts}
    if len(dims) != 1 or len({part.dtype for part in parts}) != 1:
        raise DamagedFileError(
            f"{where}: {name} differs in dimensions or dtype between tensor ranks: the files are "
            "not of one save."
        )
    adapter = _ADAPTER.fullmatch(name)
    if adapter:
        if _is_gated(name, adapter):
            return _side_by_side_halves(name, parts, where=where)
        is_row_parallel = adapter[1] in ("linear_proj", "linear_fc2")
        return _joined(
            name, parts, dim=1 if is_row_parallel and adapter[2] == "in" else 0, where=where
        )
    # Each rank holds its part of the gate above its part of the up projection, so the parts
    # interleave.
    if _GATED.fullmatch(name):
        return _side_by_side_halves(name, parts, where=where)
    if _ROWS.fullmatch(name):
        return _joined(name, parts, dim=1, where=where)
    # A critic's head has one row, which is on every tensor rank.
    is_value_head = name == "output_layer.weight" and all(part.shape[0] == 1 for part in parts)
    if name.endswith(_COLUMNS) and not is_value_head:
        return _joined(name, parts, dim=0, where=where)
    if len({part.shape for part in parts}) != 1:
        raise DamagedFileError(
            f"{where}: {name} should be the same on every tensor rank, but has shapes "
            f"{[p.shape for p in parts]}."
        )
    return parts[0]


def part_of(name: str, full: LazyTensor, *, rank: int, num_ranks: int) -> LazyTensor | None:
    """Return one tensor rank's part of a full tensor; None if it does not divide."""
    if num_ranks == 1:
        return full
    rows = full.shape[0]
    adapter = _ADAPTER.fullmatch(name)
    if adapter and adapter[1] in ("linear_proj", "linear_fc2") and adapter[2] == "in":
        return _columns(full, rank=rank, num_ranks=num_ranks)
    if _GATED.fullmatch(name) or (adapter and _is_gated(name, adapter)):
        if rows % (2 * num_ranks):
            return None
        half, size = rows // 2, rows // (2 * num_ranks)
        return Rows(
            full, ((rank * size, (rank + 1) * size), (half + rank * size, half + (rank + 1) * size))
        )
    if _ROWS.fullmatch(name):
        return _columns(full, rank=rank, num_ranks=num_ranks)
    is_value_head = name == "output_layer.weight" and rows == 1
    if adapter or (name.endswith(_COLUMNS) and not is_value_head):
        size, rest = divmod(rows, num_ranks)
        return None if rest else Rows(full, ((rank * size, (rank + 1) * size),))
    return full


def _is_gated(name: str, adapter: re.Match[str]) -> bool:
    """Check if an adapter's half has the gate rows above the up rows on each rank."""
    return adapter[1] == "linear_fc1" and adapter[2] == "out" and ".adapter.adapter_" not in name


def _columns(full: LazyTensor, *, rank: int, num_ranks: int) -> LazyTensor | None:
    size, rest = divmod(full.shape[1], num_ranks)
    return None if rest else Columns(full, rank * size, (rank + 1) * size)


def _joined(name: str, parts: Sequence[LazyTensor], *, dim: int, where: Path) -> LazyTensor:
    others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(others) != 1 or any(len(part.shape) <= dim for part in parts):
        raise DamagedFileError(
            f"{where}: the parts of {name} have shapes {[p.shape for p in parts]}, which do not "
            "fit side by side."
        )
    return concatenated(parts, dim=dim)


def _side_by_side_halves(name: str, parts: Sequence[LazyTensor], *, where: Path) -> LazyTensor:
    """Join parts that have gate above up rows; the full matrix has all gate rows first."""
    full = _joined(name, parts, dim=0, where=where)
    if any(part.shape[0] % 2 for part in parts):
        raise DamagedFileError(
            f"{where}: {name} has parts of {[p.shape[0] for p in parts]} rows, but gate and up "
            "halves are expected."
        )
    starts = [sum(part.shape[0] for part in parts[:i]) for i in range(len(parts))]
    gates = [(start, start + part.shape[0] // 2) for start, part in zip(starts, parts, strict=True)]
    ups = [
        (start + part.shape[0] // 2, start + part.shape[0])
        for start, part in zip(starts, parts, strict=True)
    ]
    return Rows(full, (*gates, *ups))
