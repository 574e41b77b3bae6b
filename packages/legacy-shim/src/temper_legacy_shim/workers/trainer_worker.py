"""A rank of a role that trains through the deprecated workers, with their numerics.

``temper-train use_legacy_worker_impl=enable`` uses it.

temper-trainer finds it through the entry point ``training_worker``. The trainer's plan is kept:
mini-batches and the tokens of a micro-batch; inside a mini-batch the old worker cuts and averages
as it always did.
"""

import dataclasses
import logging
import time
import warnings
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.metrics import Metric, compute_weighted_mean
from temper_engine_api.objective import AggregationMode, HeadOutput, Objective
from temper_engine_api.outputs import ForwardOutputs, StepResult
from temper_engine_api.specs import EngineConfig, OptimizerSpec
from temper_engine_api.topology import Topology
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import RECORDS, LegacyWorkerWarning
from temper_legacy_shim.numerics.masked_losses import OLD_KL_CLAMP
from temper_legacy_shim.workers.batches.rows import PaddedPart, pad_part
from temper_legacy_shim.workers.engine.adopted_models import NEVER
from temper_legacy_shim.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.runtime.worker_group import TrainingWorker, UpdateResult

logger = logging.getLogger(__name__)

_AGGREGATIONS = {
    AggregationMode.TOKEN_MEAN: "token-mean",
    AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN: "seq-mean-token-mean",
    AggregationMode.SEQUENCE_MEAN_TOKEN_SUM: "seq-mean-token-sum",
}
_KL_LOSS_TYPES = {"k2": "mse", "k3": "low_var_kl"}
_NEVER_CLIPPED = 1e30
"""Bound for an objective without a clip, where the old loss requires a number."""


