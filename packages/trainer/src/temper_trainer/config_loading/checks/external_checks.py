"""Check the files, folders, libraries and functions that a configuration refers to, without torch.

docs/how-to/check.md lists the checks.
"""

import inspect
import ipaddress
import shlex
import shutil
import socket
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from pathlib import Path

from temper_engine_api.capabilities import Capability, find_required_capabilities
from temper_engine_api.checkpoint import verify
from temper_engine_api.checkpoint.manifest import read_manifest
from temper_engine_api.errors import CheckpointError, ConfigError, TemperError, format_install
from temper_engine_api.settings_check import find_write_error
from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.checkpoint.checkpointer import Checkpointer, check_resume_step
from temper_trainer.checkpoint.step_contents import find_role_parts
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.data import DatasetsSource
from temper_trainer.config.environment import (
    BUILT_IN_ENVIRONMENTS,
    EnvironmentConfig,
    load_environment_class,
)
from temper_trainer.config.run import RunConfig
from temper_trainer.config.run_folder_checks import (
    contains_run,
    find_generated_file_problems,
    find_inputs_in_run_folder,
    find_wrong_entries,
)
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.data_files import find_data_problems
from temper_trainer.config_loading.checks.model_folders import find_model_problems
from temper_trainer.config_loading.checks.resumed_models import (
    ENGINES_WITH_PEFT,
    find_resumed_model_problems,
)
from temper_trainer.config_loading.checks.vllm_environment import (
    check_vllm_environment,
    find_vllm_problems,
)
from temper_trainer.config_loading.loading import is_set_by_user
from temper_trainer.config_loading.resolved_config import LoadedConfig
from temper_trainer.environment.sandbox import open_sandbox
from temper_trainer.reward.registry import check_rewards, iterate_selected_rewards
from temper_trainer.rollout.completion_record import CompletionReplay
from temper_trainer.rollout.vllm.server_addresses import read_addresses, read_token
from temper_trainer.run_lock import describe_write_error, find_lock_refusal
from temper_trainer.runtime.engine_checks import find_engine_problems, iterate_engines
from temper_trainer.runtime.placement import AVERAGED_ROLE, find_missing_cpus
from temper_trainer.settings.names import import_object, is_installed, is_within
from temper_trainer.settings.variants import Custom


def check_external_objects(config: TrainerConfig) -> None:
    """Raise if a file, folder, library or function does not exist.

    Remote paths are left to the run.

    Raises:
        ConfigError: One line per missing file, directory or library, or the reward's own message.
    """
    if problems := [
        *find_data_problems(config),
        *find_model_problems(config),
        *_find_run_problems(config),
        *_find_host_problems(config),
        *find_vllm_problems(config),
    ]:
        raise ConfigError("\n".join(problems))
    if config.generates_completions:
        check_rewards(config.reward, iterate_selected_rewards(config.data, config.reward))
    for key, environment in config.all_environments.items():
        _check_command(environment, key=key)
        if environment.name not in BUILT_IN_ENVIRONMENTS:
            _check_custom_environment(environment)
        elif environment.name == "python":
            open_sandbox(environment.sandbox)
    if config.rollout.replay is not None:
        needs_experts = config.rollout.routing_replay == "sampler"
        CompletionReplay(Path(config.rollout.replay), needs_experts=needs_experts)
    if config.task == "rl":
        _check_custom_algorithm(config.algorithm)
    if config.has_teachers and isinstance(config.distillation.objective, Custom):
        # Repeat the checks of the configuration with the imported class, which knows what the loss
        # requires.
        loss = config.distillation.loss
        replace(config, distillation=replace(config.distillation, objective=loss))


