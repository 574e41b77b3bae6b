"""Find the program and the tree of a launch from entry, config name and keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from temper_legacy_shim.configs.reading.config_values import Override, Plain, flatten
from temper_legacy_shim.configs.reading.trees import (
    Family,
    known_keys,
    own_configs,
    releases_of_program,
)

Program = Literal["ppo", "sft", "sft1", "generation", "evaluation"]

_MEGATRON_ENGINES = ("megatron",)
_FOREIGN_ENGINES = ("veomni", "torchtitan", "mindspeed", "automodel", "nemo_automodel")

_OWN_CONFIGS: tuple[tuple[str, str], ...] = (
    ("dapo", "dapo"),
    ("entropy", "entropy"),
    ("one_step_off", "one_step_off_ppo"),
    ("fully_async", "fully_async_ppo"),
    ("prime", "prime"),
    ("spin", "spin"),
    ("sppo", "sppo"),
    ("flowrl", "flowrl"),
    ("split", "ppo_trainer_split"),
)
"""Parts of an entry, and the configuration it is composed from: its name, or its beginning."""

FOREIGN_TRAINERS = (
    "prime",
    "spin",
    "sppo",
    "gkd",
    "vla",
    "minicpmo",
    "langgraph",
    "collabllm",
    "flowrl",
    "genrm",
    "split",
    "r1_ascend",
    "sac",
    "dance_grpo",
    "atropos",
    "spo",
)
"""Trainers with losses or data that have no counterpart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    program: Program
    family: Family
    entry: str
    configs: tuple[str, ...] = ()
    """Configurations composed on that tree; see ``trees.own_configs``."""
    foreign: str = ""
    """Reason why this program has no counterpart; empty if it has one."""
    config_name: str = ""
    """The file that the composition began with."""
    is_fork: bool = False
    """True if no release contains the entry, and it was treated as a known entry."""
    contradiction: str = ""
    """Reason why tree and strategy contradict each other; empty if they do not."""


def launch_of(
    entry: str, *, config_name: str | None, overrides: Sequence[Override], given: dict[str, Plain]
) -> Launch:
    """Find the program of an entry point from its module or file, config name and overrides.

    Args:
        entry: ``verl.trainer.main_ppo``, ``recipe/dapo/main_dapo.py``, or a bare kind: ppo, sft,
            generation, evaluation.
        config_name: Hydra's; None takes the name in the overrides, or the entry's default.
        overrides: of the command line.
        given: leaves of the user's own file.
    """
    name = config_named(config_name, overrides)
    name = name.removesuffix(".yaml").rpartition("/")[2]
    path = _module(entry)
    program = _program(path, overrides, given)
    model_engine = _group(overrides, "model_engine") or str(given.get("model_engine") or "")
    engine = model_engine or _group(overrides, "engine")
    placed = [
        (override.key.partition("@")[0], str(override.value))
        for override in overrides
        if override.kind == "set" and "@" in override.key
    ]
    engine = engine or next(
        (word for _, choice in placed if (word := choice.partition("_")[0]) in _FOREIGN_ENGINES), ""
    )
    is_megatron = (
        "megatron" in name
        or any(group == "actor" and choice.startswith("megatron") for group, choice in placed)
        or name.startswith("on_policy_distill")
        or engine in _MEGATRON_ENGINES
        or given.get("actor_rollout_ref.actor.strategy") == "megatron"
    )
    foreign = (
        f"the training engine {engine} has no counterpart here"
        if engine in _FOREIGN_ENGINES or (model_engine or "dp") not in ("dp", "fsdp", "megatron")
        else ""
    )
    if "automodel" in path or any(
        f".{part}." in f".{path}." or f"main_{part}" in path for part in FOREIGN_TRAINERS
    ):
        foreign = foreign or f"{entry} is a trainer of its own, which has no counterpart here"
    if path == "verl.trainer.main":
        foreign = (
            f"{entry} is the entry of EasyR1, whose configuration is of another kind "
            "(config=FILE, worker.*)"
        )
    contradiction = ""
    if (
        "megatron" not in path
        and _group(overrides, "actor_rollout_ref.actor.strategy") == "megatron"
        and program == "ppo"
    ):
        if not is_megatron and name in ("", "ppo_trainer") and not given:
            contradiction = (
                "actor_rollout_ref.actor.strategy is megatron, but the configuration that the "
                "overrides are composed on is that of FSDP, and would have failed: name the one "
                "that was meant (--config-name ppo_megatron_trainer), or take the strategy out"
            )
        is_megatron = True
    return Launch(
        program=program,
        # The program with servers was composed on the tree of main_ppo.
        family=_family(
            "ppo" if path.endswith("main_generation_server") else program, is_megatron=is_megatron
        ),
        entry=path,
        configs=_configs_of(path, name, is_megatron=is_megatron) if program == "ppo" else (),
        foreign=foreign,
        config_name=name,
        is_fork=_is_fork(path),
        contradiction=contradiction,
    )


