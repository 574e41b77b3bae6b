"""Computations of ``MegatronPPOActor`` and ``MegatronPPOCritic`` on an engine.

Where their numbers differ from the FSDP classes': every micro-batch of an update weighs the same,
however many rows it has; the only update of a call is no exception; losses are listed by
micro-batch, the policy's without the entropy term; the critic's mask is the attention mask. Facts
from verl's ``workers/actor/megatron_actor.py`` and ``workers/critic/megatron_critic.py`` of January
2026.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, CapabilityError, ConfigError
from temper_engine_api.hooks import Context, Predictions
from temper_engine_api.objective import HeadOutput
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.numerics.masked_losses import aggregate, kl_penalty, value_loss
from temper_legacy_shim.numerics.policy_losses import PolicyInputs, mismatch, policy_loss
from temper_legacy_shim.workers.engine_configs import adopted_config
from temper_legacy_shim.workers.engines import Adopted, adopt
from temper_legacy_shim.workers.objective_updates import (
    update_actor_with_objective,
    update_critic_with_objective,
)
from temper_legacy_shim.workers.on_engine import (
    Numerics,
    OnEngine,
    column_of,
    compute_outputs,
    empty_batch,
    forward_split,
    from_replica,
    needed_column,
)
from temper_legacy_shim.workers.ppo_actor import MicroBatch, PPOActor, temperature_of
from temper_legacy_shim.workers.ppo_critic import PPOCritic
from temper_legacy_shim.workers.rows import read_rows
from temper_legacy_shim.workers.settings import block
from temper_legacy_shim.workers.updates import SplitSettings, append_metrics, matched

_INPUTS = ("responses", "input_ids", "attention_mask", "position_ids")
_ACTOR_COLUMNS = (*_INPUTS, "response_mask", "old_log_probs", "advantages")
_ACTOR_EXTRAS = ("rollout_is_weights", "rollout_log_probs")
_CRITIC_COLUMNS = (*_INPUTS, "values", "returns")


class _OnMegatron(OnEngine):
    """Shared parts of actor and critic.

    They have the adopted model's engine, mini-batches as the caller iterates them, and
    micro-batches of equal weight.
    """

    def _adopt(
        self,
        module: nn.Module | BaseEngine,
        optimizer: torch.optim.Optimizer | None,
        *,
        grad_clip: float | None,
    ) -> Adopted:
        configure = adopted_config(block(self._values, "megatron"))
        return adopt(
            module,
            optimizer,
            grad_clip=grad_clip,
            model_type=self.model_type,
            engine_name="megatron",
            configure=configure,
        )

    @property
    def split(self) -> SplitSettings:
        """Sizes of an update, adapted to the layout."""
        multiple = self.engine.topology.plan_constraints.micro_batch_multiple
        return replace(
            super().split,
            ulysses_sequence_parallel_size=self.ranks_per_sequence,
            micro_batch_multiple=multiple,
        )

    def _mini_batches(self, data: DataProto, *, columns: Sequence[str]) -> Iterator[DataProto]:
        """Yield the rows of every update of every pass.

        Shuffled like torch's DataLoader does it from the same seed.
        """
        split = self.split
        if len(data) == 0 or len(data) % split.ppo_mini_batch_size:
            raise BatchError(
                f"the batch has {len(data)} rows, but must be a multiple of ppo_mini_batch_size, "
                f"{split.ppo_mini_batch_size}."
            )
        chosen = data.select(batch_keys=list(columns), non_tensor_batch_keys=[])
        seed, shuffles = (
            self._values.get("data_loader_seed"),
            bool(self._values.get("shuffle", False)),
        )
        if shuffles and not isinstance(seed, int):
            raise ConfigError(
                f"shuffle is set, but data_loader_seed is {seed!r}: give a whole number, so that "
                "all ranks draw the same order."
            )
        loader: DataLoader[int] = DataLoader(
            range(len(data)),  # type: ignore[arg-type]  # anything with a length and items
            batch_size=split.ppo_mini_batch_size,
            shuffle=shuffles,
            generator=torch.Generator().manual_seed(seed) if isinstance(seed, int) else None,
            collate_fn=list,
        )
        return (chosen.select_idxs(rows) for _ in range(split.ppo_epochs) for rows in loader)

    def _columns_in(self, data: DataProto, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if data.batch is not None and name in data.batch)

    def _micro_batches(self, mini_batch: DataProto) -> Iterator[tuple[DataProto, float, bool]]:
        """Yield rows, their weight in the loss, and True for rows that only fill up a rank."""
        own = self.split.micro_batches(mini_batch)
        for chosen in matched(own, engine=self.engine):
            yield (
                mini_batch.select_idxs(chosen) if chosen else mini_batch[:1],
                1 / len(own),
                not chosen,
            )

    def forward_backward_batch(self, *_: object, **__: object) -> None:
        """Raise an error: the engine runs the passes."""
        raise CapabilityError(
            f"{type(self).__name__}.forward_backward_batch() ran Megatron's schedule on chunks "
            "that no longer exist: call "
            "engine.forward_backward_batch(), or the update and compute methods of this class."
        )


class MegatronActor(_OnMegatron, PPOActor):
    """The old Megatron actor on an engine, without its warning."""

    def __init__(
        self,
        config: object,
        actor_module: nn.Module | BaseEngine,
        actor_optimizer: torch.optim.Optimizer | None,
        *,
        numerics: Numerics,
    ) -> None:
        PPOActor.__init__(self, config, actor_module, actor_optimizer, numerics=numerics)

    def compute_log_prob(  # type: ignore[override]  # the old class returned another kind than its FSDP sibling
        self, data: DataProto, calculate_entropy: bool = False
    ) -> tuple[Tensor, Tensor, None]:
        """Compute log-probs and entropies [B, W], equal on all ranks of a replica.

        Entropies are empty if not requested.

        Args:
            data: as ``DataParallelPPOActor.compute_log_prob`` takes it.
            calculate_entropy: return entropies too.

        Returns:
            Both, and None in the place of expert choices, which nothing here replays.
        """
        result = PPOActor.compute_log_prob(self, data, calculate_entropy)
        return result["log_probs"], result.get("entropys", torch.empty(0)), None

    def make_minibatch_iterator(self, data: DataProto) -> Iterable[DataProto]:
        """Return the mini-batches of every pass, as ``update_policy`` takes them."""
        columns = [*_ACTOR_COLUMNS, *(("ref_log_prob",) if self.settings.use_kl_loss else ())]
        return self._mini_batches(data, columns=[*columns, *self._columns_in(data, _ACTOR_EXTRAS)])

    def update_policy(  # type: ignore[override]
        self, dataloader: Iterable[DataProto], enable_mtp: bool = False
    ) -> dict[str, object]:
        """Return one optimizer step for each mini-batch.

        Args:
            dataloader: the result of ``make_minibatch_iterator``.
            enable_mtp: rejected if True, because multi-token prediction is not available.

        Returns:
            Metrics by their old names, a list each with an entry for each micro-batch or update, on
            every rank of a replica.
        """
        if enable_mtp:
            raise CapabilityError(
                "enable_mtp is set, but no engine trains multi-token predictors: set it to False."
            )
        with self._adopted.trained():
            if self.numerics == "temper":
                return self._update_with_objective(dataloader)
            metrics: dict[str, object] = {}
            for mini_batch in dataloader:
                self._update(mini_batch, metrics)
            self.engine.optimizer_zero_grad()
        return from_replica(self.engine, metrics)

    def _update_with_objective(self, dataloader: Iterable[DataProto]) -> dict[str, object]:
        metrics: dict[str, object] = {}
        for mini_batch in dataloader:
            result = update_actor_with_objective(
                self,
                [mini_batch],
                settings=self.settings,
                loss_settings=self.loss_settings,
                temperature=temperature_of(mini_batch),
            )
            for name, entries in result.items():
                assert isinstance(entries, list)
                metrics.setdefault(name, []).extend(entries)  # type: ignore[attr-defined]
        return metrics

    def _update(self, mini_batch: DataProto, metrics: dict[str, object]) -> None:
        self.engine.optimizer_zero_grad()
        with self.engine.train_mode():
            for part, scale, is_empty in self._micro_batches(mini_batch):
                rows = read_rows(part, temperature=temperature_of(mini_batch))
                micro = MicroBatch(
                    data=part, rows=rows, scale=scale, is_only_update=False, is_empty=is_empty
                )
                self._train(micro, metrics=metrics, totals={})
        append_metrics(metrics, {"actor/grad_norm": float(self._optimizer_step())})

    @property
    def _needs_entropy(self) -> bool:
        return self.settings.entropy_coeff != 0

    def _loss(
        self,
        micro: MicroBatch,
        predictions: Predictions,
        *,
        metrics: dict[str, float],
        totals: dict[str, float],
    ) -> Tensor:
        settings = self.settings
        logprobs = micro.rows.grid(predictions[HeadOutput.LOGPROB.value])
        inputs: PolicyInputs = self._inputs(micro, logprobs)
        loss, result = policy_loss(self.loss_settings.loss_mode)(inputs, self.loss_settings)
        metrics.update(result)
        sampled = column_of(micro.data, "rollout_log_probs", like=logprobs)
        if sampled is not None and self.loss_settings.loss_mode != "bypass_mode":
            metrics.update(mismatch(logprobs.detach(), rollout_logprobs=sampled, mask=inputs.mask))
        metrics["actor/pg_loss"] = float(loss.detach())
        if self._needs_entropy:
            entropy = micro.rows.grid(predictions[HeadOutput.ENTROPY.value])
            loss = loss - settings.entropy_coeff * aggregate(
                entropy, inputs.mask, settings.loss_agg_mode
            )
        if settings.use_kl_loss:
            kl = kl_penalty(
                logprobs,
                needed_column(micro.data, "ref_log_prob", like=logprobs),
                kind=settings.kl_loss_type,
            )
            kl_loss = aggregate(kl, inputs.mask, settings.loss_agg_mode)
            loss = loss + settings.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = float(kl_loss.detach())
            metrics["actor/kl_coef"] = settings.kl_loss_coef
        return loss


class MegatronCritic(_OnMegatron, PPOCritic):
    """The old Megatron critic on an engine, without its warning."""

    def __init__(
        self,
        config: object,
        critic_module: nn.Module | BaseEngine,
        critic_optimizer: torch.optim.Optimizer | None,
        *,
        numerics: Numerics,
    ) -> None:
        PPOCritic.__init__(self, config, critic_module, critic_optimizer, numerics=numerics)

    def compute_values(self, data: DataProto) -> Tensor:
        """Compute values [B, W] before each response token, equal on all ranks of a replica.

        Values at padding are 0.
        """
        requested = data.select(batch_keys=list(_INPUTS), non_tensor_batch_keys=[])
        micro_batches = forward_split(data, ranks_per_sequence=self.ranks_per_sequence)
        with self._adopted.weights_of_module():
            return compute_outputs(
                self.engine,
                requested,
                requested_outputs=[HeadOutput.VALUE],
                temperature=1.0,
                micro_batches=micro_batches,
            )[HeadOutput.VALUE]

    def make_minibatch_iterator(self, data: DataProto) -> Iterable[DataProto]:
        """Return the mini-batches of every pass, as ``update_critic`` takes them."""
        return self._mini_batches(data, columns=_CRITIC_COLUMNS)

    def update_critic(self, dataloader: Iterable[DataProto]) -> dict[str, object]:  # type: ignore[override]
        """Return one optimizer step for each mini-batch.

        Metrics as ``MegatronPPOActor.update_policy`` returns them.
        """
        with self._adopted.trained():
            chosen = (
                mini_batch.select(batch_keys=list(_CRITIC_COLUMNS), non_tensor_batch_keys=[])
                for mini_batch in dataloader
            )
            if self.numerics == "temper":
                return update_critic_with_objective(self, chosen, settings=self.settings)
            metrics: dict[str, object] = {}
            for mini_batch in chosen:
                lr = self.engine.current_lr
                self.engine.optimizer_zero_grad()
                with self.engine.train_mode():
                    for part, scale, is_empty in self._micro_batches(mini_batch):
                        self._train_part(part, metrics=metrics, scale=scale, is_empty=is_empty)
                append_metrics(
                    metrics, {"critic/grad_norm": float(self._optimizer_step()), "critic/lr": lr}
                )
            self.engine.optimizer_zero_grad()
        return from_replica(self.engine, metrics)

    def _train_part(
        self, part: DataProto, *, metrics: dict[str, object], scale: float, is_empty: bool
    ) -> None:
        """Run one micro-batch forward and backward."""
        rows = read_rows(part)
        result: dict[str, float] = {}

        def loss_of(
            _: SequenceBatch, predictions: Predictions, ctx: Context
        ) -> tuple[Tensor, Context]:
            values = rows.grid(predictions[HeadOutput.VALUE.value])
            width = values.shape[1]
            loss, numbers = value_loss(
                values,
                returns=needed_column(part, "returns", like=values),
                old_values=needed_column(part, "values", like=values),
                mask=needed_column(part, "attention_mask", like=values)[:, -width:],
                cliprange=self.settings.cliprange_value,
                agg_mode=self.settings.loss_agg_mode,
            )
            result.update(numbers)
            result["critic/vf_loss"] = float(loss.detach())
            return loss * scale, ctx

        self.engine.set_loss_fn(loss_of, required_outputs={HeadOutput.VALUE})
        self.engine.forward_backward_step(
            empty_batch(rows.sequences) if is_empty else rows.sequences
        )
        append_metrics(metrics, result)
