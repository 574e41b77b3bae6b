"""Plan which process runs where, and describe the plan. Pure functions without torch or Ray."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from temper_engine_api.errors import ConfigError
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import INFERENCE_TASKS, RL_TASKS, RuntimeConfig
from temper_trainer.config.trainer_config import TrainerConfig

REWARD_MODEL_ROLE = "reward_model"
"""Name of the reward model's worker group."""
AVERAGED_ROLE = "averaged_actor"
"""Role whose weights are a moving average of the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """Resources that one role needs."""

    num_workers: int
    """Number of processes, one per rank or server."""
    pool: str
    """Resource pool. Roles in the same pool share devices; see `plan_bundles`."""
    devices_per_worker: int = 1
    """Devices per worker, such as a server's tensor-parallel size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources on one host, shared by one worker of each of the given roles.

    Example:
        >>> roles = ("actor", "rollout")
        >>> colocated = Bundle(pool="default", rank=0, roles=roles, cpus=4.0, gpus=1.0)
        >>> colocated.worker_resources
        (2.0, 0.5)
    """

    pool: str
    rank: int
    """Position in the pool."""
    roles: tuple[str, ...]
    """Roles that share it."""
    cpus: float
    gpus: float

    @property
    def worker_resources(self) -> tuple[float, float]:
        """CPU cores and GPUs per role, as equal fractions of the bundle."""
        return self.cpus / len(self.roles), self.gpus / len(self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All bundles in a run."""

    bundles: tuple[Bundle, ...]
    """Ordered by pool and rank."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """Number of bundles per worker, for roles whose workers use several."""

    def find_bundle(self, role: str, rank: int) -> int:
        """Return the bundle index for a worker that uses a single bundle."""
        return self.list_bundles(role)[rank]

    def list_bundles(self, role: str) -> list[int]:
        """Return the bundle indices for all workers in a role."""
        return [i for i, bundle in enumerate(self.bundles) if role in bundle.roles]

    def group_bundles(self, role: str, hosts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the bundle indices for each worker, all on the same host.

        Args:
            role: A role whose workers may have several bundles.
            hosts: Each bundle's host.

        Raises:
            ConfigError: If a host's bundles can't be divided evenly into workers.
        """
        span = self.spans.get(role, 1)
        by_host: dict[str, list[int]] = {}
        for index in self.list_bundles(role):
            by_host.setdefault(hosts[index], []).append(index)
        for host, indices in by_host.items():
            if len(indices) % span:
                raise ConfigError(
                    f"host {host} got {len(indices)} devices of {role}, which servers of {span} "
                    "devices cannot divide: set rollout.vllm.tensor_parallel_size to a divisor of "
                    "the GPUs of each host."
                )
        return [
            tuple(indices[first : first + span])
            for indices in by_host.values()
            for first in range(0, len(indices), span)
        ]

    def describe(self) -> str:
        """Return one line per bundle, and one per role whose workers use several bundles."""
        lines = [
            f"{b.pool}[{b.rank}]: {', '.join(b.roles)} on {b.cpus:g} CPU, {b.gpus:g} GPU"
            for b in self.bundles
        ]
        lines += [
            f"{role}: every server on {span} of these, which are on one host"
            for role, span in self.spans.items()
        ]
        return "\n".join(lines)


def collect_role_requests(config: TrainerConfig) -> dict[str, RoleRequest]:
    """Return the resources of every role.

    The sampler is `rollout`; replica R of a teacher is `teacher.NAME.R`.
    """
    roles = {} if config.task in INFERENCE_TASKS else config.roles
    requests = {
        name: RoleRequest(num_workers=role.num_workers, pool=role.pool)
        for name, role in roles.items()
    }
    if config.averaged_engine is not None:
        # Use the actor's number of workers and pool to give each of its devices one rank of the
        # averaged model. Every device then has the same amount of memory left.
        requests[AVERAGED_ROLE] = requests["actor"]
    if config.generates_completions and not config.rollout.vllm.has_remote_servers:
        rollout = config.rollout
        per_replica = rollout.vllm.tensor_parallel_size if rollout.sampler == "vllm" else 1
        requests["rollout"] = RoleRequest(
            num_workers=rollout.num_replicas, pool=rollout.pool, devices_per_worker=per_replica
        )
    if config.generates_completions and (model := config.reward.model) is not None:
        requests[REWARD_MODEL_ROLE] = RoleRequest(num_workers=model.num_workers, pool=model.pool)
    for name, teacher in list_teacher_roles(config.teachers).items():
        # Every replica has its own pool, so teachers share devices with no other role or teacher.
        is_server = teacher.backend == "vllm"
        requests[name] = RoleRequest(
            num_workers=1 if is_server else teacher.num_workers,
            pool=f"{teacher.pool}/{name}",
            devices_per_worker=teacher.num_workers if is_server else 1,
        )
    return requests


