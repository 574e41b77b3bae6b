"""The command ``temper-train``: compose, check or print a configuration, or run it.

Failures that a user can fix are printed as a message without traceback.
"""

from temper_trainer import import_interrupt  # noqa: F401 - sets a hook for the imports below

# isort: split
import argparse
import atexit
import difflib
import errno
import gc
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from temper_engine_api.errors import ConfigError, TemperError, format_install
from temper_trainer.config.run_folder_checks import contains_run
from temper_trainer.config_loading import LoadedConfig, format_config, load, write_resolved
from temper_trainer.config_loading.composition import DEFAULT_CONFIG_NAME
from temper_trainer.config_loading.help_text import USAGE, build_help_text
from temper_trainer.config_loading.hub_models import load_hub_models
from temper_trainer.config_loading.secrets import redact_override
from temper_trainer.config_loading.sizes import describe_sizes
from temper_trainer.metrics.run_files import (
    METRICS_FILE,
    list_run_starts,
    read_latest_rows,
    record_start,
)
from temper_trainer.redaction import (
    configure_logging,
    escape_control_characters,
    print_redacted_traceback,
    redact_secrets,
    redact_standard_streams,
)
from temper_trainer.run_lock import NO_SPACE, RunLock
from temper_trainer.runtime.placement import describe_plan
from temper_trainer.stop_watcher import kill_started_processes, open_call_table
from temper_trainer.versions import format_versions

