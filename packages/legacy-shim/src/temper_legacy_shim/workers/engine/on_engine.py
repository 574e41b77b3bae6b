"""Shared parts of the deprecated actor and critic: engine, update sizes, columns of the old batch.

Forward passes without gradients return grids [B, W], equal on all ranks of a replica.

Updates by Temper's own objectives have denominators over all ranks, metrics that are true means,
and old names. The mini-batches are those of the old classes; how each is split over ranks and
micro-batches no longer matters.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from temper_engine_api.batch import Denominators, SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, ConfigError
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput, Objective
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import MiniBatchPlan, RankPlan, build_packed_batch
from temper_engine_api.reduction import count_denominators
from temper_engine_api.specs import ModelType
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.numerics.masked_losses import OLD_KL_CLAMP
from temper_legacy_shim.numerics.policy_losses import PolicyLossSettings
from temper_legacy_shim.workers.batches.rows import read_rows, row_lengths, temperature_of
from temper_legacy_shim.workers.batches.settings import ActorSettings, CriticSettings, known, plain
from temper_legacy_shim.workers.batches.updates import (
    SplitSettings,
    append_metrics,
    matched,
    rows_by_count,
    rows_by_tokens,
    scheduled,
)
from temper_legacy_shim.workers.engine.adopted_models import Adopted, adopt
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo

Numerics = Literal["legacy", "temper"]


class OnEngine(ABC):
    """A deprecated model class whose passes run on an engine."""

    model_type: ClassVar[ModelType]
    lists_losses: ClassVar[bool] = False
    """True if each micro-batch's loss is reported, as by the Megatron classes, not the sum."""
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
            # A rank without rows runs one real row that does not count, because the passes are
            # collective.
            part = mini_batch.select_idxs(chosen) if chosen else mini_batch[:1]
            yield part, split.scale(len(chosen)), not chosen

    def _optimizer_step(self) -> float:
        """Take one optimizer step, skipped for a non-finite gradient norm, and return that."""
        return self.engine.optimizer_step()


