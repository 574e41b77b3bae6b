"""Check the files, folders, libraries and functions that a configuration refers to, without torch.

docs/how-to/check.md lists the checks.
"""

import importlib.util
import inspect
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.environment import (
    BUILT_IN_ENVIRONMENTS,
    EnvironmentConfig,
    load_environment_class,
)
from temper_trainer.config.import_path import is_import_path
from temper_trainer.config.reward import REWARD_MODEL
from temper_trainer.config.run import RunConfig
from temper_trainer.config.run_files import contains_run, find_inputs_in_run_folder
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.data_files import find_data_problems
from temper_trainer.config_loading.model_folders import find_model_problems
from temper_trainer.environment.sandbox import open_sandbox
from temper_trainer.reward.registry import resolve_reward, split_components
from temper_trainer.rollout.vllm import vllm_versions

logger = logging.getLogger(__name__)


_LIST_TIMEOUT_S = 10.0
"""Maximum time for another interpreter to list its packages; 0.2 s on a local disk."""


_ENGINES_WITH_PEFT = ("fsdp", "megatron")
"""Engines that implement LoRA with peft."""


def check_external_objects(config: TrainerConfig) -> None:
    """Raise if a file, folder, library or function does not exist.

    Remote paths are left to the run.

    Raises:
        ConfigError: One line per missing file, directory or library, or the reward's own message.
    """
    if problems := [
        *find_data_problems(config),
        *find_model_problems(config),
        *_find_run_problems(config.run),
        *find_inputs_in_run_folder(config, Path(config.run.dir)),
    ]:
        raise ConfigError("\n".join(problems))
    if config.generates_completions:
        for part in split_components(config.reward):
            if part.function != REWARD_MODEL:
                resolve_reward(part)
    if config.environment is not None and config.environment.name not in BUILT_IN_ENVIRONMENTS:
        _check_custom_environment(config.environment)
    elif config.environment is not None and config.environment.name == "python":
        open_sandbox(config.environment.sandbox)
    if config.task == "rl":
        _check_custom_algorithm(config.algorithm)


def check_libraries(config: TrainerConfig) -> None:
    """Raise if a library is missing that the run would need only after its warm start.

    Raises:
        ConfigError: If Ray, peft, datasets or vLLM is not installed, or the vLLM version does not
            work.
    """
    for name, source in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if source is not None and source.kind == "datasets" and not _is_installed("datasets"):
            raise ConfigError(
                f"{name}.kind is datasets, but datasets is not installed: pip install "
                "'temper-trainer[datasets]'."
            )
    if config.runtime.kind == "ray":
        if not _is_installed("ray"):
            raise ConfigError(
                "runtime.kind is ray, but Ray is not installed: pip install "
                "'temper-trainer[ray]', or use inline."
            )
        return  # the libraries of servers and engines may be on other hosts
    adapted = [
        name
        for name, role in (("actor", config.actor), ("critic", config.critic))
        if role is not None and role.engine.lora.is_enabled
    ]
    if adapted and config.model_engine in _ENGINES_WITH_PEFT and not _is_installed("peft"):
        raise ConfigError(
            f"{adapted[0]}.engine.lora is on, but peft is not installed: pip install "
            "'temper-engine-fsdp[lora]'."
        )
    taught = [name for name, teacher in config.teachers.items() if teacher.backend == "vllm"]
    if config.generates_completions and config.rollout.sampler == "vllm":
        _check_vllm("rollout.sampler is vllm", python=config.runtime.rollout_python)
    elif taught:
        _check_vllm(f"teachers.{taught[0]}.backend is vllm", python=config.runtime.rollout_python)


