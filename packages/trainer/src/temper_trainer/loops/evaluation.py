"""Held-out problems: completions under given sampling, scored by the run's reward."""

from collections.abc import Sequence
from dataclasses import dataclass

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.loops.turns import all_tokens, complete
from temper_trainer.metrics.log import SampleRow
from temper_trainer.types import SamplingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of the held-out problems under one sampling."""

    name: str
    """greedy or sampled."""
    mean_reward: float
    """Over problems that could be scored; for a 0/1 reward, the share solved."""
    num_scored: int
    """How many could be scored."""
    rows: Sequence[SampleRow]
    """Some completions to look at."""


def evaluate(rooms: Rooms, *, name: str, sampling: SamplingConfig) -> Evaluation:
    """One completion of every held-out problem; the draws are the same at every evaluation of a run."""
    prompts, run = rooms.eval_prompts, rooms.config.run
    requests = [
        SamplingRequest(request_id=i, prompt_tokens=p.tokens, sampling=sampling, seed=derive_seed(run.seed, f"eval-{name}", i))
        for i, p in enumerate(prompts)
    ]
    talks, _ = complete(rooms, requests, prompts=prompts)
    texts = [rooms.tokenizer.decode(talk.tokens, skip_special_tokens=True) for talk in talks]
    scores = rooms.scorer.score(list(zip(prompts, texts, strict=True)), tokens=all_tokens(talks))
    rewards = [score.reward + talk.reward for score, talk in zip(scores, talks, strict=True) if score.reward is not None]
    rows = [
        SampleRow(prompt=p.text, completion=t, answer=p.answer, reward=s.reward if s.reward is not None else float("nan"))
        for p, t, s in list(zip(prompts, texts, scores, strict=True))[: run.num_table_rows]
    ]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    return Evaluation(name=name, mean_reward=mean, num_scored=len(rewards), rows=rows)


def evaluate_all(rooms: Rooms, *, step: int, moment: str) -> dict[str, float]:
    """Greedy, and sampled where asked; said, logged and returned by metric name."""
    run, found = rooms.config.run, {}
    if not rooms.eval_prompts:
        return {}
    kinds = [("greedy" if run.eval_sampling.temperature == 0 else "eval", run.eval_sampling)]
    if run.eval_sampled:
        kinds.append(("sampled", rooms.config.sampling))
    for name, sampling in kinds:
        result = evaluate(rooms, name=name, sampling=sampling)
        found[f"eval/{name}/reward"] = result.mean_reward
        if name == kinds[0][0]:
            rooms.log.show_samples(step, result.rows)
    numbers = ", ".join(f"{name.split('/')[1]} {value:.3f}" for name, value in found.items())
    function = rooms.config.reward.function
    rooms.log.say(f"{moment}: held-out {function} over {len(rooms.eval_prompts)} problems never trained on: {numbers}")
    rooms.log.log(step, found, phase="eval")
    return found
