"""Score completions of held-out prompts, or write them to a file, without training on them."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from temper_trainer.config.reward import RewardConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config.run_folder_checks import make_partial_path
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.rows import Row
from temper_trainer.loops.rollouts.multi_turn import measure_turns
from temper_trainer.loops.rollouts.scored_rollouts import ScoredRollout, run_scored_rollouts
from temper_trainer.loops.run.run_components import EvalSet, RunComponents
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.evaluation_estimators import (
    ProblemResult,
    group_by_category,
    measure_problems,
)
from temper_trainer.metrics.headline import format_reward
from temper_trainer.metrics.run_log import SampleRow
from temper_trainer.progress import track_progress
from temper_trainer.reward.builtin_rewards import ANSWER_EXTRACTORS
from temper_trainer.reward.registry import find_rewards, get_function_config
from temper_trainer.types import Prompt, SamplingRequest


def _sample(
    components: RunComponents,
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingConfig,
    purpose: str,
    num_completions: int,
) -> list[ScoredRollout]:
    """Sample and score ``num_completions`` per prompt, prompt after prompt."""
    seed = components.config.run.seed
    requests = [
        SamplingRequest(
            request_id=i * num_completions + j,
            prompt_tokens=prompt.tokens,
            sampling=sampling,
            # The seed is the same at every step, so that evaluations of a run are comparable. It
            # does not depend on num_completions either, so a larger number keeps the first
            # completions.
            seed=derive_seed(seed, purpose, i) if j == 0 else derive_seed(seed, purpose, i, j),
        )
        for i, prompt in enumerate(prompts)
        for j in range(num_completions)
    ]
    repeated = [prompt for prompt in prompts for _ in range(num_completions)]
    return components.scheduler.run(run_scored_rollouts(components, requests, prompts=repeated))


def _average(rewards: Sequence[float | None]) -> tuple[float, int]:
    """Return the mean of the rewards that are known, NaN if there are none, and their number."""
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else float("nan"), len(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of the held-out prompts with one sampling configuration."""

    problems: Sequence[ProblemResult]
    """Results in prompt order."""
    num_completions: int
    """Completions per prompt."""
    rows: Sequence[SampleRow]
    """Some completions, for the sample table."""


def evaluate(
    components: RunComponents,
    prompts: Sequence[Prompt],
    *,
    name: str,
    sampling: SamplingConfig,
) -> Evaluation:
    """Sample and score completions for each held-out prompt.

    Args:
        components: Components of the run.
        prompts: Held-out prompts.
        name: Name of the evaluation, such as ``greedy`` or ``math500-greedy``; used in the seeds.
        sampling: How completions are sampled; one per prompt if greedily.
    """
    run = components.config.run
    num_completions = 1 if sampling.temperature == 0 else run.eval_num_completions
    with track_progress(f"{name} evaluation"):
        completions = _sample(
            components,
            prompts,
            sampling=sampling,
            purpose=f"eval-{name}",
            num_completions=num_completions,
        )
    rows = [
        SampleRow(
            prompt=each.prompt.text,
            completion=each.text,
            answer=each.prompt.answer,
            reward=float("nan") if each.reward is None else each.reward,
        )
        # The first completion for each of the first prompts.
        for each in islice(completions, 0, run.num_table_rows * num_completions, num_completions)
    ]
    extract_answer = _find_answer_extractor(
        components.config, rewards={prompt.reward for prompt in prompts}
    )
    problems = [
        ProblemResult(
            rewards=tuple(each.reward for each in completions[i : i + num_completions]),
            answers=None
            if extract_answer is None
            else tuple(extract_answer(each.text) for each in completions[i : i + num_completions]),
            category=completions[i].prompt.category,
        )
        for i in range(0, len(completions), num_completions)
    ]
    return Evaluation(problems=problems, num_completions=num_completions, rows=rows)


