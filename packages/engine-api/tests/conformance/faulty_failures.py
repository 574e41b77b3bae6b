"""Faulty engines that continue wrongly after an exception. Each has one bug."""

from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
from data_parallel_oracle import DataParallelOracle
from full_oracle import FullOracle
from torch.distributed.distributed_c10d import _set_pg_timeout

from temper_engine_api.distributed.process_group import ThreadGroup
from temper_engine_api.distributed.rank_failures import RankFailures
from temper_engine_api.errors import RankFailedError
from temper_engine_api.updates import GradientState


class KeepsGradientsOfFailedCalls(DataParallelOracle):
    """Keeps the gradients of earlier micro-batches when it discards a failed update."""

    def _discard_update(self):
        """Do nothing."""


class KeepsUnreducedSumsOfFailedCalls(DataParallelOracle):
    """Adds sums that it keeps outside of ``.grad``, and drops them in ``_zero_gradients`` only."""

    def _run_micro_batches(self, batch, *, micro_batch_loss, forward_only, **options):
        def keep(head_outputs, micro):
            # The gradients so far, as an engine does that accumulates in a dtype of its own.
            for name, gradient in self.gradients().items():
                self._sums[name] = self._sums.get(name, 0.0) + gradient
            super(KeepsUnreducedSumsOfFailedCalls, self)._zero_gradients()
            return micro_batch_loss(head_outputs, micro)

        outputs = super()._run_micro_batches(
            batch,
            micro_batch_loss=micro_batch_loss if forward_only else keep,
            forward_only=forward_only,
            **options,
        )
        if not forward_only:
            for name, parameter in self.parameters().items():
                if name in self._sums:
                    parameter.grad = self.gradients()[name] + self._sums.pop(name)
        return outputs

    def _build(self):
        self._sums = {}
        return super()._build()

    def _zero_gradients(self):
        self._sums = {}
        super()._zero_gradients()

    def _discard_update(self):
        super()._zero_gradients()


class DropsCompleteGradientsOnly(DataParallelOracle):
    """Drops the gradients of a failed update only if every parameter has one."""

    def _discard_update(self):
        if all(parameter.grad is not None for parameter in self.parameters().values()):
            super()._zero_gradients()


class StepsAfterAFailedCall(DataParallelOracle):
    """Steps with the gradients that a failed call left behind."""

    def optimizer_step(self):
        self._update_cycle._failure = None
        self._update_cycle._gradients = GradientState.REDUCED
        return super().optimizer_step()


class IgnoresExceptionsAfterThePasses(DataParallelOracle):
    """Accepts the gradients of a training call that raised after its passes."""

    def _run_passes(self, *arguments, **options):
        outputs = super()._run_passes(*arguments, **options)
        self._have_ended = True
        return outputs

    @contextmanager
    def _record_call(self, **options):
        self._have_ended = False
        try:
            with super()._record_call(**options):
                yield
        except BaseException:
            if self._have_ended:
                self._update_cycle._failure = None
                self._update_cycle._gradients = GradientState.ACCUMULATED
            raise

    @contextmanager
    def _enter_mode(self, mode):
        try:
            with super()._enter_mode(mode):
                yield
        finally:
            self._update_cycle._interruption = None


class IgnoresExceptionsInStepsOfTheRfc(DataParallelOracle):
    """Accepts the gradients of a `forward_backward_step` that raised."""

    def forward_backward_step(self, *arguments, **options):
        try:
            return super().forward_backward_step(*arguments, **options)
        except BaseException:
            self._update_cycle._failure = None
            raise


class StepsAfterFailedZeroing(DataParallelOracle):
    """Accepts the gradients that an exception in `optimizer_zero_grad` left behind."""

    def optimizer_zero_grad(self):
        gradients = self._update_cycle._gradients
        try:
            super().optimizer_zero_grad()
        except BaseException:
            self._update_cycle._failure = None
            self._update_cycle._gradients = gradients
            raise


