"""Create the environment of the everyday commands in .temper/env, and update it when needed.

It is built from the packages' pyproject.toml files and constraints/cpu.txt, whose hashes are kept
in .temper/stamp.json. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("engine-api", "engine-fsdp", "engine-megatron", "trainer", "legacy-shim")
"""All packages; each comes after the packages that it depends on."""

EXTRAS = {
    "engine-api": "[conformance]",
    "engine-fsdp": "[lora]",
    "legacy-shim": "[checkpoint,workers,workers-megatron]",
    "trainer": "[fsdp,lora,megatron,ray,report,math,datasets,prometheus,judge,agent]",
}

TOOLS = (
    "build",
    "coverage",
    "editables",  # needed by hatchling for editable installs
    "griffelib",
    "hatchling",
    "hypothesis",
    "import-linter",
    "mypy",
    "nox",
    "pytest",
    "pytest-timeout",
    "ruff",
    "towncrier",
    "twine",
    "types-PyYAML",
    "virtualenv",
)

TORCH = "torch==2.13.0"
"""Installed first, so that a later `torch>=x` does not replace it.

It is a CPU build only if pip's configuration has an index with CPU builds; PyPI's wheels for Linux
contain CUDA. See docs/install.md.
"""

MODULES_OF_A_RUN = (
    "temper_trainer.__main__",
    "temper_trainer.loops.run.training_run",
    "temper_engine_fsdp.engine",
    "temper_engine_megatron.engine",
    "transformers.models.qwen2.modeling_qwen2",
    "matplotlib.pyplot",
    "peft",
    "ray",
)
"""Modules that together import most of what runs and tests import."""

MEGATRON_BRIDGE = "megatron-bridge==0.3.1"
"""Installed without dependencies: one needs torch at build time, which pip cannot resolve.

engine-megatron declares the ones that are used.
"""

TEST_DATA = "TEMPER_TEST_DATA"
"""Variable that names the folder of data which tests use and the repository does not contain.

It holds `gsm8k` (`train.jsonl`, `test.jsonl`) and `legacy` (checkpoints, traces, configurations and
scripts of the older system). Tests whose data is missing are skipped and name this variable.
"""
DEFAULT_TEST_DATA = Path(__file__).resolve().parents[2] / "shared"

NEEDED_BYTES = 4 << 30
"""Disk space for the environment and pip's temporary files."""

LIMIT_S = 21 * 60
"""Time limit of one installation command."""


class EnvironmentSetupError(RuntimeError):
    """Raised if the environment cannot be created; the message says what to do."""


def env_python(root: Path) -> Path:
    """Return the path of the environment's Python, which `ensure_environment` creates."""
    return root / ".temper" / "env" / "bin" / "python"


def compute_fingerprints(root: Path) -> dict[str, str]:
    """Return a hash of the inputs of each stage of the installation."""
    version = ".".join(str(part) for part in sys.version_info[:2])
    constraints = (root / "constraints" / "cpu.txt").read_text()
    declared = [(root / "packages" / name / "pyproject.toml").read_text() for name in PACKAGES]
    requirements = [*TOOLS, *(name + EXTRAS.get(name, "") for name in PACKAGES)]
    return {
        # With the path of the repository, because a virtual environment cannot be moved.
        "python": f"{version} at {Path(sys.base_prefix).resolve()} for {root}",
        "torch": TORCH,
        "packages": _digest([constraints, *declared, *requirements, MEGATRON_BRIDGE]),
    }


