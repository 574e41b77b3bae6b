"""Score completions of held-out prompts, or write them to a file, without training on them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.data.rows import Row
from temper_trainer.loops.run_components import RunComponents
from temper_trainer.loops.run_folder import RunFolder
from temper_trainer.loops.sampling import ScoredCompletions, complete_and_score
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.metrics.run_log import SampleRow
from temper_trainer.progress import track_progress
from temper_trainer.types import Prompt, SamplingRequest


def _sample_once(
    components: RunComponents, prompts: Sequence[Prompt], *, sampling: SamplingConfig, purpose: str
) -> ScoredCompletions:
    """Sample one completion of each prompt and score it."""
    seed = components.config.run.seed
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=prompt.tokens,
            sampling=sampling,
            # Without the step: each evaluation of a run draws with the same seeds.
            seed=derive_seed(seed, purpose, i),
        )
        for i, prompt in enumerate(prompts)
    ]
    return complete_and_score(components, requests, prompts=prompts)


def _average(rewards: Sequence[float | None]) -> tuple[float, int]:
    """Return the mean of the rewards that are known, NaN if there are none, and their number."""
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else float("nan"), len(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards of the held-out prompts with one sampling configuration."""

    mean_reward: float
    """Mean over prompts that could be scored; with a 0/1 reward, the fraction that was solved."""
    num_scored: int
    """Number of prompts that could be scored."""
    rows: Sequence[SampleRow]
    """Some of the completions, for the table of samples."""


def evaluate(components: RunComponents, *, name: str, sampling: SamplingConfig) -> Evaluation:
    """Score one completion of each held-out prompt.

    Args:
        components: Components of the run.
        name: Name of the evaluation, such as ``greedy``; part of the seeds.
        sampling: How completions are sampled.
    """
    prompts = components.eval_prompts
    with track_progress(f"{name} evaluation"):
        completions = _sample_once(components, prompts, sampling=sampling, purpose=f"eval-{name}")
    scored = list(zip(prompts, completions.texts, completions.rewards, strict=True))
    rows = [
        SampleRow(
            prompt=prompt.text,
            completion=text,
            answer=prompt.answer,
            reward=float("nan") if reward is None else reward,
        )
        for prompt, text, reward in scored[: components.config.run.num_table_rows]
    ]
    mean_reward, num_scored = _average(completions.rewards)
    return Evaluation(mean_reward=mean_reward, num_scored=num_scored, rows=rows)


def evaluate_all(components: RunComponents, *, step: int, label: str) -> dict[str, float]:
    """Evaluate with ``run.eval_sampling``, and with the training's sampling if configured.

    Args:
        components: Components of the run.
        step: Number of completed steps.
        label: Start of the printed line, such as ``before RL``.

    Returns:
        The logged metrics; empty without held-out prompts.
    """
    run, log = components.config.run, components.log
    if not components.eval_prompts:
        return {}
    kinds = [("greedy" if run.eval_sampling.temperature == 0 else "eval", run.eval_sampling)]
    if run.eval_sampled:
        kinds.append(("sampled", components.config.sampling))
    metrics: dict[str, float] = {}
    results: list[str] = []
    for i, (name, sampling) in enumerate(kinds):
        evaluation = evaluate(components, name=name, sampling=sampling)
        # Logged and printed: a mean over fewer problems must not pass for one over all.
        num_failed = len(components.eval_prompts) - evaluation.num_scored
        metrics |= {
            f"eval/{name}/reward": evaluation.mean_reward,
            f"eval/{name}/failed": float(num_failed),
        }
        note = f" (over {evaluation.num_scored} that could be scored)" if num_failed else ""
        results.append(f"{name} {evaluation.mean_reward:.3f}{note}")
        if i == 0:
            log.show_samples(step, evaluation.rows)
    problems = _describe_problems(
        components.config.reward.function,
        num_problems=len(components.eval_prompts),
        num_trained=components.num_eval_trained,
    )
    log.print_line(f"{label}: {problems}: {', '.join(results)}")
    log.log_metrics(step, metrics, phase="eval")
    return metrics


def _describe_problems(reward_function: str, *, num_problems: int, num_trained: int | None) -> str:
    """Describe what is evaluated; "held-out" only if the training data was compared.

    Args:
        reward_function: Name of the reward function.
        num_problems: Number of held-out prompts.
        num_trained: How many of them are also in the training data; None if nothing is trained.
    """
    problems = f"{reward_function} over {num_problems} problems"
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
        prompts: Prompts made from ``rows``, some of which may have been dropped.
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
    """Write ``generate.num_completions`` completions of each prompt to ``generate.file``.

    The file has one JSON object per line, in the order of the prompts. It is renamed to its final
    name when it is complete.

    Returns:
        The logged metrics.

    Raises:
        ConfigError: If the file exists.
    """
    config, log = components.config, components.log
    path = folder.root / config.generate.file
    if path.exists():
        raise ConfigError(
            f"{path} already exists and is never overwritten: choose another generate.file or "
            "run.dir."
        )
    num_completions = config.generate.num_completions
    prompts = [prompt for prompt in components.eval_prompts for _ in range(num_completions)]
    completions = _sample_once(components, prompts, sampling=config.sampling, purpose="generate")
    lines = [
        json.dumps(
            {
                "prompt_id": prompt.prompt_id,
                "prompt": prompt.text,
                "completion": text,
                "answer": prompt.answer,
                "reward": reward,
                "tokens": [list(each.tokens) for each in conversation.completions],
                "logprobs": [list(each.rollout_logprobs) for each in conversation.completions],
                "finish_reason": conversation.completions[-1].finish_reason.value,
            },
            ensure_ascii=False,
        )
        for prompt, conversation, text, reward in zip(
            prompts, completions.conversations, completions.texts, completions.rewards, strict=True
        )
    ]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(path)
    mean_reward, num_scored = _average(completions.rewards)
    metrics = {
        "generate/completions": float(len(lines)),
        "generate/reward": mean_reward,
        "generate/failed": float(len(lines) - num_scored),
    }
    log.log_metrics(0, metrics | completions.turn_metrics, phase="generate")
    log.print_line(
        f"{len(lines)} completions of {len(components.eval_prompts)} prompts are in {path}"
    )
    return metrics
