"""Call the reward functions on the first row of each data source, for `--check`."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DatasetsSource
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.data_files import read_first_rows
from temper_trainer.data.rows import Row
from temper_trainer.reward.registry import find_rewards, get_function_config, resolve_reward
from temper_trainer.reward.reward_calls import CallRound, RewardCall
from temper_trainer.reward.reward_threads import ThreadScoring
from temper_trainer.types import Prompt


def check_reward_calls(config: TrainerConfig) -> None:
    """Check that each reward function scores the reference answer of the first row.

    The answer takes the place of a completion, and the prompt has neither template nor tokens.
    Judges and reward models are left out. A function that loads a model or has side effects is left
    out if its attribute ``call_in_check`` is False.

    Raises:
        ConfigError: If a call raises, takes longer than reward.timeout_s, or returns no finite
            number. The message describes the failure as a run would.
    """
    if config.generates_completions and (problems := list(_find_problems(config))):
        raise ConfigError("\n".join(problems))


def _find_problems(config: TrainerConfig) -> Iterator[str]:
    called: set[str] = set()
    for key, source in config.data.sources.items():
        if isinstance(source, DatasetsSource):
            continue
        for row in read_first_rows(replace(source, max_rows=1), kind=None).rows:
            for name in find_rewards(config.reward, [row.reward]):
                if name == REWARD_MODEL or name in config.reward.judges or name in called:
                    continue
                called.add(name)
                if problem := _call(config.reward, name, row):
                    yield f"{key}: the reward {name} of the first row failed: {problem}"


def _call(config: RewardConfig, name: str, row: Row) -> str | None:
    """Return why a reward function gives no reward for a row, or None."""
    function = get_function_config(config, name)
    reward = resolve_reward(function)
    if not getattr(reward, "call_in_check", True):
        return None
    call = RewardCall(function=reward, arguments=dict(function.arguments))
    prompt = Prompt(
        prompt_id=row.row_id,
        text=row.question,
        tokens=(0,),
        answer=row.answer,
        question=row.question,
        location=row.location,
        extra=row.extra,
        route=row.route,
        reward=row.reward,
        category=row.category,
    )
    scoring = ThreadScoring(call, timeout_s=config.timeout_s)
    calls = CallRound(num_items=1, max_failures=1, timeout_s=config.timeout_s)
    item = (prompt, row.answer)
    outcome = asyncio.run(scoring.score(item, calls=calls, priority=(0, 0))).redact()
    if outcome.kind is None:
        return None
    return f"{outcome.kind}: {outcome.message}\n{outcome.trace}".rstrip()
