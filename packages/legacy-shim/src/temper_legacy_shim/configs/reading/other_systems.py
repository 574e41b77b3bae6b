"""Configurations of other training systems, which are recognized by their keys and never read as verl's."""

from collections.abc import Mapping
from dataclasses import dataclass

from temper_legacy_shim.configs.reading.config_values import Plain, flatten
from temper_legacy_shim.configs.reading.trees import known_keys


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
        name="TRL",
        some=(
            *("model_name_or_path", "dataset_name", "output_dir", "learning_rate", "per_device_train_batch_size"),
            *("gradient_accumulation_steps", "num_train_epochs", "num_generations", "max_prompt_length", "max_completion_length"),
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
            *("pretrain", "reward_pretrain", "remote_rm_url", "actor_num_nodes", "actor_num_gpus_per_node", "vllm_num_engines"),
            *("rollout_batch_size", "micro_rollout_batch_size", "micro_train_batch_size", "train_batch_size", "prompt_data"),
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
        if all(name in values for name in system.needs) and sum(name in values for name in system.some) >= system.at_least:
            return system.name
    return ""


def has_known_key(values: Mapping[str, Plain]) -> bool:
    """Return whether a configuration has a key, or a whole block of keys, that any release of verl had."""
    known = known_keys()
    return any(key in known or any(name.startswith(f"{key}.") for name in known) for key in flatten(dict(values)))
