"""``DataParallelPPOActor``: log-probs and policy updates of an old batch, on an engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import deprecated

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.hooks import Context, Predictions
from temper_engine_api.objective import HeadOutput
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import deprecated_class
from temper_legacy_shim.numerics.masked_losses import aggregate, kl_penalty
from temper_legacy_shim.numerics.policy_losses import (
    PolicyInputs,
    PolicyLossSettings,
    mismatch,
    policy_loss,
)
from temper_legacy_shim.workers.batches.rows import Rows, read_rows, temperature_of
from temper_legacy_shim.workers.batches.settings import ActorSettings, known, policy_loss_settings
from temper_legacy_shim.workers.batches.updates import append_metrics, passes
from temper_legacy_shim.workers.engine.on_engine import (
    Numerics,
    OnEngine,
    column_of,
    compute_outputs,
    empty_batch,
    forward_split,
    needed_column,
    refuse_own_forward,
    single_forward,
    update_actor_with_objective,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    data: DataProto
    """Rows of the micro-batch; a single untrained row if it is empty."""
    rows: Rows
    """The same laid end to end."""
    scale: float
    """Factor of its loss in the update's."""
    is_only_update: bool
    """True if the call makes a single update."""
    is_empty: bool
    """True if this rank has no rows left and only joins collectives."""


