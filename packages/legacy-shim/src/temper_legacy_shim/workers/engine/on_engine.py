"""Shared parts of the deprecated actor and critic: engine, update sizes, columns of the old batch.

Forward passes without gradients return grids [B, W], equal on all ranks of a replica.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import MiniBatchPlan, RankPlan, build_packed_batch
from temper_engine_api.reduction import count_denominators
from temper_engine_api.specs import ModelType
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.numerics.micro_batches import rows_by_count, rows_by_tokens
from temper_legacy_shim.workers.batches.rows import read_rows, row_lengths
from temper_legacy_shim.workers.batches.settings import known, plain
from temper_legacy_shim.workers.batches.updates import SplitSettings, matched, scheduled
from temper_legacy_shim.workers.engine.adopted_models import Adopted, adopt

Numerics = Literal["legacy", "temper"]


class OnEngine(ABC):
    """A deprecated model class whose passes run on an engine."""

    model_type: ClassVar[ModelType]
    """The head that it trains."""
    lists_losses: ClassVar[bool] = False
    """True if losses are reported for each micro-batch, as by the Megatron classes; the FSDP
    classes reported the sum over a call.
    """
    _adopted: Adopted
    """The engine and its source; set by the class after configuration."""

    def __init__(self, config: object, *, numerics: Numerics) -> None:
        if numerics not in ("legacy", "temper"):
            raise ConfigError(f"numerics is {numerics!r}, but must be legacy or temper.")
        self.config = config
        self.numerics = numerics
        self._values: dict[str, object] = {}
        self.configure(plain(config))

    @abstractmethod
    def configure(self, values: Mapping[str, object]) -> None:
        """Apply a config's values to later updates; settings of the engine do not change."""

    def _adopt(
        self,
        module: nn.Module | BaseEngine,
        optimizer: torch.optim.Optimizer | None,
        *,
        grad_clip: float | None,
    ) -> Adopted:
        """Build the engine for the arguments of the constructor. Collective."""
        return adopt(
            module,
            optimizer,
            grad_clip=grad_clip,
            model_type=self.model_type,
            engine_name="fsdp",
            configure=FSDPConfig,
        )

    @property
    def engine(self) -> BaseEngine:
        return self._adopted.engine

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that share a sequence; each adds a token budget."""
        return self.engine.topology.sp.size * self.engine.topology.cp.size

    @property
    def split(self) -> SplitSettings:
        """Sizes of an update; parsed at the update, as a reference policy has none."""
        values: SplitSettings = known(SplitSettings, {"ppo_mini_batch_size": 0, **self._values})
        return values

    def _micro_batches(self, mini_batch: DataProto) -> Iterator[tuple[DataProto, float, bool]]:
        """Yield rows, their weight in the loss, and True for rows that only fill up a rank."""
        split = self.split
        for chosen in matched(split.micro_batches(mini_batch), engine=self.engine):
            part = mini_batch.select_idxs(chosen) if chosen else mini_batch[:1]
            yield part, split.scale(len(chosen)), not chosen

    def _optimizer_step(self) -> float:
        """Take one optimizer step, and return the gradient norm before clipping.

        A non-finite gradient norm skips the update.
        """
        return self.engine.optimizer_step()


def column_of(data: DataProto, name: str, *, like: Tensor) -> Tensor | None:
    """Return a column [B, W] next to ``like``, float32 unless it is the mask.

    None if the batch has none.
    """
    if data.batch is None or name not in data.batch:
        return None
    column = data.batch.column(name).to(like.device)
    return column if name == "response_mask" else column.float()


def needed_column(data: DataProto, name: str, *, like: Tensor) -> Tensor:
    """Return a column that an update requires; see ``column_of``.

    Raises:
        BatchError: the batch has none.
    """
    column = column_of(data, name, like=like)
    if column is None:
        raise BatchError(
            f"the batch has no {name}, which this update reads: add it [B, {like.shape[1]}]."
        )
    return column


def compute_outputs(
    engine: BaseEngine,
    data: DataProto,
    *,
    requested_outputs: Sequence[HeadOutput],
    temperature: float,
    micro_batches: Sequence[list[int]],
) -> Mapping[HeadOutput, Tensor]:
    """Return [B, W] by query, on the CPU; tokens of the response only, 0 at padding."""
    rows = read_rows(data, temperature=temperature)
    packed = build_packed_batch(
        rows.sequences,
        plan=MiniBatchPlan(
            ranks=(
                RankPlan(micro_batches=tuple(map(tuple, scheduled(micro_batches, engine=engine)))),
            )
        ),
        rank=0,
        denominators=count_denominators(rows.sequences),
    )
    with engine.eval_mode():
        result = engine.forward_backward_batch(packed, forward_only=True, outputs=requested_outputs)
    outputs: ForwardOutputs = from_replica(engine, result.outputs)
    ordered = outputs.reorder(rows.sequences.sample_ids)
    return {
        head_output: rows.grid(ordered.columns[head_output]) for head_output in requested_outputs
    }


def single_forward(
    micro_batch: Mapping[str, Tensor], *, temperature: float, trained_by: str
) -> DataProto:
    """Return a micro-batch as a batch that is processed in a single piece.

    Args:
        micro_batch: input_ids, attention_mask, position_ids, responses.
        temperature: of the logits.
        trained_by: the method that trains, for the error.

    Raises:
        ConfigError: a gradient is wanted, which only the engine has.
    """
    if torch.is_grad_enabled():
        raise ConfigError(
            "_forward_micro_batch() answers without gradient here: call it under torch.no_grad(), "
            f"and train through {trained_by}(), "
            "or an engine with a loss function."
        )
    settings: dict[str, object] = {
        "micro_batch_size": len(micro_batch["input_ids"]),
        "use_dynamic_bsz": False,
        "temperature": temperature,
    }
    return DataProto.from_dict(tensors=micro_batch, meta_info=settings)


def refuse_own_forward(cls: type) -> None:
    """Refuse a subclass whose forward pass no one would call.

    Raises:
        ConfigError: it overrides ``_forward_micro_batch``.
    """
    if "_forward_micro_batch" in vars(cls):
        raise ConfigError(
            f"{cls.__name__} overrides _forward_micro_batch, which training no longer calls: the "
            "engine runs the model. Override "
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
    """Return a dummy token, which a rank runs while other ranks have a micro-batch."""
    plan = MiniBatchPlan(ranks=(RankPlan(micro_batches=((),)),))
    return build_packed_batch(like, plan=plan, rank=0, denominators=count_denominators(like))


T = TypeVar("T")


def from_replica(engine: BaseEngine, item: T | None) -> T:
    """Share the item of the rank that returns outputs with all ranks of its replica. Collective."""
    topology = engine.topology
    if topology.world_size == topology.dp.size:
        return cast("T", item)
    gathered = engine.gather_objects(
        (topology.dp.rank, topology.returns_outputs, item if topology.returns_outputs else None)
    )
    (result,) = (
        kept for replica, speaks, kept in gathered if speaks and replica == topology.dp.rank
    )
    return cast("T", result)


def gather_replicas(engine: BaseEngine, item: T) -> list[T]:
    """Return one item of each replica, in the order of ranks, on every rank. Collective."""
    gathered = engine.gather_objects((engine.topology.returns_outputs, item))
    return [kept for speaks, kept in gathered if speaks]
