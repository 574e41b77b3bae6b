"""The Ray runtime: a placement group with the actors for all roles and the sampler."""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import cast

import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import LOOPBACK, RuntimeConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.sampler import Replica, Sampler
from temper_trainer.rollout.vllm.server_spec import build_server_spec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime.placement import (
    Placement,
    RoleRequest,
    describe_weight_path,
    format_teacher_role,
    plan_placement,
)
from temper_trainer.runtime.ray.device_holder import DeviceHolder, HolderHandle
from temper_trainer.runtime.ray.ray_guard import RayGuard
from temper_trainer.runtime.ray.ray_replica import (
    MAX_CONCURRENT_CALLS,
    RayReplica,
    ReplicaActor,
    ReplicaHandle,
)
from temper_trainer.runtime.ray.ray_sampler import RaySampler, SamplerActor, SamplerHandle
from temper_trainer.runtime.ray.ray_token import protect_token_file
from temper_trainer.runtime.ray.ray_worker_group import (
    RayWorkerGroup,
    RoleActor,
    RoleHandle,
)
from temper_trainer.runtime.vllm_servers import (
    ServerPlan,
    assign_devices,
    connect_sampler,
    plan_rollout_servers,
    plan_teacher_servers,
)
from temper_trainer.runtime.worker_group import WorkerError, WorkerGroup
from temper_trainer.temporary_folders import (
    announce_session,
    claim_folder,
    make_ray_root,
    remove_claimed_folders,
)

logger = logging.getLogger(__name__)

_RAY_CLUSTERS_BY_DEFAULT = ray_constants.ENABLE_RAY_CLUSTER
"""False on macOS and Windows, where Ray uses only the loopback interface by default."""

_own_jobs: set[str] = set()
"""Ids of the Ray jobs that `connect_to_ray` started in this process. A user's own job is never shut
down."""

_guards: list[RayGuard] = []
"""The guard of the cluster that this process started; empty if it joined a running cluster."""


