import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from temper_engine_api.errors import ConfigError
from temper_trainer.metrics.run_files import Row, read_latest_rows, read_rows, to_json
from temper_trainer.metrics.run_log import RunLog, SampleRow


def open_log(
    directory: Path,
    *,
    trackers: Sequence[str] = ("jsonl",),
    resume_step: int | None = None,
    terminal: bool = False,
    progress: bool = True,
) -> tuple[RunLog, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, highlight=False)
    return RunLog(
        directory, trackers=trackers, progress=progress, resume_step=resume_step, console=console
    ), text


def read_steps(directory: Path, name: str = "metrics.jsonl") -> list[tuple[str, int]]:
    return [(row.phase, row.step) for row in read_rows(directory / name)]


def test_each_step_is_one_line_on_the_terminal_and_in_the_file(tmp_path: Path) -> None:
    log, text = open_log(tmp_path)
    with log, log.progress_bar("rl", total=3) as bar:
        for step in (1, 2, 3):
            log.log_metrics(step, {"reward/mean": step / 4, "batch/tokens": 9.0}, phase="rl")
            bar.advance()
    assert text.getvalue() == "rl 1/3  reward 0.250\nrl 2/3  reward 0.500\nrl 3/3  reward 0.750\n"
    assert read_steps(tmp_path) == [("rl", 1), ("rl", 2), ("rl", 3)]


def test_lines_are_not_wrapped_and_brackets_are_not_markup(tmp_path: Path) -> None:
    log, text = open_log(tmp_path)
    with log:
        log.print_line("[bold]" + "x" * 300)
    assert text.getvalue() == "[bold]" + "x" * 300 + "\n"


def test_progress_bars_are_drawn_on_a_terminal_only_if_enabled(tmp_path: Path) -> None:
    for progress in (True, False):
        log, text = open_log(tmp_path / str(progress), terminal=True, progress=progress)
        with log, log.progress_bar("rl", total=4, start=2) as bar:
            bar.advance()
        assert ("3/4" in text.getvalue()) is progress


def test_terminal_shows_a_table_of_metrics(tmp_path: Path) -> None:
    log, text = open_log(tmp_path, terminal=True)
    with log, log.progress_bar("rl", total=4):
        log.log_metrics(1, {"reward/mean": 0.25}, phase="rl")
    assert "mean of 20" in text.getvalue()


def test_resumed_run_moves_rows_of_later_steps(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    with log:
        log.log_metrics(1, {"actor/loss": 1.0}, phase="warm_start")
        for step in (1, 2, 3):
            log.log_metrics(step, {"actor/loss": 1.0}, phase="rl")
            log.show_samples(
                step,
                [SampleRow(prompt="p", completion="c", answer="a", reward=1.0)],
                kind="training",
            )
    log, _ = open_log(tmp_path, resume_step=2)
    with log:
        log.log_metrics(3, {"actor/loss": 2.0}, phase="rl")
    assert read_steps(tmp_path) == [("warm_start", 1), ("rl", 1), ("rl", 2), ("rl", 3)]
    assert read_steps(tmp_path, "metrics.superseded-1.jsonl") == [("rl", 3)]
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "samples.superseded-1.jsonl").read_text().splitlines()
    ] == [3]


@pytest.mark.parametrize(
    ("present", "lines"),
    [
        ([1, 2, 3, 4], []),
        ([], ["no rows of steps 1 to 4"]),
        ([1, 2], ["no rows of steps 3 to 4"]),
        ([1, 3, 4], ["no row of step 2"]),
        # A run that began with the checkpoint of another one.
        ([3, 4], []),
    ],
)
def test_resumed_run_warns_about_rows_that_are_gone(
    tmp_path: Path, present: list[int], lines: list[str]
) -> None:
    head = [Row(step=step, phase="eval", time_s=0.0, values={}) for step in (0, 2)]
    rows = [Row(step=step, phase="rl", time_s=0.0, values={}) for step in (0, *present, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{to_json(row)}\n" for row in head + rows))
    _, text = open_log(tmp_path, resume_step=4)
    warnings = re.findall(r"metrics.jsonl has (no rows? of .*?), although", text.getvalue())
    assert warnings == lines


def test_first_start_in_a_folder_warns_about_no_rows(tmp_path: Path) -> None:
    _, text = open_log(tmp_path, resume_step=4)
    assert text.getvalue() == ""


def test_restarted_run_keeps_warm_start_rows_up_to_its_checkpoint(
    tmp_path: Path,
) -> None:
    log, _ = open_log(tmp_path)
    with log:
        for step in (1, 2, 3):
            log.log_metrics(step, {"actor/loss": 1.0}, phase="warm_start")
        log.log_metrics(0, {"eval/greedy/reward": 0.5}, phase="eval")
    log, _ = open_log(tmp_path, resume_step=None)
    with log, log.progress_bar("warm_start", total=3, start=2):
        log.log_metrics(3, {"actor/loss": 1.0}, phase="warm_start")
    assert read_steps(tmp_path) == [("warm_start", 1), ("warm_start", 2), ("warm_start", 3)]


def test_secrets_in_samples_are_neither_printed_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "value of the token")
    encoded = b64encode(b"user:value of the token").decode()
    log, text = open_log(tmp_path)
    with log:
        row = SampleRow(prompt="value of the token", completion=encoded, answer=encoded, reward=1.0)
        log.show_samples(1, [row], kind="training")
    written = (tmp_path / "samples.jsonl").read_text()
    for shown in (text.getvalue(), written):
        assert "value of the token" not in shown
        assert encoded[8:] not in shown
        assert shown.count("<hidden>") == 3


def test_samples_are_printed_and_saved(tmp_path: Path) -> None:
    log, text = open_log(tmp_path)
    with log:
        log.show_samples(
            7,
            [
                SampleRow(
                    prompt="Tom has [3] pens.\n", completion="3+4=7\n#### 7", answer="7", reward=1.0
                )
            ],
            kind="held-out",
        )
    assert "held-out samples of step 7" in text.getvalue()
    assert "Tom has [3] pens." in text.getvalue()
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    assert row == {
        "step": 7,
        "kind": "held-out",
        "prompt": "Tom has [3] pens.\n",
        "completion": "3+4=7\n#### 7",
        "answer": "7",
        "reward": 1.0,
    }


def read_scalars(directory: Path, phase: str, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard" / phase))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_each_scalar_once_after_a_resume(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path, trackers=["tensorboard"])
    with log:
        for step in (1, 2, 3):
            log.log_metrics(step, {"actor/loss": step / 2}, phase="rl")
    log, _ = open_log(tmp_path, trackers=["tensorboard"], resume_step=1)
    with log:
        log.log_metrics(2, {"actor/loss": 5.0}, phase="rl")
    assert read_scalars(tmp_path, "rl", "actor/loss") == [(1, 0.5), (2, 5.0)]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_non_finite_values_reach_every_tracker(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path, trackers=["jsonl", "tensorboard"])
    with log:
        log.log_metrics(1, {"actor/loss": math.nan}, phase="rl")
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(row.values["actor/loss"])


@pytest.mark.skipif(find_spec("wandb") is not None, reason="needs an environment without wandb")
def test_missing_wandb_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"run.trackers names wandb, which is not installed: run pip install "
            r"'\./packages/trainer\[wandb\]'"
        ),
    ):
        open_log(tmp_path, trackers=["wandb"])


