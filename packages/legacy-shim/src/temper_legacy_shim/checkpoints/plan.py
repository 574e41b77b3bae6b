"""Plan a conversion: which tensors go to which file, from names and shapes alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from temper_legacy_shim.checkpoints import adapters
from temper_legacy_shim.checkpoints.files.dtypes import BY_NAME, CASTS
from temper_legacy_shim.checkpoints.files.lazy import Cast, LazyTensor, num_bytes
from temper_legacy_shim.checkpoints.files.safetensors_files import index_of, plan_shards
from temper_legacy_shim.checkpoints.huggingface.joined_experts import as_mixtral_s_files
from temper_legacy_shim.checkpoints.layouts import Kind, Role, check_own, check_readable, find_roles
from temper_legacy_shim.checkpoints.model import OldModel, Sources, described, merged, no_base
from temper_legacy_shim.errors import UsageError, VerificationError

Target = Literal["hf", "peft", "temper"]
_COPIED = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"})
# Written again from what is known, or meaningless outside an old checkpoint.
_SYNC_LOOP = frozenset(
    {
        "config.json",
        "adapter_config.json",
        "fsdp_config.json",
        "lora_train_meta.json",
        "transformer_config.json",
        "ckpt_contents.json",
        "temper-receipt.json",
    }
)
# Tokenizers are far smaller, and weights may have any name.
_MAX_COPY = 256 << 20
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Target = "hf"
    """hf, peft or temper."""
    dtype: str | None = None
    """float32, bfloat16 or float16 for every floating weight; None keeps each as it is."""
    keeps_adapter: bool = False
    """hf: write the adapter next to its base instead of adding it to the weights."""
    max_shard_bytes: int = _SHARD_BYTES
    """Tensor bytes per safetensors file; only for hf."""
    is_strict: bool = False
    """NaN and infinity are errors."""
    checks_names: bool = True
    """Compare names and shapes with the model that transformers builds from the config."""
    verifies_logits: bool = False
    """Load the output with transformers and compare logits."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in CASTS:
            raise UsageError(
                f"--dtype is {self.dtype!r}, but must be one of {', '.join(CASTS)}; leave it out "
                "to keep every dtype."
            )
        if self.max_shard_bytes < 1:
            raise UsageError(
                f"--max-shard-size is {self.max_shard_bytes} bytes, but must be above 0."
            )
        if self.target != "hf" and self.max_shard_bytes != _SHARD_BYTES:
            raise UsageError(
                f"--max-shard-size has no effect with --to {self.target}: it is for --to hf."
            )
        if self.target != "hf" and self.verifies_logits:
            raise UsageError(
                f"--verify-logits has no effect with --to {self.target}, which writes no model to "
                "load: it is for --to hf."
            )
        if self.keeps_adapter and self.target != "hf":
            raise UsageError(
                f"--adapter keep has no effect with --to {self.target}: it is for --to hf."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    shards: Mapping[str, Mapping[str, LazyTensor]]
    """Tensors by relative path of their safetensors file."""
    texts: Mapping[str, str]
    """Content by relative path."""
    copies: Mapping[str, Path]
    model: OldModel
    """The model as written: merged and cast."""
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(tensor) for group in self.shards.values() for tensor in group.values())

    def tensors(self) -> dict[str, LazyTensor]:
        return {name: tensor for group in self.shards.values() for name, tensor in group.items()}


def plan_conversion(model: OldModel, options: Options) -> Plan:
    """Plan the output.

    Raises:
        UsageError: an option does not fit this checkpoint, or something that no file says is
            missing.
    """
    if options.target == "peft":
        return _plan_peft(model, options)
    return _plan_hf(model, options)


def _plan_hf(model: OldModel, options: Options) -> Plan:
    """Plan a model directory of transformers, with an adapter in the weights or next to them."""
    if options.keeps_adapter and model.adapter is None:
        raise UsageError("--adapter keep has no effect: this checkpoint has no adapter.")
    notes = list(model.notes)
    written = model if options.keeps_adapter else merged(model)
    if model.adapter is not None and not options.keeps_adapter:
        notes.append(
            f"adapter of rank {model.adapter.rank}, alpha {model.adapter.alpha:g} "
            f"({model.adapter.alpha_from}) added in float32"
        )
    if not written.weights:
        raise no_base(model.role, model.adapter)
    written = replace(
        written,
        weights={
            _to_file_name(name, model): _cast(tensor, options)
            for name, tensor in written.weights.items()
        },
    )
    shards: dict[str, Mapping[str, LazyTensor]] = dict(
        plan_shards(written.weights, max_bytes=options.max_shard_bytes, stem="model")
    )
    texts = {"config.json": _text(described(written, dtype=main_dtype(written.weights)))}
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = _text(index_of(shards))
    if options.keeps_adapter and model.adapter is not None:
        shards["adapter/adapter_model.safetensors"] = {
            name: _cast(tensor, options)
            for name, tensor in adapters.peft_tensors(model.adapter).items()
        }
        texts["adapter/adapter_config.json"] = _text(
            adapters.peft_config(model.adapter, base_model=None, task=_task(model))
        )
    if model.head != "language_model":
        notes.append(
            f"a {model.head.replace('_', ' ')} by its keys, whatever the old config says; the "
            "config is written to match"
        )
    return Plan(
        shards=shards, texts=texts, copies=companions(model), model=written, notes=tuple(notes)
    )


def _to_file_name(name: str, model: OldModel) -> str:
    """Return the name in transformers' files, where Mixtral's experts have their own."""
    is_mixtral = (
        model.role.kind in (Kind.MEGATRON_RANKS, Kind.MEGATRON_DIST)
        and (model.config or {}).get("model_type") == "mixtral"
    )
    return as_mixtral_s_files(name) if is_mixtral else name


def _plan_peft(model: OldModel, options: Options) -> Plan:
    """Plan an adapter directory of PEFT, without weights of the base model."""
    if model.adapter is None:
        raise UsageError(
            f"{model.role.path} has no adapter, which is all that --to peft writes: use --to hf."
        )
    if model.adapter.lacks_biases:
        raise UsageError(
            f"{model.role.path} trained biases next to its adapter, which --to peft would leave "
            "behind: use --to hf."
        )
    tensors = {
        name: _cast(tensor, options)
        for name, tensor in adapters.peft_tensors(model.adapter).items()
    }
    base = _base_name(model)
    config = adapters.peft_config(model.adapter, base_model=base, task=_task(model))
    notes = [
        *model.notes,
        (
            f"adapter of rank {model.adapter.rank}, alpha {model.adapter.alpha:g} "
            f"({model.adapter.alpha_from})"
        ),
    ]
    if base is None:
        notes.append(
            "no file says which base model this adapter belongs to: base_model_name_or_path is "
            "empty"
        )
    shards = {"adapter_model.safetensors": tensors}
    return Plan(
        shards=shards,
        texts={"adapter_config.json": _text(config)},
        copies=companions(model),
        model=model,
        notes=tuple(notes),
    )


def _base_name(model: OldModel) -> str | None:
    # The adapter's own config knows its base; _name_or_path of a config may be the path of a
    # resumed run.
    own = model.adapter.config.get("base_model_name_or_path") if model.adapter else None
    configured = (model.config or {}).get("_name_or_path")
    return next((str(name) for name in (own, configured) if name), None)


def _task(model: OldModel) -> str:
    return {"value_model": "TOKEN_CLS", "reward_model": "SEQ_CLS"}.get(model.head, "CAUSAL_LM")


def _cast(tensor: LazyTensor, options: Options) -> LazyTensor:
    if options.dtype is None or not tensor.dtype.is_float or tensor.dtype.name == options.dtype:
        return tensor
    return Cast(tensor, BY_NAME[options.dtype])


def main_dtype(tensors: Mapping[str, LazyTensor]) -> str:
    """Return the dtype that most bytes have."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + num_bytes(tensor)
    return max(sizes, key=lambda name: sizes[name])


def companions(model: OldModel) -> dict[str, Path]:
    """Return the tokenizer, generation settings and the like: small files next to the config.

    Code among them is copied and never run.

    Raises:
        LayoutError: one is a broken link, or one that leads out of the checkpoint.
    """
    result: dict[str, Path] = {}
    for folder in (model.config_folder, model.role.tokenizer_in()):
        if folder is None:
            continue
        for path in sorted(folder.iterdir()):
            is_expected = (
                path.suffix in _COPIED
                and path.name not in _SYNC_LOOP
                and not path.name.endswith(".index.json")
            )
            if is_expected:
                check_readable(path)
            if is_expected and path.is_file() and path.stat().st_size <= _MAX_COPY:
                check_own(path, model.role)
                result[path.name] = path
    return result


def _text(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


Progress = Callable[[str, int, int], None]
"""Callback with the current file, finished bytes and total bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A role and the output folder."""

    role: Role
    out: Path


def plan_jobs(
    path: Path, out: Path, *, step: int | None = None, role: str | None = None
) -> list[Job]:
    """Return roles and outputs; several roles get a folder each below the output."""
    roles = find_roles(path, step=step, role=role)
    if len(roles) == 1:
        return [Job(role=roles[0], out=out)]
    return [Job(role=each, out=out / each.name) for each in roles]


def recorded(options: Options, sources: Sources) -> dict[str, object]:
    """Return the options and additional inputs, in the form of the receipt."""
    return {**asdict(options), **sources.recorded()}


def check_nan(names: Sequence[str], options: Options) -> None:
    """Refuse NaN and infinity, if that was asked for.

    Raises:
        VerificationError: naming the first tensor that holds one.
    """
    if names and options.is_strict:
        raise VerificationError(
            f"{names[0]}{_more(names)} hold NaN or infinity: the training diverged, or an alpha is "
            "wrong. Without --strict that is a note."
        )


def nan_note(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note for the receipt, if there is a NaN or an infinity."""
    return (f"NaN or infinity in {names[0]}{_more(names)}",) if names else ()


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
