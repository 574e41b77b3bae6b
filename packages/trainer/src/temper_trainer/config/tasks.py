"""Settings of single tasks and of the warm start."""

from dataclasses import field
from typing import Annotated

from temper_engine_api.specs import OptimizerSpec, ScheduleSpec
from temper_trainer.algorithms.sft_losses import CrossEntropy, SftLoss
from temper_trainer.config.data import DataSource
from temper_trainer.settings.ranges import NonNegativeFloat, PositiveInt, Range
from temper_trainer.settings.variants import settings


@settings
class WarmStartConfig:
    """Supervised fine-tuning of the actor before RL.

    RL starts from the model that it trains. Other roles with the path and the architecture of the
    actor, such as ``ref=frozen`` and ``critic=value_model``, start from that model too. If
    ``actor.engine.model.path`` is set, the warm start trains the model of that path. Task sft does
    not use it: its settings are data, batching, run and actor.
    """

    data: DataSource | None = None
    """Demonstrations; None takes data.train."""
    total_steps: PositiveInt = 100
    """Number of updates of the warm start."""
    batch_size: PositiveInt = 64
    """Number of demonstrations in each update."""
    loss: SftLoss = field(default_factory=CrossEntropy)
    """Loss of the tokens of demonstrations."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """Optimizer of the warm start; the actor's own starts fresh afterwards."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Learning-rate schedule of the warm start; the actor's own starts at step 0 afterwards."""


@settings
class RewardModelTaskConfig:
    """Settings of task rm, which trains with the Bradley-Terry loss."""

    label_smoothing: Annotated[float, Range(at_least=0, at_most=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels, in [0, 0.5]."""
    center_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores near 0; at least 0."""


@settings
class GenerateConfig:
    """Settings of task generate, which completes held-out prompts, or data.train without any."""

    num_completions: PositiveInt = 1
    """Completions per prompt; more than 1 needs sampling.temperature above 0."""
    file: str = "completions.jsonl"
    """File in the run folder with one line per completion: prompt, completion, log-probs and score.
    """
