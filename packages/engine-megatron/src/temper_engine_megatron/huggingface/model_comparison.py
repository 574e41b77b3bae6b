"""Accept a model that no test covers if a tiny one of its structure computes as in transformers.

Megatron-Bridge translates more architectures than this engine has layers for, and a layer that
lacks a part gives wrong numbers without an error. So the first start with such a model compares the
gradients of a tiny model: on one rank, in float32, on the CPU, in a process of its own. The result
is kept for all models that differ in sizes only.
"""

import fcntl
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_api.process_folders import open_temporary_folder
from temper_engine_megatron.bridge_compat import TESTED_MODEL_TYPES

TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest entry of a tensor.

Rounding in float32 gives up to 1e-5, and up to 1e-4 with linear attention. A missing norm, bias or
factor gives more than 1e-2.
"""
_MAX_TIMEOUT_S = 300.0
_VERSIONS = ("megatron-core", "megatron-bridge", "transformers", "torch")
_SOURCES = ("temper_engine_api", "temper_engine_megatron")
"""Packages of which a change makes results invalid. Their versions differ by release only."""
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_NUM_LAYERS = 4
_NUM_HEADS = 4
_SIZES: Mapping[str, int] = {
    # Prime, so that no number of ranks divides it.
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": _NUM_HEADS,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    # Latent attention; values are narrower than queries and keys.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "moe_shared_expert_intermediate_size": 24,
    # Mamba layers; a state is carried from chunk to chunk.
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
}
"""Sizes of the tiny model, for the fields that a config has."""
_UNTESTED_SIZES: Mapping[str, int] = {"moe_latent_size": 16}
"""Sizes of optional parts; a model that has them is compared although its type is tested."""
_TAKEN = frozenset(
    {
        *("model_type", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings"),
        *("initializer_range", "rms_norm_eps", "rope_parameters", "partial_rotary_factor"),
        *("tie_word_embeddings", "layer_types", "use_sliding_window", "max_window_layers"),
        *("query_pre_attn_scalar", "use_qk_norm", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "n_group", "topk_group", "first_k_dense_replace"),
        *("norm_topk_prob", "routed_scaling_factor", "router_aux_loss_coef"),
        *("layers_block_type", "layer_norm_epsilon"),
        # Read by the Mamba layer of transformers, which the engine runs.
        *("conv_kernel", "expand", "time_step_min", "time_step_max", "time_step_floor"),
        *("time_step_limit", "mamba_proj_bias"),
        # Refused by `transformer_settings` where the engine lacks it.
        *("attention_dropout", "attn_logit_softcapping", "final_logit_softcapping"),
        *("use_bidirectional_attention", "decoder_sparse_step", "mlp_only_layers"),
        # These have no effect on what transformers computes.
        *("is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
        *("output_router_logits", "problem_type", "pretraining_tp", "num_nextn_predict_layers"),
        *("mtp_layers_block_type", "moe_shared_expert_overlap", "num_logits_to_keep"),
        *("mamba_ssm_cache_dtype", "use_mamba_kernels", "rescale_prenorm_residual"),
        "residual_in_fp32",
    }
)
"""Fields, other than sizes, that may differ from the defaults of a tested model type."""
TESTED_ROPE_TYPES: Mapping[str, str] = {
    "deepseek_v3": "yarn",
    "gemma3_text": "linear",
    "glm4_moe": "yarn",
    "gpt_oss": "yarn",
    "qwen2": "yarn",
    "qwen3": "yarn",
    "qwen3_moe": "yarn",
    "llama": "llama3",
}
"""Type of rotary embeddings, other than the default, that tests cover, by model type."""
_IGNORED = frozenset(
    {
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("id2label", "label2id", "quantization_config", "use_cache", "name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward"),
    }
)

_ACCEPTS_UNTESTED: ContextVar[bool] = ContextVar("accepts_untested", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Result of a comparison."""

    difference: float | None
    """Largest relative difference; None if the model could not be computed."""
    quantity: str
    """Quantity with this difference, or the error."""
    is_final: bool
    """True if another attempt would give the same result, unlike after a lack of memory or disk."""