class DeprecatedTrainingWorker(TrainingWorker):
    """The trainer's worker around ``ActorRolloutRefWorker`` or ``CriticWorker``."""

    def __init__(self, *, engine_name: str, config: EngineConfig, num_threads: int | None) -> None:
        if engine_name != "fsdp" or not isinstance(config, FSDPConfig):
            raise CapabilityError(
                "temper-train drives the deprecated workers on the engine fsdp alone, not on "
                f"{engine_name}: choose model_engine=fsdp, or set use_legacy_worker_impl=disable."
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._advances_per_update = config.schedule.advance == "update"
        self._role = (
            "critic"
            if config.model.model_type == "value_model"
            else "ref"
            if config.optimizer is None
            else "actor"
        )
        self._worker = _open_worker(self._role, config=_with_old_optimizer(config))
        self._objective: Objective | None = None

    def init(self) -> Topology:
        """Build the model; collective over the role's ranks."""
        self._worker.init_model()
        policy = self._policy()
        self._engine: BaseEngine = policy.engine
        return self._engine.topology

    def set_objective(self, objective: Objective) -> None:
        """Translate the objective to the old settings.

        Raises:
            ConfigError: the old losses can't express it.
        """
        self._settings = _old_settings(objective)
        self._objective = objective

    def forward(
        self, part: PackedBatch, outputs: Collection[HeadOutput], without_adapter: bool = False
    ) -> StepResult:
        """Return the log-probs of a policy, values of a critic, through the old methods."""
        if without_adapter:
            raise CapabilityError(
                "a deprecated worker can't disable its adapter: set algorithm.kl_reference to ref."
            )
        expected = frozenset(outputs)
        offered = {HeadOutput.VALUE} if self._role == "critic" else {HeadOutput.LOGPROB}
        if expected != offered:
            raise CapabilityError(
                f"a deprecated {self._role} answers {sorted(offered)}, but was asked for "
                f"{sorted(expected)}."
            )
        padded = pad_part(part, full_rows=True)
        data = padded.data(columns=())
        self._adjust(padded)
        if self._role == "critic":
            grid = _tensor(cast("CriticWorker", self._worker).compute_values(data), "values")
        elif self._role == "ref":
            grid = _tensor(
                cast("ActorRolloutRefWorker", self._worker).compute_ref_log_prob(data),
                "ref_log_prob",
            )
        else:
            grid = _tensor(
                cast("ActorRolloutRefWorker", self._worker).compute_log_prob(data), "old_log_probs"
            )
        (head_output,) = offered
        return StepResult(
            outputs=ForwardOutputs(
                sample_ids=padded.kept.sample_ids.clone(),
                sequence_starts=padded.kept.sequence_starts.long(),
                columns={head_output: padded.tokens_of(grid)},
            )
        )

    def evaluate(self, part: PackedBatch) -> StepResult:
        """Raise an error: the old workers cannot evaluate a loss."""
        raise CapabilityError(
            "a deprecated worker can't evaluate a loss without training: set "
            "use_legacy_worker_impl=disable."
        )

    def update(self, part: PackedBatch, is_last_of_step: bool) -> UpdateResult:
        """Return one mini-batch through the old update method; see TrainingWorker."""
        if self._objective is None:
            raise ConfigError("a deprecated worker has no objective: call set_objective() before.")
        begin, steps = time.perf_counter(), self._engine.num_schedule_steps
        padded = pad_part(part)
        self._adjust(padded)
        if isinstance(self._objective, ValueObjective):
            data = padded.data(columns=("returns", "values"))
            metrics = cast("CriticWorker", self._worker).update_critic(data).meta_info["metrics"]
        else:
            data = padded.data(columns=self._columns())
            metrics = (
                cast("ActorRolloutRefWorker", self._worker).update_actor(data).meta_info["metrics"]
            )
        # The trainer determines the schedule's steps; the old worker counted calls.
        self._engine.num_schedule_steps = steps + int(self._advances_per_update or is_last_of_step)
        report = self._engine.last_update
        assert report is not None
        result = cast("Mapping[str, object]", metrics)
        return UpdateResult(
            report=report,
            lr=float(cast("float", result[f"{self._role}/lr"])),
            elapsed_s=time.perf_counter() - begin,
            metrics=self._metrics(result, part=part),
        )

    def close(self) -> None:
        if self._policy(required=False) is not None:
            self._engine.close()

    def _columns(self) -> tuple[str, ...]:
        assert isinstance(self._objective, PolicyObjective)
        columns: tuple[str, ...] = ("advantages",)
        columns += () if self._objective.old_is_current else ("old_logprobs",)
        return (*columns, "ref_logprobs") if self._objective.kl_coef else columns

    def _adjust(self, padded: PaddedPart) -> None:
        """Replace a config's sizes by those that the trainer planned for this part."""
        sizes: dict[str, object] = {
            "ppo_mini_batch_size": padded.kept.num_sequences,
            "ppo_max_token_len_per_gpu": padded.max_tokens,
            "use_dynamic_bsz": True,
            "ppo_epochs": 1,
        }
        if self._objective is not None:
            self._policy().configure({**self._settings, **sizes})
        config = self._worker.config
        config["use_dynamic_bsz"] = True
        config["forward_max_token_len_per_gpu"] = padded.max_tokens
        for name in ("rollout", "ref"):
            config[name] = {
                "temperature": padded.temperature,
                "log_prob_use_dynamic_bsz": True,
                "log_prob_max_token_len_per_gpu": padded.max_tokens,
            }

    def _policy(self, *, required: bool = True) -> PPOActor | PPOCritic:
        worker = self._worker
        policy = (
            worker.critic if isinstance(worker, CriticWorker) else worker.actor or worker.ref_policy
        )
        assert policy is not None or not required, "init() comes before"
        return cast("PPOActor | PPOCritic", policy)

    def _metrics(self, result: Mapping[str, object], *, part: PackedBatch) -> dict[str, Metric]:
        """Return mergeable numbers: losses averaged over ranks, lists over entries."""
        own = {f"{self._role}/{name}" for name in ("lr", "grad_norm")}
        metrics = {
            name: Metric(value=float(sum(values)), weight=float(len(values)))
            for name, values in result.items()
            if isinstance(values, list) and name not in own
        }
        dp_size = self._engine.topology.dp.size
        loss = float(
            cast("float", result["critic/vf_loss" if self._role == "critic" else "actor/pg_loss"])
        )
        if isinstance(self._objective, PolicyObjective):
            kl_loss = float(cast("float", result["actor/kl_loss"]))
            metrics["actor/kl_loss"] = Metric(value=kl_loss)
            loss += self._objective.kl_coef * kl_loss
        metrics["loss"] = Metric(value=loss / dp_size, reduction="sum")
        if isinstance(self._objective, ValueObjective):
            metrics |= _spread(part)
        return metrics


def _spread(part: PackedBatch) -> dict[str, Metric]:
    """Compute the statistics of the explained variance, which the old update lacks."""
    returns, values = part.columns["returns"], part.columns["values"]
    error = returns - values
    columns = {"return_mean": returns, "return_square_mean": returns.square()}
    columns |= {"error_mean": error, "error_square_mean": error.square()}
    return {
        f"value/{name}": compute_weighted_mean(column, part.loss_mask)
        for name, column in columns.items()
    }


def _open_worker(role: str, *, config: FSDPConfig) -> ActorRolloutRefWorker | CriticWorker:
    cls = CriticWorker if role == "critic" else ActorRolloutRefWorker
    logger.warning("%s", RECORDS[f"{cls.__module__}.{cls.__qualname__}"].format_warning())
    sizes: dict[str, object] = {
        # More than any part has: the trainer has divided the step already, and `_adjust` sets the
        # sizes.
        "ppo_mini_batch_size": 2**30,
        "use_dynamic_bsz": True,
        "forward_micro_batch_size_per_gpu": 1,
    }
    with warnings.catch_warnings():
        # Said above, where a user of temper-train reads it.
        warnings.simplefilter("ignore", LegacyWorkerWarning)
        if role == "critic":
            return CriticWorker(sizes, engines={"critic": config})
        return ActorRolloutRefWorker({"actor": sizes}, role, engines={role: config})


def _with_old_optimizer(config: FSDPConfig) -> FSDPConfig:
    """Return the old optimizer: decay on every parameter, any number of skips."""
    if not isinstance(config.optimizer, OptimizerSpec):
        return config
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(
            config.optimizer, decays_vectors=True, max_consecutive_skips=NEVER
        ),
    )


