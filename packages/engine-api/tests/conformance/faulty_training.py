"""Faulty engines with wrong settings, long runs or checkpoints. Each has one bug."""

import math
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from data_parallel_oracle import DataParallelOracle
from full_oracle import FullOracle
from peft.tuners.lora import LoraLayer

from temper_engine_api.weights import NamedWeight


class ClipsByLocalNorm(DataParallelOracle):
    """Clips by the norm of each rank's own gradient, and reports the global one."""

    def _reduce_pending_gradients(self):
        self._local_norm = torch.stack([g.norm() for g in self.gradients().values()]).norm().item()
        super()._reduce_pending_gradients()

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        limit = spec.clip_grad_norm or math.inf
        factor = min(1.0, limit / (self._local_norm + 1e-6))
        super()._adamw(name, parameter, self.gradients()[name] * factor, lr=lr, spec=spec)


class AddsEpsilonBeforeBiasCorrection(DataParallelOracle):
    """Adds Adam's epsilon to the second moment before bias correction."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        count = self.update_counts[name] + 1
        eps = spec.eps / math.sqrt(1 - spec.betas[1] ** count)
        super()._adamw(name, parameter, gradient, lr=lr, spec=replace(spec, eps=eps))


class DecaysByHighestRate(DataParallelOracle):
    """Decays weights by the highest learning rate of the schedule instead of the current one."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        if parameter.ndim >= 2 or spec.decays_vectors:
            parameter.mul_((1 - spec.lr * spec.weight_decay) / (1 - lr * spec.weight_decay))
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)


class StopsBiasCorrectionAtUpdateEight(DataParallelOracle):
    """Omits Adam's bias correction from the eighth update on."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        ahead = 10_000 if self.update_counts[name] >= 7 else 0
        self.update_counts[name] += ahead
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)
        self.update_counts[name] -= ahead


class NeverTrainsTheHead(DataParallelOracle):
    """Updates a value or reward head with learning rate 0."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        is_head = name.startswith("score.")
        super()._adamw(name, parameter, gradient, lr=0.0 if is_head else lr, spec=spec)


class SkipsZeroGradients(DataParallelOracle):
    """Leaves weight and moments of a parameter as they are if its gradient is all zero."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        if bool(gradient.any()):
            super()._adamw(name, parameter, gradient, lr=lr, spec=spec)
        else:
            self.update_counts[name] += 1


class StepsOnNonfiniteWithoutClipping(DataParallelOracle):
    """Applies a gradient that is not finite if ``clip_grad_norm`` is None."""

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        spec = self.config.optimizer
        if not math.isfinite(norm) and spec.clip_grad_norm is None:
            with torch.no_grad():
                for name, parameter in self.parameters().items():
                    self._adamw(name, parameter, self.gradients()[name], lr=lr, spec=spec)
        return norm


class SumsSquaresInFloat32(DataParallelOracle):
    """Sums squares of gradients in float32, and skips an update whose sum overflows."""

    def _apply_gradients(self, *, lr):
        squares = torch.stack([g.square().sum() for g in self.gradients().values()]).sum()
        return super()._apply_gradients(lr=lr) if bool(squares.isfinite()) else math.inf


class SumsSquaresOfATensorInFloat32(DataParallelOracle):
    """Computes the norm of each tensor in float32, and skips an update if one overflows."""

    def _apply_gradients(self, *, lr):
        squares = torch.stack([g.square().sum() for g in self.gradients().values()])
        return super()._apply_gradients(lr=lr) if bool(squares.isfinite().all()) else math.inf


class StepsOnHugeGradientWithoutClipping(DataParallelOracle):
    """Steps without clipping if a gradient is finite, but its square overflows in AdamW."""

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        spec, gradients = self.config.optimizer, self.gradients()
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        if norm == math.inf and spec.clip_grad_norm is None and is_finite:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            with torch.no_grad():
                for name, parameter in self.parameters().items():
                    self._adamw(name, parameter, gradients[name], lr=lr, spec=spec)
        return norm


class _DividesState(DataParallelOracle):
    """Export each parameter's state from another rank, as an engine with shards does."""

    def _iterate_state(self):
        for position, state in enumerate(super()._iterate_state()):
            if self.topology.dp.size > 1:
                for tensor in (state.master, state.first_moment, state.second_moment):
                    dist.broadcast(tensor, src=position % self.topology.dp.size)
            yield state


