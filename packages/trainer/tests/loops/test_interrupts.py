"""Stop requests: which work a signal interrupts, and what ends the process."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from temper_trainer.loops.run.interrupts import (
    RunInterrupted,
    StopRequest,
    WorkAbandoned,
    allow_stop_after_half_grace,
)
from temper_trainer.stop_watcher import describe_saved_step

GRACE_S = 60.0


def receive(number: signal.Signals) -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    time.sleep(0)  # the handler runs between two bytecodes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_interrupts_abandonable_work_at_once(number: signal.Signals) -> None:
    with StopRequest(grace_s=GRACE_S) as stop:
        with pytest.raises(WorkAbandoned):
            receive(number)
        assert stop.requested == number


def test_deferred_work_is_finished_before_the_stop() -> None:
    done = []

    def work(stop: StopRequest) -> None:
        with stop.defer():
            receive(signal.SIGTERM)
            done.append(stop.is_set)
        done.append(False)

    with StopRequest(grace_s=GRACE_S) as stop, pytest.raises(WorkAbandoned):
        work(stop)
    assert done == [True]


def test_no_work_starts_after_a_signal() -> None:
    with StopRequest(grace_s=GRACE_S) as stop, stop.defer():
        receive(signal.SIGTERM)
        with pytest.raises(WorkAbandoned), stop.allow_abandon():
            pytest.fail("the body began")


def test_blocking_call_is_interrupted_after_half_of_the_grace_period() -> None:
    called = []
    with StopRequest(grace_s=1.0) as stop, stop.defer():
        stop.on_late = lambda: called.append(threading.current_thread().name)
        begin = time.monotonic()
        receive(signal.SIGTERM)
        with pytest.raises(WorkAbandoned), allow_stop_after_half_grace():
            threading.Event().wait(30)
        assert 0.5 <= time.monotonic() - begin < 5
        time.sleep(0.1)
    assert called == ["stop-request"]


def test_second_ctrl_c_acts_as_usual_and_second_sigterm_is_ignored() -> None:
    class StoppedError(Exception):
        pass

    def usual(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGINT, usual)
    try:
        with StopRequest(grace_s=GRACE_S) as stop, stop.defer():
            receive(signal.SIGINT)
            receive(signal.SIGTERM)
            with pytest.raises(StoppedError):
                receive(signal.SIGINT)
            stop.requested = None  # so that leaving the body does not stop this test
        assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_after_the_run_has_decided_to_end_have_no_effect() -> None:
    done = []
    with StopRequest(grace_s=0.4) as stop:
        with stop.defer():
            receive(signal.SIGTERM)
            error = stop.make_interrupted(step=3, checkpoint=Path("step_00000003"))
        receive(signal.SIGTERM)
        time.sleep(0.3)  # beyond half of the grace period, at which the main thread is woken
        done.append(True)
    assert done == [True]
    assert "interrupted after step 3" in str(error)


@contextmanager
def send_at_exit(*, done: list[str]) -> Iterator[None]:
    """Send a signal at the end of the body, while the context closes."""
    try:
        yield
    finally:
        receive(signal.SIGTERM)
        done.append("closed")


def test_signal_while_a_context_closes_interrupts_only_what_follows() -> None:
    done: list[str] = []

    def work(stop: StopRequest) -> None:
        with stop.protect_exit(send_at_exit(done=done)):
            done.append("body")
        done.append("next work")

    with StopRequest(grace_s=GRACE_S) as stop, pytest.raises(WorkAbandoned):
        work(stop)
    assert done == ["body", "closed"]


def test_signal_while_an_error_closes_a_context_does_not_replace_the_error() -> None:
    done: list[str] = []
    with StopRequest(grace_s=GRACE_S) as stop:
        with (
            pytest.raises(ValueError, match="the error"),
            stop.protect_exit(send_at_exit(done=done)),
        ):
            raise ValueError("the error")
        receive(signal.SIGTERM)
    assert done == ["closed"]


class SendsWhenDeleted:
    """Object whose finalizer receives a signal; Python ignores exceptions of finalizers."""

    def __del__(self) -> None:
        receive(signal.SIGTERM)


def test_stop_that_a_finalizer_has_swallowed_is_repeated() -> None:
    def work() -> None:
        SendsWhenDeleted()
        threading.Event().wait(20)

    begin = time.monotonic()
    with StopRequest(grace_s=GRACE_S), pytest.raises(WorkAbandoned):
        work()
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("ends_process", [True, False])
def test_repeated_sigterm_has_no_effect_while_a_stopped_process_ends(ends_process: bool) -> None:
    received = []

    def stop_run() -> None:
        with StopRequest(grace_s=GRACE_S, ends_process=ends_process) as stop, stop.defer():
            receive(signal.SIGTERM)
            raise stop.make_interrupted(step=1, checkpoint=None)

    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(RunInterrupted):
            stop_run()
        receive(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    # A program that calls `train` has its own handler again.
    assert received == ([] if ends_process else [signal.SIGTERM])


def test_handlers_of_another_library_are_replaced_and_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(grace_s=GRACE_S) as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.install()
        with pytest.raises(WorkAbandoned):
            receive(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


PROGRAM = """
import time
from temper_trainer.loops.run.interrupts import StopRequest
with StopRequest(grace_s=1.0, run_dir={run_dir!r}) as stop, stop.defer():
    print("ready", flush=True)
    {work}