def fail_after_a_step(log: RunLog) -> None:
    with log:
        log.log_metrics(1, {"actor/loss": 0.25}, phase="rl")
        raise ArithmeticError


def test_failing_run_closes_its_files(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path, trackers=["tensorboard"])
    with pytest.raises(ArithmeticError):
        fail_after_a_step(log)
    assert read_scalars(tmp_path, "rl", "actor/loss") == [(1, 0.25)]


@pytest.mark.skipif(
    find_spec("wandb") is None, reason="needs wandb: pip install './packages/trainer[wandb]'"
)
def test_resume_continues_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resume_step in (None, 1):
        log, _ = open_log(tmp_path, trackers=["wandb"], resume_step=resume_step)
        with log:
            log.log_metrics(2 if resume_step else 1, {"actor/loss": 1.0}, phase="rl")
    run_id = (tmp_path / "wandb_id.txt").read_text()
    assert all(run.name.endswith(run_id) for run in (tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    "damaged", [b"\xff\xfe\n", b"{no json}\n", b"[" * 100_000 + b"\n", b"\0\0\n", b"[1]\n", b"{}\n"]
)
def test_damaged_line_of_the_metrics_is_moved_and_the_others_are_kept(
    damaged: bytes, tmp_path: Path
) -> None:
    good = to_json(Row(step=1, phase="rl", time_s=0.0, values={"x": 1.0})).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(damaged + good)
    log, text = open_log(tmp_path, resume_step=1)
    log.log_metrics(2, {"x": 1.0}, phase="rl")
    assert read_steps(tmp_path) == [("rl", 1), ("rl", 2)]
    assert (tmp_path / "metrics.superseded-1.jsonl").read_bytes() == damaged
    assert "metrics.jsonl has 1 damaged line: moved to metrics.superseded-1" in text.getvalue()


def test_report_leaves_out_a_damaged_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = Row(step=1, phase="rl", time_s=0.0, values={"x": 1.0})
    (tmp_path / "metrics.jsonl").write_text("\0\0\n" + to_json(row) + "\n")
    assert read_latest_rows(tmp_path / "metrics.jsonl") == [row]
    assert "metrics.jsonl has 1 damaged line, which is left out" in caplog.text


HOSTILE = "a\x1b]0;title\x07\x1b[2J\rb\x9bc\u202ed\te"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x0db\x9bc\u202ed"


def test_control_characters_of_completions_and_messages_are_escaped(tmp_path: Path) -> None:
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=200, color_system=None)
    log = RunLog(tmp_path, trackers=(), progress=False, console=terminal)
    log.show_samples(
        1, [SampleRow(prompt=HOSTILE, completion=HOSTILE, answer="", reward=1.0)], kind="training"
    )
    log.print_line(HOSTILE)
    assert text.getvalue().count(SHOWN) == 3
    assert not set(text.getvalue()) & set("\x1b\x07\r\x9b\u202e")


def test_report_can_be_turned_off(tmp_path: Path) -> None:
    with RunLog(tmp_path, trackers=("jsonl",), progress=False, writes_report=False) as log:
        log.log_metrics(1, {"reward/mean": 0.5}, phase="rl")
        log.refresh_report()
        assert log.report() is None
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_report_is_written_after_the_first_step(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    log.log_metrics(1, {"reward/mean": 0.5}, phase="rl")
    log.refresh_report()
    written = (tmp_path / "report.html").stat().st_mtime_ns
    log.log_metrics(2, {"reward/mean": 0.5}, phase="rl")
    log.refresh_report()
    assert (tmp_path / "report.html").stat().st_mtime_ns == written  # not again within a minute
