"""The data-parallel oracle with the capabilities of production engines that settings need."""

import copy
import math
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from data_parallel_oracle import DataParallelOracle

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.oracle.oracle_engine import STATE_FILE
from temper_engine_api.distributed.process_group import ThreadGroup

OTHER_STATE_FILE = "other_optimizer.pt"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FullOracle(DataParallelOracle):
    """Any torch optimizer, bf16 parameters, reduction and buffers, and saves in the background."""

    capabilities = DataParallelOracle.capabilities | {
        Capability.ANY_OPTIMIZER,
        Capability.OTHER_DTYPES,
        Capability.BACKGROUND_SAVE,
    }

    def _build(self):
        topology = super()._build()
        spec = self.config.optimizer
        is_other = spec is not None and not spec.is_adamw
        self.other_optimizer = self._make_other_optimizer(spec) if is_other else None
        self._round_parameters()
        self._round_buffers()
        self._saving_group = ThreadGroup(timeout_s=self.config.collective_timeout_s)
        return topology

    def _make_other_optimizer(self, spec):
        module, _, name = spec.name.rpartition(".")
        parameters = self.parameters().values()
        groups = [
            {
                "params": [p for p in parameters if (p.ndim >= 2 or spec.decays_vectors) == decays],
                "weight_decay": spec.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        return getattr(import_module(module), name)(
            [group for group in groups if group["params"]], lr=spec.lr, **spec.arguments
        )

    @torch.no_grad()
    def _round_parameters(self):
        for parameter in self.parameters().values():
            parameter.copy_(parameter.to(_DTYPES[self.config.precision.parameters]))

    def _round_buffers(self):
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.to(_DTYPES[self.config.precision.buffers]))

    def _apply_gradients(self, *, lr):
        if self.other_optimizer is None:
            norm = super()._apply_gradients(lr=lr)
        else:
            norm = self._clip_gradients()
            if math.isfinite(norm):
                self._step_other_optimizer(lr=lr)
        self._round_parameters()
        return norm

    def _clip_gradients(self):
        limit = self.config.optimizer.clip_grad_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self.parameters().values(), limit))

    def _step_other_optimizer(self, *, lr):
        for group in self.other_optimizer.param_groups:
            group["lr"] = lr
        self.other_optimizer.step()

    def _reduce_pending_gradients(self):
        if self.topology.dp.size > 1:
            for parameter in self.parameters().values():
                if parameter.grad is not None:
                    dtype = _DTYPES[self.config.precision.reduce]
                    parameter.grad = parameter.grad.to(dtype).float()
        super()._reduce_pending_gradients()

    def _write_state(self, directory):
        files = super()._write_state(directory)
        if self.other_optimizer is None or self.topology.global_rank != 0:
            return files
        torch.save(self.other_optimizer.state_dict(), Path(directory) / OTHER_STATE_FILE)
        return [*files, OTHER_STATE_FILE]

    def _read_state(self, directory):
        super()._read_state(directory)
        if self.other_optimizer is not None:
            self._read_other_state(directory)

    def _read_other_state(self, directory):
        state = torch.load(Path(directory) / OTHER_STATE_FILE, weights_only=True)
        self.other_optimizer.load_state_dict(state)

    def _stage_state(self):
        if dist.is_initialized():
            self._saving_group.get()
        staged = {
            "masters": {name: p.detach().clone() for name, p in self.parameters().items()},
            "buffers": {name: buffer.clone() for name, buffer in self.buffers().items()},
            "first_moments": copy.deepcopy(self.first_moments),
            "second_moments": copy.deepcopy(self.second_moments),
            "update_counts": dict(self.update_counts),
            "random": torch.get_rng_state(),
        }
        return partial(self._write_staged, staged)

    def _write_staged(self, staged, directory):
        rank = self.topology.global_rank
        own = f"random-{rank}.pt"
        torch.save(staged["random"], Path(directory) / own)
        if rank != 0:
            return [own]
        torch.save(staged, Path(directory) / STATE_FILE)
        return [own, STATE_FILE]

    def _gather_in_background(self, item):
        return self._saving_group.gather(item) if dist.is_initialized() else [item]

    def close(self):
        self._saving_group.close()
        super().close()
