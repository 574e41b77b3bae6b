"""Faulty engines with wrong losses, gradients or outputs. Each has one bug."""

from dataclasses import replace

import torch
import torch.distributed as dist
from data_parallel_oracle import DataParallelOracle

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.oracle.oracle_head import compute_sequence_outputs, join_outputs
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput, HeadOutputs


class _ChangedBatch(DataParallelOracle):
    """Run another batch than the given one."""

    def _change(self, batch):
        raise NotImplementedError

    def _run_micro_batches(self, batch, **arguments):
        return super()._run_micro_batches(self._change(batch), **arguments)


class _ScaledLoss(DataParallelOracle):
    """Scale the loss before the backward pass."""

    def _factor(self, batch, micro):
        raise NotImplementedError

    def _run_micro_batches(self, batch, *, micro_batch_loss, **arguments):
        def changed(head_outputs, micro):
            return micro_batch_loss(head_outputs, micro) * self._factor(batch, micro)

        return super()._run_micro_batches(
            batch, micro_batch_loss=micro_batch_loss and changed, **arguments
        )


class _ChangedOutputs(DataParallelOracle):
    """Change the head outputs."""

    def _change(self, columns, micro):
        raise NotImplementedError

    def _compute_outputs(self, micro, *, requested_outputs, only_trained):
        head_outputs = super()._compute_outputs(
            micro, requested_outputs=requested_outputs, only_trained=only_trained
        )
        return HeadOutputs(columns=self._change(dict(head_outputs.columns), micro))


class MeanPerMicroBatch(_ScaledLoss):
    """Divides by each micro-batch's trained tokens and by the number of micro-batches."""

    def _factor(self, batch, micro):
        here = max(int(micro.loss_mask.sum()), 1) * self.topology.dp.size
        return batch.denominators.tokens / here / batch.num_micro_batches


class MeanPerRank(_ScaledLoss):
    """Divides by the trained tokens of its own rank, and averages over ranks."""

    def _factor(self, batch, micro):
        return (
            batch.denominators.tokens / max(int(batch.loss_mask.sum()), 1) / self.topology.dp.size
        )


class CountsDummies(_ScaledLoss):
    """Counts each dummy sample as one more trained token."""

    def _factor(self, batch, micro):
        tokens = batch.denominators.tokens
        return tokens / (tokens + int(batch.is_dummy.sum()))


class ReducesTwice(DataParallelOracle):
    """Sums gradients over ranks after the last micro-batch, and again before the update."""

    def _apply_gradients(self, *, lr):
        self._reduce_pending_gradients()
        return super()._apply_gradients(lr=lr)


class ReducesEveryCall(DataParallelOracle):
    """Sums gradients over ranks at the end of every call, those of earlier calls again."""

    def _run_micro_batches(self, batch, *, reduce_gradients, forward_only, **arguments):
        head_outputs = super()._run_micro_batches(
            batch, reduce_gradients=False, forward_only=forward_only, **arguments
        )
        if not forward_only:
            super()._reduce_pending_gradients()
        return head_outputs

    def _reduce_pending_gradients(self):
        """Leave the gradients as they are; every call has reduced already."""


class NeverReducesPending(DataParallelOracle):
    """Never reduces the gradients of calls that were not final."""

    def _run_micro_batches(self, batch, *, reduce_gradients, **arguments):
        head_outputs = super()._run_micro_batches(batch, reduce_gradients=False, **arguments)
        if reduce_gradients:
            super()._reduce_pending_gradients()
        return head_outputs

    def _reduce_pending_gradients(self):
        """Leave the gradients unreduced."""


class IgnoresTemperature(_ChangedBatch):
    """Computes the log-softmax of logits that are not divided by the temperature."""

    def _change(self, batch):
        return replace(batch, temperature=torch.ones_like(batch.temperature))


