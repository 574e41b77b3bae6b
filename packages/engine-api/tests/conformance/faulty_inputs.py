"""Faulty engines whose bug shows only for some sizes, models or plans. Each has one bug."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from data_parallel_oracle import DataParallelOracle
from faulty_numerics import LeaksAcrossSequences, _ChangedBatch, _ChangedOutputs, _ScaledLoss

from temper_engine_api.conformance.oracle.oracle_engine import STATE_FILE
from temper_engine_api.conformance.oracle.oracle_routers import RouterPass, find_routers
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput, HeadOutputs

NUM_PADDED_LOGITS = 13


class MeanPerMicroBatchNextToAnIdleRank(_ScaledLoss):
    """Averages over micro-batches and ranks if a rank has no trained token."""

    def _run_micro_batches(self, batch, **arguments):
        counts = self._gather_objects(int(batch.loss_mask.sum()))
        self._has_idle_rank = min(counts) == 0
        return super()._run_micro_batches(batch, **arguments)

    def _factor(self, batch, micro):
        here = max(int(micro.loss_mask.sum()), 1) * self.topology.dp.size
        return (
            batch.denominators.tokens / here / batch.num_micro_batches
            if self._has_idle_rank
            else 1.0
        )


class RepeatsLastOfOddMicroBatches(_ScaledLoss):
    """Runs the last micro-batch twice if their number is odd and above 1."""

    def _factor(self, batch, micro):
        *_, last = batch.iterate_micro_batches()
        is_odd = batch.num_micro_batches % 2 == 1 and batch.num_micro_batches > 1
        return 2.0 if is_odd and torch.equal(micro.sample_ids, last.sample_ids) else 1.0


class HalvesCallsThatAreNotFinal(_ScaledLoss):
    """Gives calls with ``final=False`` and more than two micro-batches half their weight."""

    def _run_micro_batches(self, batch, *, reduce_gradients, **arguments):
        self._is_final = reduce_gradients
        return super()._run_micro_batches(batch, reduce_gradients=reduce_gradients, **arguments)

    def _factor(self, batch, micro):
        return 0.5 if not self._is_final and batch.num_micro_batches > 2 else 1.0


class IgnoresTemperatureInForwardPasses(DataParallelOracle):
    """Divides logits by the temperature in training only."""

    def _run_micro_batches(self, batch, *, forward_only, **arguments):
        if forward_only:
            batch = replace(batch, temperature=torch.ones_like(batch.temperature))
        return super()._run_micro_batches(batch, forward_only=forward_only, **arguments)


class IgnoresTemperatureOfLastOfMany(DataParallelOracle):
    """Gives the last of more than 16 sequences in a micro-batch the temperature 1."""

    def _compute_outputs(self, micro, **arguments):
        if micro.num_sequences > 16:
            temperature = micro.temperature.clone()
            temperature[-1] = 1.0
            micro = replace(micro, temperature=temperature)
        return super()._compute_outputs(micro, **arguments)


class RoundsTemperaturesToBf16(DataParallelOracle):
    """Casts temperatures to bf16 with bf16 compute, as FSDP1 does with the inputs of a module."""

    def _compute_outputs(self, micro, **arguments):
        if self.config.precision.compute == "bf16":
            micro = replace(micro, temperature=micro.temperature.bfloat16())
        return super()._compute_outputs(micro, **arguments)


class CountsPaddedLogits(_ChangedOutputs):
    """Computes the entropy with 13 padded logits of 0."""

    def _compute_outputs(self, micro, *, requested_outputs, only_trained):
        if HeadOutput.ENTROPY not in requested_outputs:
            return super(_ChangedOutputs, self)._compute_outputs(
                micro, requested_outputs=requested_outputs, only_trained=only_trained
            )
        known = super(_ChangedOutputs, self)._compute_outputs(
            micro,
            requested_outputs=requested_outputs | {HeadOutput.LOGSUMEXP},
            only_trained=only_trained,
        )
        entropy, exact = known[HeadOutput.ENTROPY], known[HeadOutput.LOGSUMEXP]
        padded = torch.logaddexp(exact, torch.tensor(math.log(NUM_PADDED_LOGITS)))
        kept = (exact - padded).exp()
        wrong = kept * (entropy - kept.log()) + NUM_PADDED_LOGITS * (-padded).exp() * padded
        columns = {
            **known.columns,
            HeadOutput.ENTROPY: torch.where(entropy == 0, entropy, wrong),
        }
        return HeadOutputs(columns={name: columns[name] for name in requested_outputs})


class TakesLogprobOfARequestedToken(_ChangedOutputs):
    """Returns the log-prob of the last requested token if both kinds of log-probs are requested."""

    def _change(self, outputs, micro):
        if {HeadOutput.LOGPROB, HeadOutput.LOGPROB_AT} <= outputs.keys():
            return {**outputs, HeadOutput.LOGPROB: outputs[HeadOutput.LOGPROB_AT][:, -1]}
        return outputs


class LeaksBetweenLongSequences(LeaksAcrossSequences):
    """Lets a sequence attend to those before it if one has more than 32 tokens."""

    def _compute_outputs(self, micro, **arguments):
        if int(micro.lengths.max()) > 32:
            return super()._compute_outputs(micro, **arguments)
        return DataParallelOracle._compute_outputs(self, micro, **arguments)


class ZeroesEvery256thToken(_ChangedOutputs):
    """Returns 0 at every 256th token of a micro-batch, where its head starts another chunk."""

    def _change(self, columns, micro):
        position = torch.arange(micro.num_tokens)
        is_boundary = (position > 0) & (position % 256 == 0)
        return {
            name: column
            if name is HeadOutput.SCORE
            else torch.where(is_boundary if column.ndim == 1 else is_boundary[:, None], 0.0, column)
            for name, column in columns.items()
        }


class WrapsPositions(_ChangedBatch):
    """Counts positions modulo 32."""

    def _change(self, batch):
        return replace(batch, position_ids=batch.get_position_ids() % 32)


class ShardsWithoutPositionIds(DataParallelOracle):
    """Leaves `position_ids` out of the local batches."""

    def shard_data(self, batch, **arguments):
        return super().shard_data(replace(batch, position_ids=None), **arguments)


class UnshardsWithoutMedia(DataParallelOracle):
    """Leaves `media` out of the gathered batch."""

    def unshard_data(self, part, **arguments):
        return replace(super().unshard_data(part, **arguments), media=None)


class UnshardsWithAnotherColumn(DataParallelOracle):
    """Adds a column to the gathered batch."""

    def unshard_data(self, part, **arguments):
        batch = super().unshard_data(part, **arguments)
        return batch.with_columns({}, {"rank": torch.zeros(batch.num_sequences)})


class DetachesEntropyOfLoneSequences(_ChangedOutputs):
    """Gives the entropy no gradient in micro-batches of one sequence."""

    def _change(self, columns, micro):
        if HeadOutput.ENTROPY in columns and micro.num_sequences == 1:
            columns[HeadOutput.ENTROPY] = columns[HeadOutput.ENTROPY].detach()
        return columns


class IgnoresSlidingWindow(DataParallelOracle):
    """Computes full attention in layers with a sliding window."""

    def _build(self):
        topology = super()._build()
        if getattr(self.model.config, "sliding_window", None):
            self.model.config.sliding_window = 1 << 20
        return topology


class IgnoresRopeTheta(DataParallelOracle):
    """Computes rotary embeddings with the default base of 10000."""

    def _build(self):
        topology = super()._build()
        rotary = getattr(self.model.get_submodule("model"), "rotary_emb", None)
        if rotary is not None and hasattr(rotary, "inv_freq"):
            size = 2 * rotary.inv_freq.numel()
            rotary.inv_freq.copy_(10_000.0 ** -(torch.arange(0, size, 2) / size))
        return topology


class IgnoresRopeScaling(DataParallelOracle):
    """Computes rotary embeddings from ``rope_theta`` alone."""

    def _build(self):
        topology = super()._build()
        rotary = getattr(self.model.get_submodule("model"), "rotary_emb", None)
        if rotary is not None and hasattr(rotary, "inv_freq"):
            size = 2 * rotary.inv_freq.numel()
            theta = self.model.config.rope_parameters["rope_theta"]
            rotary.inv_freq.copy_(theta ** -(torch.arange(0, size, 2) / size))
        return topology


class ReadsUndeclaredFields(DataParallelOracle):
    """Caps the logits if the config has ``final_logit_softcapping``, whatever its class."""

    def _build(self):
        topology = super()._build()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        if cap is not None:
            self.model.get_output_embeddings().register_forward_hook(
                lambda module, inputs, logits: cap * torch.tanh(logits / cap)
            )
        return topology


class IgnoresPositionIdsInTraining(DataParallelOracle):
    """Uses the batch's position ids in forward-only calls only."""

    def _compute_outputs(self, micro, *, only_trained, **arguments):
        if only_trained:
            micro = replace(micro, position_ids=None)
        return super()._compute_outputs(micro, only_trained=only_trained, **arguments)


