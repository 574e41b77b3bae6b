"""The placement in words, from a configuration alone: for ``--check``, and for the log of a run in one process. Without torch."""

from collections.abc import Sequence

from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.runtime.placement import (
    Placement,
    collect_role_requests,
    list_teacher_roles,
    plan_bundles,
)


def describe_plan(config: TrainerConfig) -> list[str]:
    """Who will stand where and how weights will travel, a line each; what the cluster has is compared when the run starts.

    Raises:
        ConfigError: roles of one pool need different numbers of devices.
    """
    if config.runtime.kind == "inline":
        return [*_describe_inline(config), *describe_weight_path(config)]
    bundles = plan_bundles(collect_role_requests(config), config.runtime)
    asked = f"the cluster needs {sum(b.cpus for b in bundles):g} CPU and {sum(b.gpus for b in bundles):g} GPU"
    return [
        *Placement(bundles=bundles).describe().splitlines(),
        asked,
        *describe_weight_path(config),
    ]


def _describe_inline(config: TrainerConfig) -> list[str]:
    """One process, and the servers beside it."""
    found = [
        f"this process: {', '.join(name for name in collect_role_requests(config) if not _is_server(name, config))}"
    ]
    if config.samples and config.rollout.sampler == "vllm":
        devices = config.runtime.rollout_devices
        found += [
            _describe_server("rollout", i, devices=devices)
            for i in range(config.rollout.num_replicas)
        ]
    for name, teacher in config.teachers.items():
        if teacher.backend == "vllm":
            found += [
                _describe_server(f"teacher {name}", i, devices=teacher.devices)
                for i in range(teacher.num_replicas)
            ]
    return found


def _is_server(role: str, config: TrainerConfig) -> bool:
    if role == "rollout":
        return config.rollout.sampler == "vllm"
    return (
        role.startswith("teacher.") and list_teacher_roles(config.teachers)[role].backend == "vllm"
    )


def _describe_server(name: str, number: int, *, devices: Sequence[str]) -> str:
    return f"{name} replica {number}: a server beside it" + (
        f" on devices {devices[number]}" if devices else ", on this process's devices"
    )


def describe_weight_path(config: TrainerConfig) -> list[str]:
    """How weights get to the sampler, as far as that is known before anything runs."""
    if config.task not in ("rl", "distill"):
        return []
    sync = config.weight_sync
    if config.rollout.sampler == "hf":
        way = "in this process" if config.runtime.kind == "inline" else "through Ray's object store"
    elif sync.content == "adapter":
        way = "the adapter alone, as a file in shared memory"
    elif sync.transport == "auto":
        way = "chosen when actor and servers are up: CUDA IPC on one GPU, NCCL to others, shared memory on one host of CPUs, else gloo"
    else:
        way = f"by {sync.transport}"
    return [
        f"weights to the sampler: {way}"
        + (", what changed alone" if sync.content == "delta" else "")
    ]
