"""Answers of an engine about an old batch, without gradients, as grids [B, W]."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import Query
from temper_engine_api.outputs import Outputs
from temper_engine_api.plan import MiniBatchPlan, RankPlan, pack_rank
from temper_engine_api.reduction import count_denominators
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.numerics.micro_batches import rows_by_count, rows_by_tokens
from temper_legacy_shim.workers.replica import from_replica
from temper_legacy_shim.workers.rows import read_rows, row_lengths
from temper_legacy_shim.workers.updates import scheduled


def answer(
    engine: BaseEngine, data: DataProto, *, queries: Sequence[Query], temperature: float, micro_batches: Sequence[list[int]]
) -> Mapping[Query, Tensor]:
    """[B, W] by query, on the CPU; tokens of the response only, 0 at padding."""
    rows = read_rows(data, temperature=temperature)
    packed = pack_rank(
        rows.sequences,
        plan=MiniBatchPlan(ranks=(RankPlan(micro_batches=tuple(map(tuple, scheduled(micro_batches, engine=engine)))),)),
        rank=0,
        denominators=count_denominators(rows.sequences),
    )
    with engine.eval_mode():
        result = engine.forward_backward_batch(packed, forward_only=True, outputs=queries)
    outputs: Outputs = from_replica(engine, result.outputs)
    ordered = outputs.in_order_of(rows.sequences.sample_ids)
    return {query: rows.grid(ordered.columns[query]) for query in queries}


def forward_split(data: DataProto, *, ranks_per_sequence: int) -> list[list[int]]:
    """Micro-batches of a forward pass, as the batch's settings ask."""
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
    """One dummy token: what a rank runs while the others still have a micro-batch."""
    plan = MiniBatchPlan(ranks=(RankPlan(micro_batches=((),)),))
    return pack_rank(like, plan=plan, rank=0, denominators=count_denominators(like))
