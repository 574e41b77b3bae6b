"""Plan and create the vLLM servers for a run and its teachers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.rollout import normalize_address
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.sampler import Replica
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.remote_server import AddressWatch, RemoteServer
from temper_trainer.rollout.vllm.server_addresses import parse_addresses, read_addresses
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.rollout.vllm.server_spec import build_server_spec, build_teacher_server_spec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler

WATCH_INTERVAL_S = 5.0
"""Time between two looks at the addresses of servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Everything to create a server on any host."""

    spec: ServerSpec
    name: str
    """Name for messages."""
    python: str
    """Interpreter, on the server's host."""
    log_file: str
    """Path on the server's host."""
    start_timeout_s: float
    stall_timeout_s: float
    """Longest time without a token or a heartbeat while requests are open."""
    load_timeout_s: float
    """Longest time without new tokens while the server's heartbeat continues, as it does while it
    loads weights.
    """

    def create_process(self) -> ServerProcess:
        """Create the server on this host, not started yet."""
        return ServerProcess(
            self.spec,
            name=self.name,
            python=self.python,
            log_file=Path(self.log_file),
            start_timeout_s=self.start_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            load_timeout_s=self.load_timeout_s,
        )


def plan_rollout_servers(config: TrainerConfig, *, spec: ServerSpec) -> list[ServerPlan]:
    """Plan the sampler's servers."""
    return [
        _make_plan(config, spec, name=f"rollout replica {i}", log=f"rollout/replica-{i}.log")
        for i in range(config.rollout.num_replicas)
    ]


def plan_teacher_servers(name: str, config: TrainerConfig) -> list[ServerPlan]:
    """Plan a teacher's servers."""
    teacher = config.teachers[name]
    spec = build_teacher_server_spec(name, teacher, config=config)
    return [
        _make_plan(config, spec, name=f"teacher {name} replica {i}", log=f"teachers/{name}-{i}.log")
        for i in range(teacher.num_replicas)
    ]


def connect_sampler(config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> VllmSampler:
    """Connect to the servers that the configuration names, which may join and leave later.

    Raises:
        ConfigError: If none are named, or the file of addresses is wrong.
    """
    spec = build_server_spec(config, tokenizer=tokenizer)
    vllm = config.rollout.vllm
    configured = [normalize_address(each) for each in vllm.servers]

    def read_current() -> Sequence[str]:
        # Not `read_addresses`: after the start, an invalid line in the file must not end the run,
        # because other servers are connected.
        if vllm.servers_file is None:
            return configured
        return parse_addresses(Path(vllm.servers_file).read_text(encoding="utf-8"))

    def make_server(address: str) -> RemoteServer:
        return RemoteServer(
            spec,
            address=address,
            start_timeout_s=vllm.start_timeout_s,
            stall_timeout_s=vllm.stall_timeout_s,
            load_timeout_s=vllm.load_timeout_s,
        )

    first = configured if vllm.servers_file is None else read_addresses(vllm.servers_file)
    servers = [make_server(address) for address in first]
    return VllmSampler(
        servers,
        spec=spec,
        max_restarts=vllm.max_restarts,
        watch=AddressWatch(
            read_current, connected=servers, connect=make_server, interval_s=WATCH_INTERVAL_S
        ),
        join_timeout_s=vllm.start_timeout_s,
    )


def start_local_sampler(
    config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase
) -> VllmSampler:
    """Start the sampler's servers on the driver's host."""
    spec = build_server_spec(config, tokenizer=tokenizer)
    replicas = _make_local_replicas(
        plan_rollout_servers(config, spec=spec), devices=config.runtime.rollout_devices
    )
    return VllmSampler(replicas, spec=spec, max_restarts=config.rollout.vllm.max_restarts)


def make_local_teacher_servers(name: str, config: TrainerConfig) -> list[Replica]:
    """Create a teacher's servers on the driver's host, not started yet."""
    return _make_local_replicas(
        plan_teacher_servers(name, config), devices=config.teachers[name].devices
    )


def _make_local_replicas(plans: Sequence[ServerPlan], *, devices: Sequence[str]) -> list[Replica]:
    """Create one server per plan, each with its entry of `devices` if there are any."""
    if devices:
        plans = [
            assign_devices(plan, gpu_ids) for plan, gpu_ids in zip(plans, devices, strict=True)
        ]
    return [plan.create_process() for plan in plans]


def assign_devices(plan: ServerPlan, gpu_ids: str) -> ServerPlan:
    """Return the plan of a server that uses the named GPUs, as in CUDA_VISIBLE_DEVICES."""
    environment = {**plan.spec.environment, "CUDA_VISIBLE_DEVICES": gpu_ids}
    return replace(plan, spec=replace(plan.spec, environment=environment))


def _make_plan(config: TrainerConfig, spec: ServerSpec, *, name: str, log: str) -> ServerPlan:
    vllm = config.rollout.vllm
    return ServerPlan(
        spec=spec,
        name=name,
        python=config.runtime.rollout_python or sys.executable,
        # Absolute: the process that starts the server may have another working directory.
        log_file=str(Path(config.run.dir).resolve() / log),
        start_timeout_s=vllm.start_timeout_s,
        stall_timeout_s=vllm.stall_timeout_s,
        load_timeout_s=vllm.load_timeout_s,
    )