class DropsGradientsInFailedEvaluation(DataParallelOracle):
    """Drops the gradients of the update when a forward-only call raises."""

    def _run_micro_batches(self, batch, *, forward_only, **options):
        try:
            return super()._run_micro_batches(batch, forward_only=forward_only, **options)
        except BaseException:
            if forward_only:
                self._zero_gradients()
            raise


class SwallowsOutOfMemory(DataParallelOracle):
    """Skips a micro-batch whose backward pass runs out of memory."""

    def _run_micro_batches(self, batch, **options):
        try:
            return super()._run_micro_batches(batch, **options)
        except torch.OutOfMemoryError:
            return []


class WaitsForFailedRanks(DataParallelOracle):
    """Keeps its connections when it raises, so that the other ranks wait for the timeout."""

    def init_model(self):
        super().init_model()
        self._rank_failures = None
        # More than the limit of the test, but less than the kit's timeout.
        _set_pg_timeout(timedelta(seconds=12))


class HidesTheFailedRank(DataParallelOracle):
    """Raises an error of its own instead of the one that names the failed rank."""

    @contextmanager
    def _report_call(self, name):
        try:
            with super()._report_call(name):
                yield
        except RankFailedError as error:
            raise RuntimeError("a rank was lost") from error


class ReportsNoFailureInStreams(DataParallelOracle):
    """Reports no exception that one rank raises while it reads or loads a stream."""

    def _report_call(self, name):
        if name not in ("export_weights", "export_state", "load_weights"):
            return super()._report_call(name)
        # The other ranks wait for it in the next collective; a test need not.
        _set_pg_timeout(timedelta(seconds=2))
        return nullcontext()


class ReportsNoFailureInModes(DataParallelOracle):
    """Reports no exception that one rank raises in `train_mode` or `eval_mode`, between calls."""

    def _report_call(self, name):
        if name not in ("train_mode", "eval_mode"):
            return super()._report_call(name)
        _set_pg_timeout(timedelta(seconds=2))
        return nullcontext()


class ReportsNoFailureToMove(DataParallelOracle):
    """Reports no exception that one rank raises in `to`."""

    def _report_call(self, name):
        if name != "to":
            return super()._report_call(name)
        _set_pg_timeout(timedelta(seconds=2))
        return nullcontext()


class ReportsNoFailureInBackground(FullOracle):
    """Reports no exception that one rank raises while it saves in the background."""

    def _report_in_background(self, call):
        return nullcontext()

    def _build(self):
        topology = super()._build()
        self._saving_group = ThreadGroup(timeout_s=2.0)
        return topology


class ReportsNoFailureToBuild(DataParallelOracle):
    """Reports no exception that one rank raises in `init_model`."""

    def init_model(self):
        topology = self._topology = self._build()
        self._rank_failures = RankFailures.join()
        if self._rank_failures is not None:
            self._rank_failures.mark_engine_built(topology)
            _set_pg_timeout(timedelta(seconds=2))


class StepsAfterAnInterruptedUpdate(DataParallelOracle):
    """Steps although an exception left `train_mode` before the final call of the update."""

    def optimizer_step(self):
        self._update_cycle._interruption = None
        return super().optimizer_step()


class LoadsStateBeforeItChecks(DataParallelOracle):
    """Replaces weights before it finds that an entry of the state is missing or unknown."""

    def _load_state(self, stream):
        received = list(stream)
        with torch.no_grad():
            for parameter in self.parameters().values():
                parameter.zero_()
        super()._load_state(received)


class TrainsAfterAnInterruptedLoad(DataParallelOracle):
    """Trains although a load raised after it had replaced some of the weights."""

    def optimizer_zero_grad(self):
        self._update_cycle._interrupted_changes.clear()
        super().optimizer_zero_grad()


class AcceptsCallsInABrokenGroup(DataParallelOracle):
    """Accepts calls after a rank failed, although its process group is broken."""

    def init_model(self):
        super().init_model()
        if self._rank_failures is not None:
            self._rank_failures.check = lambda: None
