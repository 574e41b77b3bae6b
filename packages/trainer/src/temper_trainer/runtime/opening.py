"""Which implementation of a role and of the sampler a configuration means."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import RuntimeConfig, TrainerConfig
from temper_trainer.rollout.hf import HfSampler
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.runtime.group import InlineWorkerGroup, WorkerGroup


@contextmanager
def runtime_session(runtime: RuntimeConfig) -> Iterator[None]:
    """The cluster of a run, where it has one."""
    del runtime
    yield


def open_group(role: str, *, config: TrainerConfig, engine: EngineConfig) -> WorkerGroup:
    """The ranks of one role, not yet initialised."""
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    return InlineWorkerGroup(role, engine_name=config.model_engine, config=engine)


def open_sampler(config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> Sampler:
    """The sampler, without weights until the first publish."""
    return HfSampler(model=config.actor.engine.model, tokenizer=tokenizer, config=config.rollout)
