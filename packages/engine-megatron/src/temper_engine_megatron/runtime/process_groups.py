"""The process groups of an engine: torch's default group and Megatron's model-parallel groups.

Megatron keeps its groups in module variables, so a process has a single set of them. Engines of one
process can share it if they have the same parallel sizes; the last engine to leave destroys it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from temper_engine_api.distributed import process_group
from temper_engine_api.errors import ConfigError
from temper_engine_api.topology import Axis, PlanConstraints, Topology
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda

_FLOAT8_TOKENS: Mapping[str, int] = {"none": 1, "tensorwise": 16, "blockwise": 128}
"""Multiple of the tokens on a rank, by `float8`; a block has 128 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Sizes of Megatron's groups; all engines of a process must have the same."""

    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int | None
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int

    @classmethod
    def from_config(cls, config: MegatronConfig) -> "ParallelSizes":
        """Return the sizes that a config requests."""
        return cls(
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            virtual_pipeline=config.virtual_pipeline,
            context_parallel=config.context_parallel,
            expert_parallel=config.expert_parallel,
            expert_tensor_parallel=config.expert_tensor_parallel_size,
        )

    def __str__(self) -> str:
        sizes = {item.name: getattr(self, item.name) for item in fields(self)}
        return (
            ", ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, None))
            or "no model parallelism"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This process's rank, device and process groups."""

    topology: Topology
    device: torch.device
    """Device on which this rank computes."""
    sizes: ParallelSizes
    pg_collection: Any
    """Megatron's `ProcessGroupCollection`, which its own classes take as an argument."""
    owns_group: bool
    """True if the engine created the default group and must destroy it."""

    @property
    def tp(self) -> dist.ProcessGroup:
        """Ranks with shards of the same matrices."""
        group: dist.ProcessGroup = self.pg_collection.tp
        return group

    @property
    def pp(self) -> dist.ProcessGroup:
        """One rank per pipeline stage."""
        group: dist.ProcessGroup = self.pg_collection.pp
        return group

    @property
    def cp(self) -> dist.ProcessGroup:
        """Ranks with slices of the same sequences."""
        group: dist.ProcessGroup = self.pg_collection.cp
        return group

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks with the same weights: data and context parallel."""
        group: dist.ProcessGroup = self.pg_collection.dp_cp
        return group

    @property
    def ep(self) -> dist.ProcessGroup:
        """Ranks with different experts of the same layers."""
        group: dist.ProcessGroup = self.pg_collection.ep
        return group

    @property
    def expert_tp(self) -> dist.ProcessGroup:
        """Ranks with shards of the same expert's matrices."""
        group: dist.ProcessGroup = self.pg_collection.expt_tp
        return group

    @property
    def expert_dp(self) -> dist.ProcessGroup:
        """Ranks with the same experts."""
        group: dist.ProcessGroup = self.pg_collection.expt_dp
        return group

    @property
    def is_last_stage(self) -> bool:
        """True on the pipeline stage that computes outputs and losses."""
        return self.topology.pp.rank == self.topology.pp.size - 1


_NUM_ENGINES: Counter[ParallelSizes] = Counter()
"""Number of engines by parallel sizes; at most one key, since Megatron has one set of groups."""
_BUILT: list[dist.ProcessGroup] = []
"""Megatron's groups, which all these engines share."""


def join_groups(config: MegatronConfig) -> Membership:
    """Join or create the default process group and Megatron's groups. Collective.

    Raises:
        ConfigError: If the sizes do not divide the world size, or an engine with other sizes exists
            in this process.
    """
    device = choose_device(config.device)
    owns_group = process_group.join_default_group(
        device=device, timeout_s=config.collective_timeout_s
    )
    sizes = ParallelSizes.from_config(config)
    world_size = dist.get_world_size()
    try:
        _check_sizes(config, sizes, world_size)
    except ConfigError:
        # No engine is created, so nothing else would destroy the group.
        if owns_group:
            dist.destroy_process_group()
        raise
    if not _NUM_ENGINES:
        _create_groups(sizes, timeout_s=config.collective_timeout_s, seed=config.model.seed)
    _NUM_ENGINES[sizes] += 1
    with support_missing_cuda():
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return Membership(
        topology=_build_topology(config, pg_collection),
        device=device,
        sizes=sizes,
        pg_collection=pg_collection,
        owns_group=owns_group,
    )


def connect_stages(membership: Membership, config: TransformerConfig) -> None:
    """Connect this rank to the pipeline stages next to it. Collective over the stages.

    NCCL connects two ranks at their first message. A rank that waits there for the other waits on
    the host, and would not learn that the other has failed.
    """
    if membership.pp.size() == 1:
        return
    shape = (1, 1, 1)
    message = torch.zeros(shape, dtype=config.pipeline_dtype, device=membership.device)
    with support_missing_cuda(), torch.no_grad():
        P2PCommunicator(membership.pp, config).send_forward_backward_recv_forward_backward(
            message, message, recv_prev=True, recv_next=True, tensor_shape=shape
        )


def leave_groups(membership: Membership) -> None:
    """Destroy Megatron's groups when the last engine leaves.

    The default group is destroyed too if `join_groups` created it.
    """
    _NUM_ENGINES[membership.sizes] -= 1
    if _NUM_ENGINES[membership.sizes] == 0:
        # Remove the key, so that the next engine may have other sizes.
        _NUM_ENGINES.clear()
        # This call only clears Megatron's variables.
        parallel_state.destroy_model_parallel()
        process_group.destroy_groups(_BUILT)
    if membership.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def choose_device(requested: str) -> torch.device:
    """Return this rank's device; see `temper_engine_api.distributed.process_group.choose_device`.

    Raises:
        ConfigError: If CUDA is requested but not available, or if the CPU is requested although
            CUDA is available.
    """
    # Megatron calls torch.cuda in many places without asking for a device, so the CPU can only be
    # used where torch finds no CUDA device.
    if requested == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "device is cpu, but torch finds a CUDA device, and Megatron would use it: start the "
            "process with an empty CUDA_VISIBLE_DEVICES, or use device auto."
        )
    return process_group.choose_device(requested)


