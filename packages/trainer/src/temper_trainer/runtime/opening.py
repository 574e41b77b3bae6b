"""Which implementation of a role and of the sampler a configuration means."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import TrainerConfig
from temper_trainer.rollout.hf import HfSampler
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.runtime.group import InlineWorkerGroup, WorkerGroup
from temper_trainer.runtime.placement import RoleRequest
from temper_trainer.runtime.reward_model import ROLE as REWARD_MODEL_ROLE
from temper_trainer.runtime.teachers import teacher_roles
from temper_trainer.runtime.vllm_opening import open_local_servers


class Runtime(Protocol):
    """Makes the roles and the sampler of a run."""

    def open_group(self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False) -> WorkerGroup:
        """The ranks of one role, not yet initialised; deprecated ones where asked."""
        ...

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """The sampler, without weights until the first publish."""
        ...


class InlineRuntime:
    """Everything in the driver's process."""

    def __init__(self, engine_name: str) -> None:
        self._engine_name = engine_name

    def open_group(self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False) -> WorkerGroup:
        """One rank."""
        assert num_workers == 1
        return InlineWorkerGroup(role, engine_name=self._engine_name, config=engine, is_deprecated=is_deprecated)

    def open_sampler(self, config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
        """In this process; vLLM's servers beside it."""
        if config.rollout.sampler == "vllm":
            return open_local_servers(config, tokenizer=tokenizer)
        return HfSampler(model=config.actor.engine.model, tokenizer=tokenizer, config=config.rollout)


@contextmanager
def open_runtime(config: TrainerConfig) -> Iterator[Runtime]:
    """The runtime that ``runtime.kind`` names.

    Raises:
        ConfigError: Ray is asked for and not installed, or the cluster is too small.
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    if config.runtime.kind == "inline":
        yield InlineRuntime(config.model_engine)
        return
    try:
        from temper_trainer.runtime.ray_runtime import open_ray_runtime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("runtime.kind is ray, but Ray is not installed: pip install 'temper-trainer[ray]', or use inline.") from error
    with open_ray_runtime(config, roles=role_requests(config)) as runtime:
        yield runtime


def role_requests(config: TrainerConfig) -> dict[str, RoleRequest]:
    """What every role of a run needs, the sampler as ``rollout``, replica R of a teacher as ``teacher.NAME.R``."""
    roles = {"actor": config.actor, "critic": config.critic, "ref": config.ref}
    requests = {n: RoleRequest(num_workers=r.num_workers, pool=r.pool) for n, r in roles.items() if r is not None}
    if config.samples:
        rollout = config.rollout
        per_replica = rollout.vllm.tensor_parallel_size if rollout.sampler == "vllm" else 1
        requests["rollout"] = RoleRequest(num_workers=rollout.num_replicas, pool=rollout.pool, devices_per_worker=per_replica)
    if config.samples and (model := config.reward.model) is not None:
        requests[REWARD_MODEL_ROLE] = RoleRequest(num_workers=model.num_workers, pool=model.pool)
    for name, teacher in teacher_roles(config.teachers).items():
        # A bundle of its own for every replica: teachers share devices with nobody, not with each other either.
        requests[name] = RoleRequest(num_workers=teacher.num_workers, pool=f"{teacher.pool}/{name}")
    return requests
