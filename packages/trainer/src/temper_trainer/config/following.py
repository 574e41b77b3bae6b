"""Settings whose keys are fixed and whose implementation follows: refused with a sentence, never ignored."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from temper_trainer.config.run import TrainerConfig

FOLLOWING: tuple[tuple[str, Callable[["TrainerConfig"], bool]], ...] = (
    ("algorithm.reweight", lambda config: config.algorithm.reweight is not None),
)


def not_yet(config: "TrainerConfig") -> Iterator[str]:
    """One sentence for each setting that this release reads but can't act on."""
    for what, is_asked in FOLLOWING:
        if is_asked(config):
            yield f"{what} is part of the configuration, but its implementation follows in a later release: remove it for now."
