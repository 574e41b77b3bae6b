"""Settings whose keys are fixed and whose implementation follows: refused with a sentence, never ignored."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from temper_trainer.config.shaping import ShapingConfig

if TYPE_CHECKING:
    from temper_trainer.config.run import TrainerConfig

FOLLOWING: tuple[tuple[str, Callable[["TrainerConfig"], bool]], ...] = (
    (
        "algorithm.advantage with remax, opo, gpg or gdpo",
        lambda config: config.algorithm.advantage in ("remax", "opo", "gpg", "gdpo"),
    ),
    ("algorithm.policy_loss other than ppo", lambda config: config.algorithm.policy_loss != "ppo"),
    ("algorithm.entropy_target", lambda config: config.algorithm.entropy_target is not None),
    ("algorithm.dynamic_sampling", lambda config: config.algorithm.dynamic_sampling is not None),
    ("algorithm.rollout_correction", lambda config: config.algorithm.rollout_correction is not None),
    ("algorithm.reweight", lambda config: config.algorithm.reweight is not None),
    ("batching.tokens_per_update", lambda config: config.batching.tokens_per_update is not None),
    ("data.streaming", lambda config: config.data.streaming),
    ("data.train.messages_key", lambda config: config.data.train.messages_key is not None),
    ("reward.components", lambda config: bool(config.reward.components)),
    ("reward.shaping", lambda config: config.reward.shaping != ShapingConfig()),
    ("teachers", lambda config: bool(config.teachers)),
    ("environment", lambda config: config.environment is not None),
)


def not_yet(config: "TrainerConfig") -> Iterator[str]:
    """One sentence for each setting that this release reads but can't act on."""
    for what, is_asked in FOLLOWING:
        if is_asked(config):
            yield f"{what} is part of the configuration, but its implementation follows in a later release: remove it for now."