class HalvesMomentsAfterSkip(_DividesState):
    """Halves the second moments on rank 1 after a skipped update."""

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        if not math.isfinite(norm) and self.topology.global_rank == 1:
            self.second_moments = {name: v / 2 for name, v in self.second_moments.items()}
        return norm


class AdvancesLrOnEmptyMiniBatch(DataParallelOracle):
    """Advances the schedule after a mini-batch without trained tokens."""

    def lr_scheduler_step(self):
        if self.last_update is not None and self.last_update.outcome == "nothing_trained":
            self.num_schedule_steps += 1
        return super().lr_scheduler_step()


class ResumesOneStepAhead(DataParallelOracle):
    """Resumes the learning-rate schedule one step ahead."""

    def read_part(self, directory):
        super().read_part(directory)
        self.num_schedule_steps += 1


class ResumesRandomStateOfRankZero(DataParallelOracle):
    """Restores the random state of rank 0 on every rank."""

    def _read_state(self, directory):
        super()._read_state(directory)
        torch.set_rng_state(torch.load(Path(directory) / "random-0.pt", weights_only=True))


class ResumesAdapterWithoutScale(DataParallelOracle):
    """Resumes an adapter with scale 1 instead of alpha / rank."""

    def _read_state(self, directory):
        super()._read_state(directory)
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.scaling = dict.fromkeys(module.scaling, 1.0)


class RoundsOffloadedMoments(DataParallelOracle):
    """Offloads second moments in bf16."""

    @contextmanager
    def _loaded(self, mode):
        with super()._loaded(mode):
            yield
        if mode == "update" and self.config.offload.optimizer:
            self.second_moments = {
                name: v.bfloat16().float() for name, v in self.second_moments.items()
            }


class SavesLaterMomentsInBackground(FullOracle):
    """Writes the second moments of the time at which a background save writes its files."""

    def _write_staged(self, staged, directory):
        # Until the next update, which takes seconds on a busy host, so that the bug does not depend
        # on the speed of the disk.
        deadline = time.monotonic() + 30.0
        while self.update_counts == staged["update_counts"] and time.monotonic() < deadline:
            time.sleep(0.01)
        staged["second_moments"] = dict(self.second_moments)
        return super()._write_staged(staged, directory)


class ExportsWeightsBeforeTheUpdate(DataParallelOracle):
    """Exports the weights as they were before the last update."""

    def _apply_gradients(self, *, lr):
        self._previous = list(super()._iterate_weights())
        return super()._apply_gradients(lr=lr)

    def _iterate_weights(self):
        yield from getattr(self, "_previous", None) or super()._iterate_weights()


class ExportsVectorsInBf16(DataParallelOracle):
    """Rounds exported norms and biases to bf16."""

    def _iterate_weights(self):
        for name, tensor in super()._iterate_weights():
            yield NamedWeight(name, tensor.bfloat16().float() if tensor.ndim == 1 else tensor)


class ExportsLiveTensors(DataParallelOracle):
    """Exports the tensors that the next update changes in place."""

    def _iterate_weights(self):
        live = self.parameters()
        for name, tensor in super()._iterate_weights():
            yield NamedWeight(name, live[name].detach() if name in live else tensor)


class StaysInTrainingMode(DataParallelOracle):
    """Keeps dropout active in evaluation once it has trained."""

    @contextmanager
    def _loaded(self, mode):
        with super()._loaded(mode):
            self._has_trained = getattr(self, "_has_trained", False) or mode == "train"
            if mode == "eval":
                self.model.train(self._has_trained)
            yield


