"""How old the weights were that made what a step trains on."""

from collections.abc import Sequence

from temper_engine_api.errors import BatchError
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.types import Completion, Rollout


def max_staleness(config: TrainerConfig) -> int:
    """Updates that a completion's oldest weights may be behind the published ones."""
    return {"sync": 0, "one_step_off": 1, "async": config.asynchrony.max_staleness}[config.loop]


def check_staleness(
    completions: Sequence[Completion], *, config: TrainerConfig, version: int
) -> None:
    """Refuse completions of weights that the loop does not allow.

    Raises:
        BatchError: naming the versions.
    """
    oldest = version - max_staleness(config)
    wrong = [c for c in completions if not oldest <= c.weight_version <= version]
    if wrong:
        raise BatchError(
            f"{len(wrong)} completions carry weights {wrong[0].weight_version}, but {version} are published and loop {config.loop} allows "
            f"none before {oldest}."
        )


def staleness_metrics(rollouts: Sequence[Rollout], *, version: int) -> dict[str, float]:
    """Updates between the weights that are trained now and those that drew the tokens: by token, and of the oldest token.

    Args:
        rollouts: of a step.
        version: published when the step begins to train.
    """
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    ages = [
        version - drawn
        for c in completions
        for drawn in (c.token_versions or (c.weight_version,) * len(c.tokens))
    ]
    mixed = sum(bool(c.token_versions) for c in completions)
    return {
        "staleness/mean": sum(ages) / max(len(ages), 1),
        "staleness/max": float(max((version - c.weight_version for c in completions), default=0)),
        "staleness/mixed_share": mixed / max(len(completions), 1),
    }