EXIT_FAILED = 1
EXIT_WRONG_CONFIG = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
EXIT_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments after the program's name; None uses the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong configuration, 130 stopped by SIGINT, 143 stopped
        by SIGTERM, 141 if the reader of the output has exited.
    """
    if arguments is None:
        # Imports create a million objects that live until the exit. The garbage collector would
        # scan them for a fifth of the import time, and as long again at exit. `_train` enables it.
        gc.disable()
        atexit.register(gc.freeze)
    _open_closed_streams()
    redact_standard_streams()
    configure_logging()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    sys.excepthook = print_redacted_traceback
    # `python -m` does this too; it lets reward functions in the current directory be imported.
    sys.path.insert(0, os.getcwd())
    code = _execute_with_messages(options)
    if arguments is None:
        _end_hanging_calls(code)
    return code


def _end_hanging_calls(code: int) -> None:
    """End the process if a call of a reward still runs in a thread.

    At its exit the interpreter would wait for the threads and processes that the call has started.
    """
    if not open_call_table(os.getpid()).list_threads():
        return
    from temper_trainer.loops.run.interrupts import end_process  # imported by the run

    # All parts of the run are closed, so the rewards have started what is left. The main thread is
    # left out: its children may be older than this program, or belong to a module of the user.
    own = threading.main_thread()
    threads = [each.native_id for each in threading.enumerate() if each is not own]
    kill_started_processes(each for each in threads if each is not None)
    end_process(code)


def _execute_with_messages(options: argparse.Namespace) -> int:
    """Return the exit code, after a message about an error that a user can fix."""
    try:
        with _end_at_sigterm(options) as early_stop:
            code = _execute(options, early_stop=early_stop)
        # Flushed here, so that a reader that has exited (`| head`) gives an exit code and not a
        # traceback when the interpreter exits.
        sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        # The interpreter flushes standard output at its exit, which would raise the error once
        # more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if notes := getattr(error, "__notes__", []):
            sentence = "the reader of the standard output has exited, and the run with it."
            return _fail("\n".join([sentence, *notes]), code=EXIT_NO_READER)
        return EXIT_NO_READER
    except ConfigError as error:
        return _fail(f"configuration error:\n{error}", code=EXIT_WRONG_CONFIG)
    except TemperError as error:
        notes = getattr(error, "__notes__", [])  # such as the last saved step
        return _fail("\n".join([f"{type(error).__name__}: {error}", *notes]), code=EXIT_FAILED)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        sentence = f"{error}. Free space, then run: {_format_resume_command(options)}"
        notes = getattr(error, "__notes__", [])
        return _fail("\n".join([sentence, *notes]), code=EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail(
            f"interrupted before the run was started, start again with: {_format_command(options)}",
            code=EXIT_INTERRUPTED,
        )


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, as some programs leave them.

    Otherwise the first files of the run get the numbers of these streams, and whatever C libraries
    and child processes print goes into them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is that of the stream.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - open until the exit
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


class _Parser(argparse.ArgumentParser):
    """Parser whose usage errors hide what may be a secret, as errors about overrides do."""

    def __init__(self, arguments: Sequence[str], *, usage: str) -> None:
        super().__init__(prog="temper-train", usage=usage, add_help=False)
        self._arguments = arguments

    def error(self, message: str) -> NoReturn:
        """Print usage and message, which repeats arguments, and exit with 2."""
        for argument in self._arguments:
            redacted = redact_override(argument)
            if redacted == argument:
                continue
            message = message.replace(argument, redacted)
            # The value alone, which argparse repeats for a flag that takes none.
            _, separator, value = argument.partition("=")
            value = value if separator else argument[2:]
            message = message.replace(value, "<hidden>") if value else message
        super().error(message + self._suggest_flag())

    def _suggest_flag(self) -> str:
        """Return the flag that a misspelled one resembles, formatted to end a message."""
        known = list(self._option_string_actions)
        for argument in self._arguments:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                near = difflib.get_close_matches(flag, known, n=1)
                return f": did you mean {near[0]}?" if near else ": see temper-train --help"
        return ""


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(arguments, usage=USAGE.split("usage: ")[1].splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--report", metavar="RUN_DIR")
    parser.add_argument("--config-dir")
    parser.add_argument("--config-name", default=DEFAULT_CONFIG_NAME)
    # Intermixed, so that options may also follow overrides.
    return parser.parse_intermixed_args(list(arguments))


@dataclass(slots=True)
class _EarlyStop:
    """State that a SIGTERM must clean up before the run handles signals itself."""

    lock: RunLock | None = None
    """Lock of the run folder; it only removes what this process has made."""
    has_run: bool = False
    """True once the run folder may have steps; the run itself handles signals until it ends."""


@contextmanager
def _end_at_sigterm(options: argparse.Namespace) -> Iterator[_EarlyStop]:
    """End the process at once if it gets SIGTERM, until a run sets its own handler.

    The handler exits instead of raising an exception. The signal can arrive in a callback of
    Python's import system, which would only print an exception, and the process would continue.
    """
    stop, process = _EarlyStop(), os.getpid()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = f"terminated before the run was started, start again with: {_format_command(options)}"
    later = (
        "terminated while the run was starting or ending, continue with: "
        f"{_format_resume_command(options)}"
    )

    def end(number: int, frame: object) -> None:
        if os.getpid() != process:  # a forked worker must not release the lock of its parent
            os._exit(EXIT_TERMINATED)
        if stop.lock is not None:
            stop.lock.abandon(exit_with_message)
        else:
            exit_with_message()

    def exit_with_message() -> None:
        # os.write and not print, which cannot be called again if the signal has interrupted a
        # print.
        os.write(2, f"{later if stop.has_run else before}\n".encode())
        os._exit(EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield stop
    finally:
        # After an interrupted run, SIGTERM stays ignored until the process has ended.
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, previous)


def _execute(options: argparse.Namespace, *, early_stop: _EarlyStop) -> int:
    if options.help:
        print(build_help_text(overrides=options.overrides, config_dir=options.config_dir), end="")
        return 0
    if options.version:
        print(f"temper-train {format_versions()}")
        return 0
    if options.report:
        return _report(Path(options.report))
    is_default = options.config_dir is None and options.config_name == DEFAULT_CONFIG_NAME
    if is_default and not options.overrides:
        raise ConfigError(
            "there are no settings, but a run needs at least data and a model: start with "
            "temper-train experiment=quickstart, or see temper-train --help."
        )
    loaded = load(options.overrides, config_dir=options.config_dir, config_name=options.config_name)
    if options.print:
        print(format_config(loaded), end="")
        return 0
    # --help and --print, which need no check, start in half the time without these imports.
    from temper_trainer.config_loading.checks.external_checks import (
        check_external_objects,
        check_libraries,
    )
    from temper_trainer.config_loading.checks.settings_warnings import (
        warn_about_aggregation,
        warn_about_settings,
    )

    # Importing modules of the user and torch may take ten seconds and more. Not to the standard
    # output, which is the result of --check.
    print(f"temper-train {version('temper-trainer')}: checking", file=sys.stderr, flush=True)
    loaded = load_hub_models(loaded)
    check_external_objects(loaded.config)
    if loaded.config.task == "rl":
        warn_about_aggregation(loaded.config.algorithm)
    warn_about_settings(loaded.config)
    if options.check:
        _check_without_run(loaded)
        return 0
    # A missing vLLM would otherwise be noticed only after the warm start.
    check_libraries(loaded.config)
    return _train_with_lock(loaded, options, early_stop=early_stop)


def _check_without_run(loaded: LoadedConfig) -> None:
    """Make the checks that only --check makes, and print the plan of the run."""
    from temper_trainer.config_loading.checks.external_checks import check_libraries, check_models
    from temper_trainer.config_loading.checks.first_rows import check_first_rows
    from temper_trainer.config_loading.checks.reward_calls_check import check_reward_calls
    from temper_trainer.config_loading.checks.settings_warnings import (
        warn_about_judges,
        warn_about_remote_files,
    )

    check_models(loaded)
    check_first_rows(loaded.config)
    check_reward_calls(loaded.config)
    warn_about_judges(loaded.config)
    warn_about_remote_files(loaded.config)
    placement = [f"  {line}" for line in describe_plan(loaded.config)]
    print(
        "\n  ".join(
            [
                "OK",
                *describe_sizes(loaded.config),
                "placement:",
                *placement,
                f"digest: {loaded.digest}",
            ]
        )
    )
    try:
        check_libraries(loaded.config)
    except ConfigError as error:  # no error here, because the run may use another host
        print(f"  not on this machine: {error}")


def _find_last_save(loaded: LoadedConfig) -> str | None:
    from temper_trainer.checkpoint.checkpoint_messages import find_last_save

    root = Path(loaded.config.run.dir)
    return find_last_save(root / "checkpoints", warm_start=root / "warm_start" / "checkpoints")


def _train_with_lock(
    loaded: LoadedConfig, options: argparse.Namespace, *, early_stop: _EarlyStop
) -> int:
    """Train with the lock of the run folder. Add what was saved to the messages of errors."""
    # Take the lock before torch is imported, so that a second process is refused within a second.
    lock = RunLock(Path(loaded.config.run.dir))
    # Set before the lock is taken, so that a SIGTERM in between removes its file and folder.
    early_stop.lock = lock
    with lock:
        try:
            return _train(loaded, options, lock=lock, early_stop=early_stop)
        except KeyboardInterrupt:  # while torch is imported, or a second SIGINT during the run
            if not contains_run(Path(loaded.config.run.dir)):
                raise
            if _find_last_save(loaded) is None:
                advice = "no checkpoint was saved, so all steps are lost. Start again with"
            else:
                advice = "steps after the last checkpoint are lost. Resume with"
            return _fail(
                f"interrupted; {advice}: {_format_resume_command(options)}", code=EXIT_INTERRUPTED
            )
        except OSError as error:
            if error.errno in (*NO_SPACE, errno.EPIPE) and not getattr(error, "__notes__", []):
                from temper_trainer.checkpoint.checkpoint_messages import NOTHING_SAVED

                error.add_note(_find_last_save(loaded) or NOTHING_SAVED)
            raise
        finally:
            early_stop.lock = None


def _train(
    loaded: LoadedConfig, options: argparse.Namespace, *, lock: RunLock, early_stop: _EarlyStop
) -> int:
    begin = time.monotonic()
    print(
        f"temper-train {version('temper-trainer')}: starting in {loaded.config.run.dir}", flush=True
    )
    # Imported here, because they import torch, which --help and --check do not need.
    from temper_trainer.loops import train
    from temper_trainer.loops.run.interrupts import RunInterrupted, end_process_at

    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    logging.getLogger("temper_trainer").setLevel(logging.INFO)
    early_stop.has_run = True
    try:
        result = train(
            loaded.config,
            digest=loaded.digest,
            write_config=partial(_write_start, loaded, options),
            lock=lock,
            ends_process=True,
        )
    except RunInterrupted as error:
        code = 128 + error.signal_number
        end_process_at(error.deadline, signal_number=error.signal_number)
        if not contains_run(Path(loaded.config.run.dir)):
            return _fail(
                "interrupted before the first step was completed, start again with: "
                f"{_format_command(options)}",
                code=code,
            )
        command = _format_resume_command(options)
        if error.checkpoint is not None:
            return _fail(f"interrupted at step {error.step}, resume with: {command}", code=code)
        saved = _find_last_save(loaded)
        if saved is None:
            return _fail(
                f"interrupted before the first checkpoint, start again with: {command}", code=code
            )
        # Before the checkpoint was found, or after a warm start that has saved one.
        saved = saved.partition(": continue with")[0]
        return _fail(f"interrupted; {saved}, resume with: {command}", code=code)
    print(
        _describe_end(
            result.directory,
            seconds=time.monotonic() - begin,
            # An earlier start may have left a report that is behind metrics.jsonl.
            has_report=loaded.config.run.report,
        )
    )
    return 0


def _write_start(loaded: LoadedConfig, options: argparse.Namespace, directory: Path) -> None:
    """Write the configuration of a start, and record its command line."""
    write_resolved(loaded, directory)
    record_start(directory, command=redact_secrets(_format_command(options)))


def _describe_end(directory: Path, *, seconds: float, has_report: bool) -> str:
    """Return a run's last line: its duration and result, the report and the model."""
    from temper_trainer.metrics.headline import describe_result, format_duration  # slow

    rows = read_latest_rows(directory / METRICS_FILE)
    result = describe_result(rows)
    paths = {
        name: directory / file
        for name, file in (("report", "report.html"), ("model", "huggingface"))
        if (has_report or name != "report") and (directory / file).exists()
    }
    parts = [result or f"results in {directory}", *(f"{k} {path}" for k, path in paths.items())]
    duration = format_duration(seconds)
    starts = list_run_starts(directory, rows)
    if len(starts) > 1:
        since_first_s = time.time() - float(str(starts[0]["time_s"]))
        duration += f" ({format_duration(since_first_s)} since the first start)"
    return f"done in {duration}: {'; '.join(parts)}"


