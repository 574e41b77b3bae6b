"""The rooms of one run, open at once: what a step reaches into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.streams import InMemoryStream
from temper_trainer.environment.protocol import EnvironmentFactory
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.reward.scoring import Scorer
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.teacher.teacher_client import TeacherClient
from temper_trainer.types import Prompt
from temper_trainer.weight_sync.publisher import Canary, Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Everything one RL step needs."""

    config: TrainerConfig
    """Of the run."""
    log: RunLog
    """Where numbers go."""
    tokenizer: PreTrainedTokenizerBase
    """Of every role."""
    prompts: InMemoryStream[Prompt]
    """Training prompts in their order."""
    eval_prompts: Sequence[Prompt]
    """Held-out prompts; may be empty."""
    sampler: Sampler
    """Makes completions."""
    scorer: Scorer
    """Scores them."""
    roles: Mapping[str, WorkerGroup]
    """actor, and critic and ref where the configuration has them."""
    publisher: Publisher
    """Actor to sampler."""
    teachers: TeacherClient | None
    """Of on-policy distillation, where the configuration has them."""
    make_environment: EnvironmentFactory | None
    """Of rollouts of several turns, where the configuration has an environment."""
    canary: Canary | None
    """Compared after every publish, where the configuration wants it."""
    num_eval_trained: int | None = None
    """How many of the held-out prompts are in the run's training data too; None where the run trains nothing, so that nobody knows."""
