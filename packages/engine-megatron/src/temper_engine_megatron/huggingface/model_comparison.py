"""Accept a model that no test covers if a tiny one of its structure computes as in transformers.

Megatron-Bridge translates more architectures than this engine has layers for, and a layer that
lacks a part gives wrong numbers without an error. So the first start with such a model compares
log-probs and gradients of a tiny model, on the CPU in a process of its own. The result is kept for
all models that differ in sizes only.
"""

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError
from temper_engine_megatron.bridge_compat import TESTED_MODEL_TYPES

TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest entry of a tensor.

Rounding in float32 gives up to 1e-5, and up to 1e-4 with linear attention. A missing norm, bias or
factor gives more than 1e-2.
"""
_TIMEOUT_S = 600
_VERSIONS = ("megatron-core", "megatron-bridge", "transformers", "torch", "temper-engine-megatron")
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
}
"""Sizes of the tiny model, for the fields that a config has."""
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


def check_computes_alike(hf_config: PretrainedConfig) -> None:
    """Compare the engine with transformers on a tiny model of this structure, once.

    Models of families that the kit tests are accepted at once.

    Raises:
        CapabilityError: If they differ, with the measured difference.
    """
    if hf_config.model_type in TESTED_MODEL_TYPES or _ACCEPTS_UNTESTED.get():
        return
    name = type(hf_config).__name__
    result = _read_or_measure(shrink_config(hf_config), name=name)
    if result.difference is not None and result.difference <= TOLERANCE:
        return
    reason = (
        f"cannot compute a tiny model of it ({result.quantity})"
        if result.difference is None
        else f"computes a tiny model of it otherwise than transformers: {result.quantity} is off "
        f"by {result.difference:.1e} of its largest entry, and {TOLERANCE:.0e} is allowed"
    )
    raise CapabilityError(
        f"the Megatron engine does not support {name}. It {reason}. Use the FSDP engine."
    )


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
    num_layers = min(int(fields["num_hidden_layers"]), _NUM_LAYERS)
    fields |= {name: size for name, size in _SIZES.items() if fields.get(name) is not None}
    fields["num_hidden_layers"] = num_layers
    if "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = max(1, _NUM_HEADS * num_key_heads // num_heads)
    for name, value in fields.items():
        if isinstance(value, list) and name.endswith(("layer_types", "block_type")):
            fields[name] = value[:num_layers]
    return fields


def _read_or_measure(fields: Mapping[str, object], *, name: str) -> ComparisonResult:
    versions = {package: version(package) for package in _VERSIONS}
    key = json.dumps([fields, versions], sort_keys=True, default=str)
    path = _cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    # One of the ranks of a host measures, and the others read its result.
    with _locked(path.with_suffix(".lock")):
        if path.exists():
            return ComparisonResult(**json.loads(path.read_text()))
        logging.getLogger(__name__).warning(
            "comparing a tiny %s with transformers, because no test of the Megatron engine covers "
            "this model; the result is kept in %s",
            name,
            path,
        )
        result = _measure(fields)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(result)))
        partial.replace(path)
    return result


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "temper", "megatron_models")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _measure(fields: Mapping[str, object]) -> ComparisonResult:
    """Compare in a process of its own: Megatron's process groups are global."""
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fields.json").write_text(json.dumps(fields))
        command = [sys.executable, "-m", "temper_engine_megatron.comparison_process", folder]
        finished = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        result = Path(folder, "result.json")
        if result.exists():
            return ComparisonResult(**json.loads(result.read_text()))
    last_line = (finished.stderr.strip().splitlines() or [f"exit status {finished.returncode}"])[-1]
    return ComparisonResult(difference=None, quantity=last_line)