def _old_settings(objective: Objective) -> dict[str, object]:
    if objective.aggregation.mode not in _AGGREGATIONS:
        raise ConfigError(
            f"algorithm.aggregation is {objective.aggregation.mode.value}, which the deprecated "
            "workers compute with another divisor: use "
            f"{', '.join(mode.value for mode in _AGGREGATIONS)}, or set "
            "use_legacy_worker_impl=disable."
        )
    mode = _AGGREGATIONS[objective.aggregation.mode]
    if isinstance(objective, ValueObjective):
        return {
            "cliprange_value": _NEVER_CLIPPED if objective.clip is None else objective.clip,
            "loss_agg_mode": mode,
        }
    loss = objective.loss if isinstance(objective, PolicyObjective) else None
    if not (isinstance(objective, PolicyObjective) and isinstance(loss, Ppo)):
        name = objective.name if loss is None else loss.name
        raise ConfigError(
            f"objective {name!r} has no deprecated counterpart: set use_legacy_worker_impl=disable."
        )
    if objective.kl_coef > 0 and (
        objective.kl_estimator not in _KL_LOSS_TYPES
        or objective.kl_clamp not in (None, OLD_KL_CLAMP)
    ):
        raise ConfigError(
            f"algorithm.kl_estimator is {objective.kl_estimator} with kl_clamp "
            f"{objective.kl_clamp}, but the deprecated workers compute only "
            f"{' and '.join(_KL_LOSS_TYPES)}, with k3 at most {OLD_KL_CLAMP:g}: use one of these, "
            "or set use_legacy_worker_impl=disable."
        )
    return {
        "clip_ratio_low": loss.clip_low,
        "clip_ratio_high": loss.clip_high,
        "clip_ratio_c": _NEVER_CLIPPED if loss.dual_clip is None else loss.dual_clip,
        "entropy_coeff": objective.entropy_coef,
        "use_kl_loss": objective.kl_coef > 0,
        "kl_loss_coef": objective.kl_coef,
        "kl_loss_type": _KL_LOSS_TYPES.get(objective.kl_estimator, "low_var_kl"),
        # Without it the old worker would use the current log-probs as the old ones, because every
        # mini-batch is the only update of its call here.
        "use_rollout_log_probs": not objective.old_is_current,
        "loss_agg_mode": mode,
    }


def _tensor(data: DataProto, name: str) -> Tensor:
    assert data.batch is not None
    return data.batch.column(name)
