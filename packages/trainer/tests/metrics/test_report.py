import base64
import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from temper_trainer.config_loading import load, write_resolved
from temper_trainer.metrics.report import write_report
from temper_trainer.metrics.run_files import read_last_lines, record_start
from temper_trainer.metrics.run_log import RunLog, SampleRow


@pytest.fixture
def page(tmp_path: Path) -> tuple[Path, str]:
    """The run folder and the report of a run of three steps."""
    folder = tmp_path / "my <run>"
    write_resolved(load(["experiment=quickstart", "run.seed=7"]), folder)
    record_start(folder, command="temper-train run.seed=7")
    with RunLog(
        folder, trackers=("jsonl",), progress=False, console=Console(file=io.StringIO())
    ) as log:
        for step in (1, 2, 3):
            log.log_metrics(
                step,
                {"reward/mean": step / 4, "time/step_s": 2.0, "time/rollout_s": 0.5 * step},
                phase="rl",
            )
        log.log_metrics(3, {"eval/greedy/reward": 0.625}, phase="eval")
        log.show_samples(
            3,
            [
                SampleRow(
                    prompt="2 < 3", completion="<script>alert(1)</script>", answer="&", reward=0.125
                )
            ],
            kind="held-out",
        )
        path = log.report()
    assert path == folder / "report.html"
    return folder, path.read_text(encoding="utf-8")


def row(*cells: str) -> str:
    return "".join(
        f"<td class=number>{c[1:]}</td>"
        if c.startswith("#")
        else f"<td class=text><div>{c}</div></td>"
        for c in cells
    )


def test_report_is_self_contained(page: tuple[Path, str]) -> None:
    folder, text = page
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    curves, evaluations = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert base64.b64decode(evaluations).startswith(b"\x89PNG")
    assert base64.b64decode(curves) == (folder / "curves.png").read_bytes()


def test_completions_are_escaped_in_the_report(page: tuple[Path, str]) -> None:
    _, text = page
    script = "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert row("#3", "held-out", "2 &lt; 3", script, "&amp;", "#0.125") in text
    assert "<script>alert" not in text
    assert "<h1>my &lt;run&gt;</h1>" in text


def test_report_shows_the_time_of_each_operation(page: tuple[Path, str]) -> None:
    _, text = page
    # rollout: 0.5 + 1 + 1.5 = 3 of 3 x 2 = 6 seconds.
    assert row("rl", "step", "#3", "6 s", "2 s", "100 %") in text
    assert row("rl", "rollout", "#3", "3 s", "1 s", "50 %") in text


def test_report_shows_settings_with_origin_evaluations_and_versions(
    page: tuple[Path, str],
) -> None:
    _, text = page
    assert row("run.seed", "7", "command line") in text
    assert row("data.train.name", "arithmetic", "group experiment=quickstart") in text
    assert row("#3", "data.eval", "greedy", "0.625") in text
    assert row("rl", "reward/mean", "#1", "#0.250", "#3", "#0.750") in text
    assert "<td class=text><div>torch</div></td>" in text


def test_report_shows_the_versions_of_the_run(page: tuple[Path, str]) -> None:
    folder, _ = page
    starts = folder / "starts.jsonl"
    fields = json.loads(starts.read_text().splitlines()[-1])
    fields["versions"]["torch"] = "9.9.9"
    starts.write_text(json.dumps(fields) + "\n")
    path = write_report(folder)
    assert path is not None
    assert row("torch", "9.9.9") in path.read_text(encoding="utf-8")


def test_run_without_logged_steps_has_no_report(tmp_path: Path) -> None:
    with RunLog(
        tmp_path, trackers=("jsonl",), progress=False, console=Console(file=io.StringIO())
    ) as log:
        assert log.report() is None
    assert not (tmp_path / "report.html").exists()


def test_last_lines_are_read_from_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"line {i} ü\n" for i in range(1000)) + "cut o")
    expected = [f"line {i} ü".encode() for i in range(1000)]
    for block_bytes in (1, 7, 64, 1 << 20):
        assert read_last_lines(path, 3, block_bytes=block_bytes) == expected[-3:]
    assert read_last_lines(path, 5000, block_bytes=64) == expected