def _find_answer_extractor(
    config: TrainerConfig, *, rewards: Collection[str]
) -> Callable[[str], str | None] | None:
    """Return the function that reads the answer of a completion for maj@k; None if there is none.

    With several reward functions, ``run.eval_answer_pattern`` must say what the answer is.

    Args:
        config: The configuration.
        rewards: Reward names for the held-out prompts.
    """
    if config.run.eval_answer_pattern is None:
        parts = find_rewards(config.reward, rewards)
        if len(parts) != 1 or any(map(config.reward.is_sum, rewards)):
            return None
        return ANSWER_EXTRACTORS.get(get_function_config(config.reward, parts[0]).function)
    pattern = re.compile(config.run.eval_answer_pattern)

    def extract(text: str) -> str | None:
        matches = list(pattern.finditer(text))
        answer: str | None = matches[-1][1 if pattern.groups else 0] if matches else None
        return answer

    return extract


def evaluate_all(components: RunComponents, *, step: int, label: str) -> dict[str, float]:
    """Evaluate all held-out prompts, with all sampling configurations of evaluation.

    They are ``run.eval_sampling``, and with ``run.eval_sampled`` that of training.

    Args:
        components: Components of the run.
        step: Number of completed steps.
        label: Start of the printed lines, such as ``before RL``.

    Returns:
        The logged metrics; empty without held-out prompts.
    """
    log = components.log
    metrics: dict[str, float] = {}
    for i, (name, eval_set) in enumerate(components.eval_sets.items()):
        description, measured = _evaluate_set(
            components, eval_set, name=name, table_step=step if i == 0 else None
        )
        log.print_line(f"{label}{f', {name}' if name else ''}: {description}")
        metrics |= {
            f"eval/{name}/{key}" if name else f"eval/{key}": measured[key] for key in measured
        }
    if metrics:
        # The lines above have the results.
        log.log_metrics(step, metrics, phase="eval", prints_line=False)
    return metrics


def _evaluate_set(
    components: RunComponents, eval_set: EvalSet, *, name: str, table_step: int | None
) -> tuple[str, dict[str, float]]:
    """Return a description of the results, and the metrics without the set's name.

    Args:
        components: Components of the run.
        eval_set: The held-out prompts.
        name: Name of the set; empty for ``data.eval``.
        table_step: Show some completions for this step; None shows none.
    """
    run = components.config.run
    kinds = [("greedy" if run.eval_sampling.temperature == 0 else "eval", run.eval_sampling)]
    if run.eval_sampled:
        kinds.append(("sampled", components.config.sampling))
    metrics: dict[str, float] = {}
    results: list[str] = []
    for i, (kind, sampling) in enumerate(kinds):
        evaluation = evaluate(
            components,
            eval_set.prompts,
            name=f"{name}-{kind}" if name else kind,
            sampling=sampling,
        )
        for category, problems in group_by_category(evaluation.problems).items():
            measured = measure_problems(
                problems,
                num_completions=evaluation.num_completions,
                solved_reward=run.eval_solved_reward,
            )
            prefix = f"{kind}/{category}" if category else kind
            metrics |= {f"{prefix}/{key}": value for key, value in measured.items()}
            # The console has one number for the full set; the metrics also have the categories.
            if not category:
                results.append(f"{kind} {_describe_result(measured, evaluation=evaluation)}")
        # One table per set is enough to see what the model writes.
        if i == 0 and table_step is not None:
            components.log.show_samples(table_step, evaluation.rows, kind="held-out")
    problems_text = _describe_problems(
        _describe_rewards(components.config.reward, prompts=eval_set.prompts),
        num_problems=len(eval_set.prompts),
        num_trained=eval_set.num_trained,
    )
    return f"{problems_text}: {', '.join(results)}", metrics


def _describe_result(metrics: Mapping[str, float], *, evaluation: Evaluation) -> str:
    """Return the mean reward with its interval, pass@k and maj@k of all completions, as text."""
    num_completions = evaluation.num_completions
    names = {"reward": "" if num_completions == 1 else f"mean@{num_completions} "}
    if num_completions > 1:
        names |= {
            f"{name}_at_{num_completions}": f"{name}@{num_completions} " for name in ("pass", "maj")
        }
    parts = []
    for key, title in names.items():
        if key in metrics:
            interval = f" +- {metrics[ci]:.3f}" if (ci := f"{key}_ci95") in metrics else ""
            parts.append(f"{title}{metrics[key]:.3f}{interval}")
    text = " ".join(parts)
    # Say so if the mean leaves out problems.
    num_scored = sum(
        any(reward is not None for reward in problem.rewards) for problem in evaluation.problems
    )
    if num_scored < len(evaluation.problems):
        text += f" (over {num_scored} that could be scored)"
    return text