def check_computes_alike(hf_config: PretrainedConfig, *, collective_timeout_s: float) -> None:
    """Compare the engine with transformers on a tiny model of this structure, once.

    Models of families that the kit tests are accepted at once, unless a field has a value that the
    tests do not cover.

    Args:
        hf_config: The model.
        collective_timeout_s: Timeout of the ranks that have a result and wait for this one.

    Raises:
        CapabilityError: If they differ, with the measured difference.
    """
    if _ACCEPTS_UNTESTED.get():
        return
    untested = list_untested_fields(hf_config)
    if hf_config.model_type in TESTED_MODEL_TYPES and not untested:
        return
    name = type(hf_config).__name__
    if hf_config.model_type in TESTED_MODEL_TYPES:
        name += f" with {', '.join(untested)}"
    # Other hosts may have a result, and already wait in the rendezvous.
    timeout_s = min(_MAX_TIMEOUT_S, collective_timeout_s / 2)
    fields = shrink_config(hf_config)
    path = _find_cache_file(fields)
    result = _read_or_measure(fields, path=path, name=name, timeout_s=timeout_s)
    if result.difference is not None and result.difference <= TOLERANCE:
        return
    reason = (
        f"cannot compute a tiny model of it ({result.quantity})"
        if result.difference is None
        else f"does not compute a tiny model of it as transformers does: {result.quantity} is off "
        f"by {result.difference:.1e} of its largest entry, and {TOLERANCE:.0e} is allowed"
    )
    advice = f" To compare again, delete {path}." if result.is_final else ""
    raise CapabilityError(
        f"the Megatron engine does not support {name}. It {reason}. Use the FSDP engine.{advice}"
    )


def list_untested_fields(hf_config: PretrainedConfig) -> list[str]:
    """List, as name=value, fields whose values the tests of the model type do not cover.

    These differ from the defaults of the config class, and are neither sizes nor fields that the
    engine takes or refuses.

    Example:
        >>> from transformers import LlamaConfig
        >>> list_untested_fields(LlamaConfig(attention_bias=True, hidden_size=64))
        ['attention_bias=True']
    """
    values = hf_config.to_dict()
    skipped = _SIZES.keys() | _TAKEN | _IGNORED
    # Only declared fields: transformers keeps any key, but its models read these.
    untested = [
        f"{name}={values.get(name)!r}"
        for name, default in type(hf_config)().to_dict().items()
        if name not in skipped and not name.startswith("_") and values.get(name) != default
    ]
    # The tests of Nemotron-H have experts. A dense model has other settings of Megatron.
    kinds = values.get("layers_block_type")
    if kinds is not None and "moe" not in kinds:
        untested.append(f"layers_block_type={kinds}")
    tested_rope_types = {"default", TESTED_ROPE_TYPES.get(hf_config.model_type)}
    rope_types = {settings.get("rope_type", "default") for settings in _list_rope_settings(values)}
    untested += [f"rope_type={name!r}" for name in sorted(rope_types - tested_rope_types)]
    # Only some model types of transformers read it, but the engine does for all.
    factors = _list_rotary_factors(values)
    if factors != _list_rotary_factors(type(hf_config)().to_dict()):
        untested += [f"partial_rotary_factor={factor:g}" for factor in sorted(factors)]
    return untested


def _list_rotary_factors(fields: Mapping[str, Any]) -> set[float]:
    """Return which parts of a head rotate."""
    return {settings.get("partial_rotary_factor", 1.0) for settings in _list_rope_settings(fields)}


