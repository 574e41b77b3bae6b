"""Outputs of an engine for an old batch without gradients, as grids [B, W], the same on all ranks of a replica."""

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import MiniBatchPlan, RankPlan, build_packed_batch
from temper_engine_api.reduction import count_denominators
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.numerics.micro_batches import rows_by_count, rows_by_tokens
from temper_legacy_shim.workers.rows import read_rows, row_lengths
from temper_legacy_shim.workers.updates import scheduled


def compute_outputs(
    engine: BaseEngine, data: DataProto, *, requested_outputs: Sequence[HeadOutput], temperature: float, micro_batches: Sequence[list[int]]
) -> Mapping[HeadOutput, Tensor]:
    """Return [B, W] by query, on the CPU; tokens of the response only, 0 at padding."""
    rows = read_rows(data, temperature=temperature)
    packed = build_packed_batch(
        rows.sequences,
        plan=MiniBatchPlan(ranks=(RankPlan(micro_batches=tuple(map(tuple, scheduled(micro_batches, engine=engine)))),)),
        rank=0,
        denominators=count_denominators(rows.sequences),
    )
    with engine.eval_mode():
        result = engine.forward_backward_batch(packed, forward_only=True, outputs=requested_outputs)
    outputs: ForwardOutputs = from_replica(engine, result.outputs)
    ordered = outputs.reorder(rows.sequences.sample_ids)
    return {head_output: rows.grid(ordered.columns[head_output]) for head_output in requested_outputs}


def single_forward(micro_batch: Mapping[str, Tensor], *, temperature: float, trained_by: str) -> DataProto:
    """Return one micro-batch as a batch that is answered in one piece.

    Args:
        micro_batch: input_ids, attention_mask, position_ids, responses.
        temperature: of the logits.
        trained_by: the method that trains, for the error.

    Raises:
        ConfigError: a gradient is wanted, which only the engine has.
    """
    if torch.is_grad_enabled():
        raise ConfigError(
            f"_forward_micro_batch() answers without gradient here: call it under torch.no_grad(), and train through {trained_by}(), "
            "or an engine with a loss function."
        )
    settings: dict[str, object] = {"micro_batch_size": len(micro_batch["input_ids"]), "use_dynamic_bsz": False, "temperature": temperature}
    return DataProto.from_dict(tensors=micro_batch, meta_info=settings)


def refuse_own_forward(cls: type) -> None:
    """Refuse a subclass whose forward pass no one would call.

    Raises:
        ConfigError: it overrides ``_forward_micro_batch``.
    """
    if "_forward_micro_batch" in vars(cls):
        raise ConfigError(
            f"{cls.__name__} overrides _forward_micro_batch, which training no longer calls: the engine runs the model. Override "
            f"the method that updates, or give the engine a loss function of your own."
        )


def forward_split(data: DataProto, *, ranks_per_sequence: int) -> list[list[int]]:
    """Return the micro-batches of a forward pass, as the batch's settings ask."""
    if data.meta_info["use_dynamic_bsz"]:
        budget = _number(data, "max_token_len") * ranks_per_sequence
        return rows_by_tokens(row_lengths(data), max_tokens=budget)
    return rows_by_count(len(data), size=_number(data, "micro_batch_size"))


def _number(data: DataProto, name: str) -> int:
    value = data.meta_info.get(name)
    if not isinstance(value, int) or value < 1:
        raise BatchError(f"meta_info[{name!r}] is {value!r}, but must be a whole number above 0.")
    return value


def empty_batch(like: SequenceBatch) -> SequenceBatch:
    """Return one dummy token: what a rank runs while the others still have a micro-batch."""
    plan = MiniBatchPlan(ranks=(RankPlan(micro_batches=((),)),))
    return build_packed_batch(like, plan=plan, rank=0, denominators=count_denominators(like))


T = TypeVar("T")


def from_replica(engine: BaseEngine, item: T | None) -> T:
    """Share the item of the rank that returns outputs with all ranks of its replica. Collective."""
    topology = engine.topology
    if topology.world_size == topology.dp.size:
        return cast("T", item)
    gathered = engine.gather_objects((topology.dp.rank, topology.returns_outputs, item if topology.returns_outputs else None))
    (result,) = (kept for replica, speaks, kept in gathered if speaks and replica == topology.dp.rank)
    return cast("T", result)


def gather_replicas(engine: BaseEngine, item: T) -> list[T]:
    """Return one item of each replica, in the order of ranks, on every rank. Collective."""
    gathered = engine.gather_objects((engine.topology.returns_outputs, item))
    return [kept for speaks, kept in gathered if speaks]
