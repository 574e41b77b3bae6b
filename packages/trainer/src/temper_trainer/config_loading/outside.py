"""What a configuration refers to outside itself: files, folders, model directories, libraries, the reward function; without torch."""

import importlib.util
import json
import re
import shutil
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.data import SourceConfig
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.environment import BUILT_IN, environment_class
from temper_trainer.config.folder import holds_run
from temper_trainer.config.images import image_part
from temper_trainer.config.importing import is_import_path
from temper_trainer.config.reward_model import REWARD_MODEL, RewardModelConfig
from temper_trainer.config.run import RoleConfig, RunConfig, TrainerConfig
from temper_trainer.environment.sandbox import open_sandbox
from temper_trainer.reward.registry import resolve_reward, reward_parts

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NUM_CHECKED_ROWS = 100
_NEED_PEFT = ("fsdp", "megatron")
"""Engines whose adapters are PEFT's."""


def check_outside(config: TrainerConfig) -> None:
    """Refuse what is not there; addresses with a scheme (``s3://...``) are left to the run.

    Raises:
        ConfigError: one line per file, directory or library that is missing, or in the way; or the reward's own sentence.
    """
    if problems := [*_missing_data(config), *_missing_models(config), *_problems_of_run(config.run)]:
        raise ConfigError("\n".join(problems))
    if config.samples:
        for part in reward_parts(config.reward):
            if part.function != REWARD_MODEL:
                resolve_reward(part)
    if config.environment is not None and config.environment.name not in BUILT_IN:
        environment_class(config.environment)
    elif config.environment is not None and config.environment.name == "python":
        open_sandbox(config.environment.sandbox)
    if config.task == "rl":
        _check_own_algorithm(config.algorithm)


def check_libraries(config: TrainerConfig) -> None:
    """Refuse a run that would ask for an extra late, after its warm start; a check may be made on a machine without it.

    Raises:
        ConfigError: Ray, peft or vLLM is not installed, or the interpreter that should have the last is not there.
    """
    if config.runtime.kind == "ray":
        if not _is_installed("ray"):
            raise ConfigError("runtime.kind is ray, but Ray is not installed: pip install 'temper-trainer[ray]', or use inline.")
        return  # its servers and engines may be on other machines
    adapted = [name for name, role in (("actor", config.actor), ("critic", config.critic)) if role is not None and role.engine.lora.is_on]
    if adapted and config.model_engine in _NEED_PEFT and not _is_installed("peft"):
        raise ConfigError(f"{adapted[0]}.engine.lora is on, but peft is not installed: pip install 'temper-engine-fsdp[lora]'.")
    serves = config.samples and config.rollout.sampler == "vllm"
    python = config.runtime.rollout_python
    # What another interpreter has installed is asked when its servers start.
    if python is not None and shutil.which(python) is None and (serves or any(t.backend == "vllm" for t in config.teachers.values())):
        raise ConfigError(
            f"runtime.rollout_python is {python}, but nothing that can be run lies there: give the interpreter of an environment with "
            "vLLM, such as rollout-env/bin/python."
        )
    if serves and python is None and not _is_installed("vllm"):
        raise ConfigError(
            "rollout.sampler is vllm, but vLLM is not installed here: pip install 'temper-trainer[vllm]', or name the interpreter of an "
            "environment that has it in runtime.rollout_python."
        )


def _check_own_algorithm(config: AlgorithmConfig) -> None:
    if not (is_import_path(config.advantage) or is_import_path(config.policy_loss)):
        return
    # Imported here, because it brings torch, which nothing else of a check needs.
    from temper_trainer.algorithms.own import own_advantage, own_policy_loss

    if is_import_path(config.advantage):
        own_advantage(config)
    if is_import_path(config.policy_loss):
        own_policy_loss(config)


def _missing_data(config: TrainerConfig) -> Iterator[str]:
    warm_start = None if config.warm_start is None else config.warm_start.data
    sources: dict[str, SourceConfig | None] = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "warm_start.data": warm_start,
    }
    for name, source in sources.items():
        if source is None or source.kind not in ("jsonl", "parquet"):
            continue
        for path in source.paths:
            if _is_local(path) and not Path(path).is_file():
                yield f"{name}.paths names {path}, which is no file here ({Path.cwd()}): mend the path."
            elif _is_local(path) and path.endswith(".jsonl"):
                key = source.prompt_key if config.task == "rl" and name != "warm_start.data" else None
                if problem := _broken_row(Path(path), prompt_key=key):
                    yield f"{name}.{problem}"
    tools = config.data.tools_path
    if tools is not None and not Path(tools).is_file():
        yield f"data.tools_path is {tools}, which is no file here ({Path.cwd()}): mend the path."