class RayRuntime:
    """A connection to Ray and one placement group, for the duration of a run."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        *,
        roles: Mapping[str, RoleRequest],
        engine_name: str,
        num_threads: int | None,
        weight_path: Sequence[str],
    ) -> None:
        """Connect to Ray and reserve resources for all roles.

        Args:
            runtime: Settings of the cluster.
            roles: Resources by role name.
            engine_name: Engine of all worker groups (``model_engine``).
            num_threads: CPU threads of a worker (``run.num_threads``).
            weight_path: Lines from `describe_weight_path`, logged with the placement.

        Raises:
            ConfigError: If there is no cluster at the address, or it is too small.
            WorkerError: If the cluster does not grant the resources in time.
        """
        self._engine_name, self._num_threads = engine_name, num_threads
        self._worker_timeout_s = runtime.worker_timeout_s
        self._holders: dict[int, HolderHandle] = {}
        """Reservations of servers with several bundles, by bundle."""
        self._owns_ray = connect_to_ray(runtime)
        resources = ray.cluster_resources()
        self.placement: Placement = plan_placement(
            roles, runtime, cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0)
        )
        logger.info("placement:\n%s", "\n".join([self.placement.describe(), *weight_path]))
        bundles = [_format_resources(bundle.cpus, bundle.gpus) for bundle in self.placement.bundles]
        self._group: PlacementGroup = placement_group(bundles, strategy="PACK")
        if not self._group.wait(timeout_seconds=runtime.worker_timeout_s):
            raise WorkerError(
                f"the cluster did not grant {bundles} within runtime.worker_timeout_s = "
                f"{runtime.worker_timeout_s} s: check `ray status` for other jobs."
            )
        logger.info(
            "granted:\n%s",
            "\n".join(
                f"{b.pool}[{b.rank}]: {node}"
                for b, node in zip(self.placement.bundles, self._nodes(), strict=True)
            ),
        )

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """Create one actor per rank; see Runtime."""
        return RayWorkerGroup(
            role,
            actors=[
                cast(
                    "RoleHandle",
                    self._start(RoleActor, bundle=self.placement.find_bundle(role, rank)),
                )
                for rank in range(num_workers)
            ],
            engine_name=self._engine_name,
            config=engine,
            num_threads=self._num_threads,
            timeout_s=self._worker_timeout_s,
            is_deprecated=is_deprecated,
        )

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """Create the sampler's actor, or one actor per vLLM server; see Runtime."""
        if config.rollout.vllm.has_remote_servers:
            return connect_sampler(config, tokenizer=tokenizer)
        if config.rollout.sampler == "vllm":
            return self._open_servers(config, tokenizer=tokenizer)
        arguments = (config.actor.engine.model, tokenizer, config.rollout, self._num_threads)
        # With loop=async an interrupt must get through while the actor samples.
        max_concurrency = 2 if config.loop == "async" else 1
        actor = self._start(
            SamplerActor,
            *arguments,
            bundle=self.placement.find_bundle("rollout", 0),
            max_concurrency=max_concurrency,
        )
        return RaySampler(cast("SamplerHandle", actor), timeout_s=self._worker_timeout_s)

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """Create a teacher's servers; see Runtime."""
        return [
            self._replica(
                plan, bundles=(self.placement.find_bundle(format_teacher_role(name, i), 0),)
            )
            for i, plan in enumerate(plan_teacher_servers(name, config))
        ]

    def _open_servers(
        self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase
    ) -> VllmSampler:
        spec = build_server_spec(config, tokenizer=tokenizer)
        plans = plan_rollout_servers(config, spec=spec)
        groups = self.placement.group_bundles("rollout", self._nodes())
        replicas = [
            self._replica(
                plan,
                bundles=bundles,
                # Each open request is a call: twice the places of a server, by up to 1.5 times
                # unevenly balanced, and interrupts.
                max_concurrency=MAX_CONCURRENT_CALLS + 3 * config.rollout.max_concurrent,
            )
            for plan, bundles in zip(plans, groups, strict=True)
        ]
        return VllmSampler(replicas, spec=spec, max_restarts=config.rollout.vllm.max_restarts)

    def _replica(
        self,
        plan: ServerPlan,
        *,
        bundles: tuple[int, ...],
        max_concurrency: int = MAX_CONCURRENT_CALLS,
    ) -> Replica:
        """Create a server that uses the devices of one or more bundles, not started yet."""
        has_shared_gpus = len(bundles) > 1 and self.placement.bundles[bundles[0]].gpus > 0

        def make_actor() -> ReplicaHandle:
            used = assign_devices(plan, self._reserve_gpus(bundles)) if has_shared_gpus else plan
            actor = self._start(
                ReplicaActor,
                used,
                bundle=bundles[0],
                max_concurrency=max_concurrency,
                reserves_gpus=not has_shared_gpus,
            )
            return cast("ReplicaHandle", actor)

        return RayReplica(make_actor, name=plan.name, start_timeout_s=plan.start_timeout_s)

    def _reserve_gpus(self, bundles: tuple[int, ...]) -> str:
        """Reserve a server's share of the GPUs of several bundles.

        Ray gives an actor resources of one bundle only. So each bundle gets an actor that reserves
        the share and knows the GPU.

        Returns:
            The GPUs in the order of the bundles, for CUDA_VISIBLE_DEVICES.
        """
        try:
            return self._list_reserved_gpus(bundles)
        except ray.exceptions.RayError as error:
            # The server is often restarted because its node has failed, which ends these actors
            # too.
            logger.warning("reserving the GPUs of a server again: %s", error)
            for bundle in bundles:
                ray.kill(self._holders.pop(bundle))
            return self._list_reserved_gpus(bundles)

    def _list_reserved_gpus(self, bundles: tuple[int, ...]) -> str:
        for bundle in bundles:
            if bundle not in self._holders:
                holder = self._start(DeviceHolder, bundle=bundle, reserves_cpus=False)
                self._holders[bundle] = cast("HolderHandle", holder)
        answers = [self._holders[bundle].list_gpus.remote() for bundle in bundles]
        gpus = cast("list[list[str]]", ray.get(answers, timeout=self._worker_timeout_s))
        return ",".join(gpu for each in gpus for gpu in each)

    def close(self) -> None:
        """Free the resources, and stop Ray if this run started it."""
        remove_placement_group(self._group)
        if self._owns_ray:
            ray.shutdown()
            _own_jobs.clear()  # a later job may get the same id
            while _guards:
                _guards.pop().close()

    def _nodes(self) -> list[str]:
        """Return the address of each bundle's node."""
        addresses: dict[str, str] = {
            node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()
        }
        node_ids = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [addresses[node_ids[i]] for i in range(len(self.placement.bundles))]

    def _start(
        self,
        actor_class: type[object],
        *arguments: object,
        bundle: int,
        max_concurrency: int = 1,
        reserves_cpus: bool = True,
        reserves_gpus: bool = True,
    ) -> object:
        """Start an actor in a bundle, with the share of one of the bundle's roles."""
        cpus, gpus = self.placement.bundles[bundle].worker_resources
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        remote = ray.remote(actor_class).options(
            num_cpus=cpus if reserves_cpus else 0,
            num_gpus=gpus if reserves_gpus else 0,
            scheduling_strategy=strategy,
            max_restarts=0,  # a restarted worker would have lost its state
            max_concurrency=max_concurrency,
        )
        return cast("object", remote.remote(*arguments))


