"""The process groups an engine runs on: the default one, joined or made, and Megatron's, which are one set for the whole process.

Several engines may live in a process while they have the same sizes; the last one that leaves takes Megatron's groups with it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from temper_engine_api.errors import ConfigError
from temper_engine_api.rendezvous import store_from_environment
from temper_engine_api.topology import Axis, PlanConstraints, Topology
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.runtime.cpu_device import megatron_on_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Of Megatron's groups; two engines of one process must have the same."""

    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int | None
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int

    @classmethod
    def of(cls, config: MegatronConfig) -> "ParallelSizes":
        """What a configuration asks."""
        return cls(
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            virtual_pipeline=config.virtual_pipeline,
            context_parallel=config.context_parallel,
            expert_parallel=config.expert_parallel,
            expert_tensor_parallel=config.expert_ranks_of_a_matrix,
        )

    def __str__(self) -> str:
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return (
            ", ".join(f"{name} {size}" for name, size in found.items() if size not in (1, None))
            or "no model parallelism"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This process among the ranks of an engine, and the groups that it is part of."""

    topology: Topology
    """ParallelSizes and ranks."""
    device: torch.device
    """Where this rank computes."""
    sizes: ParallelSizes
    """Of Megatron's groups."""
    collection: Any
    """Megatron's groups."""
    owns_group: bool
    """Whether the engine made the default group, and so must destroy it."""

    @property
    def tp(self) -> dist.ProcessGroup:
        """Ranks that hold parts of the same matrices."""
        group: dist.ProcessGroup = self.collection.tp
        return group

    @property
    def pp(self) -> dist.ProcessGroup:
        """One rank of each stage."""
        group: dist.ProcessGroup = self.collection.pp
        return group

    @property
    def cp(self) -> dist.ProcessGroup:
        """Ranks that hold parts of the same sequences."""
        group: dist.ProcessGroup = self.collection.cp
        return group

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold the same weights."""
        group: dist.ProcessGroup = self.collection.dp_cp
        return group

    @property
    def ep(self) -> dist.ProcessGroup:
        """Ranks that hold different experts."""
        group: dist.ProcessGroup = self.collection.ep
        return group

    @property
    def expert_tp(self) -> dist.ProcessGroup:
        """Ranks that hold parts of the same expert's matrices."""
        group: dist.ProcessGroup = self.collection.expt_tp
        return group

    @property
    def expert_dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same experts."""
        group: dist.ProcessGroup = self.collection.expt_dp
        return group

    @property
    def is_last_stage(self) -> bool:
        """Whether losses and answers are made here."""
        return self.topology.pp.rank == self.topology.pp.size - 1


_IN_USE: Counter[ParallelSizes] = Counter()
"""Engines by the sizes of Megatron's groups; at most one entry, because Megatron has one set of groups."""

_STORES: dict[tuple[str, ...], tuple[Store, int, int]] = {}
_NUM_GROUPS: Counter[tuple[str, ...]] = Counter()
"""One store per address for the life of a process, and keys of its own for every group made over it."""


def join(config: MegatronConfig) -> Membership:
    """Join or make the default process group, and Megatron's groups; collective.

    Raises:
        ConfigError: the sizes do not divide the ranks, or an engine with other sizes lives in this process.
    """
    device = _choose_device(config.device)
    owns_group = _join_default(device, timeout_s=config.collective_timeout_s)
    sizes = ParallelSizes.of(config)
    world_size = dist.get_world_size()
    try:
        _check(config, sizes, world_size)
    except ConfigError:
        if owns_group:
            dist.destroy_process_group()
        raise
    if not _IN_USE:
        _make_groups(sizes, timeout_s=config.collective_timeout_s, seed=config.model.seed)
    _IN_USE[sizes] += 1
    with megatron_on_cpu():
        collection = ProcessGroupCollection.use_mpu_process_groups()
    topology = _topology(config, collection)
    return Membership(
        topology=topology, device=device, sizes=sizes, collection=collection, owns_group=owns_group
    )


def leave(membership: Membership) -> None:
    """Give up Megatron's groups if nobody else has them, and destroy the default group if this engine made it."""
    _IN_USE[membership.sizes] -= 1
    if _IN_USE[membership.sizes] == 0:
        _IN_USE.clear()
        parallel_state.destroy_model_parallel()
    if membership.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def _check(config: MegatronConfig, sizes: ParallelSizes, world_size: int) -> None:
    if world_size % config.replica_size:
        raise ConfigError(
            f"tensor_parallel {config.tensor_parallel} x pipeline_parallel {config.pipeline_parallel} x context_parallel "
            f"{config.context_parallel} is {config.replica_size}, which must divide the {world_size} ranks."
        )
    replica_of_experts = (
        sizes.expert_tensor_parallel * sizes.expert_parallel * sizes.pipeline_parallel
    )
    if world_size % replica_of_experts:
        raise ConfigError(
            f"expert_tensor_parallel {sizes.expert_tensor_parallel} x expert_parallel {sizes.expert_parallel} x pipeline_parallel "
            f"{sizes.pipeline_parallel} is {replica_of_experts}, which must divide the {world_size} ranks."
        )
    if _IN_USE and sizes not in _IN_USE:
        raise ConfigError(
            f"an engine with {next(iter(_IN_USE))} lives in this process, and Megatron has one set of process groups for a process, so one "
            f"with {sizes} can't be made beside it: give all roles the same sizes, or run them in processes of their own "
            "(the trainer's Ray runtime), or close the first engine before."
        )


def _make_groups(sizes: ParallelSizes, *, timeout_s: float, seed: int) -> None:
    with megatron_on_cpu(), preserve_rng_state():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_parallel,
            pipeline_model_parallel_size=sizes.pipeline_parallel,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
            context_parallel_size=sizes.context_parallel,
            expert_model_parallel_size=sizes.expert_parallel,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
        model_parallel_cuda_manual_seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """What Megatron seeds and draws while it builds leaves the process's own stream of random numbers as it was."""
    with torch.random.fork_rng(
        devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []
    ):
        yield


def _topology(config: MegatronConfig, collection: Any) -> Topology:
    tp, pp, cp, dp, ep = (
        _axis(group)
        for group in (collection.tp, collection.pp, collection.cp, collection.dp, collection.ep)
    )
    stages = pp.size if config.virtual_pipeline is not None else 1
    return Topology(
        world_size=dist.get_world_size(),
        global_rank=dist.get_rank(),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        returns_outputs=pp.rank == pp.size - 1 and tp.rank == cp.rank == 0,
        plan_constraints=PlanConstraints(
            micro_batch_multiple=stages,
            min_micro_batches=stages,
            token_multiple=cp.size * (tp.size if config.sequence_parallel else 1),
        ),
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(size=group.size(), rank=group.rank())


def _choose_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device: use device auto or cpu.")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if wanted == "cpu":
        raise ConfigError(
            "device is cpu, but torch sees CUDA, which Megatron then uses in places of its own: start with CUDA_VISIBLE_DEVICES= "
            "(nothing after the sign), or use device auto."
        )
    index = (
        int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) % torch.cuda.device_count()
    )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join_default(device: torch.device, *, timeout_s: float) -> bool:
    """Whether the group had to be made: from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or else a group of one."""
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    place = tuple(
        os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    )
    if place not in _STORES:
        _STORES[place] = store_from_environment(timeout)
    store, rank, world_size = _STORES[place]
    _NUM_GROUPS[place] += 1
    own = PrefixStore(f"temper_engine_megatron/{_NUM_GROUPS[place]}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
    return True
