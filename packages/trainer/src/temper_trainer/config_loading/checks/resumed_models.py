"""Compare a configuration's models with the checkpoint to resume from, without torch.

The engines save the model's config.json with its state, and its adapter's config.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_trainer.checkpoint.step_contents import find_engine_checkpoints
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.model_folders import read_json_fields, select_text_fields

ENGINES_WITH_PEFT = ("fsdp", "megatron")
"""Engines that implement LoRA with peft, and save `adapter/adapter_config.json`."""
_SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
    # Names of older model types.
    *("n_embd", "n_inner", "n_layer", "n_head"),
)
"""Fields of config.json that decide the names and shapes of tensors.

Without vocab_size, which a run fits to its tokenizer.
"""


def find_resumed_model_problems(config: TrainerConfig, checkpoint: Path) -> Iterator[str]:
    """Yield why trained models could not load a checkpoint's state.

    A setting that is left to the default of the model's class is not compared.
    """
    parts = find_engine_checkpoints(checkpoint)
    for name, role in config.trained_roles.items():
        folder = parts[name] / "engine" if name in parts else checkpoint / name
        saved = read_json_fields(folder / "huggingface" / "config.json")
        if not saved:
            continue  # a lost part is reported by the checkpoint, and third engines may have none
        key = f"{name}.engine"
        problems = [
            *_find_shape_problems(role.engine.model, saved, key=f"{key}.model"),
            # A migrated checkpoint and other engines may keep the adapter elsewhere.
            *(
                _find_adapter_problems(role.engine.lora, folder, key=f"{key}.lora")
                if name not in parts and config.model_engine in ENGINES_WITH_PEFT
                else ()
            ),
        ]
        for problem in problems:
            yield (
                f"{problem}: {checkpoint} cannot be loaded. Set the saved value, or choose another "
                "run.dir to start again."
            )


def _find_shape_problems(
    model: ModelSpec, saved: Mapping[str, object], *, key: str
) -> Iterator[str]:
    requested: Mapping[str, object] = model.architecture
    source = f"{key}.architecture"
    if model.path is not None:
        requested = read_json_fields(Path(model.path) / "config.json")
        source = f"{key}.path {model.path}: config.json"
    requested, saved = select_text_fields(requested), select_text_fields(saved)
    for name in _SHAPE_KEYS:
        if name in requested and name in saved and requested[name] != saved[name]:
            yield f"{source} has {name} {requested[name]}, but the saved model has {saved[name]}"


def _find_adapter_problems(lora: LoraSpec, folder: Path, *, key: str) -> Iterator[str]:
    saved = read_json_fields(folder / "adapter" / "adapter_config.json")
    if lora.is_enabled and not saved:
        yield f"{key} is on, but the saved model has no adapter"
    elif saved and not lora.is_enabled:
        yield f"{key} is off, but the saved model has an adapter of rank {saved.get('r')}"
    elif saved and lora.path is None and lora.rank != saved.get("r"):
        yield f"{key}.rank is {lora.rank}, but the saved adapter has rank {saved.get('r')}"
