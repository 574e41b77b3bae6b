"""Which process goes where: a pure function of the cluster and the roles, printed, then executed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.config.trainer_config import TrainerConfig

REWARD_MODEL_ROLE = "reward_model"
"""Its name among worker groups and in the placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """What one role needs."""

    num_workers: int
    """Processes."""
    pool: str
    """Resource pool; the workers of equal rank of one pool's roles share a bundle."""
    devices_per_worker: int = 1
    """Times the resources of one worker that each needs, such as the tensor-parallel size of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources that the workers of one rank of one pool share."""

    pool: str
    """Its pool."""
    rank: int
    """Rank of the workers in it."""
    roles: tuple[str, ...]
    """Who shares it."""
    cpus: float
    """CPU cores of the bundle."""
    gpus: float
    """GPUs of the bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Every bundle of a run."""

    bundles: tuple[Bundle, ...]
    """In the order of pool and rank."""

    def find_bundle(self, role: str, rank: int) -> int:
        """Index of the bundle of one worker."""
        return next(
            i
            for i, bundle in enumerate(self.bundles)
            if role in bundle.roles and bundle.rank == rank
        )

    def get_worker_resources(self, role: str, rank: int) -> tuple[float, float]:
        """(CPU cores, GPUs) of one worker: an equal share of its bundle."""
        bundle = self.bundles[self.find_bundle(role, rank)]
        return bundle.cpus / len(bundle.roles), bundle.gpus / len(bundle.roles)

    def describe(self) -> str:
        """One line a bundle."""
        return "\n".join(
            f"{b.pool}[{b.rank}]: {', '.join(b.roles)} on {b.cpus:g} CPU, {b.gpus:g} GPU"
            for b in self.bundles
        )


def collect_role_requests(config: TrainerConfig) -> dict[str, RoleRequest]:
    """What every role of a run needs, the sampler as ``rollout``, replica R of a teacher as ``teacher.NAME.R``."""
    roles = {"actor": config.actor, "critic": config.critic, "ref": config.ref}
    if config.task in ("eval", "generate"):
        roles = {}
    requests = {
        n: RoleRequest(num_workers=r.num_workers, pool=r.pool)
        for n, r in roles.items()
        if r is not None
    }
    if config.samples:
        rollout = config.rollout
        per_replica = rollout.vllm.tensor_parallel_size if rollout.sampler == "vllm" else 1
        requests["rollout"] = RoleRequest(
            num_workers=rollout.num_replicas, pool=rollout.pool, devices_per_worker=per_replica
        )
    if config.samples and (model := config.reward.model) is not None:
        requests[REWARD_MODEL_ROLE] = RoleRequest(num_workers=model.num_workers, pool=model.pool)
    for name, teacher in list_teacher_roles(config.teachers).items():
        # A bundle of its own for every replica: teachers share devices with nobody, not with each other either.
        is_server = teacher.backend == "vllm"
        requests[name] = RoleRequest(
            num_workers=1 if is_server else teacher.num_workers,
            pool=f"{teacher.pool}/{name}",
            devices_per_worker=teacher.num_workers if is_server else 1,
        )
    return requests


def format_teacher_role(name: str, replica: int) -> str:
    """The role of one replica of a teacher."""
    return f"teacher.{name}.{replica}"


def list_teacher_roles(teachers: Mapping[str, TeacherConfig]) -> dict[str, TeacherConfig]:
    """The replicas of all teachers by role name."""
    return {
        format_teacher_role(name, replica): teacher
        for name, teacher in teachers.items()
        for replica in range(teacher.num_replicas)
    }


def plan_placement(
    roles: Mapping[str, RoleRequest], runtime: RuntimeConfig, *, cpus: float, gpus: float
) -> Placement:
    """Bundles for every role.

    Args:
        roles: by name, in the order in which they share a bundle.
        runtime: resources of one bundle.
        cpus: of the whole cluster.
        gpus: of the whole cluster.

    Raises:
        ConfigError: the cluster is too small; says what is missing and which keys ask for it.
    """
    bundles = plan_bundles(roles, runtime)
    _check_fits(bundles, roles, cpus=cpus, gpus=gpus)
    return Placement(bundles=bundles)


def plan_bundles(roles: Mapping[str, RoleRequest], runtime: RuntimeConfig) -> tuple[Bundle, ...]:
    """Bundles for every role, whatever the cluster has; see plan_placement."""
    pools: dict[str, dict[str, RoleRequest]] = {}
    for name, request in roles.items():
        pools.setdefault(request.pool, {})[name] = request
    return tuple(
        Bundle(
            pool=pool,
            rank=rank,
            roles=tuple(name for name, request in members.items() if rank < request.num_workers),
            cpus=runtime.cpus_per_worker * _count_devices(pool, members),
            gpus=runtime.gpus_per_worker * _count_devices(pool, members),
        )
        for pool, members in pools.items()
        for rank in range(max(request.num_workers for request in members.values()))
    )


def _count_devices(pool: str, members: Mapping[str, RoleRequest]) -> int:
    """Devices of a pool's bundles; roles that share them need the same number."""
    sizes = {request.devices_per_worker for request in members.values()}
    if len(sizes) > 1:
        listed = ", ".join(
            f"{name}: {request.devices_per_worker}" for name, request in members.items()
        )
        raise ConfigError(
            f"roles of pool {pool!r} need different numbers of devices per worker ({listed}): set rollout.pool to a pool of its own, or "
            "rollout.vllm.tensor_parallel_size=1."
        )
    return sizes.pop()


def _check_fits(
    bundles: Sequence[Bundle], roles: Mapping[str, RoleRequest], *, cpus: float, gpus: float
) -> None:
    asked_cpus, asked_gpus = sum(b.cpus for b in bundles), sum(b.gpus for b in bundles)
    if asked_cpus > cpus or asked_gpus > gpus:
        sizes = ", ".join(
            f"{name}: {request.num_workers} in pool {request.pool!r}"
            for name, request in roles.items()
        )
        raise ConfigError(
            f"the roles ({sizes}) need {asked_cpus:g} CPU and {asked_gpus:g} GPU, but the cluster has {cpus:g} and {gpus:g}: lower "
            "runtime.cpus_per_worker, runtime.gpus_per_worker or a role's num_workers, or give roles the same pool."
        )