def _configs_of(path: str, name: str, *, is_megatron: bool) -> tuple[str, ...]:
    """Return the further configurations of an entry, of the given engine or its default."""
    if name in own_configs():
        return (name,)
    result = []
    for part, config in _OWN_CONFIGS:
        if part in path or part in name:
            names = (
                (f"{config}_megatron_trainer", f"{config}_trainer", config)
                if is_megatron
                else (f"{config}_trainer", config)
            )
            result += [next(each for each in names if each in own_configs())]
    return tuple(result)


_KINDS = ("", "ppo", "sft", "sft1", "generation", "evaluation")
_PROGRAMS = re.compile(
    r"main(_\w+)?|fsdp_sft_trainer|sft_trainer(_ray)?|generation|evaluation|generate|fully_async_main|\w+_trainer"
)
"""Last parts of the entries of all releases and recipes."""
_EXTERNAL_PROGRAMS = re.compile(
    r"(?:.+\.)?recipe\.(?:dapo|entropy|fully_async_policy|one_step_off_policy|transfer_queue)\.\w+"
    r"|main_(?:ppo|dapo|entropy|eval|generation)|(?:fsdp_)?sft_trainer|fully_async_main"
)
"""Recipes that train as their configuration says, and programs that are named without a folder."""
_CONFIGS = re.compile(
    r"(one_step_off_|fully_async_|transfer_queue_)?(ppo|dapo)(_megatron)?_trainer|sft_trainer(_engine)?|generation|evaluation"
    r"|(entropy|prime|spin|sppo|rm|gkd)_(trainer|config)|ppo_(diffusion|veomni|torchtitan)_trainer"
)


def is_program(entry: str) -> bool:
    """Check if a release of verl, or a fork's copy, contains this entry point."""
    path = _module(entry)
    return path in _KINDS or _PROGRAMS.fullmatch(path.rpartition(".")[2]) is not None


def is_config(name: str) -> bool:
    """Check if a release of verl contains a configuration of this name."""
    stem = name.removesuffix(".yaml").rpartition("/")[2]
    return stem in own_configs() or _CONFIGS.fullmatch(stem) is not None


def config_named(config_name: str | None, overrides: Sequence[Override]) -> str:
    """Return Hydra's config name, from the option or from the overrides; may be empty."""
    return config_name or _flag(overrides, ("config-name", "cn")) or ""


def _module(entry: str) -> str:
    return entry.replace("/", ".").removesuffix(".py")


def _is_fork(path: str) -> bool:
    """Check if no release has this module or file, wherever the old packages were cloned."""
    return (
        path not in _KINDS
        and not releases_of_program(path)
        and not _EXTERNAL_PROGRAMS.fullmatch(path)
    )


def _program(path: str, overrides: Sequence[Override], given: dict[str, Plain]) -> Program:
    """Return the kind of program by its name, or by keys of one kind alone."""
    last = path.rpartition(".")[2]
    if "fsdp_sft_trainer" in path or path == "sft1":
        return "sft1"
    if "sft" in last:
        return "sft"
    if "generation" in last or last == "generate":
        return "generation"
    if "eval" in last:
        return "evaluation"
    keys = {override.key for override in overrides} | given.keys()
    if not path and "model.partial_pretrain" in keys:
        return "sft1"
    if not path and any(key.startswith("actor_rollout_ref.") for key in keys):
        return "ppo"
    if not path and "model.path" in keys and "data.output_path" in keys:
        return "generation"
    if not path and any(key.startswith(("optim.", "engine.")) for key in keys):
        return "sft"
    return "ppo"