def check_models(loaded: LoadedConfig) -> None:
    """Check models and optimizers with the code of the engine that will build them.

    Slower than the other checks, because it imports torch. Nothing is imported if no engine has a
    setting that it may refuse, and none is to run on CUDA.

    Raises:
        ConfigError: If an engine could not build a model or an optimizer, or CUDA is requested but
            not available.
    """
    config, problems = loaded.config, []
    set_keys = [key for key, origin in loaded.origins.items() if is_set_by_user(origin)]
    engines = dict(iterate_engines(config))
    for name, engine in engines.items():
        if engine.device == "cuda" and config.runtime.kind == "inline":
            from temper_engine_api.distributed.process_group import choose_device

            try:
                choose_device(engine.device)
            except TemperError as error:
                problems.append(f"{name}: {error}")
    problems += find_engine_problems(
        {
            name: engine
            for name, engine in engines.items()
            # The model of the warm start is the actor's.
            if _may_be_refused(
                engine,
                role=name.removesuffix(".engine").replace("warm_start", "actor"),
                set_keys=set_keys,
            )
        },
        model_engine=config.model_engine,
        replays_routing=config.rollout.routing_replay != "none",
    )
    # Find one reason only: a model that cannot be built has no routers to look for.
    problems += [] if problems else _find_replay_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _find_replay_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield why choices of experts could not be recorded or replayed."""
    rollout, model = config.rollout, config.actor.engine.model
    if rollout.routing_replay == "none" or not config.generates_completions:
        return
    # Imports transformers.
    from temper_trainer.rollout import hf_model

    try:
        text_config = hf_model.build_model_config(model).get_text_config(decoder=True)
        hf_model.check_experts(text_config, routing_replay=rollout.routing_replay)
        is_recorded_here = rollout.sampler == "hf" and rollout.replay is None
        if is_recorded_here and rollout.routing_replay == "sampler":
            hf_model.ExpertRecorder(hf_model.build_on_meta(model))
    except ConfigError as error:
        yield str(error)


def _may_be_refused(engine: EngineConfig, *, role: str, set_keys: Collection[str]) -> bool:
    """Return True if an engine has a setting that only the engine's own code can check.

    These are settings that need an optional capability, and a saved model, because its weights may
    not fit its config. The architecture, the adapter and settings that only this engine has count
    only if the user has set them.
    """
    own = {field.name for field in fields(engine)} - {field.name for field in fields(EngineConfig)}
    blocks = [f"{role}.engine.{name}" for name in ("model.architecture", "lora", *own)]
    is_changed = any(is_within(key, *blocks) for key in set_keys)
    unusual = find_required_capabilities(engine) - {Capability(engine.model.model_type)}
    return is_changed or bool(unusual) or engine.model.path is not None


def check_libraries(config: TrainerConfig) -> None:
    """Raise if this host lacks a library, CPUs or a secret; a run would notice that later.

    Raises:
        ConfigError: If Ray, peft, datasets, vLLM, matplotlib or tensorboard is needed and not
            installed, the vLLM version does not work, Ray would start here with fewer CPUs than the
            workers need, or the secret of rollout servers is not set or too short.
    """
    if config.generates_completions and config.rollout.vllm.has_remote_servers:
        read_token()
    is_ray = config.runtime.kind == "ray"
    needs = [
        (f"{name} is datasets", "datasets", "temper-trainer[datasets]", "")
        for name, source in config.data.sources.items()
        if isinstance(source, DatasetsSource)
    ]
    needs += (
        [("runtime.kind is ray", "ray", "temper-trainer[ray]", "set runtime.kind=inline")]
        if is_ray
        else [
            (f"{name}.engine.lora is on", "peft", "temper-engine-fsdp[lora]", "")
            for name, role in config.trained_roles.items()
            if role.engine.lora.is_enabled and config.model_engine in ENGINES_WITH_PEFT
        ]
    )
    plots = "temper-trainer[report]"
    if config.run.report:
        needs.append(("run.report is on", "matplotlib", plots, "set run.report=false"))
    if (name := "tensorboard") in config.run.trackers:
        needs.append((f"run.trackers has {name}", name, plots, "remove it from run.trackers"))
    for cause, module, package, remedy in needs:
        for problem in _find_missing(module, cause=cause, package=package, remedy=remedy):
            raise ConfigError(problem)
    if is_ray and (message := find_missing_cpus(config)):
        raise ConfigError(message)
    if is_ray and config.runtime.address is not None:
        return  # the servers may be on other hosts
    taught = [name for name, teacher in config.teachers.items() if teacher.backend == "vllm"]
    samples_here = config.generates_completions and not config.rollout.vllm.has_remote_servers
    if samples_here and config.rollout.sampler == "vllm":
        check_vllm_environment("rollout.sampler is vllm", python=config.runtime.rollout_python)
    elif taught:
        check_vllm_environment(
            f"teachers.{taught[0]}.backend is vllm", python=config.runtime.rollout_python
        )


def _check_command(config: EnvironmentConfig, *, key: str) -> None:
    """Raise if the command of an agent or an MCP server is no program of this host.

    Environments run where the run starts, also with Ray.
    """
    command = config.arguments.get("command")
    if config.name not in ("agent", "mcp") or not isinstance(command, str):
        return
    setting = f"{key}.arguments.command is {command or 'empty'}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"{setting}, which cannot be split into words ({error}): quote it as for a shell."
        ) from error
    if not words:
        raise ConfigError(f"{setting}: give a program and its arguments.")
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{setting}, but there is no program {words[0] or repr('')}: install it, or give its "
            "path."
        )


def _check_custom_environment(config: EnvironmentConfig) -> None:
    environment_class = load_environment_class(config)
    if config.name == "agent" and "function" in config.arguments:
        import_object(str(config.arguments["function"]), key="environment.arguments.function")
    given = {"chat_template": None, "address": None} if config.name == "agent" else {}
    try:
        # The callable that `make_environment_factory` will use.
        signature = inspect.signature(getattr(environment_class, "make_factory", environment_class))
    except (
        ValueError
    ):  # classes in C may have no signature; then the first instantiation reports it
        return
    try:
        signature.bind(config=config, tokenizer=None, **given, **config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.name {config.name} cannot be created with config, tokenizer and "
            f"environment.arguments {dict(config.arguments)}: {error}."
        ) from error


def _check_custom_algorithm(config: AlgorithmConfig) -> None:
    if isinstance(config.advantage, Custom):
        # Imported here because it imports torch, which no other check needs.
        from temper_trainer.algorithms.advantages.custom_estimators import load_advantage_function

        load_advantage_function(config.advantage)
    if isinstance(config.policy_loss, Custom):
        config.policy_loss.build(PolicyLoss, key="algorithm.policy_loss")  # type: ignore[type-abstract]


def _find_run_problems(config: TrainerConfig) -> Iterator[str]:
    run = config.run
    if error := find_write_error(run.dir):
        yield describe_write_error(Path(run.dir), error)
    elif problems := list(find_wrong_entries(Path(run.dir))):
        # The checks below would fail on these files.
        yield from problems
    else:
        if refusal := find_lock_refusal(Path(run.dir)):
            yield refusal
        if run.resume == "never" and contains_run(Path(run.dir)):
            yield (
                f"run.dir {run.dir} already contains a run: continue it with run.resume=auto, or "
                "choose another run.dir."
            )
        yield from _find_resume_problems(config)
        yield from find_inputs_in_run_folder(config, Path(run.dir))
        if config.task == "generate":
            yield from find_generated_file_problems(Path(run.dir) / config.generate.file)
    if run.resumes_from_path and not Path(run.resume).is_dir():
        yield (
            f"run.resume is {run.resume}, but there is no such directory: use never, auto, or the "
            "path of a step directory."
        )
    for name in ("wandb", "mlflow", "trackio"):
        if name in run.trackers:
            yield from _find_missing(
                name,
                cause=f"run.trackers has {name}",
                package=f"temper-trainer[{name}]",
                remedy="remove it from run.trackers",
            )


def _find_resume_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield why the run could not continue from the checkpoint that it would choose."""
    run = config.run
    if run.resumes_from_path and not Path(run.resume).is_dir():
        return  # reported with the other settings of the run
    checkpointer = _open_for_preview(run)
    try:
        checkpoint = checkpointer.preview(run.resume)
        if checkpoint is not None:
            step = checkpointer.read_completed_steps(checkpoint, phase=config.phase)
            if run.total_epochs is None:
                check_resume_step(step, total_steps=run.total_steps, checkpoint=checkpoint)
            if config.phase == "rl":
                averaged = () if config.averaged_engine is None else (AVERAGED_ROLE,)
                find_role_parts(checkpoint, (*config.roles, *averaged))
            yield from find_resumed_model_problems(config, checkpoint)
    except CheckpointError as error:
        yield str(error)


