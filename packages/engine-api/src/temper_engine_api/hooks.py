"""The RFC's hooks: what a user's own functions see and return, and one call through them."""

from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.objective import HeadOutput, HeadOutputs, Objective
from temper_engine_api.reduction import reduce_loss
from temper_engine_api.specs import ModelType

Context = MutableMapping[str, object] | None
"""What the RFC's hooks hand to each other."""
Predictions = Mapping[str, Tensor]
"""Columns by the value of their query, in the layout of the packed batch."""
RawBatch = PackedBatch | SequenceBatch | Mapping[str, Tensor]
"""What the RFC's loop may pass: a batch, or a padded mapping (see ``padding.from_padded``)."""
LossFn = Callable[[SequenceBatch, Predictions, Context], tuple[Tensor, Context]]
"""loss_fn(data, predictions, ctx) -> (scalar, ctx); the scalar is this call's mean and is averaged over data-parallel ranks."""
PreprocessFn = Callable[[RawBatch, Context], tuple[RawBatch, Context]]
"""Runs before the model."""
PostprocessFn = Callable[[Predictions, Context], tuple[Predictions, Context]]
"""Runs between the model and the loss; its predictions are what the loss sees."""

DEFAULT_OUTPUT: Mapping[ModelType, HeadOutput] = {
    "language_model": HeadOutput.LOGPROB,
    "value_model": HeadOutput.VALUE,
    "reward_model": HeadOutput.SCORE,
}
"""What an RFC callable wants predicted when it does not say."""


class HookedStep:
    """One call through the hooks: keeps what passes between them."""

    def __init__(
        self,
        loss: Objective | LossFn | None,
        *,
        packed: PackedBatch,
        ctx: Context,
        postprocess: PostprocessFn | None,
        dp_size: int,
    ) -> None:
        self.ctx = ctx
        self.predictions: Predictions = {}
        self.total = torch.zeros(())
        self._loss = loss
        self._packed = packed
        self._postprocess = postprocess
        self._dp_size = dp_size

    def loss(self, head_outputs: HeadOutputs, micro: SequenceBatch) -> Tensor:
        """The scalar to differentiate for one micro-batch; a dummy that pads a schedule has a zero one."""
        if bool(micro.is_dummy.all()):
            return (
                torch.stack([column.sum() for column in head_outputs.columns.values()]).sum() * 0.0
            )
        predictions: Predictions = {
            head_output.value: column for head_output, column in head_outputs.columns.items()
        }
        if self._postprocess is not None:
            predictions, self.ctx = self._postprocess(predictions, self.ctx)
        if isinstance(self._loss, Objective):
            terms = self._loss(head_outputs, micro)
            loss = reduce_loss(
                terms,
                micro,
                denominators=self._packed.denominators,
                aggregation=self._loss.aggregation,
            )
        else:
            assert self._loss is not None
            loss, self.ctx = self._loss(micro, predictions, self.ctx)
            loss = loss / self._dp_size
        self.predictions = {name: column.detach() for name, column in predictions.items()}
        self.total = self.total + loss.detach().to(self.total.device)
        return loss

    def finish_forward(self, head_outputs: list[HeadOutputs] | None) -> Predictions | None:
        """Detached predictions of a forward pass, through the postprocess hook."""
        if head_outputs is None:
            return None
        predictions: Predictions = {
            head_output.value: column for head_output, column in head_outputs[0].columns.items()
        }
        if self._postprocess is not None:
            predictions, self.ctx = self._postprocess(predictions, self.ctx)
        return predictions