def _check_vllm(reason: str, *, python: str | None) -> None:
    """Raise if an interpreter's packages cannot run vLLM servers.

    Packages are listed and not imported, because importing takes minutes. A mismatch of torchvision
    and torch is only found when a server starts.
    """
    if python is None:
        if not _is_installed("vllm"):
            raise ConfigError(
                f"{reason}, but vLLM is not installed here: pip install 'temper-trainer[vllm]', "
                "or set runtime.rollout_python to the Python of an environment that has it."
            )
        found = vllm_versions.find_installed_versions()
    else:
        if shutil.which(python) is None:
            raise ConfigError(
                f"runtime.rollout_python is {python}, but there is no such program: give the "
                "Python of an environment with vLLM, such as rollout-env/bin/python."
            )
        listed = _list_versions(python)
        if listed is None:
            return
        missing = [
            module.replace("_", "-")
            for module in ("temper_trainer", "temper_engine_api")
            if module not in listed
        ]
        if missing:
            also = "" if "vllm" in listed else f" It has no vLLM either: {reason}."
            raise ConfigError(
                f"runtime.rollout_python is {python}, which has no {' and no '.join(missing)}: run "
                f"{python} -m pip install --no-deps {' '.join(missing)}.{also}"
            )
        found = listed
    if problem := vllm_versions.find_version_problem(found, python=python or sys.executable):
        raise ConfigError(f"{reason}: {problem}")


def _list_versions(python: str) -> dict[str, str] | None:
    """Return the package versions of another interpreter; None if it does not answer in time.

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
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(
            f"runtime.rollout_python is {python}, which could not list its packages ({last}): "
            "give a working Python, 3.11 or later."
        )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _check_custom_environment(config: EnvironmentConfig) -> None:
    found = load_environment_class(config)
    try:
        signature = inspect.signature(found)
    except (
        ValueError
    ):  # classes in C may have no signature; then the first instantiation reports it
        return
    try:
        signature.bind(config=config, tokenizer=None, **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.name {config.name} cannot be created with config, tokenizer and "
            f"environment.arguments {dict(config.arguments)}: {error}."
        ) from error


def _check_custom_algorithm(config: AlgorithmConfig) -> None:
    if not (is_import_path(config.advantage) or is_import_path(config.policy_loss)):
        return
    # Imported here because it imports torch, which no other check needs.
    from temper_trainer.algorithms.custom_algorithms import (
        load_advantage_function,
        load_policy_loss_class,
    )

    if is_import_path(config.advantage):
        load_advantage_function(config)
    if is_import_path(config.policy_loss):
        load_policy_loss_class(config)


def _find_run_problems(run: RunConfig) -> Iterator[str]:
    if run.resume == "never" and contains_run(Path(run.dir)):
        yield (
            f"run.dir {run.dir} already contains a run: continue it with run.resume=auto, or "
            "choose another run.dir."
        )
    if problem := _find_write_obstacle(Path(run.dir)):
        yield f"run.dir is {run.dir}, but {problem}: choose another run.dir."
    if run.resume not in ("never", "auto") and not Path(run.resume).is_dir():
        yield (
            f"run.resume is {run.resume}, but there is no such directory: use never, auto, or the "
            "path of a step directory."
        )
    for name in ("wandb", "mlflow", "trackio"):
        if name in run.trackers and not _is_installed(name):
            yield (
                f"run.trackers has {name}, which is not installed: pip install "
                f"'temper-trainer[{name}]', or remove it from run.trackers."
            )
    if run.prometheus_port is not None:
        yield from _find_port_problems(run.prometheus_address, run.prometheus_port)


def _find_port_problems(address: str, port: int) -> Iterator[str]:
    if not _is_installed("prometheus_client"):
        yield (
            "run.prometheus_port is set, but prometheus_client is not installed: pip install "
            "'temper-trainer[prometheus]', or remove it."
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            yield (
                f"run.prometheus_port is {port}, which cannot be opened on run.prometheus_address "
                f"{address}: {error.strerror}. Choose a free port and an address of this host."
            )


def _is_installed(module: str) -> bool:
    found = importlib.util.find_spec(module)
    # A namespace package, such as the folder /tmp/ray seen from /tmp, is not the library.
    return found is not None and found.origin is not None


def _find_write_obstacle(folder: Path) -> str | None:
    """Return why a folder, which may not exist yet, is not writable, or None."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"
