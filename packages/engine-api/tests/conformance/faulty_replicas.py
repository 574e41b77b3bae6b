"""Faulty engines whose replicas consist of several ranks. Public engines have had these bugs."""

import torch
from staged_oracle import CONFORMANCE_LAYOUTS, StagedOracle

__all__ = [
    "CONFORMANCE_LAYOUTS",
    "AcceptsWhatItsLayoutRefuses",
    "DividesByMicroBatchesTwice",
    "FloorsTokenCounts",
    "KeepsLossOnLastStage",
]


class _ScaledMicroLoss(StagedOracle):
    """Scale the loss before the backward pass."""

    def _factor(self, batch, micro):
        raise NotImplementedError

    def _run_micro_batches(self, batch, *, micro_batch_loss, **arguments):
        def changed(head_outputs, micro):
            return micro_batch_loss(head_outputs, micro) * self._factor(batch, micro)

        return super()._run_micro_batches(
            batch, micro_batch_loss=micro_batch_loss and changed, **arguments
        )


class DividesByMicroBatchesTwice(_ScaledMicroLoss):
    """Divides by the number of micro-batches in the schedule, and again when reducing."""

    def _factor(self, batch, micro):
        return 1 / batch.num_micro_batches**2


class FloorsTokenCounts(_ScaledMicroLoss):
    """Counts a micro-batch's tokens as those per context rank, rounded down, times the ranks."""

    def _factor(self, batch, micro):
        ranks = self.topology.cp.size
        counted = sum(
            int(part.loss_mask.sum()) // ranks * ranks for part in batch.iterate_micro_batches()
        )
        here = int(batch.loss_mask.sum())
        return here / max(counted, 1) if here else 1.0


class KeepsLossOnLastStage(StagedOracle):
    """Does not send the loss to the stages before the last."""

    def _sum_over_data_parallel(self, value):
        total = super()._sum_over_data_parallel(value)
        return total if self.is_last else torch.zeros_like(total)


class AcceptsWhatItsLayoutRefuses(StagedOracle):
    """Offloads in a layout that is declared to refuse it."""

    def _check_offload(self):
        pass
