"""Types for user hook functions in `forward_backward_step`, and one call through them."""

from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import Tensor

from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch
from temper_engine_api.objective import HeadOutput, HeadOutputs, Objective
from temper_engine_api.padding import from_padded
from temper_engine_api.plan import build_packed_batch, plan_single_micro_batch
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_engine_api.specs import ModelType
from temper_engine_api.topology import PlanConstraints

Context = MutableMapping[str, object] | None
"""State that hooks pass to each other."""
Predictions = Mapping[str, Tensor]
"""Columns by the value of their HeadOutput, aligned with the packed batch."""
RawBatch = PackedBatch | SequenceBatch | Mapping[str, Tensor]
"""A batch, or a padded mapping (see `padding.from_padded`)."""
LossFn = Callable[[SequenceBatch, Predictions, Context], tuple[Tensor, Context]]
"""loss_fn(data, predictions, ctx) -> (scalar, ctx). The scalar is the mean over this call's tokens
or sequences; it is averaged across data-parallel ranks."""
PreprocessFn = Callable[[RawBatch, Context], tuple[RawBatch, Context]]
"""Hook that runs before the model."""
PostprocessFn = Callable[[Predictions, Context], tuple[Predictions, Context]]
"""Hook that runs between the model and the loss; the loss gets the predictions it returns."""

DEFAULT_OUTPUT: Mapping[ModelType, HeadOutput] = {
    "language_model": HeadOutput.LOGPROB,
    "value_model": HeadOutput.VALUE,
    "reward_model": HeadOutput.SCORE,
}
"""Output that a loss function gets if `set_loss_fn` names none."""


def pack_single_micro_batch(
    batch: RawBatch,
    *,
    constraints: PlanConstraints,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> PackedBatch:
    """Pack a batch as one micro-batch on this rank. Collective if it has no denominators yet.

    Args:
        batch: This rank's batch.
        constraints: Constraints of the engine on plans.
        sum_over_ranks: Sums a tensor across data-parallel ranks.
    """
    if isinstance(batch, Mapping):
        batch = from_padded(batch)
    if isinstance(batch, PackedBatch):
        denominators = batch.denominators
    else:
        counted = count_denominators(batch)
        # float64 is exact for counts up to 2**53.
        local = torch.tensor(
            [counted.tokens, counted.sequences, counted.groups], dtype=torch.float64
        )
        tokens, sequences, groups = (int(n) for n in sum_over_ranks(local).tolist())
        denominators = Denominators(tokens=tokens, sequences=sequences, groups=groups)
    # The constraints may need more, empty micro-batches, for example in a pipeline.
    plan = plan_single_micro_batch(batch.num_sequences, constraints=constraints)
    return build_packed_batch(batch, plan=plan, rank=0, denominators=denominators)


class HookedStep:
    """One call of `forward_backward_step`, with the state that its hooks pass on."""

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

    def compute_loss(self, head_outputs: HeadOutputs, micro: SequenceBatch) -> Tensor:
        """Compute the scalar to differentiate; it is 0 for a dummy micro-batch."""
        if bool(micro.is_dummy.all()):
            # Zero with a graph, so that the backward pass of the dummy runs its collectives.
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
            # Gradients are summed across ranks; dividing here makes that sum the average.
            loss = loss / self._dp_size
        self.predictions = {name: column.detach() for name, column in predictions.items()}
        self.total = self.total + loss.detach().to(self.total.device)
        return loss

    def postprocess_outputs(self, head_outputs: list[HeadOutputs] | None) -> Predictions | None:
        """Run the postprocess hook on the outputs of a forward-only pass; None without outputs."""
        if head_outputs is None:
            return None
        predictions: Predictions = {
            head_output.value: column for head_output, column in head_outputs[0].columns.items()
        }
        if self._postprocess is not None:
            predictions, self.ctx = self._postprocess(predictions, self.ctx)
        return predictions