def _family(program: Program, *, is_megatron: bool) -> Family:
    if program == "ppo":
        return "ppo_megatron" if is_megatron else "ppo_fsdp"
    if program == "sft":
        return "sft_megatron" if is_megatron else "sft_fsdp"
    return "sft_columns" if program == "sft1" else program


def is_placed_choice(choice: str, *, is_megatron: bool) -> bool:
    """Check if a group that is placed by hand has the values of the tree that is read."""
    engines = ("megatron",) if is_megatron else ("dp", "fsdp")
    return choice in _PLAIN_CHOICES or choice.partition("_")[0] in (*engines, *_FOREIGN_ENGINES)


_PLAIN_CHOICES = (
    *("actor", "critic", "ref", "rollout", "reward", "reward_model", "distillation"),
    *("hf_model", "legacy_data"),
)


def _flag(overrides: Sequence[Override], names: tuple[str, ...]) -> str | None:
    result = [
        str(override.value)
        for override in overrides
        if override.kind == "flag" and override.key in names and override.value
    ]
    return next((name for name in result if "$" not in name), None)


def _group(overrides: Sequence[Override], name: str) -> str:
    return next(
        (
            str(item.value)
            for item in reversed(overrides)
            if item.kind == "set" and item.key == name
        ),
        "",
    )


GROUPS = ("model_engine", "engine", "optim")
"""Config groups of the old trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Signs of one system's YAML."""

    name: str
    needs: tuple[str, ...] = ()
    """Blocks and keys that all stand in the file."""
    some: tuple[str, ...] = ()
    """Keys of which at least `at_least` stand in it."""
    at_least: int = 0


SYSTEMS = (
    System(name="EasyR1", needs=("worker", "data", "trainer")),
    System(
        name="NeMo-RL",
        needs=("policy", "cluster"),
        some=("grpo", "sft", "dpo", "rm", "distillation", "loss_fn", "logger", "checkpointing"),
        at_least=2,
    ),
    System(
        name="SkyRL",
        needs=("generator", "trainer"),
    ),
    System(
        name="AReaL",
        needs=("actor",),
        some=("allocation_mode", "gconfig", "train_dataset", "weight_update_mode"),
        at_least=2,
    ),
    System(
        name="LLaMA-Factory",
        some=("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "do_train"),
        at_least=2,
    ),
    System(
        name="TRL",
        some=(
            *(
                "model_name_or_path",
                "dataset_name",
                "output_dir",
                "learning_rate",
                "per_device_train_batch_size",
            ),
            *(
                "gradient_accumulation_steps",
                "num_train_epochs",
                "num_generations",
                "max_prompt_length",
                "max_completion_length",
            ),
            *("use_vllm", "torch_dtype", "dtype", "beta", "report_to", "trust_remote_code"),
        ),
        at_least=3,
    ),
    System(
        name="accelerate, such as TRL's examples have",
        needs=("distributed_type",),
        some=("compute_environment", "num_processes"),
        at_least=1,
    ),
    System(
        name="OpenRLHF",
        some=(
            *(
                "pretrain",
                "reward_pretrain",
                "remote_rm_url",
                "actor_num_nodes",
                "actor_num_gpus_per_node",
                "vllm_num_engines",
            ),
            *(
                "rollout_batch_size",
                "micro_rollout_batch_size",
                "micro_train_batch_size",
                "train_batch_size",
                "prompt_data",
            ),
            *("prompt_max_len", "generate_max_len", "zero_stage", "init_kl_coef"),
        ),
        at_least=3,
    ),
)
"""The first one that fits counts."""


def other_system(values: Mapping[str, Plain]) -> str:
    """Return the name of the system that a configuration is of; empty if it can be verl's."""
    if "actor_rollout_ref" in values:
        return ""
    for system in SYSTEMS:
        if (
            all(name in values for name in system.needs)
            and sum(name in values for name in system.some) >= system.at_least
        ):
            return system.name
    return ""


def num_known_keys(values: Mapping[str, Plain]) -> tuple[int, int]:
    """Count the keys that some release has, and all of them; empty blocks count."""
    known = known_keys()
    leaves = flatten(dict(values))
    num_known = sum(
        key in known or (value in (None, {}) and any(name.startswith(f"{key}.") for name in known))
        for key, value in leaves.items()
    )
    return num_known, len(leaves)
