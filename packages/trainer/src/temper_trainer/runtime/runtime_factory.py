"""The runtime of a run: it creates worker groups and the sampler, in this process or on Ray."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.distributed.rendezvous import bind_collectives
from temper_engine_api.errors import ConfigError, format_install
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.sampler import Replica, Sampler
from temper_trainer.runtime.placement import collect_role_requests, describe_plan
from temper_trainer.runtime.vllm_servers import (
    connect_sampler,
    make_local_teacher_servers,
    start_local_sampler,
)
from temper_trainer.runtime.worker_group import InlineWorkerGroup, WorkerGroup

logger = logging.getLogger(__name__)


class Runtime(Protocol):
    """Creates a run's worker groups and sampler."""

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """Create the ranks of one role, not yet initialized."""
        ...

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """Create the sampler, which has no weights of the actor before the first publish."""
        ...

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """Create the servers of a teacher with backend vllm, not yet started."""
        ...


class InlineRuntime:
    """Runs all roles in the driver's process."""

    def __init__(self, engine_name: str) -> None:
        self._engine_name = engine_name
        # Reentrant: publishing runs inside a call of a role and may call the sampler.
        self._compute_lock = threading.RLock()

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """Create a role with one rank."""
        assert num_workers == 1
        return InlineWorkerGroup(
            role,
            engine_name=self._engine_name,
            config=engine,
            is_deprecated=is_deprecated,
            compute_lock=self._compute_lock,
        )

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """Create the sampler in this process, or start vLLM servers on this host."""
        if config.rollout.vllm.has_remote_servers:
            return connect_sampler(config, tokenizer=tokenizer)
        if config.rollout.sampler == "vllm":
            return start_local_sampler(config, tokenizer=tokenizer)
        return HfSampler(
            model=config.actor.engine.model,
            tokenizer=tokenizer,
            config=config.rollout,
            compute_lock=self._compute_lock,
        )

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """Create servers on this host."""
        return make_local_teacher_servers(name, config)


@contextmanager
def open_runtime(config: TrainerConfig) -> Iterator[Runtime]:
    """Open the runtime of `runtime.kind` for the body.

    Raises:
        ConfigError: If Ray is not installed but needed, or the cluster is too small.
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    if config.runtime.kind == "inline":
        logger.info("placement:\n%s", "\n".join(describe_plan(config)))
        # gloo and NCCL would otherwise take the first network interface that they find.
        bind_collectives(config.runtime.bind_address)
        yield InlineRuntime(config.model_engine)
        return
    try:
        from temper_trainer.runtime.ray.ray_runtime import open_ray_runtime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "runtime.kind is ray, but Ray is not installed: run "
            f"{format_install('temper-trainer[ray]')}, or set runtime.kind=inline."
        ) from error
    with open_ray_runtime(config, roles=collect_role_requests(config)) as runtime:
        yield runtime
