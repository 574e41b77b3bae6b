"""Faulty engines with wrong updates, weights or checkpoints. Each has one bug."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from data_parallel_oracle import DataParallelOracle
from full_oracle import FullOracle
from peft.tuners.lora import LoraLayer

from temper_engine_api.checkpoint import ENGINE_PART, find_step
from temper_engine_api.errors import EngineStateError
from temper_engine_api.weights import NamedWeight


class IgnoresClip(DataParallelOracle):
    """Ignores the limit of the gradient norm."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        unclipped = self.gradients()[name]
        super()._adamw(name, parameter, unclipped, lr=lr, spec=spec)


class ReportsClippedNorm(DataParallelOracle):
    """Reports the gradient norm after clipping."""

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        limit = self.config.optimizer.clip_grad_norm
        return norm if limit is None else min(norm, limit)


class ReportsNormOfOneRank(DataParallelOracle):
    """Reports the norm of its local gradient, before the reduction."""

    def _reduce_pending_gradients(self):
        self._local_norm = math.sqrt(
            sum(float(g.square().sum()) for g in self.gradients().values())
        )
        super()._reduce_pending_gradients()

    def _apply_gradients(self, *, lr):
        norm = super()._apply_gradients(lr=lr)
        return self._local_norm if math.isfinite(norm) else norm


class SkipsOnOneRank(DataParallelOracle):
    """Skips the step only on the rank that has the non-finite gradient."""

    def _reduce_pending_gradients(self):
        self._is_finite = all(bool(g.isfinite().all()) for g in self.gradients().values())
        if not self._is_finite:
            self._zero_gradients()
        super()._reduce_pending_gradients()

    def _apply_gradients(self, *, lr):
        return super()._apply_gradients(lr=lr) if self._is_finite else math.nan


class StepsOnNonfinite(DataParallelOracle):
    """Replaces non-finite gradients by zero and updates."""

    def _apply_gradients(self, *, lr):
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.nan_to_num(0.0, 0.0, 0.0)
        return super()._apply_gradients(lr=lr)


class StepsOnAllMasked(DataParallelOracle):
    """Decays weights and moments although no token was trained."""

    def optimizer_step(self):
        self._update_cycle.trains_something = True
        return super().optimizer_step()


class AdvancesLrOnSkip(DataParallelOracle):
    """Advances the schedule although the update was skipped."""

    def lr_scheduler_step(self):
        self.num_schedule_steps += 1
        return self.current_lr


class StartsWarmupAtZero(DataParallelOracle):
    """Starts the warm-up at learning rate 0."""

    @property
    def current_lr(self):
        warmup = self.config.schedule.warmup_steps
        if self.num_schedule_steps < warmup:
            return self.config.optimizer.lr * self.num_schedule_steps / warmup
        return DataParallelOracle.current_lr.fget(self)


class DecaysVectors(DataParallelOracle):
    """Applies weight decay to norms and biases."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        if parameter.ndim < 2:
            parameter.mul_(1 - lr * spec.weight_decay)
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)


class NeverDecaysVectors(DataParallelOracle):
    """Ignores ``decays_vectors``: norms and biases never decay."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        super()._adamw(name, parameter, gradient, lr=lr, spec=replace(spec, decays_vectors=False))


class OmitsBiasCorrection(DataParallelOracle):
    """Omits Adam's bias correction."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        self.update_counts[name] += 10_000
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)
        self.update_counts[name] -= 10_000


class KeepsZeroedGradients(DataParallelOracle):
    """Keeps gradients after ``optimizer_zero_grad``."""

    def _zero_gradients(self):
        """Keep the gradients."""


class KeepsLocalGradients(DataParallelOracle):
    """Drops reduced gradients in ``optimizer_zero_grad``, but not those that are still local."""

    def _build(self):
        self._is_local = False
        return super()._build()

    def _run_micro_batches(self, batch, *, forward_only, reduce_gradients, **options):
        if not forward_only:
            self._is_local = not reduce_gradients
        return super()._run_micro_batches(
            batch, forward_only=forward_only, reduce_gradients=reduce_gradients, **options
        )

    def _zero_gradients(self):
        if not self._is_local:
            super()._zero_gradients()


class DropsGradientsOnExit(DataParallelOracle):
    """Drops gradients when it leaves a mode."""

    @contextmanager
    def _loaded(self, mode):
        with super()._loaded(mode):
            yield
        if mode != "update":
            super()._zero_gradients()


class StaysInModeOnError(DataParallelOracle):
    """Does not leave a mode if its body raises."""

    @contextmanager
    def _enter_mode(self, mode):
        if self._mode is not None:
            raise EngineStateError(f"{mode}_mode() inside {self._mode}_mode().")
        with self._loaded(mode):
            self._mode = mode
            yield
            self._mode = None


class ExportsTiedHeadTwice(DataParallelOracle):
    """Exports a tied head as a tensor of its own, with its initial values."""

    def _build(self):
        topology = super()._build()
        head = self.model.get_output_embeddings()
        self._head = None if head is None else head.weight.detach().clone()
        return topology

    def _iterate_weights(self):
        yield from super()._iterate_weights()
        if self._head is not None and "lm_head.weight" not in self.parameters():
            yield NamedWeight("lm_head.weight", self._head)


class ExportsStaleWeights(DataParallelOracle):
    """Exports the weights that it loaded at the start."""

    def _build(self):
        topology = super()._build()
        self._first = list(super()._iterate_weights())
        return topology

    def _iterate_weights(self):
        yield from self._first


class IgnoresUnknownWeights(DataParallelOracle):
    """Ignores missing, unknown and misshapen weights when loading."""

    def _load_weights(self, stream):
        known = self.parameters()
        with torch.no_grad():
            for name, tensor in stream:
                if name in known and known[name].shape == tensor.shape:
                    known[name].copy_(tensor)


class DropsMoments(DataParallelOracle):
    """Loads weights without their Adam moments."""

    def _read_state(self, directory):
        super()._read_state(directory)
        for name, parameter in self.parameters().items():
            self.first_moments[name] = torch.zeros_like(parameter)
            self.second_moments[name] = torch.zeros_like(parameter)


class RestartsSchedule(DataParallelOracle):
    """Restarts the learning-rate schedule after loading."""

    def read_part(self, directory):
        super().read_part(directory)
        self.num_schedule_steps = 0


class DropsRngState(DataParallelOracle):
    """Does not restore the random state."""

    def _read_state(self, directory):
        before = torch.get_rng_state()
        super()._read_state(directory)
        torch.set_rng_state(before)


class SkipsManifestCheck(DataParallelOracle):
    """Reads a checkpoint without checking its manifest."""

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        self.read_part(str(find_step(local_path) / ENGINE_PART))


class LoadsOtherModels(DataParallelOracle):
    """Loads the matching part of another model's checkpoint."""

    def _check_saved(self, tensors, *, directory):
        known = self.parameters().keys() | self.buffers().keys()
        super()._check_saved(
            {name: tensor for name, tensor in tensors.items() if name in known},
            directory=directory,
        )


