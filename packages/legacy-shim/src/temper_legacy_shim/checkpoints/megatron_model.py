"""Weights and adapter of a role in one of Megatron's layouts, under Hugging Face names."""

import re
from collections.abc import Mapping
from pathlib import Path

from temper_legacy_shim.checkpoints import megatron_adapters, megatron_names, megatron_ranks
from temper_legacy_shim.checkpoints.adapters import Adapter
from temper_legacy_shim.checkpoints.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.layouts import Role, read_object
from temper_legacy_shim.checkpoints.lazy import LazyTensor
from temper_legacy_shim.checkpoints.megatron_names import Geometry
from temper_legacy_shim.errors import DamagedFileError, LayoutError, UsageError


def read(
    role: Role, config: Mapping[str, object], *, source: str, accepts_partial_adapter: bool
) -> tuple[dict[str, LazyTensor], Adapter | None]:
    """What Megatron's own files hold; no weights, or no adapter, where they have none.

    Args:
        role: of a Megatron layout.
        config: config.json of the model.
        source: where that lies, for errors.
        accepts_partial_adapter: read an adapter that lacks layers.

    Raises:
        ShimError: the files can't be read; says which file and key.
    """
    geometry = Geometry.of(config, source=source)
    _check_transformer_config(role, config, geometry, source=source)
    named = megatron_tensors(role)
    base = {name: tensor for name, tensor in named.items() if megatron_adapters.MARK not in name}
    adapter = None
    if any(megatron_adapters.MARK in name for name in named):
        adapter = megatron_adapters.read_adapter(named, geometry, where=role.path, accepts_missing_layers=accepts_partial_adapter)
    elif accepts_partial_adapter:
        raise UsageError("--partial-adapter has no effect: this checkpoint has no adapter of Megatron's.")
    weights = megatron_names.to_hf(base, geometry, where=role.path)
    if role.rank_files:
        _check_last_stage(weights, geometry, where=role.path / "model")
    return weights, adapter


def _check_transformer_config(role: Role, config: Mapping[str, object], geometry: Geometry, *, source: str) -> None:
    """Refuse a config of another model than the one that Megatron ran; shapes alone often fit both.

    Raises:
        UsageError: a number differs; names both files and both values.
    """
    path = role.path / "transformer_config.json"
    if not path.is_file():
        return
    saved = read_object(path)
    expected = {
        "num_layers": ("num_hidden_layers", geometry.num_layers),
        "hidden_size": ("hidden_size", config.get("hidden_size")),
        "num_attention_heads": ("num_attention_heads", geometry.num_heads),
        "num_query_groups": ("num_key_value_heads", geometry.num_groups),
        "kv_channels": ("head_dim", geometry.head_dim),
        "num_moe_experts": ("num_experts", geometry.num_experts),
        "layernorm_epsilon": ("rms_norm_eps", config.get("rms_norm_eps")),
    }
    for name, (key, value) in expected.items():
        if saved.get(name) is not None and value is not None and saved[name] != value:
            raise UsageError(
                f"{path} has {name} = {saved[name]}, but {source} has {key} = {value}: give --hf-config, the folder of the model that "
                "was trained."
            )


def _check_last_stage(weights: Mapping[str, LazyTensor], geometry: Geometry, *, where: Path) -> None:
    """Of a whole stage that was not copied, no name of a file tells."""
    layers = {int(match[1]) for match in map(_HF_LAYER.match, weights) if match}
    missing = sorted(set(range(geometry.num_layers)) - layers)
    if missing:
        raise LayoutError(
            f"{where} has {len(layers)} of {geometry.num_layers} layers, none of number {missing[0]}: copy every stage's folders here; "
            "on several nodes each holds its own."
        )


_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def megatron_tensors(role: Role) -> dict[str, LazyTensor]:
    """Base and adapter under Megatron's names, where its own files hold them; whole, layers perhaps stacked."""
    tensors: dict[str, LazyTensor] = {}
    if role.rank_files:
        tensors |= megatron_ranks.read_weights(role.rank_files, where=role.path / "model")
    elif role.dist_folders:
        found = DistCheckpoint(role.dist_folders[0]).tensors
        tensors |= model_names(found)
    if role.adapter_files:
        adapter = megatron_ranks.read_weights(role.adapter_files, where=role.path / "adapter_checkpoint")
        tensors |= {name: tensor for name, tensor in adapter.items() if megatron_adapters.MARK in name}
    return tensors


_NO_WEIGHT = re.compile(r"(?:chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler|lr_scheduler")
"""Names of what a distributed checkpoint holds beside weights."""


def model_names(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The model's among everything a distributed checkpoint mixes; each name once.

    Raises:
        LayoutError: there are weights of a model that is not known.
        DamagedFileError: a name is there twice.
    """
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.").removeprefix("module.").replace(".to_wrap.", ".")
        if _NO_WEIGHT.match(name) or "_extra_state" in short:
            continue
        if not short.startswith(("decoder.", "embedding.", "output_layer.")):
            raise LayoutError(
                f"the distributed checkpoint has {name}, which is of no model that is known here (Llama, Mistral, Qwen 2 and 3, and their "
                "MoE): images, further heads and other architectures can't be converted."
            )
        if short in found:
            raise DamagedFileError(f"the distributed checkpoint has {short} twice (as {name}): which one counts can't be known.")
        found[short] = tensor
    return found