class DividesLogprobsByTemperature(_ChangedOutputs):
    """Divides log-probs by the temperature instead of logits."""

    def _compute_outputs(self, micro, *, requested_outputs, only_trained):
        plain = replace(micro, temperature=torch.ones_like(micro.temperature))
        columns = dict(
            super(_ChangedOutputs, self)
            ._compute_outputs(plain, requested_outputs=requested_outputs, only_trained=only_trained)
            .columns
        )
        if HeadOutput.LOGPROB in columns:
            columns[HeadOutput.LOGPROB] = (
                columns[HeadOutput.LOGPROB] / micro.temperature[micro.sequence_index]
            )
        return HeadOutputs(columns=columns)


class ShiftsLabels(_ChangedOutputs):
    """Returns for each token the log-prob of the token before."""

    def _change(self, columns, micro):
        if HeadOutput.LOGPROB in columns:
            columns[HeadOutput.LOGPROB] = columns[HeadOutput.LOGPROB].roll(1)
        return columns


class DifferentiatesLossesWithoutGradient(DataParallelOracle):
    """Differentiates the loss of an objective as it is, also if it depends on no output."""

    def _prepare_loss(self, micro_batch_loss, *, num):
        return micro_batch_loss


class DetachesLogsumexp(_ChangedOutputs):
    """Gives the logsumexp no gradient."""

    def _change(self, columns, micro):
        if HeadOutput.LOGSUMEXP in columns:
            columns[HeadOutput.LOGSUMEXP] = columns[HeadOutput.LOGSUMEXP].detach()
        return columns


class SkipsTheLossInEvaluation(DataParallelOracle):
    """Computes outputs in forward-only calls, but not the loss of the objective."""

    def _run_micro_batches(self, batch, *, micro_batch_loss, forward_only, **arguments):
        return super()._run_micro_batches(
            batch,
            micro_batch_loss=None if forward_only else micro_batch_loss,
            forward_only=forward_only,
            **arguments,
        )


class DropsFirstResponseToken(_ChangedBatch):
    """Does not train the first token after the prompt."""

    def _change(self, batch):
        before = torch.cat([batch.loss_mask.new_zeros(1), batch.loss_mask[:-1]])
        starts = torch.zeros_like(batch.loss_mask)
        for b in range(batch.num_sequences):
            first, last = batch.sequence_starts[b : b + 2].tolist()
            trained = batch.loss_mask[first:last].nonzero()
            if len(trained):
                starts[first + int(trained[0])] = True
        assert before.shape == starts.shape
        return replace(batch, loss_mask=batch.loss_mask & ~starts)


class IgnoresWeights(_ChangedBatch):
    """Gives every token the weight 1."""

    def _change(self, batch):
        if "weights" not in batch.columns:
            return batch
        return batch.with_columns({"weights": torch.ones_like(batch.columns["weights"])})


class IgnoresPositions(_ChangedBatch):
    """Ignores custom position ids."""

    def _change(self, batch):
        return replace(batch, position_ids=None)


class LeaksAcrossSequences(DataParallelOracle):
    """Lets a sequence attend to those before it in the pack."""

    def _compute_outputs(self, micro, *, requested_outputs, only_trained):
        parts = []
        for b in range(micro.num_sequences):
            first, last = micro.sequence_starts[b : b + 2].tolist()
            columns = {name: column[:last] for name, column in micro.columns.items()}
            seen = SequenceBatch(
                tokens=micro.tokens[:last],
                sequence_starts=torch.tensor([0, last], dtype=torch.int32),
                loss_mask=torch.zeros(last, dtype=torch.bool),
                sample_ids=micro.sample_ids[b : b + 1],
                group_ids=micro.group_ids[b : b + 1],
                pack_group_ids=micro.pack_group_ids[b : b + 1],
                temperature=micro.temperature[b : b + 1],
                columns=columns,
                position_ids=micro.get_position_ids()[:last],
            )
            head_outputs = compute_sequence_outputs(
                self.model, seen, requested_outputs=requested_outputs
            )
            own = {
                head_output: column if head_output is HeadOutput.SCORE else column[first:]
                for head_output, column in head_outputs.items()
            }
            for head_output in own.keys() - {HeadOutput.SCORE}:
                own[head_output] = torch.cat(
                    [torch.zeros_like(own[head_output][:1]), own[head_output][1:]]
                )
            parts.append(own)
        return join_outputs(parts, mask=micro.loss_mask if only_trained else None)


