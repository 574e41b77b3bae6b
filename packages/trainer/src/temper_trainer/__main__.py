"""The command ``temper-train``: compose, check or print a configuration, or run it. Every failure that a user can mend is one message."""

import argparse
import errno
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.config.run_files import contains_run
from temper_trainer.config_loading import LoadedConfig, format_config, load, write_resolved
from temper_trainer.config_loading.composition import PRIMARY
from temper_trainer.config_loading.external_checks import check_external_objects, check_libraries
from temper_trainer.config_loading.help_text import USAGE, help_text
from temper_trainer.config_loading.sizes import describe_sizes
from temper_trainer.run_lock import RunLock
from temper_trainer.runtime.planned import describe_plan

EXIT_FAILED = 1
EXIT_WRONG_CONFIG = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what stands after the program's name; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong configuration, 130 stopped by SIGINT, 143 stopped by SIGTERM, 141 if the reader of
        the output went away.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    asked = _parse(sys.argv[1:] if arguments is None else arguments)
    sys.path.insert(
        0, os.getcwd()
    )  # as with python -m: reward functions of one's own lie beside the run
    try:
        code = _act(asked)
        sys.stdout.flush()  # here, where a reader that went away (| head) is an exit code; at the interpreter's end it is a traceback
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER
    except ConfigError as error:
        return _fail(f"configuration error:\n{error}", code=EXIT_WRONG_CONFIG)
    except TemperError as error:
        notes = getattr(error, "__notes__", [])  # such as which step is saved
        return _fail("\n".join([f"{type(error).__name__}: {error}", *notes]), code=EXIT_FAILED)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        return _fail(
            f"{error}. Complete checkpoints are untouched: free space, then: {_again(asked)}",
            code=EXIT_FAILED,
        )
    except KeyboardInterrupt:
        return _fail(
            f"interrupted; what came after the last checkpoint is lost. Go on with: {_again(asked)}",
            code=EXIT_INTERRUPTED,
        )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="temper-train", usage=USAGE.split("usage: ")[1].splitlines()[0], add_help=False
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--report", metavar="RUN_DIR")
    parser.add_argument("--config-dir")
    parser.add_argument("--config-name", default=PRIMARY)
    return parser.parse_intermixed_args(list(arguments))


def _act(asked: argparse.Namespace) -> int:
    if asked.help:
        print(help_text(overrides=asked.overrides, config_dir=asked.config_dir), end="")
        return 0
    if asked.report:
        return _report(Path(asked.report))
    loaded = load(asked.overrides, config_dir=asked.config_dir, config_name=asked.config_name)
    if asked.print:
        print(format_config(loaded), end="")
        return 0
    check_external_objects(loaded.config)
    if asked.check:
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
        _say_what_is_missing(loaded)
        return 0
    check_libraries(loaded.config)
    # Taken before torch is imported: a second process is refused within a second and touches nothing.
    with RunLock(Path(loaded.config.run.dir)) as lock:
        return _train(loaded, asked, lock=lock)


def _say_what_is_missing(loaded: LoadedConfig) -> None:
    """Print what this machine lacks; a configuration may be checked on another one than it runs on."""
    try:
        check_libraries(loaded.config)
    except ConfigError as error:
        print(f"  not on this machine: {error}")


def _train(loaded: LoadedConfig, asked: argparse.Namespace, *, lock: RunLock) -> int:
    from temper_trainer.loops import (
        train,
    )  # torch and all that comes with it, which --help and --check do without
    from temper_trainer.loops.interrupts import RunInterrupted, end_process_at

    logging.getLogger("temper_trainer").setLevel(logging.INFO)
    try:
        result = train(
            loaded.config,
            digest=loaded.digest,
            write_config=partial(write_resolved, loaded),
            lock=lock,
        )
    except RunInterrupted as error:
        code = 128 + error.signal_number
        end_process_at(error.deadline, code=code)
        if not contains_run(Path(loaded.config.run.dir)):
            return _fail(
                f"interrupted before the first step was completed, start again with: {_same(asked)}",
                code=code,
            )
        where = f"at step {error.step}" if error.checkpoint else "before the first checkpoint"
        return _fail(f"interrupted {where}, resume with: {_again(asked)}", code=code)
    print(f"done: {_contents(result.directory)}")
    return 0


def _report(directory: Path) -> int:
    from temper_trainer.metrics.report import write_report  # matplotlib

    path = write_report(directory)
    if path is None:
        raise ConfigError(
            f"--report: {directory} holds no metrics.jsonl with a complete line: give the run.dir of a run."
        )
    print(f"wrote {path} and {directory / 'curves.png'}")
    return 0


def _contents(directory: Path) -> str:
    """What a finished run left, as far as it is there."""
    names = (
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "samples.jsonl",
        "curves.png",
        "report.html",
        "checkpoints",
        "huggingface",
    )
    return f"{directory} holds {', '.join(name for name in names if (directory / name).exists())}"


def _again(asked: argparse.Namespace) -> str:
    """Return the command that resumes this run."""
    kept = [override for override in asked.overrides if not override.startswith("run.resume=")]
    return shlex.join([*_program(asked), *kept, "run.resume=auto"])


def _same(asked: argparse.Namespace) -> str:
    return shlex.join([*_program(asked), *asked.overrides])


def _program(asked: argparse.Namespace) -> list[str]:
    folder = [] if asked.config_dir is None else ["--config-dir", asked.config_dir]
    name = [] if asked.config_name == PRIMARY else ["--config-name", asked.config_name]
    return ["temper-train", *folder, *name]


def _fail(message: str, *, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
