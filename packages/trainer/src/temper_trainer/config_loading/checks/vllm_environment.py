"""Check that this host's vLLM can run the servers of a run, without importing it."""

import difflib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from temper_engine_api.errors import ConfigError, format_install
from temper_trainer.config.rollout import VllmConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.model_folders import has_experts
from temper_trainer.rollout.vllm import vllm_versions
from temper_trainer.settings.names import is_installed

logger = logging.getLogger(__name__)

_LIST_TIMEOUT_S = 10.0
"""Maximum time for another interpreter to list its packages; 0.2 s on a local disk."""


def check_vllm_environment(setting: str, *, python: str | None) -> None:
    """Raise if an interpreter's packages cannot run vLLM servers.

    `setting` starts the message: it is the setting that needs vLLM, such as "rollout.sampler is
    vllm".

    Packages are listed and not imported, because importing takes minutes. A mismatch of torchvision
    and torch is only found when a server starts.
    """
    if python is None:
        if not is_installed("vllm"):
            raise ConfigError(
                f"{setting}, but vLLM is not installed here: run "
                f"{format_install('temper-trainer[vllm]')}, or set "
                "runtime.rollout_python to the Python of an environment that has it."
            )
        versions = vllm_versions.find_installed_versions()
    else:
        if shutil.which(python) is None:
            raise ConfigError(
                f"runtime.rollout_python is {python}, but there is no such program: give the "
                "Python of an environment with vLLM, such as rollout-env/bin/python."
            )
        environment = describe_environment(python)
        if environment is None:
            return
        listed: dict[str, str] = environment["packages"]
        missing = [
            module.replace("_", "-")
            for module in ("temper_trainer", "temper_engine_api")
            if module not in listed
        ]
        if missing:
            install = format_install(*missing, command=f"{python} -m pip install --no-deps")
            vllm_note = "" if "vllm" in listed else f" It has no vLLM either: {setting}."
            raise ConfigError(
                f"runtime.rollout_python is {python}, which has no {' and no '.join(missing)}: run "
                f"{install}.{vllm_note}"
            )
        versions = listed
    if problem := vllm_versions.find_version_problem(versions, python=python or sys.executable):
        raise ConfigError(f"{setting}: {problem}")


@cache
def describe_environment(python: str) -> dict[str, Any] | None:
    """Return packages and vLLM's options of another interpreter.

    Returns:
        The output of `vllm_versions`; None if the interpreter does not answer in time.

    Raises:
        ConfigError: If it is not a Python that can run servers.
    """
    # -P keeps the file's folder off sys.path, as `python -m` would.
    command = [python, "-P", vllm_versions.__file__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        logger.warning(
            "%s did not list its packages within %g s: its vLLM is checked when a server starts.",
            python,
            _LIST_TIMEOUT_S,
        )
        return None
    except OSError as error:
        raise ConfigError(
            f"runtime.rollout_python is {python}, which cannot be executed: {error.strerror}."
        ) from error
    answer = _parse_answer(done.stdout)
    if done.returncode or answer is None:
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        else:
            last = f"it printed {_read_last_line(done.stdout)!r}"
        raise ConfigError(
            f"runtime.rollout_python is {python}, which could not list its packages ({last}): "
            "give a working Python, 3.11 or later."
        )
    return answer


def _parse_answer(output: str) -> dict[str, Any] | None:
    """Return what `vllm_versions` printed, or None if another program printed the output."""
    try:
        # Only the last line, because a start script of the environment may print a greeting.
        answer = json.loads(_read_last_line(output))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "packages" in answer else None


def _read_last_line(text: str) -> str:
    return "".join(text.strip().splitlines()[-1:])


def find_vllm_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield settings of servers that the vLLM of this host does not have or cannot run."""
    vllm, python = config.rollout.vllm, config.runtime.rollout_python or sys.executable
    is_elsewhere = vllm.has_remote_servers or config.runtime.address is not None
    if config.rollout.sampler != "vllm" or not config.generates_completions or is_elsewhere:
        return
    model = config.actor.engine.model
    serves_experts = config.weight_sync.content == "adapter" and has_experts(model)
    has_options = bool(vllm.engine_kwargs) or vllm.load_format != VllmConfig().load_format
    if not serves_experts and not has_options:
        return
    try:
        environment = describe_environment(python)
    except ConfigError:  # raised again by `check_libraries`, because it concerns this host alone
        environment = None
    if environment is None or "vllm" not in environment["packages"]:
        return
    # A server that may load adapters replaces all experts by layers that only GPUs have, even if
    # the adapter leaves experts out ("Monolithic kernels are not supported for Fused MoE LoRA").
    if serves_experts and environment["packages"].get("torch", "").endswith("+cpu"):
        yield (
            "weight_sync.content is adapter, and the actor's model has experts, but the vLLM in "
            f"{python} is a build for CPUs, which serves no adapters of models with experts: set "
            "weight_sync.content=full, which sends the merged weights."
        )
    owner = f"which vLLM {environment['packages']['vllm']} in {python} does not have"
    # A list that could not be read from vLLM's source is missing.
    arguments: list[str] = environment.get("arguments", [])
    formats: list[str] = environment.get("load_formats", [])
    for name in vllm.engine_kwargs if arguments else ():
        if name not in arguments:
            near = difflib.get_close_matches(name, arguments, n=1)
            remedy = (
                f"did you mean {near[0]}?"
                if near
                else "remove it, or see the fields of vllm.EngineArgs."
            )
            yield f"rollout.vllm.engine_kwargs has {name}, {owner}: {remedy}"
    if formats and vllm.load_format not in formats:
        *others, last = formats
        yield (
            f"rollout.vllm.load_format is {vllm.load_format}, {owner}: use {', '.join(others)} or "
            f"{last}."
        )