def format_teacher_role(name: str, replica: int) -> str:
    """Format the role name for one teacher replica."""
    return f"teacher.{name}.{replica}"


def list_teacher_roles(teachers: Mapping[str, TeacherConfig]) -> dict[str, TeacherConfig]:
    """Return the configuration of every teacher replica by role name."""
    return {
        format_teacher_role(name, replica): teacher
        for name, teacher in teachers.items()
        for replica in range(teacher.num_replicas)
    }


def plan_placement(
    roles: Mapping[str, RoleRequest], runtime: RuntimeConfig, *, cpus: float, gpus: float
) -> Placement:
    """Plan the bundles of every role and check that the cluster has the resources.

    Args:
        roles: Resources by role name.
        runtime: Resources of one worker.
        cpus: CPU cores in the cluster.
        gpus: GPUs of the cluster.

    Raises:
        ConfigError: If the cluster is too small; names the keys to change.
    """
    bundles = plan_bundles(roles, runtime)
    _check_fits(bundles, roles, cpus=cpus, gpus=gpus)
    return Placement(bundles=bundles, spans=_find_spans(roles))


def find_missing_cpus(config: TrainerConfig) -> str | None:
    """Return the error message of `plan_placement` if Ray would start here with too few CPU cores.

    Returns None for a running cluster and for GPU runs, which may be checked on another host than
    they run on.
    """
    runtime = config.runtime
    if runtime.kind != "ray" or runtime.address is not None or "RAY_ADDRESS" in os.environ:
        return None
    roles = collect_role_requests(config)
    if any(bundle.gpus for bundle in plan_bundles(roles, runtime)):
        return None
    try:
        plan_placement(roles, runtime, cpus=os.cpu_count() or 1, gpus=0)
    except ConfigError as error:
        return str(error)
    return None


def plan_bundles(roles: Mapping[str, RoleRequest], runtime: RuntimeConfig) -> tuple[Bundle, ...]:
    """Plan the bundles of every role without checking that the cluster has the resources.

    Bundle i of a pool has the workers of rank i of all its roles, so colocated roles use the same
    devices. If workers of a pool need different numbers of devices, each bundle has one device: a
    server with 4 GPUs then shares the GPUs of 4 ranks of the actor.

    Raises:
        ConfigError: If such a server would not get one GPU of each bundle.
    """
    spans = _find_spans(roles)
    if spans and runtime.gpus_per_worker not in (0, 1):
        raise ConfigError(
            f"runtime.gpus_per_worker is {runtime.gpus_per_worker:g}, but each server of "
            f"{', '.join(spans)} uses one GPU of each of several workers in its pool: set "
            "gpus_per_worker to 1, or give the servers a pool of their own."
        )
    return tuple(
        Bundle(
            pool=pool,
            rank=rank,
            roles=tuple(
                name
                for name, request in members.items()
                if rank < request.num_workers * spans.get(name, 1)
            ),
            cpus=runtime.cpus_per_worker * _count_devices(members),
            gpus=runtime.gpus_per_worker * _count_devices(members),
        )
        for pool, members in _group_by_pool(roles).items()
        for rank in range(max(r.num_workers * spans.get(name, 1) for name, r in members.items()))
    )


def _group_by_pool(roles: Mapping[str, RoleRequest]) -> dict[str, dict[str, RoleRequest]]:
    pools: dict[str, dict[str, RoleRequest]] = {}
    for name, request in roles.items():
        pools.setdefault(request.pool, {})[name] = request
    return pools


def _find_spans(roles: Mapping[str, RoleRequest]) -> dict[str, int]:
    """Return the number of bundles per worker, for roles whose workers use several."""
    return {
        name: request.devices_per_worker
        for members in _group_by_pool(roles).values()
        for name, request in members.items()
        if request.devices_per_worker > _count_devices(members)
    }