def _check_sizes(config: MegatronConfig, sizes: ParallelSizes, world_size: int) -> None:
    if world_size % config.replica_size:
        raise ConfigError(
            f"tensor_parallel {config.tensor_parallel} x pipeline_parallel "
            f"{config.pipeline_parallel} x context_parallel {config.context_parallel} is "
            f"{config.replica_size}, which must divide the {world_size} ranks: change one of these "
            "sizes, or the number of ranks."
        )
    config.check_num_ranks(world_size)
    if _NUM_ENGINES and sizes not in _NUM_ENGINES:
        raise ConfigError(
            f"this process has an engine with {next(iter(_NUM_ENGINES))}, so another one with "
            f"{sizes} cannot be created: Megatron has one set of process groups per process. Give "
            "all roles the same sizes, run them in separate processes (the trainer's Ray runtime), "
            "or close the first engine."
        )


def _create_groups(sizes: ParallelSizes, *, timeout_s: float, seed: int) -> None:
    with support_missing_cuda(), preserve_rng_state(), process_group.record_groups(_BUILT):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_parallel,
            pipeline_model_parallel_size=sizes.pipeline_parallel,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
            context_parallel_size=sizes.context_parallel,
            expert_model_parallel_size=sizes.expert_parallel,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel,
            # Megatron needs them for its own checkpoints only, which this engine does not write.
            create_gloo_process_groups=False,
            # Megatron accepts full minutes only.
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
        # Adds the named states of Megatron's RNG tracker, which its layers look up.
        model_parallel_cuda_manual_seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the RNG states of the process after Megatron has seeded or used them."""
    with torch.random.fork_rng(
        # Save the state of this rank's GPU only. By default fork_rng would allocate memory on all
        # GPUs.
        devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []
    ):
        yield


def _build_topology(config: MegatronConfig, pg_collection: Any) -> Topology:
    tp, pp, cp, dp, ep = (
        _axis(group)
        for group in (
            pg_collection.tp,
            pg_collection.pp,
            pg_collection.cp,
            pg_collection.dp,
            pg_collection.ep,
        )
    )
    # The interleaved schedule needs a micro-batch count that is a positive multiple of the stage
    # count.
    micro_batch_multiple = pp.size if config.virtual_pipeline is not None else 1
    return Topology(
        world_size=dist.get_world_size(),
        global_rank=dist.get_rank(),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        # All TP and CP ranks of the last stage have the same outputs after the all-reduce, so one
        # rank returns them.
        returns_outputs=pp.rank == pp.size - 1 and tp.rank == cp.rank == 0,
        plan_constraints=PlanConstraints(
            micro_batch_multiple=micro_batch_multiple,
            min_micro_batches=micro_batch_multiple,
            # Context and sequence parallelism all-gather slices of the tokens, so all ranks' slices
            # must have the same length. Float8 products need a multiple as well.
            token_multiple=cp.size
            * (tp.size if config.sequence_parallel else 1)
            * _FLOAT8_TOKENS[config.float8],
        ),
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(size=group.size(), rank=group.rank())