def _report(directory: Path) -> int:
    try:
        from temper_trainer.metrics.report import write_report  # slow: imports matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--report needs {error.name}, which is not installed: run "
            f"{format_install('temper-trainer[report]')}."
        ) from error

    path = write_report(directory)
    if path is None:
        raise ConfigError(
            f"--report: {directory} has no metrics.jsonl with a complete line: pass the run.dir of "
            "a run."
        )
    curves = directory / "curves.png"
    # An evaluation or a generation alone has no curves.
    print(f"wrote {path} and {curves}" if curves.exists() else f"wrote {path}")
    return 0


def _format_resume_command(options: argparse.Namespace) -> str:
    """Return the command that resumes this run."""
    kept = [override for override in options.overrides if not override.startswith("run.resume=")]
    return shlex.join([*_list_program(options), *kept, "run.resume=auto"])


def _format_command(options: argparse.Namespace) -> str:
    """Return the command that started this run."""
    # Redacted, because an early signal may come before secrets in plain text are refused.
    return shlex.join([*_list_program(options), *map(redact_override, options.overrides)])


def _list_program(options: argparse.Namespace) -> list[str]:
    folder = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    name = (
        [] if options.config_name == DEFAULT_CONFIG_NAME else ["--config-name", options.config_name]
    )
    return ["temper-train", *folder, *name]


def _fail(message: str, *, code: int) -> int:
    # Messages repeat parts of completions, tool outputs and data.
    print(escape_control_characters(redact_secrets(message)), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