class IgnoresNormEpsilon(DataParallelOracle):
    """Computes norms with the default epsilon of 1e-6."""

    def _build(self):
        topology = super()._build()
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-6
        return topology


class OmitsBuffersFromExport(DataParallelOracle):
    """Exports parameters without persistent buffers."""

    def _iterate_weights(self):
        yield from (
            weight for weight in super()._iterate_weights() if weight.name not in self.buffers()
        )


class IgnoresLoadedBuffers(DataParallelOracle):
    """Loads parameters without persistent buffers."""

    def _load_weights(self, stream):
        own = {name: buffer.clone() for name, buffer in self.buffers().items()}
        super()._load_weights(stream)
        for name, buffer in self.buffers().items():
            buffer.copy_(own[name])


class OmitsBuffersFromCheckpoints(DataParallelOracle):
    """Saves parameters without persistent buffers."""

    def _write_state(self, directory):
        files = super()._write_state(directory)
        if self.topology.global_rank == 0:
            path = Path(directory) / STATE_FILE
            torch.save({**torch.load(path), "buffers": {}}, path)
        return files


class SumsRouterLosses(DataParallelOracle):
    """Divides the router losses of a micro-batch by its own trained tokens, which adds them up."""

    def _compute_router_loss(self, passes, batch, micro):
        trained = int(micro.loss_mask.sum())
        own = replace(batch, denominators=replace(batch.denominators, tokens=trained))
        return super()._compute_router_loss(passes, own, micro)


