"""Which implementation of a role and of the sampler a configuration means."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.rendezvous import bind_collectives
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.replica import Replica
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.runtime.placement import collect_role_requests
from temper_trainer.runtime.planned import describe_plan
from temper_trainer.runtime.vllm_servers import make_local_teacher_servers, start_local_sampler
from temper_trainer.runtime.worker_group import InlineWorkerGroup, WorkerGroup

logger = logging.getLogger(__name__)


class Runtime(Protocol):
    """Makes the roles and the sampler of a run."""

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """The ranks of one role, not yet initialised; deprecated ones where asked."""
        ...

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """The sampler, without weights until the first publish."""
        ...

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """The servers of a teacher of backend vllm, not yet started."""
        ...


class InlineRuntime:
    """Everything in the driver's process."""

    def __init__(self, engine_name: str) -> None:
        self._engine_name = engine_name
        # Reentrant: publishing runs inside a call to a role and may ask the sampler.
        self._compute_lock = threading.RLock()

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """One rank."""
        assert num_workers == 1
        return InlineWorkerGroup(
            role,
            engine_name=self._engine_name,
            config=engine,
            is_deprecated=is_deprecated,
            compute_lock=self._compute_lock,
        )

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """In this process; vLLM's servers beside it."""
        if config.rollout.sampler == "vllm":
            return start_local_sampler(config, tokenizer=tokenizer)
        return HfSampler(
            model=config.actor.engine.model,
            tokenizer=tokenizer,
            config=config.rollout,
            compute_lock=self._compute_lock,
        )

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """Beside this process."""
        return make_local_teacher_servers(name, config)


@contextmanager
def open_runtime(config: TrainerConfig) -> Iterator[Runtime]:
    """The runtime that ``runtime.kind`` names.

    Raises:
        ConfigError: Ray is asked for and not installed, or the cluster is too small.
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    if config.runtime.kind == "inline":
        logger.info("placement:\n%s", "\n".join(describe_plan(config)))
        bind_collectives(config.runtime.bind_address)
        yield InlineRuntime(config.model_engine)
        return
    try:
        from temper_trainer.runtime.ray.ray_runtime import open_ray_runtime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "runtime.kind is ray, but Ray is not installed: pip install 'temper-trainer[ray]', or use inline."
        ) from error
    with open_ray_runtime(config, roles=collect_role_requests(config)) as runtime:
        yield runtime
