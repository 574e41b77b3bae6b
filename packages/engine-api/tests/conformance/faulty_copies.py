"""Faulty engines that use an old copy of a tensor, or lose one. Each has one bug."""

import re
from contextlib import contextmanager

import torch
from data_parallel_oracle import DataParallelOracle
from full_oracle import FullOracle


class _ComputesWithCopy(DataParallelOracle):
    """Keeps a second copy of the weights, as engines do for gathered or bf16 weights."""

    _copy = None

    def _run_micro_batches(self, batch, *, forward_only, **arguments):
        if not self._uses_copy(forward_only):
            return super()._run_micro_batches(batch, forward_only=forward_only, **arguments)
        if self._copy is None:
            self._refresh_copy()
        masters = {name: weight.detach().clone() for name, weight in self.parameters().items()}
        self._write(self._copy)
        try:
            return super()._run_micro_batches(batch, forward_only=forward_only, **arguments)
        finally:
            self._write(masters)

    def _refresh_copy(self):
        self._copy = {name: weight.detach().clone() for name, weight in self.parameters().items()}

    @torch.no_grad()
    def _write(self, weights):
        for name, weight in self.parameters().items():
            weight.copy_(weights[name])


class EvaluatesWithOldWeights(_ComputesWithCopy):
    """Gathers the weights for evaluations once, and again only when weights are loaded."""

    def _uses_copy(self, forward_only):
        return forward_only

    def _load_weights(self, stream):
        super()._load_weights(stream)
        self._copy = None

    def _read_state(self, directory):
        super()._read_state(directory)
        self._copy = None


class KeepsComputeWeightsUnderBf16(_ComputesWithCopy):
    """Refreshes the weights of bf16 compute in updates, but not when weights are loaded."""

    def _uses_copy(self, forward_only):
        return self.config.precision.compute == "bf16"

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        self._refresh_copy()
        return norm


class DropsGradientsOnMove(DataParallelOracle):
    """Drops gradients when the model is moved to the host."""

    def to(self, device, *, model=True, optimizer=True):
        """Move nothing, but drop gradients."""
        super().to(device, model=model, optimizer=optimizer)
        if device == "cpu" and model:
            self._zero_gradients()


class DropsGradientsOnSave(DataParallelOracle):
    """Drops gradients when it saves a checkpoint."""

    def _write_state(self, directory):
        files = super()._write_state(directory)
        self._zero_gradients()
        return files


class ZeroesNonfiniteGradientsOfEarlierCalls(DataParallelOracle):
    """Replaces gradients of earlier calls by 0 where they are not finite."""

    def _run_micro_batches(self, batch, *, forward_only, **arguments):
        for parameter in self.parameters().values() if not forward_only else ():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return super()._run_micro_batches(batch, forward_only=forward_only, **arguments)


class ResumesCountOfTheStep(DataParallelOracle):
    """Takes the number of the step directory for Adam's number of updates."""

    def _read_state(self, directory):
        super()._read_state(directory)
        step = int(re.search(r"step_(\d+)", directory)[1])
        self.update_counts = dict.fromkeys(self.update_counts, step)


class DropsStateOfOtherOptimizers(FullOracle):
    """Saves no state of other optimizers than AdamW."""

    def _read_other_state(self, directory):
        """Do nothing."""


class DropsNumbersOfOtherOptimizers(FullOracle):
    """Saves the tensors of the state of another optimizer, but no numbers."""

    def _read_other_state(self, directory):
        super()._read_other_state(directory)
        for state in self.other_optimizer.state.values():
            for name in [name for name, value in state.items() if isinstance(value, int)]:
                del state[name]


class IgnoresLoadedWeightsInStreams(DataParallelOracle):
    """Continues a stream with the weights of `load_weights`."""

    def load_weights(self, stream):
        with _uncounted(self):
            super().load_weights(stream)


class IgnoresLoadedStateInStreams(DataParallelOracle):
    """Continues a stream with the weights of `load_state`."""

    def load_state(self, stream):
        with _uncounted(self):
            super().load_state(stream)


class IgnoresLoadedCheckpointsInStreams(DataParallelOracle):
    """Continues a stream with the weights of `load_checkpoint`."""

    def load_checkpoint(self, *arguments, **options):
        with _uncounted(self):
            super().load_checkpoint(*arguments, **options)


class ExportsStateOfTwoVersions(DataParallelOracle):
    """Continues a stream of the training state after an update or a load."""

    def export_state(self):
        with self._load("update"):
            yield from self._iterate_state()


@contextmanager
def _uncounted(engine):
    """Restore the count of weight changes at the end of the context."""
    num_changes = engine._update_cycle.num_weight_changes
    yield
    engine._update_cycle.num_weight_changes = num_changes
