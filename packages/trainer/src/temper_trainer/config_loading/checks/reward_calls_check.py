"""Call the reward functions on the first row of each data source, for `--check`."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DatasetsSource
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig, RewardFunctionConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.data_files import read_first_rows
from temper_trainer.data.rows import Row
from temper_trainer.reward.registry import find_rewards, get_function_config, resolve_reward
from temper_trainer.reward.reward_calls import (
    CallRound,
    Item,
    Outcome,
    PartScoring,
    RewardCall,
)
from temper_trainer.reward.reward_processes import ProcessScoring, call_as_driver
from temper_trainer.reward.reward_threads import ThreadScoring
from temper_trainer.settings.names import is_import_path
from temper_trainer.types import Prompt

logger = logging.getLogger(__name__)


def check_reward_calls(config: TrainerConfig) -> None:
    """Check that each reward function scores the reference answer of the first row.

    The answer takes the place of a completion, and the prompt has neither template nor tokens.
    Judges and reward models are left out. A function that loads a model or has side effects is left
    out if its attribute ``call_in_check`` is False. A warning names a function that gives the
    answer no positive reward.

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
                outcome = _call(config.reward, name, row)
                if outcome.kind is not None:
                    problem = f"{outcome.kind}: {outcome.message}\n{outcome.trace}".rstrip()
                    yield f"{key}: the reward {name} of the first row failed: {problem}"
                elif outcome.reward is not None and outcome.reward <= 0 and row.answer.strip():
                    logger.warning(
                        "%s: the reference answer of the first row, %.80r, gets reward %g from %s: "
                        "check that the function accepts the form of the answers (ignore this if "
                        "completions have another form)",
                        key,
                        row.answer,
                        outcome.reward,
                        name,
                    )


def _call(config: RewardConfig, name: str, row: Row) -> Outcome:
    """Return what a reward function gives for a row; no reward if it must not be called."""
    function = get_function_config(config, name)
    reward = resolve_reward(function)
    if not getattr(reward, "call_in_check", True):
        return Outcome()
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
    return _make_call(config, function, (prompt, row.answer)).redact()


def _make_call(config: RewardConfig, function: RewardFunctionConfig, item: Item) -> Outcome:
    """Make a call with the run's time limit, a user's function in a process that can be killed."""
    if not config.num_workers and is_import_path(function.function):
        return call_as_driver(function, item, timeout_s=config.timeout_s)
    call = RewardCall(function=resolve_reward(function), arguments=dict(function.arguments))
    scoring: PartScoring
    if config.num_workers:
        scoring = ProcessScoring(call, timeout_s=config.timeout_s, num_workers=1)
    else:  # the built-in functions release the GIL
        scoring = ThreadScoring(call, name=function.function, timeout_s=config.timeout_s)
    calls = CallRound(num_items=1, max_failures=1, timeout_s=config.timeout_s)
    with closing(scoring):
        return asyncio.run(scoring.score(item, calls=calls, priority=(0, 0)))
