"""The rewards that data sources and their rows select."""

from collections.abc import Iterable, Iterator

from temper_trainer.config.data import DataConfig
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig
from temper_trainer.reward.registry import list_registered_names
from temper_trainer.settings.import_path import is_import_path


def find_unknown_rewards(config: RewardConfig, rewards: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a sentence for each row that selects an unknown reward.

    An import path comes from its source, which is checked with the configuration.

    Args:
        config: The run's reward configuration.
        rewards: Location and selected reward per row.
    """
    known = {"", *config.defined_names, *list_registered_names()}
    if config.model is not None:
        known.add(REWARD_MODEL)
    for location, reward in rewards:
        if reward not in known and not is_import_path(reward):
            yield (
                f"{location}: the row's reward is {reward!r}, which is not a reward: correct the "
                f"row, or define it. There are {', '.join(sorted(known - {''}))}."
            )


def iterate_selected_rewards(data: DataConfig, reward: RewardConfig) -> Iterator[str]:
    """Yield the configured reward names. Rows of data may select others."""
    yield ""
    for source in (*data.train_sources.values(), *data.eval_sources.values()):
        if source.reward is not None:
            yield source.reward
        if source.reward_key is not None:
            yield from reward.defined_names
