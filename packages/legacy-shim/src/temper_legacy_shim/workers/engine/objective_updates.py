"""Updates of an old batch by Temper's own objectives.

Denominators over all ranks, metrics that are true means, old names.

The mini-batches are those of the old classes; how each is split over ranks and micro-batches no
longer matters.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from temper_engine_api.batch import Denominators, SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import Aggregation, AggregationMode, Objective
from temper_engine_api.plan import MiniBatchPlan, RankPlan, build_packed_batch
from temper_engine_api.reduction import count_denominators
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.numerics.loss_settings import PolicyLossSettings
from temper_legacy_shim.numerics.masked_losses import OLD_KL_CLAMP
from temper_legacy_shim.workers.batches.rows import read_rows, temperature_of
from temper_legacy_shim.workers.batches.settings import ActorSettings, CriticSettings
from temper_legacy_shim.workers.batches.updates import append_metrics, scheduled
from temper_legacy_shim.workers.engine.on_engine import OnEngine, gather_replicas
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo

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
    """Return one update of each mini-batch by the clipped policy objective."""
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
    """Return one update of each mini-batch by the value objective."""
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
