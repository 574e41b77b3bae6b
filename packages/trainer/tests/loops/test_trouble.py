"""Interrupt, kill and fill the disk of the real program in its own process."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.external_checks import check_external_objects
from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
PROGRAM = (
    sys.executable,
    "-m",
    "temper_trainer",
    "experiment=quickstart",
    "run.num_threads=1",
    "run.table_every=0",
    "data.eval=null",
)
SMALL = (
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.intermediate_size=64",
    "actor.engine.model.architecture.num_hidden_layers=2",
    "data.train.max_rows=64",
    "warm_start=null",
    "batching.prompts_per_step=4",
    "algorithm.group_size=4",
    "reward.function=temper_trainer_test_rewards:waits",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        # In front of the tests' own path, which may name the sources under test.
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TEMPER_TEST_MARKER": str(tmp_path / "marker"),
        "OMP_NUM_THREADS": "1",
    }


def start(
    environment: dict[str, str], directory: Path, *overrides: str, **more: object
) -> "subprocess.Popen[str]":
    command = [*PROGRAM, *SMALL, f"run.dir={directory}", *overrides]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )  # type: ignore[call-overload,no-any-return]


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    with process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def wait_for_step(directory: Path, *, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = directory / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


def steps_of(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


# Nightly: cli/test_process.py interrupts a run in the same way.
@pytest.mark.nightly
def test_ctrl_c_finishes_and_saves_the_step_and_prints_the_resume_command(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(environment, run, "run.total_steps=1000")
    wait_for_step(run, step=2, process=process)
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.returncode == 130, stopped.stderr
    (saved,) = steps_of(run)
    assert "run.resume=auto" in stopped.stderr
    step = int(saved.removeprefix("step_"))
    again = start(
        environment, run, f"run.total_steps={step + 1}", "run.resume=auto", "run.save_model=false"
    )
    done = finish(again)
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == [saved, f"step_{step + 1:08d}"]


# Nightly: test_interrupts.py measures the grace period.
@pytest.mark.nightly
def test_sigterm_in_a_long_step_saves_the_previous_one_within_the_grace_period(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run, slow = tmp_path / "run", "reward.function=temper_trainer_test_rewards:slow_after_two_steps"
    process = start(environment, run, slow, "run.total_steps=1000", "run.stop_grace_s=10")
    wait_for_step(run, step=2, process=process)
    # Inside the slow step: a signal between two steps ends the run at once, as it should.
    while Path(environment["TEMPER_TEST_MARKER"]).stat().st_size <= 32:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.returncode == 143, stopped.stderr
    assert 5 <= time.monotonic() - begin < 20  # of which 10 are the grace, the rest a busy machine
    assert steps_of(run) == ["step_00000002"]
    assert "interrupted at step 2, resume with: temper-train" in stopped.stderr
    assert (run / "report.html").exists()


def test_reward_that_never_releases_the_gil_ends_the_run_within_three_timeouts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run, blocked = tmp_path / "run", "temper_trainer_test_rewards:blocks_interpreter_after_one_step"
    process = start(
        environment, run, f"reward.function={blocked}", "reward.timeout_s=3", "run.save_every=1"
    )
    marker = Path(environment["TEMPER_TEST_MARKER"])
    while not marker.exists() or marker.stat().st_size <= 16:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    try:
        process.wait(timeout=3 * 3 + 5)  # the rest is for a busy machine
    finally:
        process.kill()
    stopped = finish(process)
    assert stopped.returncode == 1
    message = stopped.stderr.splitlines()[-1]
    assert message.startswith(f"ERROR: the reward {blocked} has held Python's global lock")
    assert "(prompt " in message
    assert "The last checkpoint is that of step 1: run.resume=auto continues from it." in message
    assert "reward.num_workers=1" in message
    assert (run / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose /proc lists children")
def test_hanging_reward_ends_the_program_and_the_processes_it_has_started(
    environment: dict[str, str], tmp_path: Path
) -> None:
    hanging = "reward.function=temper_trainer_test_rewards:starts_what_hangs"
    process = start(environment, tmp_path / "run", hanging, "reward.timeout_s=2")
    try:
        stopped = finish(process)
    finally:
        process.kill()
    assert stopped.returncode == 1
    assert "RewardFailureError: " in stopped.stderr
    started = Path(environment["TEMPER_TEST_MARKER"]).read_text().split()
    assert started
    left = [each for each in started if Path(f"/proc/{each}/exe").exists()]
    for each in left:
        os.kill(int(each), signal.SIGKILL)
    assert left == []


# Nightly: test_interrupts.py ends a process that holds the GIL.
@pytest.mark.nightly
def test_sigterm_in_a_step_that_holds_the_gil_keeps_the_last_checkpoint(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run, blocked = tmp_path / "run", "blocks_interpreter_after_one_step"
    process = start(
        environment,
        run,
        f"reward.function=temper_trainer_test_rewards:{blocked}",
        "run.total_steps=1000",
        "run.save_every=1",
        "run.stop_grace_s=3",
    )
    marker = Path(environment["TEMPER_TEST_MARKER"])
    while not marker.exists() or marker.stat().st_size <= 16:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=20)
    finally:
        process.kill()
    stopped = finish(process)
    assert stopped.returncode == 143, stopped.stderr
    assert 3 <= time.monotonic() - begin < 10
    assert "SIGTERM: not stopped within run.stop_grace_s = 3 s" in stopped.stderr
    assert "The last checkpoint is that of step 1: run.resume=auto" in stopped.stderr
    assert steps_of(run) == ["step_00000001"]
    marker.unlink()
    again = finish(
        start(environment, run, "run.total_steps=2", "run.resume=auto", "run.save_model=false")
    )
    assert again.returncode == 0, again.stderr
    assert "continuing from step 1 " in again.stdout


def test_sigterm_during_startup_starts_no_step_and_the_command_can_be_repeated(
    environment: dict[str, str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    short = ("run.total_steps=1", "run.save_model=false", "run.report=false")
    process = start(environment, folder, *short)
    while not (folder / "config.yaml").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.returncode == 143, stopped.stderr
    assert (
        "interrupted before the first step was completed, start again with: temper-train"
        in stopped.stderr
    )
    # In this process, because a second one needs seconds to import its libraries.
    monkeypatch.setenv("TEMPER_TEST_MARKER", environment["TEMPER_TEST_MARKER"])
    settings = (*PROGRAM[3:], *SMALL, *short)
    check_external_objects(load([*settings, f"run.dir={folder}"]).config)
    run(folder, base=settings)
    assert steps_of(folder) == ["step_00000001"]


@pytest.mark.parametrize("delay_s", [0.1, 0.5, 1.0, 2.0])
def test_sigterm_in_the_first_seconds_ends_the_process_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, delay_s: float
) -> None:
    run = tmp_path / "run"
    process = start(environment, run)
    time.sleep(delay_s)
    check_early_sigterm(process, run)


def test_sigterm_while_torch_is_imported_releases_the_run_folder(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(environment, run)
    while not (run / "run.lock").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    stopped = check_early_sigterm(process, run)
    assert stopped.returncode == 143
    # The first line says that the command checks its settings.
    assert stopped.stderr.splitlines()[-1].startswith(
        "terminated before the run was started, start again with: temper-train "
    )


def check_early_sigterm(
    process: "subprocess.Popen[str]", run: Path
) -> "subprocess.CompletedProcess[str]":
    """Send SIGTERM; check that the process ends soon and that nothing of it is left."""
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert time.monotonic() - begin < 10  # a busy machine; 0.1 s on an idle one
    # Before `main`, the signal itself ends the process, which shells report as 143, too.
    assert stopped.returncode in (143, -signal.SIGTERM)
    assert "Traceback" not in stopped.stderr
    assert not run.exists()
    return stopped


def test_second_ctrl_c_without_a_checkpoint_does_not_promise_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run, slow = tmp_path / "run", "reward.function=temper_trainer_test_rewards:slow_after_two_steps"
    # Longer than the time between the two signals, so that the step does not end and save.
    environment = environment | {"TEMPER_TEST_WAIT_S": "5"}
    process = start(
        environment,
        run,
        slow,
        *("run.total_steps=1000", "run.save_interval_s=null", "run.report=false"),
    )
    wait_for_step(run, step=2, process=process)
    while Path(environment["TEMPER_TEST_MARKER"]).stat().st_size <= 32:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.returncode == 130, stopped.stderr
    assert not list((run / "checkpoints").glob("step_*"))
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith(
        "interrupted; no checkpoint was saved, so all steps are lost. "
        "Start again with: temper-train"
    )
    assert last.endswith("run.resume=auto")
    assert "Resume with" not in stopped.stderr


def test_secrets_in_errors_of_a_reward_function_are_neither_printed_nor_written(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    secrets = {"LLM_KEY": "first/'sentinel", "JUDGE": "second/'sentinel"}
    failed = finish(
        start(
            environment | secrets,
            run,
            "reward.function=temper_trainer_test_rewards:fails_with_its_key",
            "+reward.arguments.judge='for ${oc.env:LLM_KEY}'",
            "+reward.arguments.api_key='${oc.env:JUDGE}'",
            # Some errors of the first step are accepted, and those of the second stop the run.
            "reward.max_failure_fraction=0.9",
            "run.total_steps=2",
            "run.table_every=1",
        )
    )
    assert failed.returncode == 1, failed.stderr
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert 0 < row["reward/exception"] < 16
    output = failed.stdout + failed.stderr
    assert '401 for "<hidden>" with key <hidden>' in output
    assert "sentinel" not in output
    assert "ZW50aW5lb" not in output
    for path in run.rglob("*"):
        assert path.is_dir() or b"sentinel" not in path.read_bytes(), path
        # "sentinel" within base64 of "me:second/'sentinel".
        assert path.is_dir() or b"ZW50aW5lb" not in path.read_bytes(), path


# Nightly: test_faults.py fills the disk of a run.
@pytest.mark.nightly
def test_full_disk_at_start_up_and_in_the_last_report_names_the_saved_step(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run, short = tmp_path / "run", ("run.save_model=false", "run.resume=auto")
    run.mkdir()
    draft = run / "config.yaml.new.draft"
    draft.symlink_to("/dev/full")  # every write to it fails with ENOSPC
    first = finish(start(environment, run, "run.total_steps=1", *short))
    assert first.returncode == 1, first.stderr
    assert f"[Errno 28] No space left on device: '{run / 'config.yaml'}'. Free" in first.stderr
    assert "No checkpoint of this run was saved yet" in first.stderr
    draft.unlink(missing_ok=True)
    (run / ".report.html.partial").symlink_to("/dev/full")
    second = finish(start(environment, run, "run.total_steps=1", *short))
    assert second.returncode == 1, second.stderr
    saved = run / "checkpoints" / "step_00000001"
    named = f"step 1 is saved in {saved}: continue with run.resume=auto."
    assert second.stderr.rstrip().endswith(named)
    draft.symlink_to("/dev/full")
    third = finish(start(environment, run, "run.total_steps=2", *short))
    assert third.returncode == 1, third.stderr
    assert third.stderr.rstrip().endswith(named)


# Nightly: test_faults.py starts a second process in the folder of a run, too.
@pytest.mark.nightly
def test_second_process_in_the_folder_of_a_run_changes_no_file(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = start(environment, run, "run.total_steps=1000", "run.resume=auto")
    wait_for_step(run, step=1, process=first)
    files = ("config.yaml", "config_origins.yaml")
    before = [(run / name).stat().st_mtime_ns for name in files]
    second = finish(start(environment, run, "run.total_steps=7", "run.resume=auto"))
    assert second.returncode == 2
    assert f"run.dir {run} is in use by process {first.pid} on host " in second.stderr
    assert [(run / name).stat().st_mtime_ns for name in files] == before
    first.send_signal(signal.SIGINT)
    assert finish(first).returncode == 130
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert not list(run.glob("*.superseded-*"))


# Nightly: test_faults.py kills and resumes a run.
@pytest.mark.nightly
def test_killed_run_has_all_metrics_and_resumes_from_its_last_complete_checkpoint(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(environment, run, "run.total_steps=1000", "run.save_every=1")
    wait_for_step(run, step=3, process=process)
    process.kill()
    finish(process)
    complete = [name for name in steps_of(run) if name.startswith("step_")]
    last = int(complete[-1].removeprefix("step_"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert len(lines) >= last
    again = start(
        environment, run, f"run.total_steps={last + 1}", "run.resume=auto", "run.save_model=false"
    )
    done = finish(again)
    assert done.returncode == 0, done.stderr
    assert f"continuing from step {last} " in done.stdout


# Nightly: test_run_log.py tests when a report is written.
@pytest.mark.nightly
def test_next_start_completes_the_report_of_a_killed_run(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run, settings = tmp_path / "run", ("run.total_steps=1000", "run.save_every=1")
    report, marker = run / "report.html", Path(environment["TEMPER_TEST_MARKER"])
    process = start(environment, run, *settings)
    wait_for_step(run, step=4, process=process)
    process.kill()
    finish(process)
    steps = [int(name.removeprefix("step_")) for name in steps_of(run) if name.startswith("step_")]
    assert last_step_in(report) == 1  # written after the first step, and then once in 60 s
    slow = "reward.function=temper_trainer_test_rewards:slow_after_two_steps"
    calls = marker.stat().st_size
    again = start(environment, run, *settings, slow, "run.resume=auto")
    while marker.stat().st_size == calls:  # until its first step is under way
        assert again.poll() is None, again.communicate()[1]
        time.sleep(0.05)
    again.kill()  # so that neither its own first step nor its end writes a report
    finish(again)
    assert last_step_in(report) == steps[-1] >= 3


def last_step_in(report: Path) -> int:
    """Return the last step of which the report shows the reward."""
    row = re.search(
        r"<div>reward/mean</div></td>(?:<td class=number>[^<]*</td>){2}<td class=number>(\d+)<",
        report.read_text(),
    )
    assert row
    return int(row[1])


# Nightly: test_faults.py fills the disk of a run.
@pytest.mark.nightly
def test_full_disk_while_saving_keeps_the_earlier_checkpoint(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = finish(start(environment, run, "run.total_steps=1", "run.save_model=false"))
    assert first.returncode == 0, first.stderr

    def small_files_only() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (50_000, 50_000)
        )  # a write beyond fails with EFBIG, as on a full disk

    second = finish(
        start(environment, run, "run.total_steps=2", "run.resume=auto", preexec_fn=small_files_only)
    )
    assert second.returncode == 1, second.stderr
    assert "step 2 could not be saved" in second.stderr
    saved = run / "checkpoints" / "step_00000001"
    assert f"step 1 is saved in {saved}: continue with run.resume=auto." in second.stderr
    assert steps_of(run) == ["step_00000001"]
    third = finish(
        start(environment, run, "run.total_steps=2", "run.resume=auto", "run.save_model=false")
    )
    assert third.returncode == 0, third.stderr
    assert steps_of(run) == ["step_00000001", "step_00000002"]
