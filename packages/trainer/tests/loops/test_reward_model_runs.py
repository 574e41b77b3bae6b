"""A reward model that one run has trained is the reward of the next."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from temper_engine_api.errors import ConfigError
from temper_trainer.loops import RunResult
from temper_trainer.loops.rl_loop import StepLoop
from temper_trainer.loops.rl_step import StepResult
from temper_trainer.types import Rollout

from .test_task_runs import TINY, pairs, write

run_step = StepLoop.run_step

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of a reward model that likes good answers, and the questions it knows."""
    from temper_trainer.config_loading import load
    from temper_trainer.loops import train

    folder = tmp_path_factory.mktemp("rm")
    settings = [
        *TINY,
        "task=rm",
        pairs(folder),
        "actor.engine.model.model_type=reward_model",
        "run.total_steps=20",
    ]
    loaded = load([*settings, f"run.dir={folder / 'run'}"])
    result = train(loaded.config, digest=loaded.digest, write_config=lambda _: None)
    questions = write(
        folder / "questions.jsonl",
        [{"question": f"{a} + {b}", "answer": str(a + b)} for a in (1, 2) for b in (3, 4)],
    )
    return result.directory, questions


def settings(trained: tuple[Path, str], *more: str) -> tuple[str, ...]:
    folder, questions = trained
    return (
        questions,
        *(setting for setting in TINY if "tokenizer" not in setting),
        "data.tokenizer.kind=pretrained",
        f"data.tokenizer.path={folder / 'tokenizer'}",
        f"reward.model.engine.model={{path: {folder / 'huggingface'}, model_type: reward_model}}",
        "reward.model.engine.precision.compute=fp32",
        "reward.model.engine.device=cpu",
        "algorithm.group_size=8",
        "batching.prompts_per_step=4",
        "sampling.max_tokens=4",
        "run.table_every=0",
        "run.save_model=false",
        *more,
    )


def scores_of(model: Path, rollouts: Sequence[Rollout]) -> list[float]:
    """Score prompt and completion with transformers, one sequence at a time."""
    judge = AutoModelForTokenClassification.from_pretrained(model)
    with torch.no_grad():
        rows = [
            torch.tensor([[*rollout.prompt.tokens, *rollout.completion.tokens]])
            for rollout in rollouts
        ]
        return [float(judge(input_ids=row).logits[0, -1, 0]) for row in rows]


@pytest.fixture
def step_results(monkeypatch: pytest.MonkeyPatch) -> list[StepResult]:
    """The results of all steps of the test's runs, in their order."""
    results: list[StepResult] = []

    def watched(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        results.append(run_step(loop, step=step, **given))  # type: ignore[arg-type]
        return results[-1]

    monkeypatch.setattr(StepLoop, "run_step", watched)
    return results


def test_policy_learns_what_the_reward_model_prefers(
    run: Run, rows: Rows, tmp_path: Path, trained: tuple[Path, str], step_results: list[StepResult]
) -> None:
    run(
        tmp_path / "run",
        *settings(trained, "reward.function=reward_model", "run.total_steps=12"),
        base=(),
    )
    rewards = [rollout.reward for rollout in step_results[0].rollouts]
    assert rewards == pytest.approx(
        scores_of(trained[0] / "huggingface", step_results[0].rollouts), rel=1e-4, abs=1e-5
    )
    assert len(rewards) == 32
    means = [row["reward/mean"] for row in rows(tmp_path / "run")]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.5


def test_reward_model_can_be_one_of_several_rewards(
    run: Run, tmp_path: Path, trained: tuple[Path, str], step_results: list[StepResult]
) -> None:
    both = "reward.components={exact_match: 1.0, reward_model: 0.25}"
    run(tmp_path / "run", *settings(trained, both, "run.total_steps=1"), base=())
    (result,) = step_results
    rollouts = result.rollouts
    expected = scores_of(trained[0] / "huggingface", rollouts)
    assert [rollout.components[1] for rollout in rollouts] == pytest.approx(
        expected, rel=1e-4, abs=1e-5
    )
    assert [rollout.reward for rollout in rollouts] == pytest.approx(
        [r.components[0] + 0.25 * r.components[1] for r in rollouts]
    )


def test_reward_model_with_another_tokenizer_is_refused(
    run: Run, tmp_path: Path, trained: tuple[Path, str]
) -> None:
    own = (
        "data.tokenizer.kind=word_level",
        "data.tokenizer.path=null",
        "reward.function=reward_model",
        "run.total_steps=1",
    )
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        run(tmp_path / "run", *settings(trained, *own), base=())


# Nightly: test_ray_runs.py compares Ray with one process, and this file runs reward models inline.
@pytest.mark.nightly
@pytest.mark.bitwise
@pytest.mark.ray
def test_reward_model_on_ray_gives_the_metrics_of_one_process(
    run: Run, rows: Rows, tmp_path: Path, trained: tuple[Path, str]
) -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )
    two = settings(trained, "reward.function=reward_model", "run.total_steps=2")
    run(tmp_path / "inline", *two, base=())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(tmp_path / "ray", *two, "runtime.kind=ray", base=())
    finally:
        ray.shutdown()
    assert rows(tmp_path / "ray") == rows(tmp_path / "inline")


# Nightly: test_rl_loop.py runs loop=async, and this file runs reward models on Ray.
@pytest.mark.nightly
@pytest.mark.ray
def test_reward_model_on_ray_scores_an_asynchronous_run(
    run: Run, tmp_path: Path, trained: tuple[Path, str], step_results: list[StepResult]
) -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )
    three = settings(trained, "reward.function=reward_model", "run.total_steps=3", "loop=async")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(tmp_path / "run", *three, "runtime.kind=ray", base=())
    finally:
        ray.shutdown()
    rollouts = [rollout for result in step_results for rollout in result.rollouts]
    assert len(rollouts) == 3 * 32
    assert [rollout.reward for rollout in rollouts] == pytest.approx(
        scores_of(trained[0] / "huggingface", rollouts), rel=1e-4, abs=1e-5
    )
