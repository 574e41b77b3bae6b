"""The oracle with data parallelism: each rank has a full copy of the model.

Gradients are summed by an all-reduce, exactly once per update. Faulty engines derive from it.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine
from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_api.topology import Axis, Topology


class DataParallelOracle(OracleEngine):
    """The oracle on every rank of an initialized process group; a single rank without one."""

    capabilities = OracleEngine.capabilities | {
        Capability.DATA_PARALLEL,
        Capability.RESHARD_ON_LOAD,
        Capability.OFFLOAD,
    }

    def _build(self):
        super()._build()
        if not dist.is_initialized():
            return Topology()
        size, rank = dist.get_world_size(), dist.get_rank()
        return Topology(world_size=size, global_rank=rank, dp=Axis(size=size, rank=rank))

    def _run_micro_batches(
        self, batch, *, requested_outputs, micro_batch_loss, forward_only, reduce_gradients
    ):
        head_outputs = super()._run_micro_batches(
            batch,
            requested_outputs=requested_outputs,
            micro_batch_loss=micro_batch_loss,
            forward_only=forward_only,
            reduce_gradients=reduce_gradients,
        )
        if reduce_gradients:
            self._reduce_pending_gradients()
        return head_outputs

    def _reduce_pending_gradients(self):
        parameters = self.parameters()
        for name, gradient in self.gradients().items():
            parameters[name].grad = self._sum_over_ranks(gradient)

    def _sum_over_data_parallel(self, value):
        return self._sum_over_ranks(value)

    def _sum_over_ranks(self, value):
        total = value.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    def _gather_objects(self, item):
        if not dist.is_initialized():
            return [item]
        return gather_objects(item)

    def _write_state(self, directory):
        """Write the shared state on rank 0, and each rank's RNG state."""
        rank = self.topology.global_rank
        own = f"random-{rank}.pt"
        torch.save(torch.get_rng_state(), Path(directory) / own)
        return [own, *(super()._write_state(directory) if rank == 0 else [])]

    def _read_state(self, directory):
        super()._read_state(directory)
        own = Path(directory) / f"random-{self.topology.global_rank}.pt"
        if own.exists():
            torch.set_rng_state(torch.load(own, weights_only=True))