def _count_devices(members: Mapping[str, RoleRequest]) -> int:
    """Return the number of devices per bundle in a pool."""
    sizes = {request.devices_per_worker for request in members.values()}
    return sizes.pop() if len(sizes) == 1 else 1


def _check_fits(
    bundles: Sequence[Bundle], roles: Mapping[str, RoleRequest], *, cpus: float, gpus: float
) -> None:
    needed_cpus, needed_gpus = sum(b.cpus for b in bundles), sum(b.gpus for b in bundles)
    if needed_cpus > cpus or needed_gpus > gpus:
        sizes = ", ".join(
            f"{name}: {request.num_workers} in pool {request.pool!r}"
            for name, request in roles.items()
        )
        raise ConfigError(
            f"the roles ({sizes}) need {needed_cpus:g} CPU and {needed_gpus:g} GPU, but the "
            f"cluster has {cpus:g} and {gpus:g}: lower runtime.cpus_per_worker, "
            "runtime.gpus_per_worker or a role's num_workers, or give roles the same pool."
        )


def describe_plan(config: TrainerConfig) -> list[str]:
    """Return lines that describe where processes will run and how weights will be sent.

    Uses only the configuration, for `--check`. A run checks the cluster's resources when it starts.
    """
    if config.runtime.kind == "inline":
        return [*_describe_inline_placement(config), *describe_weight_path(config)]
    roles = collect_role_requests(config)
    bundles = plan_bundles(roles, config.runtime)
    num_cpus, num_gpus = sum(b.cpus for b in bundles), sum(b.gpus for b in bundles)
    needed = f"the cluster needs {num_cpus:g} CPU and {num_gpus:g} GPU"
    return [
        *Placement(bundles=bundles, spans=_find_spans(roles)).describe().splitlines(),
        needed,
        *describe_weight_path(config),
    ]


def _describe_inline_placement(config: TrainerConfig) -> list[str]:
    """Return a line for this process and one for each server."""
    roles = [
        name
        for name in collect_role_requests(config)
        if not _is_server(name, sampler=config.rollout.sampler, teachers=config.teachers)
    ]
    lines = [f"this process: {', '.join(roles)}"]
    if config.rollout.vllm.has_remote_servers:
        lines.append(f"rollout: servers {_describe_remote(config)}")
    elif config.generates_completions and config.rollout.sampler == "vllm":
        devices = config.runtime.rollout_devices
        lines += [
            _describe_server("rollout", i, devices=devices)
            for i in range(config.rollout.num_replicas)
        ]
    for name, teacher in config.teachers.items():
        if teacher.backend == "vllm":
            lines += [
                _describe_server(f"teacher {name}", i, devices=teacher.devices)
                for i in range(teacher.num_replicas)
            ]
    return lines


def _describe_remote(config: TrainerConfig) -> str:
    vllm = config.rollout.vllm
    return f"listed in {vllm.servers_file}" if vllm.servers_file else ", ".join(vllm.servers)


def _is_server(role: str, *, sampler: str, teachers: Mapping[str, TeacherConfig]) -> bool:
    if role == "rollout":
        return sampler == "vllm"
    return role.startswith("teacher.") and list_teacher_roles(teachers)[role].backend == "vllm"


def _describe_server(name: str, number: int, *, devices: Sequence[str]) -> str:
    used = f"devices {devices[number]}" if devices else "this process's devices"
    return f"{name} replica {number}: a server on this host, on {used}"


def describe_weight_path(config: TrainerConfig) -> list[str]:
    """Describe how weights get to the sampler, as far as the configuration tells; one line."""
    if config.task not in RL_TASKS:
        return []
    sync = config.weight_sync
    if config.rollout.sampler == "hf":
        path = (
            "in this process" if config.runtime.kind == "inline" else "through Ray's object store"
        )
    elif sync.content == "adapter":
        path = "only the adapter, as a file in shared memory"
    elif sync.transport == "auto":
        path = (
            "chosen when actor and servers are running: CUDA IPC on shared GPUs, NCCL to others, "
            "shared memory on the CPUs of one host, otherwise gloo"
        )
    else:
        path = f"by {sync.transport}"
    return [
        f"weights to the sampler: {path}"
        + (", only changed elements" if sync.content == "delta" else "")
    ]