@contextmanager
def open_ray_runtime(
    config: TrainerConfig, *, roles: Mapping[str, RoleRequest]
) -> Iterator[RayRuntime]:
    """Open the runtime for the body, and close it afterwards."""
    runtime = RayRuntime(
        config.runtime,
        roles=roles,
        engine_name=config.model_engine,
        num_threads=config.run.num_threads,
        weight_path=describe_weight_path(config),
    )
    try:
        yield runtime
    finally:
        runtime.close()


def connect_to_ray(runtime: RuntimeConfig) -> bool:
    """Connect this process to Ray, unless it is connected.

    Returns:
        True if this module has made the connection, now or earlier. A run ends only such a
        connection.

    Raises:
        ConfigError: If there is no cluster at the address.
    """
    if not ray.is_initialized():
        # By default Ray empties CUDA_VISIBLE_DEVICES in processes that reserve no GPU.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        _start_or_join(runtime.address, runtime.bind_address)
        _own_jobs.add(ray.get_runtime_context().get_job_id())
    return ray.get_runtime_context().get_job_id() in _own_jobs


def _start_or_join(address: str | None, bind_address: str) -> None:
    """Join a cluster, or start Ray on this host.

    Raises:
        ConfigError: If no cluster answers at the address.
    """
    starts_here = address is None and "RAY_ADDRESS" not in os.environ
    is_on_loopback = starts_here and bind_address == LOOPBACK
    # If clusters are enabled, Ray replaces 127.0.0.1 by an address that other hosts can reach. To
    # listen on the loopback interface only, disable clusters, as Ray does by default on macOS and
    # Windows. This process has read the environment variable already, when it imported Ray, so the
    # constant is set here. Ray's own processes read the variable when they start.
    ray_constants.ENABLE_RAY_CLUSTER = _RAY_CLUSTERS_BY_DEFAULT and not is_on_loopback
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(
        int(ray_constants.ENABLE_RAY_CLUSTER)
    )
    protect_token_file(is_starting=starts_here)
    root = make_ray_root() if starts_here else None
    with ExitStack() as stack:
        if root is not None:
            # A long-lived process may start several clusters. So the folders of dead processes are
            # removed before each of them, and not only at the start of a run.
            remove_claimed_folders(root)
            stack.enter_context(announce_session(root))
            _guards.append(stack.enter_context(RayGuard()))
        _init_ray(
            address="local" if starts_here else address,
            bind_address=bind_address if starts_here else None,
            root=root,
        )
        if starts_here:
            claim_folder(Path(ray._private.worker._global_node.get_session_dir_path()))


def _init_ray(*, address: str | None, bind_address: str | None, root: Path | None) -> None:
    try:
        with _defer_signals():
            ray.init(
                address=address,
                _node_ip_address=bind_address,
                _temp_dir=None if root is None else str(root),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
    except ConnectionError as error:
        raise ConfigError(
            f"runtime.address is {address}, but no Ray cluster answers there: start one (ray start "
            "--head), correct the address, or remove it to start Ray on this host. A cluster with "
            "token authentication needs RAY_AUTH_MODE=token and the same ~/.ray/auth_token here."
        ) from error


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Pass SIGINT and SIGTERM to their handlers after the body; a second SIGINT at once.

    Ray forks its processes with a `preexec_fn`, so Python runs the hooks that modules registered
    for a fork. If a signal handler raises an exception in such a hook, the exception is lost and
    the hook does not release its lock. The stop request would be ignored, and every other thread
    that logs would wait forever. Ray's own SIGTERM handlers must not be installed either: the
    Python handler raises SystemExit, and the C++ handler aborts the process. A start that hangs
    ends with its process, after the grace period.
    """
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in previous.items() if callable(handler)}
    # Python allows only the main thread to set handlers. Without a handler for SIGTERM, a signal
    # ends the process and no stop request can be lost.
    if not is_main or signal.SIGTERM not in handlers:
        yield
        return
    deferred: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait for the body, which may hang.
        if number == signal.SIGINT and deferred:
            deferred.clear()
            handlers[signal.SIGINT](number, frame)
        elif not deferred:
            deferred.append(number)

    install_of_ray = ray._private.utils.set_sigterm_handler
    is_disabled = ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER
    ray._private.utils.set_sigterm_handler = lambda _: None
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        ray._private.utils.set_sigterm_handler = install_of_ray
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = is_disabled
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if deferred:
            signal.raise_signal(deferred[0])


def _format_resources(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
