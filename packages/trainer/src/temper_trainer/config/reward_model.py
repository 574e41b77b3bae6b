"""A reward model as a reward: what it is, where it runs, and what contradicts it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from temper_engine_api.specs import EngineConfig
from temper_trainer.config.ranges import check_range

if TYPE_CHECKING:
    from temper_trainer.config.run import TrainerConfig

REWARD_MODEL = "reward_model"
"""In reward.function, or among reward.components, the score of reward.model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a score head, such as task rm writes."""

    engine: EngineConfig
    """Model, precision and layout; model_type is reward_model, and the optimiser is never built."""
    num_workers: int = 1
    """Processes; more than 1 needs the ray runtime."""
    pool: str = "train"
    """Resource pool; it shares the devices of those in it."""

    def __post_init__(self) -> None:
        check_range("num_workers", self.num_workers, at_least=1)


def reward_model_problems(config: "TrainerConfig") -> Iterator[str]:
    """What is wrong between the reward model, the rewards that ask it, and the runtime: one sentence each."""
    model, reward = config.reward.model, config.reward
    is_asked = REWARD_MODEL in (reward.components or (reward.function,))
    if model is None:
        if is_asked and config.samples:
            key = "reward.components" if reward.components else "reward.function"
            yield f"{key} names {REWARD_MODEL}, but there is none: set reward.model.engine.model={{path: ..., model_type: reward_model}}."
        return
    engine = model.engine
    if not is_asked:
        yield f"reward.model is set, but neither reward.function nor reward.components names {REWARD_MODEL}: name it, or remove the model."
    if engine.model.model_type != "reward_model":
        yield f"reward.model.engine.model.model_type is {engine.model.model_type}: set it to reward_model."
    if engine.model.path is None:
        yield "reward.model.engine.model.path is not set: a reward model from scratch knows nothing. Train one with task=rm."
    if engine.lora.is_on:
        yield "reward.model.engine.lora is set, but a reward model is frozen: merge the adapter into its model and remove it."
    if model.num_workers % engine.replica_size:
        yield (
            f"reward.model.num_workers is {model.num_workers}, but the layout of reward.model.engine spreads one copy of the model over "
            f"{engine.replica_size} ranks: set it to a multiple of {engine.replica_size}."
        )
    if config.runtime.kind == "inline" and model.num_workers > 1:
        yield f"reward.model.num_workers is {model.num_workers}, but runtime.kind is inline, which runs one process: use ray."
    if config.runtime.kind == "inline" and config.loop != "sync":
        yield (
            f"reward.model is set and loop is {config.loop}, which scores while the actor trains, but runtime.kind is inline, which runs "
            "both in one process: use runtime.kind=ray, or loop=sync."
        )