def find_outdated_stages(stamp: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return the stages to run: the first one whose hash differs, and all later ones."""
    stages = list(expected)
    stale = [number for number, stage in enumerate(stages) if stamp.get(stage) != expected[stage]]
    return stages[stale[0] :] if stale else []


def ensure_environment(root: Path) -> Path:
    """Create or update the environment, and return the path of its Python.

    Returns at once if nothing has changed. A second process that calls this waits for the first.

    Raises:
        EnvironmentSetupError: this Python has neither venv nor pip, the disk is too small, or an
            installation failed.
    """
    folder = root / ".temper"
    folder.mkdir(exist_ok=True)
    with _locked(folder / "lock"):
        expected = compute_fingerprints(root)
        stamp_file = folder / "stamp.json"
        stale = find_outdated_stages(_read_stamp(stamp_file, env_python(root)), expected)
        if stale:
            stamp_file.unlink(missing_ok=True)
        done = {stage: value for stage, value in expected.items() if stage not in stale}
        for stage in stale:
            started = time.monotonic()
            _STAGES[stage](root)
            done[stage] = expected[stage]
            stamp_file.write_text(json.dumps(done, indent=1))
            print(
                f"environment: {stage} is ready after {time.monotonic() - started:.0f} s",
                flush=True,
            )
    return env_python(root)


def check_disk(folder: Path, *, needed_bytes: int = NEEDED_BYTES) -> None:
    """Raise an error before an installation that would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise EnvironmentSetupError(
            f"{folder} has {free / 2**30:.1f} GiB free, and the environment needs "
            f"{needed_bytes / 2**30:.1f} GiB: free space on that disk, or clone the repository "
            "onto a larger one."
        )


def _create_environment(root: Path) -> None:
    folder = root / ".temper" / "env"
    check_disk(root)
    creator = _find_creator(root)
    print("environment: creating .temper/env", flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    _run(root, [sys.executable, *creator, str(folder)], action="creating the environment")
    # Older versions of pip ignore some constraints, and resolve more slowly.
    _run_pip(root, ["--upgrade", "pip"], action="upgrading pip")


def _find_creator(root: Path) -> list[str]:
    """Return Python arguments that create an environment.

    Uses virtualenv if the standard library's venv is missing, as in the Python of Debian.
    """
    if all(importlib.util.find_spec(module) is not None for module in ("venv", "ensurepip")):
        return ["-m", "venv"]
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentSetupError(
            f"{sys.executable} has neither pip nor venv: install one of them with the system's "
            "package manager (Debian and Ubuntu: python3-pip or python3-venv), or use another "
            "Python."
        )
    print(
        "environment: this Python has no venv; installing virtualenv into .temper/virtualenv",
        flush=True,
    )
    home = root / ".temper" / "virtualenv"
    if home.exists():
        shutil.rmtree(home)
    # Into .temper, because a Python of the system's package manager refuses installations.
    _run(
        root,
        [sys.executable, "-m", "pip", "install", "--target", str(home), "virtualenv"],
        action="installing virtualenv",
    )
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(home)!r}); "
        "runpy.run_module('virtualenv', run_name='__main__')"
    )
    return ["-c", program]


def _install_torch(root: Path) -> None:
    print(f"environment: installing {TORCH} (about a minute)", flush=True)
    check_disk(root)
    _run_pip(root, [TORCH], action=f"installing {TORCH}")


def _install_packages(root: Path) -> None:
    print(
        "environment: installing the tools and the five packages "
        "(about two minutes the first time)",
        flush=True,
    )
    _run_pip(root, list(TOOLS), action="installing the tools")
    editable = [
        word for name in PACKAGES for word in ("-e", f"packages/{name}{EXTRAS.get(name, '')}")
    ]
    # The line above has installed the build backend. Without isolation pip does not create a build
    # environment for each package.
    _run_pip(root, ["--no-build-isolation", *editable], action="installing the packages")
    _run_pip(root, ["--no-deps", MEGATRON_BRIDGE], action=f"installing {MEGATRON_BRIDGE}")
    _compile_modules(root)


def _compile_modules(root: Path) -> None:
    """Compile the modules that a run imports, by importing them.

    Otherwise each run would compile them again where PYTHONDONTWRITEBYTECODE is set.
    """
    imports = f"import {', '.join(MODULES_OF_A_RUN)}"
    _run(root, [str(env_python(root)), "-c", imports], action="importing the packages")


_STAGES = {"python": _create_environment, "torch": _install_torch, "packages": _install_packages}


def _run_pip(root: Path, arguments: Sequence[str], *, action: str) -> None:
    pip = [
        str(env_python(root)),
        "-m",
        "pip",
        "install",
        # `_compile_modules` compiles what is used. All modules take half of pip's time.
        "--no-compile",
        "--progress-bar",
        "off",
        "-c",
        "constraints/cpu.txt",
    ]
    _run(root, [*pip, *arguments], action=action)


def _run(root: Path, command: Sequence[str], *, action: str) -> None:
    """Run a command with its output in .temper/install.log; show the last lines if it fails."""
    log = root / ".temper" / "install.log"
    # Two of these would change where packages are installed, and one would keep `_compile_modules`
    # from writing anything.
    outer = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    variables = {name: value for name, value in os.environ.items() if name not in outer}
    with log.open("w") as out:
        out.write(" ".join(command) + "\n")
        out.flush()
        try:
            code = subprocess.run(
                command,
                cwd=root,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise EnvironmentSetupError(
                f"{action} took longer than {LIMIT_S // 60} minutes and was stopped: see "
                ".temper/install.log, check the connection to your package index, and run the "
                "command again. Finished stages are not repeated."
            ) from None
    if code != 0:
        tail = "\n".join(
            "    " + line for line in log.read_text(errors="replace").splitlines()[-15:]
        )
        raise EnvironmentSetupError(
            f"{action} failed with exit status {code}:\n{tail}\n"
            "The full output is in .temper/install.log. Fix the cause and run the command again; "
            "delete .temper to start from scratch."
        )


def _read_stamp(stamp_file: Path, python: Path) -> dict[str, str]:
    """Return the hashes of finished stages; empty if the environment or its stamp is missing."""
    if not (python.exists() and stamp_file.exists()):
        return {}
    try:
        stamp = json.loads(stamp_file.read_text())
    except json.JSONDecodeError:
        return {}
    return {str(key): str(value) for key, value in stamp.items()} if isinstance(stamp, dict) else {}


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("environment: waiting for another process that is installing", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