"""


@pytest.mark.parametrize(
    "work",
    [
        # Nightly: a call that runs no signal handler is the harder case.
        pytest.param("time.sleep(60)", id="python", marks=pytest.mark.nightly),
        # A call that neither returns nor lets the interpreter run its signal handler.
        pytest.param("import ctypes; [ctypes.CDLL(None).sleep(20) for _ in range(5)]", id="c"),
        # The same without releasing the GIL, so that no other thread runs either.
        pytest.param("sum(iter(int, 1))", id="c with the GIL"),
    ],
)
@pytest.mark.parametrize(
    # Nightly: both signals are handled in the same way, which the tests above show.
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)],
)
def test_process_that_does_not_stop_is_ended_after_the_grace_period(
    work: str, number: signal.Signals, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(work=work, run_dir=str(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        begin = time.monotonic()
        try:
            process.send_signal(number)
            assert process.wait(timeout=30) == 128 + number
        finally:
            process.kill()
        assert time.monotonic() - begin < 10
        (message,) = (line for line in process.stderr if "not stopped within" in line)
    assert f"{number.name}: not stopped within run.stop_grace_s = 1 s" in message
    assert "The last checkpoint is that of step 3: run.resume=auto continues" in message


CALL_IN_THREAD = """
import ctypes, subprocess, threading, time
from temper_trainer.loops.run.interrupts import StopRequest
from temper_trainer.stop_watcher import watch_call

def call():
    with watch_call("blocked. {{saved}}", limit_s={limit_s}):
        {work}

with StopRequest(grace_s=1.0) as stop, stop.defer():
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    {main_work}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose /proc measures threads")
@pytest.mark.parametrize(
    ("work", "limit_s", "main_work", "is_ended"),
    [
        pytest.param("sum(iter(int, 1))", 2.0, "thread.join(30)", True, id="call holds the GIL"),
        pytest.param(
            # The program has the pipes of this process, and has to end with it.
            "subprocess.Popen(['sleep', '100']); ctypes.PyDLL(None).sleep(60)",
            0.3,
            "thread.join(30)",
            True,
            id="call holds the GIL and waits",
        ),
        pytest.param("while True: pass", 2.0, "thread.join(5)", False, id="call computes"),
        # PyDLL holds the GIL, as a save may do while a call waits.
        pytest.param(
            "while True: pass",
            2.0,
            "ctypes.PyDLL(None).sleep(5)",
            False,
            id="another thread holds the GIL",
        ),
    ],
)
def test_process_is_ended_by_a_call_that_never_releases_the_gil(
    work: str, limit_s: float, main_work: str, is_ended: bool
) -> None:
    program = CALL_IN_THREAD.format(work=work, limit_s=limit_s, main_work=main_work)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (1 if is_ended else 0), done.stderr
    assert done.stderr.startswith("blocked. Steps after the last checkpoint" if is_ended else "")
    assert bool(done.stderr) == is_ended


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ([], "No checkpoint of this run was saved: run.resume=auto starts at step 1."),
        (
            ["warm_start/checkpoints/step_00000009/manifest.json"],
            "The last checkpoint is that of step 9 of the warm start: run.resume=auto continues",
        ),
        (
            [
                "warm_start/checkpoints/step_00000009/manifest.json",
                "checkpoints/step_00000002/manifest.json",
                "checkpoints/step_00000003/manifest.json",
                "checkpoints/step_00000004/actor/weights",
                "checkpoints/step_00000005.damaged-1/manifest.json",
            ],
            "The last checkpoint is that of step 3: run.resume=auto continues from it.",
        ),
    ],
)
def test_process_that_does_not_stop_names_the_step_that_is_saved(
    tmp_path: Path, saved: list[str], sentence: str
) -> None:
    for name in saved:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert describe_saved_step(str(tmp_path)).startswith(sentence)


HANGING_EXIT = """
import atexit, time
from temper_trainer.loops.run.interrupts import end_process_at
atexit.register({handler})
end_process_at(time.monotonic() + 1.0, signal_number=15)
"""


@pytest.mark.parametrize(
    "handler",
    [
        # Nightly: a process that holds the GIL is the harder case.
        pytest.param("time.sleep, 60", id="sleep", marks=pytest.mark.nightly),
        pytest.param("sum, iter(int, 1)", id="with the GIL"),
    ],
)
def test_process_whose_exit_hangs_is_ended_at_the_deadline(handler: str) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGING_EXIT.format(handler=handler)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 30
    assert "SIGTERM: this process did not exit" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose /proc lists children")
def test_watcher_of_a_stop_request_ends_with_its_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(work="time.sleep(60)", run_dir=".")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (watcher,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{watcher}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_late_wake_up_does_not_reach_handlers_that_a_second_ctrl_c_restored() -> None:
    received = []

    def interrupt_twice() -> None:
        with StopRequest(grace_s=4.0) as stop, stop.defer():
            receive(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                receive(signal.SIGINT)
            time.sleep(2.5)  # beyond half of the grace period

    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(WorkAbandoned):
            interrupt_twice()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == []
