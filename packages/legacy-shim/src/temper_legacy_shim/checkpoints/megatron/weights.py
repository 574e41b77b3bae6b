"""Load weights and adapter from Megatron's layouts, with Hugging Face names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.checkpoints.adapters import Adapter, Pair
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import Element, LazyTensor, Rows
from temper_legacy_shim.checkpoints.layouts import Role, read_object
from temper_legacy_shim.checkpoints.megatron import parameter_names, ranks
from temper_legacy_shim.checkpoints.megatron.parameter_names import Geometry, split_qkv
from temper_legacy_shim.errors import DamagedFileError, LayoutError, UsageError


def read(
    role: Role, config: Mapping[str, object], *, source: str, accepts_partial_adapter: bool
) -> tuple[dict[str, LazyTensor], Adapter | None]:
    """Load weights and adapter from Megatron's files; empty and None without such files.

    Args:
        role: of a Megatron layout.
        config: config.json of the model.
        source: where that lies, for errors.
        accepts_partial_adapter: read an adapter that lacks layers.

    Raises:
        ShimError: a file is damaged; the message shows file and key.
    """
    geometry = Geometry.of(config, source=source)
    _check_transformer_config(role, config, geometry, source=source)
    named = megatron_tensors(role)
    base = {name: tensor for name, tensor in named.items() if MARK not in name}
    adapter = None
    if any(MARK in name for name in named):
        adapter = read_adapter(
            named, geometry, where=role.path, accepts_missing_layers=accepts_partial_adapter
        )
    elif accepts_partial_adapter:
        raise UsageError(
            "--partial-adapter has no effect: this checkpoint has no adapter of Megatron's."
        )
    weights = parameter_names.to_hf(base, geometry, where=role.path)
    if role.rank_files:
        _check_last_stage(weights, geometry, where=role.path / "model")
    return weights, adapter


def _check_transformer_config(
    role: Role, config: Mapping[str, object], geometry: Geometry, *, source: str
) -> None:
    """Reject a config of a model other than Megatron's; shapes alone often fit both.

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
        # Fields that are absent from one of the files are skipped.
        if saved.get(name) is not None and value is not None and saved[name] != value:
            raise UsageError(
                f"{path} has {name} = {saved[name]}, but {source} has {key} = {value}: give "
                "--hf-config, the folder of the model that was trained."
            )


def _check_last_stage(
    weights: Mapping[str, LazyTensor], geometry: Geometry, *, where: Path
) -> None:
    """Check that the last stage was copied, which no file name shows."""
    layers = {int(match[1]) for match in map(_HF_LAYER.match, weights) if match}
    missing = sorted(set(range(geometry.num_layers)) - layers)
    if missing:
        raise LayoutError(
            f"{where} has {len(layers)} of {geometry.num_layers} layers, none of number "
            f"{missing[0]}: copy every stage's folders here; on several nodes each holds its own."
        )


_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def megatron_tensors(role: Role) -> dict[str, LazyTensor]:
    """Return full tensors of base and adapter under Megatron's names; layers may be stacked."""
    tensors: dict[str, LazyTensor] = {}
    if role.rank_files:
        tensors |= ranks.read_weights(role.rank_files, where=role.path / "model")
    elif role.dist_folders:
        result = DistCheckpoint(role.dist_folders[0]).tensors
        tensors |= model_names(result)
    if role.adapter_files:
        adapter = ranks.read_weights(role.adapter_files, where=role.path / "adapter_checkpoint")
        # Only the adapter: the base comes from the files above, or from the user.
        tensors |= {name: tensor for name, tensor in adapter.items() if MARK in name}
    return tensors


_NO_WEIGHT = re.compile(
    r"(?:chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler|lr_scheduler"
)
"""Names of entries next to the weights in a distributed checkpoint."""


def model_names(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the model's among everything a distributed checkpoint mixes; each name once.

    Raises:
        LayoutError: there are weights of a model that is not known.
        DamagedFileError: a name is there twice.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.").removeprefix("module.").replace(".to_wrap.", ".")
        if _NO_WEIGHT.match(name) or "_extra_state" in short:
            continue
        if not short.startswith(("decoder.", "embedding.", "output_layer.")):
            raise LayoutError(
                f"the distributed checkpoint has {name}, which is of no model that is known here "
                "(Llama, Mistral, Qwen 2 and 3, and their "
                "MoE): images, further heads and other architectures can't be converted."
            )
        if short in result:
            raise DamagedFileError(
                f"the distributed checkpoint has {short} twice (as {name}): which one counts can't "
                "be known."
            )
        result[short] = tensor
    return result


MARK = ".adapter."
_NAME = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<module>.+)\.adapter\.(?:adapter_(?P<part>\w+)\.)?linear_(?P<side>in|out)\.weight"
)
_PLAIN = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
_PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    layer: int
    module: str
    part: str | None


def read_adapter(
    tensors: Mapping[str, LazyTensor],
    geometry: Geometry,
    *,
    where: Path,
    accepts_missing_layers: bool,
) -> Adapter:
    """Return the adapter of a whole model.

    Args:
        tensors: whole, under Megatron's names; those of the base may be among them.
        geometry: of the model's config.
        where: for errors.
        accepts_missing_layers: convert the existing layers if later layers are missing.

    Raises:
        DamagedFileError: half a pair is missing, or layers have no adapter.
        LayoutError: a module is not known.
    """
    halves: dict[_Position, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if MARK not in name:
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise LayoutError(
                f"{where}: {name} is of no adapter that is known here (LoRA and canonical LoRA of "
                "Megatron-Bridge)."
            )
        if match["layer"] is not None:
            position = _Position(
                layer=int(match["layer"]), module=match["module"], part=match["part"]
            )
            halves.setdefault(position, {})[match["side"]] = tensor
        else:
            # Distributed checkpoints stack the layers of a homogeneous model in one tensor.
            for layer in range(tensor.shape[0]):
                halves.setdefault(
                    _Position(layer=layer, module=match["module"], part=match["part"]), {}
                )[match["side"]] = Element(tensor, layer)
    _check_layers(
        {position.layer for position in halves},
        geometry,
        where=where,
        accepts_missing=accepts_missing_layers,
    )
    pairs: dict[str, Pair] = {}
    for position, sides in halves.items():
        if sides.keys() != {"in", "out"}:
            raise DamagedFileError(
                f"{where}: the adapter of layer {position.layer}'s {position.module} lacks half: a "
                "file is of another save."
            )
        for module, up in _parts(position, sides["out"], geometry, where=where).items():
            pairs[f"model.layers.{position.layer}.{module}"] = Pair(down=sides["in"], up=up)
    return Adapter(pairs=pairs)


def _check_layers(
    layers: set[int], geometry: Geometry, *, where: Path, accepts_missing: bool
) -> None:
    surplus = sorted(layer for layer in layers if layer >= geometry.num_layers)
    if surplus:
        raise DamagedFileError(
            f"{where}: there is an adapter of layer {surplus[0]}, but the config has "
            f"{geometry.num_layers} layers."
        )
    missing = sorted(set(range(geometry.num_layers)) - layers)
    if missing and not accepts_missing:
        raise DamagedFileError(
            f"{where}: layers {missing[0]} to {missing[-1]} ({len(missing)} of "
            f"{geometry.num_layers}) have no adapter in the files. Under "
            "virtual pipelining 0.7 saved the first chunk's adapters only alone;  "
            "--partial-adapter converts what is there."
        )


def _parts(
    position: _Position, up: LazyTensor, geometry: Geometry, *, where: Path
) -> dict[str, LazyTensor]:
    """Return the up projection of an adapter for each module of Hugging Face that it covers."""
    if position.part is not None:
        if position.part not in _PARTS:
            raise LayoutError(
                f"{where}: adapter_{position.part} of {position.module} is not known here."
            )
        return {_PARTS[position.part]: up}
    if position.module in _PLAIN:
        return {_PLAIN[position.module]: up}
    if position.module == "self_attention.linear_qkv":
        rows = split_qkv(
            up, geometry, name=f"the adapter of layer {position.layer}'s linear_qkv", where=where
        )
        return {f"self_attn.{projection}": part for projection, part in rows}
    if position.module == "mlp.linear_fc1":
        half = up.shape[0] // 2
        return {
            "mlp.gate_proj": Rows(up, ((0, half),)),
            "mlp.up_proj": Rows(up, ((half, 2 * half),)),
        }
    raise LayoutError(f"{where}: an adapter on {position.module} is not known here.")