class BalancesPacks(DataParallelOracle):
    """Balances the experts over all tokens of a micro-batch instead of each sequence."""

    def _compute_router_loss(self, passes, batch, micro):
        joined = [
            RouterPass(
                logits=torch.cat([each.logits for each in layer]),
                experts=torch.cat([each.experts for each in layer]),
            )
            for layer in passes
        ]
        copies = [[layer] * micro.num_sequences for layer in joined]
        return super()._compute_router_loss(copies, batch, micro)


class IgnoresPrescribedExperts(DataParallelOracle):
    """Claims routing replay, and lets routers choose."""

    def _compute_sequence(self, sequence, **arguments):
        kept = {name: c for name, c in sequence.columns.items() if name != ROUTED_EXPERTS}
        return super()._compute_sequence(replace(sequence, columns=kept), **arguments)


class AcceptsAnyExperts(DataParallelOracle):
    """Does not check the experts that a batch prescribes."""

    def _check_routed_experts(self, batch):
        pass


class ReplaysLayersInReverse(DataParallelOracle):
    """Sends tokens in the first layer to the experts that are prescribed for the last one."""

    def _compute_sequence(self, sequence, **arguments):
        column = sequence.columns.get(ROUTED_EXPERTS)
        if column is not None:
            sequence = sequence.with_columns({ROUTED_EXPERTS: column.flip(1)})
        return super()._compute_sequence(sequence, **arguments)


class ReplaysWithoutRouterGradient(DataParallelOracle):
    """Treats the gate weights of prescribed experts as constants."""

    def _compute_sequence(self, sequence, **arguments):
        handles = [
            router.register_forward_hook(
                lambda _, __, output: (output[0], output[1].detach(), output[2])
            )
            for router in find_routers(self.model)
            if ROUTED_EXPERTS in sequence.columns
        ]
        try:
            return super()._compute_sequence(sequence, **arguments)
        finally:
            for handle in handles:
                handle.remove()


class ReturnsLayersInReverse(DataParallelOracle):
    """Returns the experts of the last layer as those of the first one."""

    def _run_micro_batches(self, batch, **arguments):
        results = super()._run_micro_batches(batch, **arguments)
        name = HeadOutput.ROUTED_EXPERTS
        return [
            HeadOutputs(columns={**each.columns, name: each[name].flip(1)})
            if name in each.columns
            else each
            for each in results
        ]


class ReportsLoadsOfOneRank(DataParallelOracle):
    """Computes the loads of experts from the tokens of one rank."""

    def _sum_over_data_parallel(self, value):
        return value if value.ndim == 2 else super()._sum_over_data_parallel(value)


class CountsLoadsOfDummies(DataParallelOracle):
    """Counts the token of a dummy as a load of its experts."""

    def _run_micro_batches(self, batch, **arguments):
        renumbered = replace(batch, sample_ids=torch.arange(batch.num_sequences))
        return super()._run_micro_batches(renumbered, **arguments)