class IgnoresDropoutOfTheModel(DataParallelOracle):
    """Trains without the dropout that the model's config sets."""

    def _build(self):
        topology = super()._build()
        for module in self.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        return topology


class DrawsRandomNumbersInForwardPasses(DataParallelOracle):
    """Draws a random number in every forward pass without a backward pass."""

    def _run_micro_batches(self, batch, *, forward_only, **arguments):
        if forward_only:
            torch.rand(())
        return super()._run_micro_batches(batch, forward_only=forward_only, **arguments)


class RunsAdamwForEveryOptimizer(FullOracle):
    """Accepts any ``optimizer.name`` and runs AdamW."""

    def _make_other_optimizer(self, spec):
        return None


class IgnoresArgumentsOfOtherOptimizers(FullOracle):
    """Builds other optimizers than AdamW without ``optimizer.arguments``, such as momentum."""

    def _make_other_optimizer(self, spec):
        return super()._make_other_optimizer(replace(spec, arguments={}))


class IgnoresDecayOfOtherOptimizers(FullOracle):
    """Builds other optimizers than AdamW without ``optimizer.weight_decay``."""

    def _make_other_optimizer(self, spec):
        return super()._make_other_optimizer(replace(spec, weight_decay=0.0))


class NeverClipsForOtherOptimizers(FullOracle):
    """Ignores ``optimizer.clip_grad_norm`` with other optimizers than AdamW."""

    def _clip_gradients(self):
        gradients = self.gradients().values()
        return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


class StepsOtherOptimizersOnNonfinite(FullOracle):
    """Applies a gradient that is not finite with other optimizers than AdamW."""

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        if self.other_optimizer is not None and not math.isfinite(norm):
            self._step_other_optimizer(lr=lr)
        return norm


class KeepsParametersInFloat32(FullOracle):
    """Accepts ``precision.parameters`` bf16 and keeps float32 master weights."""

    def _round_parameters(self):
        """Do nothing."""


class KeepsBuffersInFloat32(FullOracle):
    """Accepts ``precision.buffers`` bf16 and keeps float32 buffers."""

    def _round_buffers(self):
        """Do nothing."""


class ReducesInFloat32(FullOracle):
    """Accepts ``precision.reduce`` bf16 and reduces gradients in float32."""

    def _reduce_pending_gradients(self):
        DataParallelOracle._reduce_pending_gradients(self)


class RoundsMastersUnderBf16(DataParallelOracle):
    """Keeps master weights in bf16 if it computes in bf16."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)
        if self.config.precision.compute == "bf16":
            parameter.copy_(parameter.bfloat16())


class RoundsGradientsUnderBf16(DataParallelOracle):
    """Rounds gradients to bf16 if it computes in bf16."""

    def _apply_gradients(self, *, lr):
        if self.config.precision.compute == "bf16":
            for parameter in self.parameters().values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.bfloat16().float()
        return super()._apply_gradients(lr=lr)


class IgnoresDeterministic(DataParallelOracle):
    """Ignores the setting ``deterministic``."""

    @contextmanager
    def _determinism(self):
        yield


class KeepsItsModel(DataParallelOracle):
    """Keeps its model in memory when it is closed."""

    models = []

    def close(self):
        self.models.append(self.model)
        super().close()


class KeepsItsGroups(DataParallelOracle):
    """Destroys none of its process groups if the default group remains."""

    def init_model(self):
        super().init_model()
        dist.new_group()


class IgnoresComputeDtype(DataParallelOracle):
    """Computes in float32 whatever ``precision.compute`` says."""

    @contextmanager
    def _autocast(self):
        yield


class ClosesOnlyOnce(DataParallelOracle):
    """Raises if it is closed a second time."""

    def close(self):
        del self.model
        super().close()
