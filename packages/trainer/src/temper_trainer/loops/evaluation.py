"""Held-out problems: completions under given sampling, scored by the run's reward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.data.rows import Row
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.loops.turns import all_tokens, complete, rewards_of
from temper_trainer.metrics.run_log import SampleRow
from temper_trainer.progress import track_progress
from temper_trainer.types import Prompt, SamplingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of the held-out problems under one sampling."""

    name: str
    """greedy or sampled."""
    mean_reward: float
    """Over problems that could be scored; for a 0/1 reward, the share solved."""
    num_scored: int
    """How many could be scored; the others' reward raised, timed out or was not finite."""
    rows: Sequence[SampleRow]
    """Some completions to look at."""


def evaluate(rooms: Rooms, *, name: str, sampling: SamplingConfig) -> Evaluation:
    """One completion of every held-out problem; the draws are the same at every evaluation of a run."""
    prompts, run = rooms.eval_prompts, rooms.config.run
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=p.tokens,
            sampling=sampling,
            seed=derive_seed(run.seed, f"eval-{name}", i),
        )
        for i, p in enumerate(prompts)
    ]
    with (
        track_progress(f"{name} evaluation"),
        track_progress(
            "completions", total=len(requests) if rooms.config.environment is None else None
        ),
    ):
        talks, _ = complete(rooms, requests, prompts=prompts)
    texts = [rooms.tokenizer.decode(talk.tokens, skip_special_tokens=True) for talk in talks]
    scores = rooms.scorer.score(list(zip(prompts, texts, strict=True)), tokens=all_tokens(talks))
    found = rewards_of(scores, talks=talks)
    rewards = [reward for reward in found if reward is not None]
    rows = [
        SampleRow(
            prompt=p.text,
            completion=t,
            answer=p.answer,
            reward=float("nan") if reward is None else reward,
        )
        for p, t, reward in list(zip(prompts, texts, found, strict=True))[: run.num_table_rows]
    ]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    return Evaluation(name=name, mean_reward=mean, num_scored=len(rewards), rows=rows)


def evaluate_all(rooms: Rooms, *, step: int, moment: str) -> dict[str, float]:
    """Greedy, and sampled where asked; said, logged and returned by metric name."""
    run, found, said = rooms.config.run, dict[str, float](), list[str]()
    if not rooms.eval_prompts:
        return {}
    kinds = [("greedy" if run.eval_sampling.temperature == 0 else "eval", run.eval_sampling)]
    if run.eval_sampled:
        kinds.append(("sampled", rooms.config.sampling))
    for name, sampling in kinds:
        result = evaluate(rooms, name=name, sampling=sampling)
        num_failed = len(rooms.eval_prompts) - result.num_scored
        found |= {
            f"eval/{name}/reward": result.mean_reward,
            f"eval/{name}/failed": float(num_failed),
        }
        said.append(
            f"{name} {result.mean_reward:.3f}"
            + (f" (over {result.num_scored} that could be scored)" if num_failed else "")
        )
        if name == kinds[0][0]:
            rooms.log.show_samples(step, result.rows)
    rooms.log.print_line(f"{moment}: {_what(rooms)}: {', '.join(said)}")
    rooms.log.log_metrics(step, found, phase="eval")
    return found


def _what(rooms: Rooms) -> str:
    """Held-out only where that was seen."""
    scored = f"{rooms.config.reward.function} over {len(rooms.eval_prompts)} problems"
    if rooms.num_eval_trained is None:
        return scored
    if rooms.num_eval_trained > 0:
        return f"{scored}, {rooms.num_eval_trained} of them in the training data too"
    return f"held-out {scored} never trained on"


def trained_among(prompts: Sequence[Prompt], *, rows: Sequence[Row], trained: Iterable[Row]) -> int:
    """How many of these prompts have a question that is trained on as well, up to white space.

    Args:
        prompts: made from rows, some of which may have been dropped.
        rows: where they come from.
        trained: rows of everything that this run trains on.
    """
    questions = {_question(row) for row in trained}
    both = {row.row_id for row in rows if _question(row) in questions}
    return sum(prompt.prompt_id in both for prompt in prompts)


def _question(row: Row) -> tuple[str, ...]:
    asked = (
        [row.prompt]
        if isinstance(row.prompt, str)
        else [f"{message.role}: {message.content}" for message in row.prompt]
    )
    return tuple(" ".join(text.split()) for text in asked)