class PPOActor(OnEngine):
    """The deprecated class without its warning, for the workers of this package."""

    model_type = "language_model"

    def __init__(
        self,
        config: object,
        actor_module: nn.Module | BaseEngine,
        actor_optimizer: torch.optim.Optimizer | None = None,
        *,
        numerics: Numerics = "legacy",
    ) -> None:
        super().__init__(config, numerics=numerics)
        self._adopted = self._adopt(
            actor_module, actor_optimizer, grad_clip=self.settings.grad_clip
        )
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer

    def configure(self, values: Mapping[str, object]) -> None:
        """Take an actor config's values for later updates, except the engine's settings."""
        self.settings: ActorSettings = known(ActorSettings, values)
        self.loss_settings: PolicyLossSettings = policy_loss_settings(values)
        self._values = dict(values)

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return the log-probs of the responses under the current policy.

        Args:
            data: responses, input_ids, attention_mask, position_ids; meta_info holds
                micro_batch_size or max_token_len, use_dynamic_bsz and temperature.
            calculate_entropy: return entropies too.

        Returns:
            log_probs [B, W], and if asked entropys and sum_pi_squared [B, W]; 0 at padding.
        """
        return self.score_rows(data, calculate_entropy=calculate_entropy)

    def score_rows(self, data: DataProto, *, calculate_entropy: bool) -> dict[str, Tensor]:
        """Return what ``compute_log_prob`` of the FSDP class does, for both families."""
        temperature = temperature_of(data)
        micro_batches = forward_split(data, ranks_per_sequence=self.ranks_per_sequence)
        with self._adopted.weights_of_module():
            requested_outputs = (
                [HeadOutput.LOGPROB, HeadOutput.ENTROPY]
                if calculate_entropy
                else [HeadOutput.LOGPROB]
            )
            squares = self.settings.calculate_sum_pi_squared
            requested_outputs += [HeadOutput.LOGSUMEXP] if squares else []
            result = compute_outputs(
                self.engine,
                data,
                requested_outputs=requested_outputs,
                temperature=temperature,
                micro_batches=micro_batches,
            )
            outputs = {"log_probs": result[HeadOutput.LOGPROB]}
            if calculate_entropy:
                outputs["entropys"] = result[HeadOutput.ENTROPY]
            if squares:
                # sum pi^2 = exp(log sum e^2z - 2 log sum e^z), and halving the temperature doubles
                # every logit z.
                halved = compute_outputs(
                    self.engine,
                    data,
                    requested_outputs=[HeadOutput.LOGSUMEXP],
                    temperature=temperature / 2,
                    micro_batches=micro_batches,
                )
                squared = (halved[HeadOutput.LOGSUMEXP] - 2 * result[HeadOutput.LOGSUMEXP]).exp()
                outputs["sum_pi_squared"] = squared * (result[HeadOutput.LOGSUMEXP] != 0)
        return outputs

    def update_policy(self, data: DataProto) -> dict[str, object]:
        """Train on the batch: ppo_epochs passes over mini-batches, one optimizer step each.

        Args:
            data: as for ``compute_log_prob`` with response_mask, old_log_probs and advantages, and
                if the config asks ref_log_prob, rollout_is_weights, rollout_log_probs; meta_info
                holds the temperature.

        Returns:
            Metrics by their old names: sums for the losses, else a list with an entry for each
                micro-batch or update.
        """
        # A generator, because its first step is collective and belongs into the update's context.
        return self._run_updates(passes(data, split=self.split, engine=self.engine))

    def update_on_rows(self, data: DataProto) -> dict[str, object]:
        """Train on this rank's rows, as the worker around the class does."""
        return self.update_policy(data)

    def _run_updates(self, updates: Iterable[tuple[DataProto, bool]]) -> dict[str, object]:
        """Take one optimizer step for each mini-batch; true if it is the only one of its call."""
        with self._adopted.trained():
            if self.numerics == "temper":
                return update_actor_with_objective(
                    self,
                    (mini_batch for mini_batch, _ in updates),
                    settings=self.settings,
                    loss_settings=self.loss_settings,
                )
            metrics: dict[str, object] = {}
            sums = {} if self.lists_losses else {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0}
            for mini_batch, is_only in updates:
                self.engine.optimizer_zero_grad()
                with self.engine.train_mode():
                    for part, scale, is_empty in self._micro_batches(mini_batch):
                        micro = MicroBatch(
                            data=part,
                            rows=read_rows(part, temperature=temperature_of(mini_batch)),
                            scale=scale,
                            is_only_update=is_only,
                            is_empty=is_empty,
                        )
                        self._train(micro, metrics=metrics, sums=sums)
                append_metrics(metrics, {"actor/grad_norm": float(self._optimizer_step())})
            self.engine.optimizer_zero_grad()
        return {**sums, **metrics}

    def _train(
        self, micro: MicroBatch, *, metrics: dict[str, object], sums: dict[str, float]
    ) -> None:
        """Add the gradient of a micro-batch; an empty one only takes part in collectives."""
        reported: dict[str, float] = {}

        def loss_of(
            _: SequenceBatch, predictions: Predictions, ctx: Context
        ) -> tuple[Tensor, Context]:
            loss, losses = self._loss(micro, predictions, metrics=reported)
            for name, value in losses.items():
                if self.lists_losses:
                    reported[name] = value
                else:
                    sums[name] += value * micro.scale
            return loss * micro.scale, ctx

        required_outputs = (
            {HeadOutput.LOGPROB, HeadOutput.ENTROPY}
            if self._needs_entropy
            else {HeadOutput.LOGPROB}
        )
        self.engine.set_loss_fn(loss_of, required_outputs=required_outputs)
        self.engine.forward_backward_step(
            empty_batch(micro.rows.sequences) if micro.is_empty else micro.rows.sequences
        )
        append_metrics(metrics, reported)

    @property
    def _needs_entropy(self) -> bool:
        """True if an update needs the head's entropy; Megatron's class never just reported it."""
        settings = self.settings
        return settings.entropy_coeff != 0 if self.lists_losses else settings.wants_entropy

    def _loss(
        self, micro: MicroBatch, predictions: Predictions, *, metrics: dict[str, float]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a micro-batch, and the losses that are reported under old names."""
        settings = self.settings
        logprobs = micro.rows.grid(predictions[HeadOutput.LOGPROB.value])
        inputs = self._inputs(micro, logprobs)
        loss, result = policy_loss(self.loss_settings.loss_mode)(inputs, self.loss_settings)
        metrics.update(result)
        sampled = column_of(micro.data, "rollout_log_probs", like=logprobs)
        if sampled is not None and self.loss_settings.loss_mode != "bypass_mode":
            metrics.update(mismatch(logprobs.detach(), rollout_logprobs=sampled, mask=inputs.mask))
        losses = {"actor/pg_loss": float(loss.detach())}
        if self._needs_entropy:
            entropy = aggregate(
                micro.rows.grid(predictions[HeadOutput.ENTROPY.value]),
                inputs.mask,
                settings.loss_agg_mode,
            )
            loss = loss - settings.entropy_coeff * entropy if settings.entropy_coeff else loss
            if not self.lists_losses:
                metrics["actor/entropy"] = float(entropy.detach())
                # The old FSDP code subtracted in place, so that its pg_loss is the difference.
                losses["actor/pg_loss"] = float(loss.detach())
        if settings.use_kl_loss:
            kl = kl_penalty(
                logprobs,
                needed_column(micro.data, "ref_log_prob", like=logprobs),
                kind=settings.kl_loss_type,
            )
            kl_loss = aggregate(kl, inputs.mask, settings.loss_agg_mode)
            loss = loss + settings.kl_loss_coef * kl_loss
            losses["actor/kl_loss"] = float(kl_loss.detach())
            metrics["actor/kl_coef"] = settings.kl_loss_coef
        return loss, losses

    def _inputs(self, micro: MicroBatch, logprobs: Tensor) -> PolicyInputs:
        # As in the old worker: before a single update the old policy is the current one, and its
        # own log-probs give a ratio of exactly 1.
        takes_current = micro.is_only_update and not self.settings.use_rollout_log_probs
        return PolicyInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach()
            if takes_current
            else needed_column(micro.data, "old_log_probs", like=logprobs),
            advantages=needed_column(micro.data, "advantages", like=logprobs),
            mask=needed_column(micro.data, "response_mask", like=logprobs),
            weights=column_of(micro.data, "rollout_is_weights", like=logprobs),
            agg_mode=self.settings.loss_agg_mode,
        )

    def _forward_micro_batch(
        self, micro_batch: Mapping[str, Tensor], temperature: float, calculate_entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return a micro-batch's log-probs and entropies without gradient."""
        # With gradient only the engine runs the model.
        data = single_forward(micro_batch, temperature=temperature, trained_by="update_policy")
        return self.compute_log_prob(data, calculate_entropy=calculate_entropy)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.ppo_actor.DataParallelPPOActor is deprecated since "
    "temper-legacy-shim 0.2 and will be removed in 0.4: use temper_engine_fsdp.engine.FSDPEngine "
    "instead; give it a PolicyObjective with set_loss_fn() and call forward_backward_batch() and "
    "optimizer_step().",
    category=None,
)
class DataParallelPPOActor(PPOActor):
    """The old actor on an engine; see docs/migration/workers.md.

    Args:
        config: the old actor config, its sizes already divided by the number of ranks.
        actor_module: an initialized engine, or a plain Hugging Face model, which is trained by an
            engine and gets the weights back.
        actor_optimizer: torch.optim.AdamW over the model's parameters, whose learning rate is read
            at each update; None with an engine, which brings its own, and for a frozen policy.
        numerics: legacy computes as the old class did, quirks included; temper as Temper's own
            objective does.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        refuse_own_forward(cls)