class ReturnsUntrainedOutputs(DataParallelOracle):
    """Returns outputs at untrained positions in training."""

    def _compute_outputs(self, micro, *, requested_outputs, only_trained):
        return super()._compute_outputs(
            micro, requested_outputs=requested_outputs, only_trained=False
        )


class RoundsOutputsToBf16(_ChangedOutputs):
    """Rounds head outputs to bf16."""

    def _change(self, columns, micro):
        return {head_output: column.bfloat16().float() for head_output, column in columns.items()}


class EntropyChangesLogprobs(_ChangedOutputs):
    """Changes log-probs if the entropy is requested too."""

    def _change(self, columns, micro):
        if HeadOutput.ENTROPY in columns and HeadOutput.LOGPROB in columns:
            columns[HeadOutput.LOGPROB] = columns[HeadOutput.LOGPROB] * 0.99
        return columns


class IsRandomInEval(_ChangedOutputs):
    """Keeps some dropout in eval mode."""

    def _change(self, columns, micro):
        return {
            head_output: column * (1 + 1e-3 * torch.rand(()))
            for head_output, column in columns.items()
        }


class ShiftsValues(_ChangedOutputs):
    """Returns at t the value of the state after tokens[t]."""

    def _compute_outputs(self, micro, *, requested_outputs, only_trained):
        if HeadOutput.VALUE not in requested_outputs:
            return super(_ChangedOutputs, self)._compute_outputs(
                micro, requested_outputs=requested_outputs, only_trained=only_trained
            )
        values = super(_ChangedOutputs, self)._compute_outputs(
            micro, requested_outputs=requested_outputs | {HeadOutput.SCORE}, only_trained=False
        )
        column = values[HeadOutput.VALUE].roll(-1)
        column = column.index_copy(
            0, micro.sequence_starts[1:].long() - 1, values[HeadOutput.SCORE]
        )
        if only_trained:
            column = torch.where(micro.loss_mask, column, 0.0)
        return HeadOutputs(
            columns={
                head_output: column if head_output is HeadOutput.VALUE else values[head_output]
                for head_output in requested_outputs
            }
        )


class MergesMicroBatches(DataParallelOracle):
    """Runs all micro-batches as one."""

    def _run_micro_batches(self, batch, **arguments):
        ends = torch.tensor([0, batch.num_sequences], dtype=torch.int32)
        return super()._run_micro_batches(replace(batch, micro_batch_starts=ends), **arguments)


class ReturnsOutputsInRankOrder(DataParallelOracle):
    """Returns gathered outputs in rank order instead of input order."""

    def unshard_outputs(self, outputs, *, sample_ids):
        gathered = [part for part in self._gather_objects(outputs) if part is not None]
        return super().unshard_outputs(
            outputs, sample_ids=torch.cat([part.sample_ids for part in gathered])
        )


class SumsLossOverRanks(DataParallelOracle):
    """Reports the global loss on every rank, so that it is summed again."""

    def forward_backward_batch(self, batch, **arguments):
        result = super().forward_backward_batch(batch, **arguments)
        if "loss" not in result.metrics or not dist.is_initialized():
            return result
        total = float(
            self._sum_over_data_parallel(torch.tensor(float(result.metrics["loss"].value)))
        )
        return replace(
            result, metrics={**result.metrics, "loss": Metric(value=total, reduction="sum")}
        )
