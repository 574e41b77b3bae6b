"""Reward functions that misbehave, importable by worker processes."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from temper_trainer.types import Prompt


def follow_text(prompt: Prompt, completion_text: str, *, bonus: float = 0.0) -> float:
    """Do what the completion says."""
    match completion_text:
        case "hang":
            time.sleep(3600)
        case "seize":
            ctypes.PyDLL(None).usleep(
                1_500_000
            )  # holds the interpreter, as a regular expression that backtracks does
        case "raise":
            raise RuntimeError(f"no reward for {prompt.answer}")
        case "nan":
            return float("nan")
        case "infinity":
            return float("inf")
        case "word":
            return "one"  # type: ignore[return-value]
        case "die":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0 if completion_text == "seize" else float(completion_text) + bonus


def run_program(prompt: Prompt, completion_text: str) -> float:
    """Run a program without end, whose process id is written into a file."""
    with subprocess.Popen(["sleep", "600"]) as program:
        written = Path(f"{completion_text}.partial")
        written.write_text(str(program.pid))
        written.rename(completion_text)
    return 1.0


def log_text(prompt: Prompt, completion_text: str) -> float:
    """Print the completion, and log it as a warning."""
    sys.stdout.write(f"called with {completion_text}\n")
    sys.stdout.flush()
    logging.getLogger("judge").warning("called with %s", completion_text)
    return 1.0


def process_id(prompt: Prompt, completion_text: str) -> float:
    """Return the id of the process that scores."""
    return float(os.getpid())


def thread_id(prompt: Prompt, completion_text: str) -> float:
    """Return the id of the thread that scores."""
    return float(threading.get_ident())


def has_torch(prompt: Prompt, completion_text: str) -> float:
    """Return 1 if the process has imported torch, else 0."""
    return float("torch" in sys.modules)


def leave(prompt: Prompt, completion_text: str) -> float:
    """End the process as a script or a user would."""
    raise SystemExit(3) if completion_text == "exit" else KeyboardInterrupt


def hang(prompt: Prompt, completion_text: str) -> float:
    """Never return."""
    time.sleep(3600)
    return 0.0


def hang_later(prompt: Prompt, completion_text: str) -> float:
    """Take 0.15 s for the first prompt, and never return for the others."""
    time.sleep(0.15 if prompt.prompt_id == 0 else 3600)
    return 1.0


_num_running = 0
_num_running_lock = threading.Lock()


def count_running(prompt: Prompt, completion_text: str, *, is_waiting: bool) -> float:
    """Take 0.05 s, by a wait or by a computation; return how many calls run meanwhile."""
    global _num_running
    with _num_running_lock:
        _num_running += 1
        num_running = _num_running
    end = time.thread_time() + 0.05
    if is_waiting:
        time.sleep(0.05)
    while not is_waiting and time.thread_time() < end:
        pass
    with _num_running_lock:
        _num_running -= 1
    return float(num_running)


_turns = threading.Condition()
_num_requested = 0
_num_served = 0


def take_turns(prompt: Prompt, completion_text: str) -> float:
    """Take 0.2 s, one call at a time and in their order; hang if the completion says so."""
    global _num_requested, _num_served
    if completion_text == "hang":
        time.sleep(3600)
    with _turns:
        turn = _num_requested
        _num_requested += 1
        _turns.wait_for(lambda: _num_served == turn)
    time.sleep(0.2)
    with _turns:
        _num_served += 1
        _turns.notify_all()
    return 1.0