def _broken_row(path: Path, *, prompt_key: str | None) -> str | None:
    """Return what is wrong with the first row, of the first `_NUM_CHECKED_ROWS`, that is unusable.

    The run reads every row; this finds a wrong key or another format within milliseconds.
    """
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, _NUM_CHECKED_ROWS), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                return f"paths: {path}:{number} is not a line of JSON ({error}): correct that line."
            if not isinstance(row, dict):
                kind = type(row).__name__
                return f"paths: {path}:{number} is a {kind}, but each line must be a JSON object."
            if prompt_key is not None and prompt_key not in row:
                return (
                    f"prompt_key is {prompt_key}, but {path}:{number} has only "
                    f"{', '.join(sorted(row)) or 'no keys'}: set it to one of them."
                )
    return None


def _missing_models(config: TrainerConfig) -> Iterator[str]:
    roles: dict[str, RoleConfig | TeacherConfig | RewardModelConfig | None] = {
        "actor": config.actor,
        "critic": config.critic,
        "ref": config.ref,
        "reward.model": config.reward.model,
    }
    roles |= {f"teachers.{name}": teacher for name, teacher in config.teachers.items()}
    for name, role in roles.items():
        path = None if role is None else role.engine.model.path
        if path is not None and not (Path(path) / "config.json").is_file():
            remedy = "correct the path, or put the model there first."
            if _HUB_NAME.fullmatch(path) and not Path(path).exists():
                remedy = (
                    "if it is the name of a model on the Hugging Face Hub, run hf download "
                    f"{path} --local-dir models/{path.rpartition('/')[2]} and give that folder."
                )
            yield (f"{name}.engine.model.path is {path}, but there is no Hugging Face model in that folder (no config.json): {remedy}")
        elif path is not None and (damage := _damaged_weights(Path(path))):
            yield f"{name}.engine.model.path: {damage}"
        elif path is not None and not name.startswith("teachers.") and (part := image_part(Path(path))):  # a server answers text alone
            yield (
                f"{name}.engine.model.path is {path}, whose config.json says {part}: a model of images, video or sound, which no engine "
                "trains. Give the folder of a text model."
            )
    actor = config.actor.engine.model.path
    if config.weight_sync.content == "adapter" and actor is None:
        yield (
            "weight_sync.content is adapter, but actor.engine.model.path is not set, so servers have "
            "no base to put the adapter on: set weight_sync.content=full, or save the base as a "
            "Hugging Face directory first."
        )
    path = config.data.tokenizer.path
    if path is not None and not Path(path).is_dir():
        yield f"data.tokenizer.path is {path}, which is no directory: give the folder of a tokenizer."
    if config.data.tokenizer.kind == "pretrained" and path is None and config.actor.engine.model.path is None:
        yield (
            "data.tokenizer.kind is pretrained, but neither data.tokenizer.path nor actor.engine.model.path is set: give one of them, or "
            "set data.tokenizer.kind=bpe with data.tokenizer.vocab_size to train one."
        )


def _damaged_weights(folder: Path) -> str | None:
    """Return what is wrong with the first file of weights whose header does not fit its size.

    A safetensors file begins with the length of its header in 8 bytes; the header says where each
    tensor ends. Only the headers are read.
    """
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                return f"{path} has {size} bytes and is cut off: copy or download it again."
            try:
                header: dict[str, dict[str, list[int]]] = json.loads(file.read(length))
            except ValueError:
                return f"{path} has a header that is not JSON: copy or download it again."
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            return f"{path} has {size} bytes, but its header asks for {end}: copy it again."
    return None


def _problems_of_run(run: RunConfig) -> Iterator[str]:
    if run.resume == "never" and holds_run(Path(run.dir)):
        yield f"run.dir {run.dir} already holds a run: go on with run.resume=auto, or choose another run.dir."
    if run.resume not in ("never", "auto") and not Path(run.resume).is_dir():
        yield f"run.resume is {run.resume}, but must be never, auto, or the path of a step directory, and no directory lies there."
    for name in ("wandb", "mlflow", "trackio"):
        if name in run.trackers and not _is_installed(name):
            yield (
                f"run.trackers names {name}, which is not installed: pip install 'temper-trainer[{name}]', or take it out of run.trackers."
            )
    if run.prometheus_port is not None:
        yield from _problems_of_port(run.prometheus_address, run.prometheus_port)


def _problems_of_port(address: str, port: int) -> Iterator[str]:
    if not _is_installed("prometheus_client"):
        yield "run.prometheus_port is set, but prometheus_client is not installed: pip install 'temper-trainer[prometheus]', or remove it."
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            yield (
                f"run.prometheus_port is {port}, which can't be opened on run.prometheus_address "
                f"{address}: {error.strerror}. Choose a free port, and an address of this machine."
            )


def _is_installed(module: str) -> bool:
    found = importlib.util.find_spec(module)
    # A folder of that name in the current directory, such as Ray's own in /tmp, is no library.
    return found is not None and found.origin is not None


def _is_local(path: str) -> bool:
    return "://" not in path and "::" not in path