def column_of(data: DataProto, name: str, *, like: Tensor) -> Tensor | None:
    """Return a float32 column [B, W], or the mask as it is; None if the batch has none."""
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
    # Engines return sequences in the order of micro-batches.
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
    # Gradients of a pass outside the engine would never reach its sharded parameters.
    if torch.is_grad_enabled():
        raise ConfigError(
            "_forward_micro_batch() answers without gradient here: call it under torch.no_grad(), "
            f"and train through {trained_by}(), or an engine with a loss function."
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
    # vars() and not hasattr(): only the subclass's own definition counts.
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
    # Each rank is a replica of its own.
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


_MODES = {
    "token-mean": AggregationMode.TOKEN_MEAN,
    "seq-mean-token-sum": AggregationMode.SEQUENCE_MEAN_TOKEN_SUM,
    "seq-mean-token-mean": AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN,
    "seq-mean-token-sum-norm": AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM,
}
_ESTIMATORS: dict[str, Literal["k2", "k3"]] = {
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def update_actor_with_objective(
    actor: OnEngine,
    mini_batches: Iterable[DataProto],
    *,
    settings: ActorSettings,
    loss_settings: PolicyLossSettings,
) -> dict[str, object]:
    """Update the actor with Temper's objective, one optimizer step for each mini-batch.

    Returns:
        The metrics of all mini-batches under verl's names.
    """
    columns = {"advantages": "advantages", "old_log_probs": "old_logprobs"}
    if settings.use_kl_loss:
        columns["ref_log_prob"] = "ref_logprobs"
    metrics: dict[str, object] = {}
    for mini_batch in mini_batches:
        assert mini_batch.batch is not None
        if "rollout_is_weights" in mini_batch.batch:
            raise ConfigError(
                "rollout_is_weights is in the batch, which numerics temper can't apply: leave it "
                "out, or use numerics legacy."
            )
        objective = _policy_objective(
            settings, loss_settings, width=mini_batch.batch.column("responses").shape[1]
        )
        matches = _update(
            actor,
            mini_batch,
            objective=objective,
            columns=columns,
            temperature=temperature_of(mini_batch),
        )
        append_metrics(metrics, _actor_names(matches, has_kl=settings.use_kl_loss))
    actor.engine.optimizer_zero_grad()
    return metrics


def update_critic_with_objective(
    critic: OnEngine, mini_batches: Iterable[DataProto], *, settings: CriticSettings
) -> dict[str, object]:
    """Update the critic with Temper's value loss, one optimizer step for each mini-batch.

    Returns:
        The metrics of all mini-batches under verl's names.
    """
    metrics: dict[str, object] = {}
    for mini_batch in mini_batches:
        assert mini_batch.batch is not None
        width = mini_batch.batch.column("responses").shape[1]
        objective = ValueObjective(
            clip=settings.cliprange_value,
            aggregation=_aggregation(settings.loss_agg_mode, width=width),
        )
        matches = _update(
            critic,
            mini_batch,
            objective=objective,
            columns={"returns": "returns", "values": "values"},
            temperature=1.0,
        )
        names = {
            "critic/vf_loss": "loss",
            "critic/vf_clipfrac": "value/clip_fraction",
            "critic/grad_norm": "grad_norm",
        }
        append_metrics(metrics, {old: matches[new] for old, new in names.items()})
    critic.engine.optimizer_zero_grad()
    return metrics


def _policy_objective(
    settings: ActorSettings, loss: PolicyLossSettings, *, width: int
) -> PolicyObjective:
    if loss.loss_mode != "vanilla":
        raise ConfigError(
            f"policy_loss.loss_mode is {loss.loss_mode!r}, which numerics temper lacks: use "
            "vanilla, or numerics legacy."
        )
    if settings.use_kl_loss and settings.kl_loss_type not in _ESTIMATORS:
        raise ConfigError(
            f"kl_loss_type is {settings.kl_loss_type!r}, which is no loss of the KL: use mse or "
            "low_var_kl, or numerics legacy."
        )
    estimator: Literal["k2", "k3"] = _ESTIMATORS.get(settings.kl_loss_type, "k3")
    return PolicyObjective(
        loss=Ppo(clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.clip_ratio_c),
        entropy_coef=settings.entropy_coeff,
        kl_coef=settings.kl_loss_coef if settings.use_kl_loss else 0.0,
        kl_estimator=estimator,
        kl_clamp=OLD_KL_CLAMP if estimator == "k3" else None,
        aggregation=_aggregation(settings.loss_agg_mode, width=width),
    )


def _aggregation(mode: str, *, width: int) -> Aggregation:
    if mode not in _MODES:
        raise ConfigError(f"loss_agg_mode is {mode!r}, but must be one of {', '.join(_MODES)}.")
    chosen = _MODES[mode]
    return Aggregation(
        mode=chosen,
        # The old loss divided by the padded width of the batch.
        horizon=width if chosen == AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM else None,
    )


def _update(
    model: OnEngine,
    mini_batch: DataProto,
    *,
    objective: Objective,
    columns: Mapping[str, str],
    temperature: float,
) -> dict[str, float]:
    """Return one optimizer update; metrics merged over ranks, the same on each."""
    engine = model.engine
    sequences = read_rows(mini_batch, temperature=temperature, columns=tuple(columns)).sequences
    sequences = sequences.with_columns(
        {new: sequences.columns[old] for old, new in columns.items()}
    )
    micro_batches = scheduled(model.split.micro_batches(mini_batch), engine=engine)
    packed = build_packed_batch(
        sequences,
        plan=MiniBatchPlan(ranks=(RankPlan(micro_batches=tuple(map(tuple, micro_batches))),)),
        rank=0,
        denominators=_sum_over_ranks(sequences, engine=engine),
    )
    engine.set_loss_fn(objective)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        result = engine.forward_backward_batch(packed, forward_only=False)
    norm = model._optimizer_step()
    gathered: list[Mapping[str, Metric]] = list(gather_replicas(engine, result.metrics))
    return {
        "grad_norm": norm,
        **{name: metric.result for name, metric in merge_metrics(gathered).items()},
    }


def _sum_over_ranks(sequences: SequenceBatch, *, engine: BaseEngine) -> Denominators:
    counts = gather_replicas(engine, count_denominators(sequences))
    return Denominators(
        tokens=sum(count.tokens for count in counts),
        sequences=sum(count.sequences for count in counts),
        groups=sum(count.groups for count in counts),
    )


def _actor_names(matches: Mapping[str, float], *, has_kl: bool) -> dict[str, float]:
    """Return the old names; pg_loss includes the KL here."""
    names = {
        "actor/pg_loss": matches["loss"],
        "actor/ppo_kl": matches["policy/old_kl"],
        "actor/grad_norm": matches["grad_norm"],
    }
    names["actor/pg_clipfrac"] = (
        matches["policy/clip_fraction_low"] + matches["policy/clip_fraction_high"]
    )
    names["actor/pg_clipfrac_lower"] = matches["policy/dual_clip_fraction"]
    if "policy/entropy" in matches:
        names["actor/entropy"] = matches["policy/entropy"]
    names["actor/kl_loss"] = matches["policy/ref_kl"] if has_kl else 0.0
    return names
