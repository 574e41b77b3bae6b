"""``DataParallelPPOCritic``: values and value updates of an old batch, on an engine."""

from collections.abc import Mapping

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
from temper_legacy_shim.workers.objective_updates import update_critic_with_objective
from temper_legacy_shim.workers.on_engine import (
    Numerics,
    OnEngine,
    compute_outputs,
    empty_batch,
    forward_split,
    needed_column,
    refuse_own_forward,
    single_forward,
)
from temper_legacy_shim.workers.rows import read_rows
from temper_legacy_shim.workers.settings import CriticSettings, known
from temper_legacy_shim.workers.updates import append_metrics, matched, passes


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
        """Take a critic config's values for the updates to come.

        Settings of the engine do not change.
        """
        self.settings: CriticSettings = known(CriticSettings, values)
        self._values = dict(values)

    def compute_values(self, data: DataProto) -> Tensor:
        """Compute values [B, W] of the states before each response token.

        They are 0 outside response_mask if the batch contains it, else at padding.
        """
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
        """Return [B, W] values of one micro-batch, 0 at padding alone.

        They have no gradient: with gradient only the engine runs the model.
        """
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
        with self._adopted.trained():
            if self.numerics == "temper":
                parts = (part for part, _ in passes(data, split=self.split, engine=self.engine))
                return update_critic_with_objective(self, parts, settings=self.settings)
            return self._update_as_before(data)

    def _update_as_before(self, data: DataProto) -> dict[str, object]:
        metrics: dict[str, object] = {}
        total = 0.0
        split = self.split
        for mini_batch, _ in passes(data, split=split, engine=self.engine):
            self.engine.optimizer_zero_grad()
            with self.engine.train_mode():
                for chosen in matched(split.micro_batches(mini_batch), engine=self.engine):
                    part = mini_batch.select_idxs(chosen) if chosen else mini_batch[:1]
                    loss = self._train(
                        part, metrics=metrics, scale=split.scale(len(chosen)), is_empty=not chosen
                    )
                    total += loss * split.scale(len(chosen))
            append_metrics(metrics, {"critic/grad_norm": float(self._optimizer_step())})
        self.engine.optimizer_zero_grad()
        return {"critic/vf_loss": total, **metrics}

    def _train(
        self, part: DataProto, *, metrics: dict[str, object], scale: float, is_empty: bool
    ) -> float:
        """Run a micro-batch forward and backward, and return the loss before scaling."""
        rows = read_rows(part)
        result: dict[str, float] = {}
        losses = [0.0]

        def loss_of(
            _: SequenceBatch, predictions: Predictions, ctx: Context
        ) -> tuple[Tensor, Context]:
            values = rows.grid(predictions[HeadOutput.VALUE.value])
            loss, numbers = value_loss(
                values,
                returns=needed_column(part, "returns", like=values),
                old_values=needed_column(part, "values", like=values),
                mask=needed_column(part, "response_mask", like=values),
                cliprange=self.settings.cliprange_value,
                agg_mode=self.settings.loss_agg_mode,
            )
            result.update(numbers)
            losses.append(float(loss.detach()))
            return loss * scale, ctx

        self.engine.set_loss_fn(loss_of, required_outputs={HeadOutput.VALUE})
        self.engine.forward_backward_step(
            empty_batch(rows.sequences) if is_empty else rows.sequences
        )
        append_metrics(metrics, result)
        return losses[-1]


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.ppo_critic.DataParallelPPOCritic is deprecated since "
    "temper-legacy-shim 0.2 and will be "
    "removed in 0.4: use temper_engine_fsdp.engine.FSDPEngine instead; configure it with "
    "model_type value_model, give it a "
    "ValueObjective with set_loss_fn(), and call forward_backward_batch().",
    category=None,
)
class DataParallelPPOCritic(PPOCritic):
    """The old critic on an engine; arguments as those of ``DataParallelPPOActor``."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        refuse_own_forward(cls)