def _describe_rewards(config: RewardConfig, *, prompts: Sequence[Prompt]) -> str:
    """Return the names of the rewards of some prompts; a sum without a name as its parts."""
    names = dict.fromkeys(prompt.reward for prompt in prompts)
    return " and ".join(name or format_reward(config.get_parts()) for name in names)


def _describe_problems(rewards: str, *, num_problems: int, num_trained: int | None) -> str:
    """Describe what is evaluated; "held-out" only if the training data was compared.

    Args:
        rewards: Names of the rewards.
        num_problems: Number of held-out prompts.
        num_trained: How many of them are also in the training data; None if they were not
            compared: nothing is trained, or ``data.streaming`` is true.
    """
    problems = f"{rewards} over {num_problems} problems"
    if num_trained is None:
        return problems
    if num_trained > 0:
        return f"{problems}, {num_trained} of them in the training data too"
    return f"held-out {problems} never trained on"


def count_trained_prompts(
    prompts: Sequence[Prompt], *, rows: Sequence[Row], trained: Iterable[Row]
) -> int:
    """Return how many prompts have a question that is also trained on, ignoring white space.

    Args:
        prompts: Prompts made from ``rows``; some rows may have been dropped.
        rows: Rows of the held-out source.
        trained: Rows of all sources that this run trains on.
    """
    questions = {_normalize_question(row) for row in trained}
    trained_ids = {row.row_id for row in rows if _normalize_question(row) in questions}
    return sum(prompt.prompt_id in trained_ids for prompt in prompts)


def _normalize_question(row: Row) -> tuple[str, ...]:
    messages = (
        [row.prompt]
        if isinstance(row.prompt, str)
        else [f"{message.role}: {message.content}" for message in row.prompt]
    )
    return tuple(" ".join(text.split()) for text in messages)


def generate(components: RunComponents, *, folder: RunFolder) -> dict[str, float]:
    """Write ``generate.num_completions`` completions per prompt to ``generate.file``.

    The file has one JSON object per line, in prompt order. It is renamed to its final
    name when it is complete.

    Returns:
        The logged metrics.
    """
    config, log = components.config, components.log
    num_completions = config.generate.num_completions
    set_names = [
        name
        for name, eval_set in components.eval_sets.items()
        for _ in range(len(eval_set.prompts) * num_completions)
    ]
    prompts = [
        prompt
        for eval_set in components.eval_sets.values()
        for prompt in eval_set.prompts
        for _ in range(num_completions)
    ]
    completions = _sample(
        components, prompts, sampling=config.sampling, purpose="generate", num_completions=1
    )
    lines = [
        json.dumps(
            # Prompt ids are unique within a set only.
            ({"set": set_name} if set_name else {})
            | {
                "prompt_id": prompt.prompt_id,
                "prompt": prompt.text,
                "completion": rollout.text,
                "answer": prompt.answer,
                "reward": rollout.reward,
                "tokens": [list(each.tokens) for each in conversation.completions],
                "logprobs": [list(each.rollout_logprobs) for each in conversation.completions],
                "finish_reason": "failed"
                if conversation.failure is not None
                else conversation.completions[-1].finish_reason.value,
            },
            ensure_ascii=False,
        )
        for set_name, rollout in zip(set_names, completions, strict=True)
        for prompt, conversation in [(rollout.prompt, rollout.conversation)]
    ]
    path = folder.root / config.generate.file
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = make_partial_path(path)
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(path)
    mean_reward, num_scored = _average([each.reward for each in completions])
    metrics = {
        "generate/completions": float(len(lines)),
        "generate/reward": mean_reward,
        "generate/failed": float(len(lines) - num_scored),
    }
    if config.all_environments:
        metrics |= measure_turns([each.conversation for each in completions])
    log.log_metrics(0, metrics, phase="generate")
    log.print_line(
        f"{len(lines)} completions of {len(prompts) // num_completions} prompts are in {path}"
    )
    return metrics