def test_failure_to_write_the_report_is_printed_and_not_raised(tmp_path: Path) -> None:
    text = io.StringIO()
    with RunLog(tmp_path, trackers=("jsonl",), progress=False, console=Console(file=text)) as log:
        log.log_metrics(1, {"reward/mean": 0.5}, phase="rl")
        (tmp_path / "report.html").mkdir()
        log.try_report()
    assert "the report was not written: IsADirectoryError" in text.getvalue()


def test_report_begins_with_result_command_and_duration(page: tuple[Path, str]) -> None:
    _, text = page
    headline, summary = text.split("<h2>")[:2]
    assert '<p class="result">greedy 0.625</p>' in headline
    assert row("command", "temper-train run.seed=7") in summary
    assert re.search(
        r"duration</div></td><td class=text><div>[\d.e-]+ s, until the last metrics at 20\d\d-",
        summary,
    )
    assert row("steps", "rl 3") in summary
    assert row("reward", "gsm8k_strict") in summary
    assert "versions</div></td><td class=text><div>temper-trainer " in summary
    assert f"torch {torch.__version__}, transformers " in summary


def test_report_of_a_resumed_run_has_both_durations(page: tuple[Path, str]) -> None:
    folder, _ = page
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last_s = rows[-1]["time_s"]
    rows[0]["time_s"] = last_s - 100
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    fields = json.loads((folder / "starts.jsonl").read_text())
    # The earliest start has failed before the first step.
    starts = ({**fields, "time_s": last_s - before} for before in (500, 190, 68))
    (folder / "starts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in starts))
    path = write_report(folder)
    assert path is not None
    assert "3 min 10 s since the first start, 1 min 8 s since the last, until" in path.read_text()


@pytest.mark.parametrize(
    ("overrides", "expected", "absent"),
    [
        (
            ["reward.components={exact_match: 1.0, math_verify: 0.5}"],
            [row("reward", "exact_match + 0.5 * math_verify")],
            "gsm8k_strict",
        ),
        (
            ["data.eval.reward=exact_match"],
            [row("reward", "gsm8k_strict"), row("reward of data.eval", "exact_match")],
            "reward of data.train",
        ),
        (
            ["data.train.reward=exact_match", "data.eval.reward=exact_match"],
            [row("reward of data.train", "exact_match"), row("reward of data.eval", "exact_match")],
            "gsm8k_strict",
        ),
    ],
)
def test_report_names_the_rewards_that_are_called(
    overrides: list[str], expected: list[str], absent: str, tmp_path: Path
) -> None:
    write_resolved(load(["experiment=quickstart", *overrides]), tmp_path)
    console = Console(file=io.StringIO())
    with RunLog(tmp_path, trackers=("jsonl",), progress=False, console=console) as log:
        log.log_metrics(1, {"reward/mean": 0.5}, phase="rl")
        path = log.report()
    assert path is not None
    summary = path.read_text(encoding="utf-8").split("<h2>")[1]
    assert all(line in summary for line in expected)
    assert absent not in summary


def test_report_has_a_dark_mode(page: tuple[Path, str]) -> None:
    _, text = page
    # Without the first, form fields and scroll bars stay white.
    assert "color-scheme: light dark" in text
    assert "@media (prefers-color-scheme: dark)" in text


def test_report_fits_the_screen_of_a_phone(page: tuple[Path, str]) -> None:
    _, text = page
    # Without it a phone shows the page in the width of a desktop.
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (max-width: 700px)" in text


def test_long_completions_are_shortened_and_name_the_file(tmp_path: Path) -> None:
    with RunLog(
        tmp_path, trackers=("jsonl",), progress=False, console=Console(file=io.StringIO())
    ) as log:
        log.log_metrics(1, {"reward/mean": 0.5}, phase="rl")
        log.show_samples(
            1,
            [SampleRow(prompt="?", completion="y" * 5000, answer="", reward=0.0)],
            kind="training",
        )
        path = log.report()
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert f"{'y' * 4000} ... 1000 more characters in samples.jsonl" in text
    assert "y" * 4001 not in text
