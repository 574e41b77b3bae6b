"""``DataParallelPPOCritic``: values and value updates of an old batch, on an engine."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from typing_extensions import deprecated

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.hooks import Context, Predictions
from temper_engine_api.objective import HeadOutput
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import deprecated_class
from temper_legacy_shim.numerics.masked_losses import value_loss
from temper_legacy_shim.workers.batches.rows import read_rows
from temper_legacy_shim.workers.batches.settings import CriticSettings, known
from temper_legacy_shim.workers.batches.updates import append_metrics, passes
from temper_legacy_shim.workers.engine.on_engine import (
    Numerics,
    OnEngine,
    compute_outputs,
    empty_batch,
    forward_split,
    needed_column,
    refuse_own_forward,
    single_forward,
    update_critic_with_objective,
)


class PPOCritic(OnEngine):
    """The deprecated class without its warning, for the workers of this package."""

    model_type = "value_model"

    def __init__(
        self,
        config: object,
        critic_module: nn.Module | BaseEngine,
        critic_optimizer: torch.optim.Optimizer | None = None,
        *,
        numerics: Numerics = "legacy",
    ) -> None:
        super().__init__(config, numerics=numerics)
        self._adopted = self._adopt(
            critic_module, critic_optimizer, grad_clip=self.settings.grad_clip
        )
        self.critic_module = critic_module
        self.critic_optimizer = critic_optimizer

    def configure(self, values: Mapping[str, object]) -> None:
        """Take a critic config's values for later updates, except the engine's settings."""
        self.settings: CriticSettings = known(CriticSettings, values)
        self._values = dict(values)

    def compute_values(self, data: DataProto) -> Tensor:
        """Compute values [B, W] before each token; 0 outside response_mask or padding."""
        micro_batches = forward_split(data, ranks_per_sequence=self.ranks_per_sequence)
        with self._adopted.weights_of_module():
            result = compute_outputs(
                self.engine,
                data,
                requested_outputs=[HeadOutput.VALUE],
                temperature=1.0,
                micro_batches=micro_batches,
            )
        values = result[HeadOutput.VALUE]
        assert data.batch is not None
        return (
            values * data.batch.column("response_mask").cpu()
            if "response_mask" in data.batch
            else values
        )

    def _forward_micro_batch(self, micro_batch: Mapping[str, Tensor]) -> Tensor:
        """Return a micro-batch's values [B, W] without gradient, 0 at padding alone."""
        columns = {name: column for name, column in micro_batch.items() if name != "response_mask"}
        return self.compute_values(
            single_forward(columns, temperature=1.0, trained_by="update_critic")
        )

    def update_critic(self, data: DataProto) -> dict[str, object]:
        """Train on the batch: ppo_epochs passes over mini-batches, one optimizer step each.

        Args:
            data: responses, input_ids, attention_mask, position_ids, response_mask, values,
                returns.

        Returns:
            Metrics by their old names: vf_loss a sum, else a list with an entry for each
                micro-batch or update.
        """
        return self._run_updates(
            mini_batch for mini_batch, _ in passes(data, split=self.split, engine=self.engine)
        )

    def update_on_rows(self, data: DataProto) -> dict[str, object]:
        """Train on this rank's rows, as the worker around the class does."""
        return self.update_critic(data)

    def forward_sizes(self, config: Mapping[str, object], *, num_ranks: int) -> dict[str, object]:
        """Return micro_batch_size and max_token_len of a worker's forward pass."""
        total, size = (
            config.get(name)
            for name in ("forward_micro_batch_size", "forward_micro_batch_size_per_gpu")
        )
        return {
            "micro_batch_size": total // num_ranks
            if isinstance(total, int) and size is None
            else size,
            "max_token_len": config.get("forward_max_token_len_per_gpu", 32768),
        }

    def _run_updates(self, mini_batches: Iterable[DataProto]) -> dict[str, object]:
        """Take one optimizer step for each mini-batch."""
        with self._adopted.trained():
            if self.numerics == "temper":
                return update_critic_with_objective(self, mini_batches, settings=self.settings)
            metrics: dict[str, object] = {}
            sums = {} if self.lists_losses else {"critic/vf_loss": 0.0}
            for mini_batch in mini_batches:
                # Read before the step, which may advance the schedule.
                lr = self.engine.current_lr
                self.engine.optimizer_zero_grad()
                with self.engine.train_mode():
                    for part, scale, is_empty in self._micro_batches(mini_batch):
                        reported = self._train(part, scale=scale, is_empty=is_empty)
                        if not self.lists_losses:
                            sums["critic/vf_loss"] += reported.pop("critic/vf_loss", 0.0) * scale
                        append_metrics(metrics, reported)
                updated = {"critic/grad_norm": float(self._optimizer_step())}
                append_metrics(
                    metrics, {**updated, "critic/lr": lr} if self.lists_losses else updated
                )
            self.engine.optimizer_zero_grad()
        return {**sums, **metrics}

    def _train(self, part: DataProto, *, scale: float, is_empty: bool) -> dict[str, float]:
        """Run a micro-batch forward and backward, and return its metrics by their old names."""
        rows = read_rows(part)
        result: dict[str, float] = {}

        def loss_of(
            _: SequenceBatch, predictions: Predictions, ctx: Context
        ) -> tuple[Tensor, Context]:
            values = rows.grid(predictions[HeadOutput.VALUE.value])
            loss, numbers = value_loss(
                values,
                returns=needed_column(part, "returns", like=values),
                old_values=needed_column(part, "values", like=values),
                mask=self._trained_tokens(part, values),
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
        return result

    def _trained_tokens(self, part: DataProto, values: Tensor) -> Tensor:
        """Return the mask [B, W] of the tokens whose values are trained."""
        return needed_column(part, "response_mask", like=values)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.ppo_critic.DataParallelPPOCritic is deprecated since "
    "temper-legacy-shim 0.2 and will be removed in 0.4: use temper_engine_fsdp.engine.FSDPEngine "
    "instead; configure it with model_type value_model, give it a ValueObjective with "
    "set_loss_fn(), and call forward_backward_batch().",
    category=None,
)
class DataParallelPPOCritic(PPOCritic):
    """The old critic on an engine; arguments as those of ``DataParallelPPOActor``."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        refuse_own_forward(cls)