def preview_checkpoint(run: RunConfig) -> Path | None:
    """Return the checkpoint from which the run would continue, without renaming a damaged one."""
    return _open_for_preview(run).preview(run.resume)


def _open_for_preview(run: RunConfig) -> Checkpointer:
    def verify_for_check(directory: Path) -> None:
        # Reading gigabytes is left to the run, except where the answer is a refusal: the run would
        # pass over a damaged checkpoint, and may then have steps left to train.
        is_too_late = run.total_epochs is None and read_manifest(directory).step > run.total_steps
        verify(directory, with_content=is_too_late and run.verify_checkpoints == "full")

    return Checkpointer(
        root=Path(run.dir) / "checkpoints", max_to_keep=None, verify=verify_for_check
    )


def _find_bind_error(address: str, port: int) -> OSError | None:
    """Return the error of listening on an address and port, or None; port 0 is any free one."""
    is_ipv6 = ipaddress.ip_address(address).version == 6
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def _find_host_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield which addresses, ports, lists of servers and folders of this host cannot be used."""
    runtime, run, servers_file = config.runtime, config.run, config.rollout.vllm.servers_file
    if error := _find_bind_error(runtime.bind_address, 0):
        yield (
            f"runtime.bind_address is {runtime.bind_address}, on which this host cannot listen: "
            f"{error.strerror}. Give an address of this host, see ip address."
        )
    if run.prometheus_port is not None:
        yield from _find_missing(
            "prometheus_client",
            cause="run.prometheus_port is set",
            package="temper-trainer[prometheus]",
            remedy="remove run.prometheus_port",
        )
        if error := _find_bind_error(run.prometheus_address, run.prometheus_port):
            yield (
                f"run.prometheus_port is {run.prometheus_port}, which cannot be opened on "
                f"run.prometheus_address {run.prometheus_address}: {error.strerror}. Choose a free "
                "port and an address of this host."
            )
    try:
        if servers_file is not None:
            read_addresses(servers_file)
    except ConfigError as error:
        yield str(error)
    # With Ray, the folders may be on other hosts.
    for name, role in config.roles.items() if runtime.kind == "inline" else ():
        try:
            role.engine.check_folders()
        except ConfigError as error:
            yield f"{name}.engine: {error}"


def _find_missing(module: str, *, cause: str, package: str, remedy: str = "") -> Iterator[str]:
    """Yield a sentence if a library is not installed.

    Args:
        module: Name to import it by.
        cause: The setting that needs it, which opens the sentence.
        package: Package of Temper with the extra that installs it.
        remedy: Completes "run ..., or", if there is another remedy.
    """
    if not is_installed(module):
        other = f", or {remedy}" if remedy else ""
        yield f"{cause}, but {module} is not installed: run {format_install(package)}{other}."
