"""Whole small runs in one process: what they leave, how they resume, what they refuse."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from packages.trainer.tests.loops.conftest import make_run
from temper_engine_api.checkpoint import ManifestInfo, begin_checkpoint, report_part
from temper_engine_api.errors import CheckpointError, ConfigError
from temper_trainer import progress
from temper_trainer.data.rows import DataError
from temper_trainer.loops import RunResult
from temper_trainer.progress import ProgressTask
from temper_trainer.reward.scoring_round import RewardFailureError

Run = Callable[..., RunResult]
TINY = (
    "experiment=quickstart",
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.intermediate_size=64",
    "actor.engine.model.architecture.num_hidden_layers=2",
    "data.train.max_rows=64",
    "data.eval.max_rows=8",
    "run.num_threads=1",
    "run.report=false",
)
Rows = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of four steps, which saves each of them; a save changes no number."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    settings = ("run.report=true", "run.save_every=1", "run.max_ckpt_to_keep=null")
    with pytest.MonkeyPatch.context() as context:
        return make_run(context)(directory, *settings)


def test_run_writes_all_documented_files(full_run: RunResult) -> None:
    result = full_run
    left = {path.name for path in result.directory.iterdir()}
    assert {
        "metrics.jsonl",
        "tensorboard",
        "curves.png",
        "config.yaml",
        "config_origins.yaml",
        "checkpoints",
        "huggingface",
    } <= left
    assert set(result.evaluation) == {
        f"eval/{name}/{what}"
        for name in ("greedy", "sampled")
        for what in ("reward", "reward_ci95", "failed")
    }
    assert (result.directory / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("table_every", "shown"), [("20", [1, 3]), ("2", [1, 2, 3]), ("0", [])])
def test_samples_of_the_first_and_the_last_step_are_written(
    run: Run, tmp_path: Path, table_every: str, shown: list[int]
) -> None:
    short = ("warm_start=null", "data.eval=null", "run.save_model=false", "run.total_steps=3")
    directory = run(tmp_path / "run", *short, f"run.table_every={table_every}").directory
    file = directory / "samples.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    assert [json.loads(line)["step"] for line in lines] == [
        step for step in shown for _ in range(4)
    ]


def test_exported_model_loads_in_transformers_and_generates(full_run: RunResult) -> None:
    directory = str(full_run.directory / "huggingface")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    assert type(model).__name__ == "Qwen2ForCausalLM"
    inputs = tokenizer("Tom has 3 pens.", return_tensors="pt")
    completed = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=2,
        do_sample=False,
    )
    assert completed.shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.bitwise
def test_two_steps_then_two_more_equal_four_bitwise(
    run: Run, rows: Rows, tmp_path: Path, full_run: RunResult
) -> None:
    run(tmp_path / "parts", "run.total_steps=2", "run.save_model=false")
    run(tmp_path / "parts", "run.total_steps=4", "run.resume=auto")
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004",
    ]
    assert rows(tmp_path / "parts") == rows(full_run.directory)
    uninterrupted, parts = (
        load_file(directory / "huggingface" / "model.safetensors")
        for directory in (full_run.directory, tmp_path / "parts")
    )
    assert uninterrupted.keys() == parts.keys()
    assert all(torch.equal(uninterrupted[name], parts[name]) for name in uninterrupted)


def test_weight_deltas_give_the_metrics_of_full_weights_also_after_a_resume(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    # Of weights near 0.02, steps of 1e-5 leave most as they are in bfloat16.
    small = (
        "warm_start=null",
        "data.eval=null",
        "run.save_model=false",
        "actor.engine.precision.compute=bf16",
        "rollout.dtype=bf16",
        "actor.engine.optimizer.lr=1e-5",
        "rollout.canary_tolerance=0.05",
    )
    delta = (*small, "weight_sync.content=delta")
    run(tmp_path / "full", *small)
    run(tmp_path / "delta", *delta, "run.total_steps=2")
    run(tmp_path / "delta", *delta, "run.total_steps=4", "run.resume=auto")
    full, changes = rows(tmp_path / "full"), rows(tmp_path / "delta")
    sizes = [
        (row.pop("weight_sync/bytes"), other.pop("weight_sync/bytes"))
        for row, other in zip(changes, full, strict=True)
    ]
    fractions = [
        (row.pop("weight_sync/sent_fraction"), other.pop("weight_sync/sent_fraction"))
        for row, other in zip(changes, full, strict=True)
    ]
    assert changes == full
    # Before its first step each of the two processes sent a whole set, which no step's row tells
    # of.
    for (fraction, full_fraction), (size, full_size) in zip(fractions, sizes, strict=True):
        assert 0 < fraction < 0.5 < full_fraction == 1.0
        assert size < full_size / 2


@pytest.mark.bitwise
@pytest.mark.parametrize("loop", ["sync", "one_step_off"])
def test_failing_reward_loses_no_completed_step(
    run: Run, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setenv("TEMPER_TEST_MARKER", str(tmp_path / "marker"))
    short_run = ("warm_start=null", "data.eval=null", "run.save_model=false", f"loop={loop}")
    # It fails after 32 calls, in the third step of 4 x 4 completions.
    service = "reward.function=temper_trainer_test_rewards:breaks_down"
    with pytest.raises(RewardFailureError, match="the service is gone"):
        run(tmp_path / "run", *short_run, service)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    (tmp_path / "marker.mended").touch()
    run(tmp_path / "run", *short_run, service, "run.resume=auto")
    if loop == "sync":  # one_step_off samples its first batch with the weights of the checkpoint
        run(tmp_path / "whole", *short_run)
        assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_sampling_scoring_and_updates_report_progress(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[tuple[str, int | None, int]] = []

    class FinishedTasks(list[ProgressTask]):
        def remove(self, done: ProgressTask) -> None:
            printed.append((done.name, done.total, done.done))
            super().remove(done)

    monkeypatch.setattr(progress, "_active", FinishedTasks())
    short_run = (
        "warm_start=null",
        "data.eval=null",
        "run.save_model=false",
        "run.total_steps=1",
        "batching.num_mini_batches=2",
    )
    run(tmp_path / "run", *short_run)
    counted = [each for each in printed if each[1] is not None]
    assert counted == [
        ("completions", 16, 16),
        ("rewards", 16, 16),
        ("actor mini-batches", 2, 2),
    ]  # 4 prompts, 4 completions each
    assert [name for name, total, _ in printed if total is None] == [
        "rollout",
        "forward",
        "update",
        "weight sync",
    ]


def cut_back_to(folder: Path, step: int) -> None:
    """Remove all later steps, as if the run had been killed before saving them."""
    for later in (folder / "checkpoints").iterdir():
        if later.name > f"step_{step:08d}":
            shutil.rmtree(later)
    shutil.rmtree(folder / "huggingface", ignore_errors=True)


@pytest.mark.bitwise
@pytest.mark.parametrize("task", ["rl", "sft"])
def test_step_saved_in_the_background_resumes_bitwise(
    run: Run, rows: Rows, tmp_path: Path, task: str
) -> None:
    sft = (
        ("task=sft", "warm_start=null", "batching.prompts_per_step=16")
        if task == "sft"
        else ("warm_start=null", "data.eval=null")
    )
    short_run = (
        *sft,
        "run.total_steps=3",
        "run.save_every=1",
        "run.save_in_background=true",
        "run.max_ckpt_to_keep=null",
    )
    base = {"base": TINY} if task == "sft" else {}
    run(tmp_path / "run", *short_run, **base)
    uninterrupted, model = (
        rows(tmp_path / "run", phase=task),
        load_file(tmp_path / "run" / "huggingface" / "model.safetensors"),
    )
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        f"step_{n:08d}" for n in (1, 2, 3)
    ]
    cut_back_to(tmp_path / "run", 1)
    run(tmp_path / "run", *short_run, "run.resume=auto", **base)
    assert rows(tmp_path / "run", phase=task) == uninterrupted
    again = load_file(tmp_path / "run" / "huggingface" / "model.safetensors")
    assert all(torch.equal(again[name], model[name]) for name in model)


@pytest.mark.parametrize("task", ["rl", "sft"])
def test_step_is_logged_after_the_background_save_of_the_step_before_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    fsync = os.fsync

    def fsync_slowly(file: int) -> None:
        # Engines write in a thread, so the driver's own small files are not slow.
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        fsync(file)

    monkeypatch.setattr(os, "fsync", fsync_slowly)
    run(
        tmp_path / "run",
        f"task={task}",
        "warm_start=null",
        "data.eval=null",
        "batching.prompts_per_step=4",
        "run.total_steps=3",
        "run.save_every=1",
        "run.save_in_background=true",
        "run.max_ckpt_to_keep=null",
        "run.save_model=false",
        base=TINY,
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged_at = {row["step"]: row["time_s"] for row in map(json.loads, lines)}
    committed_at = {
        step: (tmp_path / f"run/checkpoints/step_{step:08d}/manifest.json").stat().st_mtime
        for step in logged_at
    }
    # So a run that is killed at any time computes at most one logged step again. `time_s` is
    # rounded to milliseconds.
    assert all(committed_at[step - 1] < logged_at[step] + 0.001 for step in (2, 3))


@pytest.mark.bitwise
def test_interrupted_supervised_run_resumes_where_it_stopped(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    sft = ("task=sft", "warm_start=null", "batching.prompts_per_step=16")
    run(tmp_path / "whole", *sft, "run.total_steps=6", base=TINY)
    run(tmp_path / "parts", *sft, "run.total_steps=3", "run.save_model=false", base=TINY)
    run(tmp_path / "parts", *sft, "run.total_steps=6", "run.resume=auto", base=TINY)
    assert rows(tmp_path / "parts", phase="sft") == rows(tmp_path / "whole", phase="sft")
    assert (
        len(rows(tmp_path / "whole", phase="sft")) == 6
    )  # 96 of 64 demonstrations: across the end of an epoch


@pytest.mark.bitwise
def test_first_of_several_updates_has_a_ratio_of_exactly_one(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        "warm_start=null",
        "data.eval=null",
        "run.save_model=false",
        "batching.num_mini_batches=2",
        "batching.num_passes=2",
        "actor.engine.optimizer.lr=1e-2",
    )
    step_rows = rows(tmp_path / "run")
    assert [row["policy/first_ratio_error_max"] for row in step_rows] == [0.0] * 4
    assert all(row["policy/ratio_error_max"] > 0.0 for row in step_rows), (
        "later updates of a step must move the ratio"
    )


def test_every_completion_has_the_weight_version_of_its_step(
    rows: Rows, full_run: RunResult
) -> None:
    assert [row["weight_sync/version"] for row in rows(full_run.directory)] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("algorithm", ["dr_grpo", "rloo", "reinforce_plus_plus"])
def test_other_estimators_run(run: Run, rows: Rows, tmp_path: Path, algorithm: str) -> None:
    run(
        tmp_path / "run",
        f"algorithm={algorithm}",
        "algorithm.group_size=4",
        "run.total_steps=2",
        "warm_start=null",
        "data.eval=null",
    )
    assert len(rows(tmp_path / "run")) == 2


def test_ppo_trains_policy_and_critic_and_reads_both_kls(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        "algorithm=ppo",
        "data.eval=null",
        "run.save_model=false",
        "ref=frozen",
        "algorithm.kl_loss_coef=0.01",
        "algorithm.kl_reward_coef=0.02",
        "batching.num_mini_batches=2",
        "critic.engine.optimizer.lr=1e-3",
    )
    step_rows = rows(tmp_path / "run")
    assert step_rows[0]["ref/kl"] == 0.0, (
        "the reference policy is the policy before its first update"
    )
    assert step_rows[-1]["ref/kl"] != 0.0
    assert step_rows[0]["policy/first_ratio_error_max"] == 0.0
    assert all(row["critic/grad_norm"] > 0 for row in step_rows)


def test_folder_with_a_run_is_refused_and_not_changed(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "run", "run.total_steps=1", "data.eval=null")
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    with pytest.raises(
        ConfigError, match=r"already holds a run: continue it with run\.resume=auto"
    ):
        run(tmp_path / "run", "run.total_steps=1", "data.eval=null")
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()
    } == before


SHORT_RUN = ("warm_start=null", "data.eval=null", "run.save_model=false", "run.total_steps=2")


def test_corrected_command_can_use_the_folder_of_a_failed_start(run: Run, tmp_path: Path) -> None:
    folder, template = tmp_path / "run", "data.tokenizer.kind=bpe"
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size is 7"):
        run(folder, *SHORT_RUN, template, "data.tokenizer.vocab_size=7")
    with pytest.raises(DataError, match="tokens"):
        run(folder, *SHORT_RUN, "data.max_prompt_tokens=1")
    (folder / "tokenizer" / "left_by_the_failed_start.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    run(folder, *SHORT_RUN)
    assert not (folder / "tokenizer" / "left_by_the_failed_start.json").exists()
    assert len(list(folder.glob("tokenizer.superseded-*/left_by_the_failed_start.json"))) == 1
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="already holds a run"):
        run(folder, *SHORT_RUN)


def test_corrected_command_can_use_the_folder_after_a_failed_first_step(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(RewardFailureError):
        run(
            tmp_path / "run", *SHORT_RUN, "reward.function=temper_trainer_test_rewards:always_fails"
        )
    run(tmp_path / "run", *SHORT_RUN)


def test_files_of_a_user_are_not_taken_for_a_failed_start(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("mine: 1\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        run(tmp_path / "run", *SHORT_RUN)
    assert (tmp_path / "run" / "config.yaml").read_text() == "mine: 1\n"


def test_run_saves_at_the_end_of_a_step_after_the_interval(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", *SHORT_RUN, "run.total_steps=3", "run.save_interval_s=0.001")
    # All three are saved, and the default keeps two.
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step_00000002",
        "step_00000003",
    ]
    assert "checkpoints: saved every 0.001 s and at the end; " in capsys.readouterr().out


def test_resumed_run_lists_changed_settings_and_those_without_effect(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", *SHORT_RUN)
    capsys.readouterr()
    changes = (
        "run.total_steps=3",
        "actor.engine.optimizer.lr=1e-3",
        "actor.engine.model.seed=5",
        "run.resume=auto",
    )
    run(tmp_path / "run", *SHORT_RUN, *changes)
    out = capsys.readouterr().out
    assert "  actor.engine.model.seed: 0 -> 5\n  actor.engine.optimizer.lr: " in out
    assert "  run.total_steps: 2 -> 3\n" in out
    assert out.count("has no effect on a resumed run") == 1
    assert (
        "WARNING: actor.engine.model.seed has no effect on a resumed run: the weights are those of "
        "the checkpoint." in out
    )
    assert "run.resume:" not in out


def test_changed_settings_are_compared_with_those_of_the_last_step_not_of_a_failed_start(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", *SHORT_RUN)
    changes = ("run.total_steps=3", "actor.engine.model.seed=5", "run.resume=auto")
    for _ in range(2):
        with pytest.raises(RewardFailureError):
            run(
                tmp_path / "run",
                *SHORT_RUN,
                *changes,
                "reward.function=temper_trainer_test_rewards:always_fails",
            )
        assert "  actor.engine.model.seed: 0 -> 5\n" in capsys.readouterr().out
    run(tmp_path / "run", *SHORT_RUN, *changes)
    out = capsys.readouterr().out
    assert "  actor.engine.model.seed: 0 -> 5\n" in out
    assert "actor.engine.model.seed has no effect on a resumed run" in out
    assert "reward.function" not in out
    # That start has trained, so there is nothing to list now.
    run(tmp_path / "run", *SHORT_RUN, *changes, "run.total_steps=4")
    assert "actor.engine.model.seed" not in capsys.readouterr().out


def test_resumed_run_warns_about_changed_settings_that_only_its_finished_warm_start_uses(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("data.eval=null", "run.save_model=false", "run.total_steps=1")
    with pytest.raises(RewardFailureError):
        run(tmp_path / "run", *short, "reward.function=temper_trainer_test_rewards:always_fails")
    capsys.readouterr()
    changes = (
        "warm_start.total_steps=9",
        "actor.engine.model.architecture.num_hidden_layers=3",
        "actor.engine.model.seed=5",
        "run.resume=auto",
    )
    run(tmp_path / "run", *short, *changes)
    out = capsys.readouterr().out
    assert "  warm_start.total_steps: 4 -> 9\n" in out
    reason = "has no effect on a resumed run: "
    assert f"WARNING: warm_start.total_steps {reason}the warm start is done." in out
    for key in ("architecture.num_hidden_layers", "seed"):
        assert (
            f"WARNING: actor.engine.model.{key} {reason}the model is that of the warm start." in out
        )
    assert out.count(reason) == 3
    assert "continuing from step" not in out


def test_failing_run_writes_a_report_up_to_its_last_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPER_TEST_MARKER", str(tmp_path / "marker"))
    service = "reward.function=temper_trainer_test_rewards:breaks_down"
    with pytest.raises(RewardFailureError):
        run(tmp_path / "run", *SHORT_RUN, "run.report=true", "run.total_steps=4", service)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<div>rl</div></td><td class=text><div>step</div></td><td class=number>2</td>" in report


SHORT = ("run.save_every=1", "run.save_model=false", "data.eval=null", "warm_start=null")


def test_run_resumes_before_a_damaged_checkpoint_with_equal_results(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    run(tmp_path / "run", "run.total_steps=2", *SHORT)
    uninterrupted = rows(tmp_path / "run")
    victim = checkpoints / "step_00000002" / "trainer" / "state.json"
    victim.write_text(victim.read_text().replace("2", "3"))
    run(tmp_path / "run", "run.total_steps=2", "run.resume=auto", *SHORT)
    assert rows(tmp_path / "run") == uninterrupted
    assert "renamed to step_00000002.damaged-1" in caplog.text
    assert f"continuing from step 1 ({checkpoints / 'step_00000001'})" in capsys.readouterr().out
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "step_00000001",
        "step_00000002",
        "step_00000002.damaged-1",
    ]


def test_remains_of_a_killed_save_are_never_resumed(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "run", "run.total_steps=2", *SHORT)
    step = tmp_path / "run" / "checkpoints" / "step_00000002"
    (step / "manifest.json").unlink()
    step.rename(step.with_name(".step_00000002.0a.partial"))
    run(tmp_path / "run", "run.total_steps=2", "run.resume=auto", *SHORT)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_run_resumes_from_a_requested_earlier_step(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "run", "run.total_steps=2", *SHORT)
    uninterrupted, earlier = (
        rows(tmp_path / "run"),
        tmp_path / "run" / "checkpoints" / "step_00000001",
    )
    run(tmp_path / "run", f"run.resume={earlier}", "run.total_steps=2", *SHORT)
    assert rows(tmp_path / "run") == uninterrupted
    names = sorted(path.name for path in earlier.parent.iterdir())
    assert names == ["step_00000001", "step_00000002", "step_00000002.superseded-1"]


def test_resume_without_a_checkpoint_reports_that_it_starts_again(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = (
        "run.total_steps=1",
        "reward.function=temper_trainer_test_rewards:fails_on_even",
        "batching.prompts_per_step=64",
    )
    with pytest.raises(RewardFailureError) as caught:
        run(tmp_path / "run", *broken, *SHORT)
    assert caught.value.__notes__ == [
        "No checkpoint of this run was saved yet: run.resume=auto would start at step 1."
    ]
    run(tmp_path / "run", "run.total_steps=1", "run.resume=auto", *SHORT)
    output = capsys.readouterr().out
    assert f"no checkpoint in {tmp_path / 'run' / 'checkpoints'}: starting from step 1" in output
    assert "the newest 2 verified ones are kept" in output


def test_failing_rewards_are_counted_and_left_out(run: Run, rows: Rows, tmp_path: Path) -> None:
    reward = "reward.function=temper_trainer_test_rewards:fails_on_even"
    run(
        tmp_path / "run",
        reward,
        *SHORT_RUN,
        "reward.max_failure_fraction=1.0",
        "batching.prompts_per_step=64",
        "run.total_steps=1",
    )
    (row,) = rows(tmp_path / "run")
    assert (
        row["reward/failed"] == 32 * 4
    )  # 64 problems, every one once, half of them even, four completions each


def test_too_many_failing_rewards_stop_the_run_with_the_first_failure(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(RewardFailureError, match="even prompts cannot be scored"):
        run(
            tmp_path / "run",
            "reward.function=temper_trainer_test_rewards:fails_on_even",
            "batching.prompts_per_step=64",
        )


def test_finished_run_can_be_extended_but_not_shortened(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "run", "run.total_steps=2", "run.save_model=false", "data.eval=null")
    with pytest.raises(CheckpointError, match=r"is at step 2, after run\.total_steps = 1"):
        run(tmp_path / "run", "run.total_steps=1", "run.resume=auto", "data.eval=null")


def test_each_resumed_run_exports_its_model_and_keeps_the_earlier_one(
    run: Run, tmp_path: Path
) -> None:
    short = ("warm_start=null", "data.eval=null")
    folder, always = tmp_path / "run", (*short, "run.resume=auto")
    run(folder, "run.total_steps=1", *short)
    first = load_file(folder / "huggingface" / "model.safetensors")
    run(folder, "run.total_steps=1", *always)  # nothing is trained: the model stays where it is
    run(folder, "run.total_steps=3", *always)
    last, kept = (
        load_file(folder / name / "model.safetensors")
        for name in ("huggingface", "huggingface.superseded-1")
    )
    assert not (folder / "huggingface.superseded-2").exists()
    assert all(torch.equal(first[name], kept[name]) for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    # Nothing is trained from an earlier step that is the last one, but the model is another one.
    step = folder / "checkpoints" / "step_00000001"
    run(folder, "run.total_steps=1", f"run.resume={step}", *short)
    returned, kept = (
        load_file(folder / name / "model.safetensors")
        for name in ("huggingface", "huggingface.superseded-2")
    )
    assert all(torch.equal(first[name], returned[name]) for name in first)
    assert all(torch.equal(last[name], kept[name]) for name in last)


def test_trainer_state_contains_step_and_position_in_the_data(full_run: RunResult) -> None:
    state = json.loads(
        (
            full_run.directory / "checkpoints" / "step_00000003" / "trainer" / "state.json"
        ).read_text()
    )
    assert (state["step"], state["cursor"], state["weight_version"]) == (
        3,
        {"epoch": 0, "index": 12},
        4,
    )  # 3 steps of 4 prompts


SFT = ("task=sft", "warm_start=null", "batching.prompts_per_step=16")


@pytest.mark.bitwise
def test_supervised_run_resumes_from_a_requested_checkpoint(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "whole", *SFT, "run.total_steps=4", base=TINY)
    run(tmp_path / "first", *SFT, "run.total_steps=2", "run.save_model=false", base=TINY)
    named = tmp_path / "first" / "checkpoints" / "step_00000002"
    run(tmp_path / "second", *SFT, "run.total_steps=4", f"run.resume={named}", base=TINY)
    assert rows(tmp_path / "second", phase="sft") == rows(tmp_path / "whole", phase="sft")[2:]
    assert not (tmp_path / "first" / "huggingface").exists(), "run.save_model=false leaves no model"
    # The model of an earlier step that is the last one replaces that of the later step.
    run(tmp_path / "first", *SFT, "run.total_steps=3", f"run.resume={named}", base=TINY)
    later = load_file(tmp_path / "first" / "huggingface" / "model.safetensors")
    run(tmp_path / "first", *SFT, "run.total_steps=2", f"run.resume={named}", base=TINY)
    earlier, kept = (
        load_file(tmp_path / "first" / name / "model.safetensors")
        for name in ("huggingface", "huggingface.superseded-1")
    )
    assert all(torch.equal(later[name], kept[name]) for name in later)
    assert any(not torch.equal(later[name], earlier[name]) for name in later)


def test_checkpoint_of_another_phase_is_refused(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "sft", *SFT, "run.total_steps=1", base=TINY)
    named = tmp_path / "sft" / "checkpoints" / "step_00000001"
    with pytest.raises(
        CheckpointError, match="is a checkpoint of phase sft, but this run is in phase rl"
    ):
        run(tmp_path / "rl", f"run.resume={named}")


def test_dropped_prompts_are_printed_and_logged_for_both_sources(
    run: Run, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        tmp_path / "run",
        "warm_start=null",
        "data.max_prompt_tokens=24",
        "data.overlong_prompts=drop",
        "run.total_steps=1",
    )
    (first, *_) = rows(tmp_path / "run")
    assert first["data/dropped"] > 0
    assert first["eval/dropped"] > 0
    assert "dropped rows that are too long (data.max_prompt_tokens = 24)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("batching.max_tokens=40", r"batching\.max_tokens is 40"),
        (
            "actor.engine.model.architecture.max_position_embeddings=40",
            r"max_position_embeddings is 40",
        ),
    ],
)
def test_overlong_demonstration_is_named_before_the_first_update(
    run: Run, tmp_path: Path, setting: str, key: str
) -> None:
    with pytest.raises(DataError, match=rf"arithmetic.*tokens, but .*{key}"):
        run(
            tmp_path / "run",
            *SFT,
            setting,
            "data.max_prompt_tokens=40",
            base=TINY,
        )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_optimizer_that_cannot_be_built_after_the_warm_start_is_refused_before_it(
    run: Run, tmp_path: Path, role: str
) -> None:
    optimizer = f"++{role}.engine.optimizer"
    unknown = (f"{optimizer}.name=torch.optim.Nope", f"{optimizer}.betas=[0.9,0.999]")
    with pytest.raises(
        ConfigError, match=rf"^{role}\.engine: optimizer\.name is torch\.optim\.Nope"
    ):
        run(tmp_path / "run", "algorithm=ppo", *unknown)
    assert not (tmp_path / "run" / "warm_start").exists()


def test_overlong_prompt_of_the_evaluation_is_named_before_the_warm_start(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"question": "1 " * 100, "answer": "1"}))
    data = ("~data.eval", "+data.eval.name=jsonl", f"+data.eval.paths=[{path}]")
    with pytest.raises(
        DataError, match=r"eval\.jsonl:1: the prompt has \d+ tokens, but data\.max_pr"
    ):
        run(tmp_path / "run", *data, "warm_start.data.max_rows=128")
    assert not (tmp_path / "run" / "warm_start").exists()


def test_run_folder_that_cannot_be_created_is_a_configuration_error(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir .* cannot be written"):
        run(Path("/proc/nowhere/run"))


def as_converted(step: Path, folder: Path, *, roles: Sequence[str]) -> None:
    """Convert a saved step to the layout of ``temper-migrate checkpoint --to temper``."""
    for role in roles:
        transaction = begin_checkpoint(
            folder / role if len(roles) > 1 else folder, int(step.name.removeprefix("step_"))
        )
        part = transaction.open_part("engine")
        shutil.copytree(step / role, part, dirs_exist_ok=True)
        files = [str(path.relative_to(part)) for path in sorted(part.rglob("*")) if path.is_file()]
        transaction.commit(
            {"engine": [report_part(part, files)]},
            info=ManifestInfo(topology={"world_size": 1}, config_hash="converted"),
        )


def test_converted_policy_and_critic_resume_like_native_ones(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    ppo = (
        "algorithm=ppo",
        "ref=frozen",
        "algorithm.kl_loss_coef=0.01",
        "data.eval=null",
        "warm_start=null",
        "run.save_model=false",
    )
    ppo = (*ppo, "run.total_steps=3", "run.save_every=2")
    run(tmp_path / "whole", *ppo)
    as_converted(
        tmp_path / "whole/checkpoints/step_00000002",
        tmp_path / "converted",
        roles=["actor", "critic"],
    )
    run(tmp_path / "second", *ppo, f"run.resume={tmp_path / 'converted'}")
    (resumed,), (*_, expected) = rows(tmp_path / "second"), rows(tmp_path / "whole")
    assert resumed == expected | {"weight_sync/version": 2.0}
    state = json.loads(
        (tmp_path / "second/checkpoints/step_00000003/trainer/state.json").read_text()
    )
    assert (state["step"], state["cursor"]) == (3, {"epoch": 0, "index": 12})


def test_converted_roles_of_different_steps_are_refused_and_a_missing_role_is_named(
    run: Run, tmp_path: Path
) -> None:
    short_run = (
        "data.eval=null",
        "warm_start=null",
        "run.save_model=false",
        "run.save_every=1",
        "run.total_steps=2",
    )
    run(tmp_path / "run", *short_run)
    for step, role in enumerate(("actor", "critic"), start=1):
        as_converted(
            tmp_path / f"run/checkpoints/step_0000000{step}",
            tmp_path / f"mixed/{role}",
            roles=["actor"],
        )
    with pytest.raises(
        CheckpointError,
        match="mixed has actor of step 1, critic of step 2: convert all roles of one step",
    ):
        run(tmp_path / "of_mixed", *short_run, f"run.resume={tmp_path / 'mixed'}")
    with pytest.raises(
        CheckpointError, match="has no part for critic, which this configuration has"
    ):
        run(
            tmp_path / "lacking",
            *short_run,
            "algorithm=ppo",
            "run.total_steps=3",
            f"run.resume={tmp_path / 'mixed/actor'}",
        )


@pytest.mark.bitwise
def test_supervised_run_resumes_from_a_converted_checkpoint(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "whole",
        *SFT,
        "run.total_steps=4",
        "run.save_every=2",
        "run.save_model=false",
        base=TINY,
    )
    as_converted(
        tmp_path / "whole/checkpoints/step_00000002", tmp_path / "converted", roles=["actor"]
    )
    run(
        tmp_path / "second",
        *SFT,
        "run.total_steps=4",
        f"run.resume={tmp_path / 'converted'}",
        "run.save_model=false",
        base=TINY,
    )
    assert rows(tmp_path / "second", phase="sft") == rows(tmp_path / "whole", phase="sft")[2:]