def _list_rope_settings(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of rotary embeddings; layers of some kinds may have their own."""
    rope = fields.get("rope_parameters") or {}
    return [settings for settings in rope.values() if isinstance(settings, Mapping)] or [rope]


@contextmanager
def accept_untested_models() -> Iterator[None]:
    """Do not compare models inside the context, which is where they are compared."""
    token = _ACCEPTS_UNTESTED.set(True)
    try:
        yield
    finally:
        _ACCEPTS_UNTESTED.reset(token)


def shrink_config(hf_config: PretrainedConfig) -> dict[str, object]:
    """Return the fields of a tiny model with the same structure: the same kinds of layers."""
    fields = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in _IGNORED and not name.startswith("_")
    }
    num_heads = int(fields["num_attention_heads"])
    num_key_heads = int(fields.get("num_key_value_heads") or num_heads)
    sizes = {**_SIZES, **_UNTESTED_SIZES}
    fields |= {name: size for name, size in sizes.items() if fields.get(name) is not None}
    if hf_config.to_dict().get("num_experts_per_tok") == 1:
        # Routers that choose one expert often have another formula.
        fields["num_experts_per_tok"] = 1
    if (fields.get("n_group") or 1) > 1:
        # Two experts of one of two groups.
        fields |= {"n_group": 2, "topk_group": 1}
    if "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = max(1, _NUM_HEADS * num_key_heads // num_heads)
    return fields | _pick_layers(fields)


def _pick_layers(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields that number layers, for a few layers with all kinds among them."""
    # Nemotron-H has the list only.
    num_layers = int(fields.get("num_hidden_layers") or len(fields["layers_block_type"]))
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == num_layers and name != "mlp_only_layers"
    }
    # The first layers up to such a number differ from the others.
    bounds = {
        name: int(fields[name])
        for name in ("first_k_dense_replace", "max_window_layers")
        if fields.get(name) is not None
    }
    if not fields.get("use_sliding_window"):
        bounds.pop("max_window_layers", None)
    kinds = [
        (
            *(str(values[number]) for values in lists.values()),
            *(number < bound for bound in bounds.values()),
            number in (fields.get("mlp_only_layers") or ()),
        )
        for number in range(num_layers)
    ]
    picked = {kinds.index(kind) for kind in kinds}
    others = [number for number in range(num_layers) if number not in picked]
    # Sorted, so that the kinds follow each other as in the model.
    layers = sorted([*picked, *others[: max(0, _NUM_LAYERS - len(picked))]])
    changes: dict[str, object] = {"num_hidden_layers": len(layers)}
    changes |= {name: [values[number] for number in layers] for name, values in lists.items()}
    changes |= {name: sum(number < bound for number in layers) for name, bound in bounds.items()}
    if fields.get("max_window_layers") is not None and "max_window_layers" not in bounds:
        changes["max_window_layers"] = len(layers)
    if fields.get("mlp_only_layers"):
        changes["mlp_only_layers"] = [
            index for index, number in enumerate(layers) if number in fields["mlp_only_layers"]
        ]
    return changes


def _find_cache_file(fields: Mapping[str, object]) -> Path:
    versions = {package: version(package) for package in _VERSIONS}
    sources = {package: _hash_sources(package) for package in _SOURCES}
    key = json.dumps([fields, versions, sources], sort_keys=True, default=str)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "temper", "megatron_models")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _hash_sources(package: str) -> str:
    (folder,) = map(Path, importlib.import_module(package).__path__)
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _read_or_measure(
    fields: Mapping[str, object], *, path: Path, name: str, timeout_s: float
) -> ComparisonResult:
    # One of the ranks of a host measures, and the others read its result.
    with _locked(path.with_suffix(".lock")):
        if path.exists():
            return ComparisonResult(**json.loads(path.read_text()))
        logging.getLogger(__name__).warning(
            "comparing the gradients of a tiny %s with transformers, on one rank in float32 on the "
            "CPU, because no test of the Megatron engine covers this model; the result is kept in "
            "%s",
            name,
            path,
        )
        result = _measure(fields, timeout_s=timeout_s)
        if result.is_final:
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(result)))
            partial.replace(path)
    return result


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_PROGRAM = """
import ctypes, gc, os, pathlib, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end if the engine is killed
    if os.getppid() != int(sys.argv[2]):  # it was killed before that took effect
        sys.exit(1)
gc.disable()
from temper_engine_megatron.comparison_process import main
gc.freeze()
gc.enable()
main(pathlib.Path(sys.argv[1]))
"""
"""Program of the comparing process. It imports torch, which takes seconds, only after it is tied to
its parent, and without looking for garbage among the imported objects."""


def _measure(fields: Mapping[str, object], *, timeout_s: float) -> ComparisonResult:
    """Compare in a process of its own: Megatron's process groups are global."""
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with open_temporary_folder("comparison") as folder:
        (folder / "fields.json").write_text(json.dumps(fields))
        command = [sys.executable, "-c", _PROGRAM, str(folder), str(os.getpid())]
        try:
            finished = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CapabilityError(
                f"the comparison of a tiny model with transformers took more than {timeout_s:g} s, "
                "so the Megatron engine cannot tell whether it supports the model. Start again on "
                "a less busy host, raise collective_timeout_s, or use the FSDP engine."
            ) from error
        result = folder / "result.json"
        if result.exists():
            return ComparisonResult(**json.loads(result.read_text()))
    # Killed, or without space for the result.
    last_line = (finished.stderr.strip().splitlines() or ["no output"])[-1]
    return ComparisonResult(
        difference=None,
        quantity=f"exit status {finished.returncode}: {last_line}",
        is_final=False,
    )