class DecaysBeforeItLoads(FullOracle):
    """Creates the state of another optimizer with a step, and keeps the decayed weights."""

    def _read_state(self, directory):
        if self.other_optimizer is not None:
            for parameter in self.parameters().values():
                parameter.grad = torch.zeros_like(parameter)
            self.other_optimizer.step()
            self.other_optimizer.zero_grad()
        super()._read_state(directory)


class DropsUpdateCounts(DataParallelOracle):
    """Loads the portable state without its update counts."""

    def _load_state(self, stream):
        super()._load_state(stream)
        self.update_counts = dict.fromkeys(self.update_counts, 0)


class StartsWithMomentsOfClosedEngine(DataParallelOracle):
    """Starts a second engine with the moments of the first."""

    _moments: dict = {}

    def _build(self):
        topology = super()._build()
        for name, moment in self.first_moments.items():
            self.first_moments[name] = self._moments.get(name, moment)
        return topology

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)
        self._moments[name] = self.first_moments[name]


class MergesWithoutScale(DataParallelOracle):
    """Merges B A into the weights without the factor alpha / rank."""

    def _iterate_weights(self):
        layers = (
            []
            if self.adapter is None
            else [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        )
        kept = [dict(layer.scaling) for layer in layers]
        for layer in layers:
            layer.scaling = dict.fromkeys(layer.scaling, 1.0)
        weights = list(super()._iterate_weights())
        for layer, scaling in zip(layers, kept, strict=True):
            layer.scaling = scaling
        yield from weights


class AdapterStaysOn(DataParallelOracle):
    """Keeps the adapter active inside ``disable_adapter``."""

    def _disable_adapter(self):
        return nullcontext()


class ExportsAdapterWithoutAlpha(DataParallelOracle):
    """Exports an adapter configuration with alpha = rank."""

    def _export_adapter(self):
        config, tensors = super()._export_adapter()
        return {**config, "lora_alpha": config["r"]}, tensors


class OrdersExpertAdapterWrongly(DataParallelOracle):
    """Exports both LoRA factors expert by expert; PEFT interleaves experts in the second."""

    def _export_adapter(self):
        config, tensors = super()._export_adapter()
        swapped = {
            name: tensor.unflatten(1, (config["r"], -1)).transpose(1, 2).flatten(1)
            if ".experts." in name and "lora_B" in name
            else tensor
            for name, tensor in tensors.items()
        }
        return config, swapped


class IgnoresUnknownAdapterWeights(DataParallelOracle):
    """Ignores missing, unknown and misshapen adapter tensors when loading."""

    def _load_adapter(self, config, tensors):
        known = self.parameters()
        with torch.no_grad():
            for name in known.keys() & tensors.keys():
                if known[name].shape == tensors[name].shape:
                    known[name].copy_(tensors[name])


class SavesBaseWeights(DataParallelOracle):
    """Saves the frozen base weights in an adapter's checkpoint."""

    def _write_state(self, directory):
        files = super()._write_state(directory)
        if self.adapter is None or self.topology.global_rank != 0:
            return files
        torch.save(self.adapter.base_parameters(), Path(directory) / "base.pt")
        return [*files, "base.pt"]


class AppliesDropoutInEval(DataParallelOracle):
    """Applies the adapter's dropout in eval mode too."""

    def _run_micro_batches(self, batch, **options):
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.train()
        return super()._run_micro_batches(batch, **options)


class InitializesTwice(DataParallelOracle):
    """Replaces the model in a second init_model()."""

    def init_model(self):
        self._was_initialized = False
        super().init_model()


class SchedulesWithoutModel(DataParallelOracle):
    """Advances the schedule before init_model()."""

    def lr_scheduler_step(self):
        self.num_schedule_steps += 1
        return self.current_lr


class MovesAnywhere(DataParallelOracle):
    """Takes every name in to() for the device."""

    def to(self, device, *, model=True, optimizer=True):
        pass


class ExportsTwoVersions(DataParallelOracle):
    """Continues a stream of weights with those of the next update."""

    def _iterate_unchanged(self, items, **_):
        yield from items
