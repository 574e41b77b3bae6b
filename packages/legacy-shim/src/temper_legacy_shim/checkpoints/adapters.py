"""Low-rank adapters inside, next to or without their base model.

Found by their keys, scaled by an alpha that is never guessed.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from temper_legacy_shim.checkpoints.files.dtypes import LARGEST_FLOAT32, SMALLEST_FLOAT32
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, LowRankSum, Transposed
from temper_legacy_shim.checkpoints.layouts import Role, read_object
from temper_legacy_shim.errors import DamagedFileError, LayoutError, UsageError

PEFT_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer."
_SAVED, _ORIGINAL = ".modules_to_save.", ".original_module."
_HALF = re.compile(
    r"(?P<module>.+)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?:\.(?P<adapter>(?!(?:weight|bias)$)[^.]+))?(?:\.weight)?$"
)
_OWN_BIAS = re.compile(r".+\.lora_[AB](?:\.[^.]+)?\.bias")
_TRANSPOSED = {
    "gpt2": re.compile(r".+\.(?:c_attn|q_attn|c_proj|c_fc)"),
    "openai-gpt": re.compile(r".+\.(?:c_attn|c_proj|c_fc)"),
}
"""Modules that are transformers' Conv1D, by the model_type of a config."""
_UNSUPPORTED = (
    "lora_magnitude_vector",
    "lora_ga",
    "vera_",
    "lokr_",
    "hada_",
    ".adapter_",
    "trainable_tokens_",
    "ia3_l",
    "oft_",
    "hra_",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two halves of one module's adapter."""

    down: LazyTensor
    """[rank, in] A; of an embedding [rank, vocabulary]."""
    up: LazyTensor
    """[out, rank] B."""
    is_embedding: bool = False
    """True if the module is an embedding, whose weight is the transpose of the product."""
    is_transposed: bool = False
    """True if the module keeps the transpose of a linear layer's weight, as GPT-2's do."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    pairs: Mapping[str, Pair]
    """Matrix pairs by Hugging Face name of the module."""
    saved_modules: Mapping[str, LazyTensor] = field(default_factory=dict)
    """Weights that were trained whole next to the adapter, by Hugging Face name."""
    extra: Mapping[str, LazyTensor] = field(default_factory=dict)
    """Other tensors of PEFT's file by name: trained biases, and embedding weights."""
    alpha: float | None = None
    """Numerator of the scale; None if neither a file nor the user gives it."""
    alpha_from: str = ""
    """File that holds alpha."""
    config: Mapping[str, object] = field(default_factory=dict)
    """PEFT's configuration, if the checkpoint has it."""

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def has_transposed(self) -> bool:
        """True if any module stores a transposed weight."""
        return any(pair.is_transposed for pair in self.pairs.values())

    @property
    def full(self) -> dict[str, LazyTensor]:
        """Weights that stand in the base's place, by Hugging Face name."""
        return {
            **self.saved_modules,
            **{name.replace(_BASE_LAYER, "."): tensor for name, tensor in self.extra.items()},
        }

    @property
    def lacks_biases(self) -> bool:
        """True if biases were trained that only the base contains."""
        return self.config.get("bias") not in (None, "none") and not self.extra

    def scale(self, module: str) -> float:
        """Return alpha / rank of one module, as PEFT computes it.

        Raises:
            UsageError: no file says alpha.
        """
        if self.alpha is None:
            raise UsageError(
                "no file of this checkpoint says the adapter's alpha (versions before 0.8.0 "
                "outside lora_adapter/ never wrote it), and a guess would scale the adapter "
                "wrongly: give --lora-alpha, the value of lora_alpha in the run's configuration."
            )
        rank = self.pairs[module].rank
        alpha = self._pattern("alpha_pattern", module, self.alpha)
        # Rank-stabilized LoRA divides by the root of the rank (Kalajdzievski 2023,
        # arXiv:2312.03732).
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _pattern(self, name: str, module: str, default: float) -> float:
        patterns = self.config.get(name)
        if isinstance(patterns, dict):
            pattern = matching(patterns, module, source=f"{name} in adapter_config.json")
            if pattern is not None:
                alpha = _alpha_in(patterns[pattern])
                if alpha is None:
                    stated = repr(patterns[pattern])
                    raise DamagedFileError(
                        f"adapter_config.json says {name} of {pattern} is {stated:.80}, which is "
                        "no alpha: copy it again."
                    )
                return alpha
        return default


def split(
    tensors: Mapping[str, LazyTensor], *, where: Path
) -> tuple[dict[str, LazyTensor], Adapter | None]:
    """Split tensors into base weights with Hugging Face names, and the adapter, if any.

    Raises:
        DamagedFileError: half a pair is missing, or there are several adapters.
        LayoutError: an adapter of a kind that is not known.
    """
    base: dict[str, LazyTensor] = {}
    halves: dict[str, dict[str, LazyTensor]] = {}
    tables: set[str] = set()
    adapters: set[str] = set()
    saved: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PEFT_PREFIX)
        match = _HALF.fullmatch(name)
        if match:
            adapters.add(match["adapter"] or "default")
            halves.setdefault(match["module"], {})[match["side"]] = tensor
            tables |= {match["module"]} if match["table"] else set()
        elif any(part in name for part in _UNSUPPORTED) or _OWN_BIAS.fullmatch(name):
            raise LayoutError(
                f"{where}: {key} belongs to an adapter that is no plain LoRA, which can't be "
                "converted yet."
            )
        elif _SAVED in name:
            module, _, rest = name.partition(_SAVED)
            saved[f"{module}.{rest.partition('.')[2]}"] = tensor
        elif _ORIGINAL not in name:
            base[name.replace(_BASE_LAYER, ".")] = tensor
    if len(adapters) > 1:
        raise LayoutError(
            f"{where} holds adapters {sorted(adapters)}, but one is expected: save the one that "
            "you want alone."
        )
    # A checkpoint of FSDP has both the trained copy and the original of a module; PEFT uses the
    # trained one.
    for name, tensor in saved.items():
        base.setdefault(name, tensor)
    if not halves:
        return base, None
    return base, Adapter(
        pairs={
            module: _pair(module, sides, table=module in tables, where=where)
            for module, sides in halves.items()
        },
        saved_modules=saved,
    )


def exported(tensors: Mapping[str, LazyTensor], *, where: Path) -> Adapter | None:
    """Read the adapter from PEFT's file, with the modules that were trained next to it.

    None if there is none.

    Raises:
        DamagedFileError: half a pair is missing, or there are several adapters.
        LayoutError: an adapter of a kind that is not known.
    """
    adapter = split(tensors, where=where)[1]
    if adapter is None:
        return None
    saved = dict(adapter.saved_modules)
    extra: dict[str, LazyTensor] = {}
    names = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in tensors.items()}
    others = {
        name: tensor
        for name, tensor in names.items()
        if not _HALF.fullmatch(name) and _SAVED not in name and _ORIGINAL not in name
    }
    for name, tensor in others.items():
        module = name.rpartition(".")[0]
        is_module = (
            f"{module}.weight" in others and _BASE_LAYER not in name and module not in adapter.pairs
        )
        (saved if is_module else extra)[name] = tensor
    return replace(adapter, saved_modules=saved, extra=extra)


def _pair(module: str, sides: Mapping[str, LazyTensor], *, table: bool, where: Path) -> Pair:
    absent = {"A", "B"} - sides.keys()
    if absent:
        raise DamagedFileError(
            f"{where}: the adapter of {module} lacks its half lora_{absent.pop()}: a file is of "
            "another save."
        )
    down, up = sides["A"], sides["B"]
    if (
        len(down.shape) != 2
        or len(up.shape) != 2
        or down.shape[0] != up.shape[1]
        or down.shape[0] == 0
    ):
        raise DamagedFileError(
            f"{where}: the halves of the adapter of {module} have shapes {down.shape} and "
            f"{up.shape}, which do not fit."
        )
    return Pair(down=down, up=up, is_embedding=table)


def with_alpha(adapter: Adapter, role: Role, *, given: float | None) -> Adapter:
    """Add the alpha to the adapter.

    It comes from the user, from lora_adapter/, or from the metadata of 0.8.0.

    Raises:
        UsageError: a file says another alpha than the user, or a rank that the tensors contradict.
    """
    extra = [
        role.path / "lora_adapter/adapter_config.json",
        role.path / "huggingface/adapter/adapter_config.json",
    ]
    extra += [
        role.path / "model/huggingface/adapter/adapter_config.json",
        role.path / "adapter_config.json",
    ]
    # PEFT's own files come first: they also have the modules and patterns of the adapter.
    metas = [role.path / "lora_train_meta.json"] + (
        [role.step_directory / "lora_train_meta.json"] if role.step_directory else []
    )
    matches: tuple[float, Path, dict[str, object]] | None = None
    for path in [*extra, *metas]:
        if path.is_file():
            content = read_object(path)
            alpha, rank = _alpha_in(content.get("lora_alpha")), content.get("r")
            if alpha is not None:
                if (
                    isinstance(rank, int)
                    and rank != adapter.rank
                    and not content.get("rank_pattern")
                ):
                    raise UsageError(
                        f"{path} says rank {rank}, but the adapter's tensors have rank "
                        f"{adapter.rank}: it is of another save."
                    )
                matches = (alpha, path, content if path in extra else {})
                break
    if given is not None:
        if matches is not None and matches[0] != given:
            raise UsageError(
                f"--lora-alpha is {given}, but {matches[1]} says {matches[0]}: leave the option "
                "out."
            )
        return replace(
            adapter, alpha=given, alpha_from="--lora-alpha", config=matches[2] if matches else {}
        )
    if matches is None:
        return adapter
    return replace(
        adapter,
        alpha=matches[0],
        alpha_from=os.path.relpath(matches[1], role.path.absolute().parent),
        config=matches[2],
    )


def around(adapter: Adapter, *, model_type: object) -> Adapter:
    """Mark pairs of modules whose weights the model stores transposed; shapes do not tell."""
    pattern = _TRANSPOSED.get(str(model_type))
    if pattern is None:
        return adapter
    return replace(
        adapter,
        pairs={
            name: replace(pair, is_transposed=bool(pattern.fullmatch(name)))
            for name, pair in adapter.pairs.items()
        },
    )


def _alpha_in(value: object) -> float | None:
    """Return the number in a file if it is usable for a scale."""
    try:
        alpha = (
            float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
        )
    except OverflowError:
        return None
    return alpha if is_alpha(alpha) else None


def is_alpha(number: float) -> bool:
    """Check if the value can be a scale: above 0 and finite, also in float32."""
    return SMALLEST_FLOAT32 <= number <= LARGEST_FLOAT32


def merged(base: Mapping[str, LazyTensor], adapter: Adapter) -> dict[str, LazyTensor]:
    """Merge the adapter into the base in float32, and round each weight once to its dtype.

    Raises:
        DamagedFileError: a module is not in the base, or its shape differs.
        UsageError: no alpha, or an adapter of transposed weights of a model that is not known to
            have any.
    """
    # PEFT transposes by this flag and by the module's type. Only the model's code knows the type.
    if adapter.config.get("fan_in_fan_out") and not adapter.has_transposed:
        raise UsageError(
            "the adapter is of weights that are kept transposed (fan_in_fan_out), but which are in "
            "this model is not known: use --to peft."
        )
    result = dict(base)
    for module, pair in adapter.pairs.items():
        name = f"{module}.weight"
        weight = base.get(name)
        is_turned = pair.is_embedding or pair.is_transposed
        down, up = (
            (Transposed(pair.up), Transposed(pair.down)) if is_turned else (pair.down, pair.up)
        )
        if weight is None or weight.shape != (up.shape[0], down.shape[1]):
            raise DamagedFileError(
                f"the adapter of {module} makes a [{up.shape[0]}, {down.shape[1]}] product, but "
                "the base "
                + (f"has {weight.shape} there" if weight else "has no such weight")
                + ": is it the base that the adapter was trained on?"
            )
        result[name] = LowRankSum(weight, down, up, adapter.scale(module))
    return result


def peft_tensors(adapter: Adapter) -> dict[str, LazyTensor]:
    """Return the adapter under the names that PEFT's files have."""
    named: dict[str, LazyTensor] = {}
    for module, pair in adapter.pairs.items():
        table, end = ("embedding_", "") if pair.is_embedding else ("", ".weight")
        named[f"{PEFT_PREFIX}{module}.lora_{table}A{end}"] = pair.down
        named[f"{PEFT_PREFIX}{module}.lora_{table}B{end}"] = pair.up
    return named | {
        f"{PEFT_PREFIX}{name}": tensor
        for name, tensor in (*adapter.saved_modules.items(), *adapter.extra.items())
    }


def peft_config(adapter: Adapter, *, base_model: str | None, task: str) -> dict[str, object]:
    """Return PEFT's configuration.

    It is that of the checkpoint if there is one, else it is derived from the tensors.

    Raises:
        UsageError: no alpha.
    """
    # Raises without an alpha, before anything is written.
    adapter.scale(next(iter(adapter.pairs)))
    made: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": adapter.has_transposed,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    ranks = {
        module: pair.rank for module, pair in adapter.pairs.items() if pair.rank != adapter.rank
    }
    made |= {"rank_pattern": ranks, "alpha_pattern": {}}
    # Settings of newer versions of PEFT stay out, because an older one would refuse the file.
    kept = {
        key: value for key, value in adapter.config.items() if key in made and value is not None
    }
    modules = (
        sorted({name.rpartition(".")[0].rpartition(".")[2] for name in adapter.saved_modules})
        or None
    )
    alpha = (
        int(adapter.alpha)
        if adapter.alpha is not None and float(adapter.alpha).is_integer()
        else adapter.alpha
    )
    named = {"base_model_name_or_path": base_model} if base_model else {}
    return (
        made
        | kept
        | named
        | {"target_modules": sorted(adapter.pairs), "lora_alpha": alpha, "inference_mode": True}
        | ({"modules_to_save": modules} if modules else {})
    )


_LITERAL = re.compile(r"\^?(?:\w|\\?\.)+\$?")
"""A name, or the end of one."""
_CONSUMED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escaped characters and classes of characters, in which nothing repeats."""
_REPEATS = re.compile(r"[*+{]")
_SLOW = re.compile(r"\)[*+?{]|\(\?(?!:)")
"""Repeated groups, and groups that look around: with nested ones a match can take for ever."""
_BACK = re.compile(r"\\[1-9]")
_MOST_REPEATS, _MOST_EXPRESSIONS, _LONGEST_NAME = 2, 64, 256


def matching(patterns: Iterable[str], module: str, *, source: str) -> str | None:
    """Return the first pattern that a module's name matches as PEFT matches it.

    A full name, or a suffix that starts after a dot.

    Args:
        patterns: keys of ``alpha_pattern``.
        module: its name in the model.
        source: names the patterns in errors.

    Raises:
        LayoutError: one could take for ever.
        DamagedFileError: one is no regular expression.
    """
    num_expressions = 0
    for pattern in patterns:
        is_literal = _LITERAL.fullmatch(pattern) is not None
        num_expressions += not is_literal
        if not is_literal:
            # The patterns come from a file of the checkpoint, which is not trusted.
            _check_is_quick(pattern, module, num_expressions, source=source)
        try:
            # The expression is that of `get_pattern_key` in peft/utils/other.py.
            if re.match(rf"(.*\.)?({pattern})$", module):
                return pattern
        except re.error as error:
            raise DamagedFileError(
                f"{source} has {pattern!r:.80}, which is no regular expression ({error}): copy it "
                "again."
            ) from error
    return None


def _check_is_quick(pattern: str, module: str, number: int, *, source: str) -> None:
    bare = _CONSUMED.sub("", pattern)
    repeats = len(_REPEATS.findall(bare))
    if (
        _SLOW.search(bare)
        or _BACK.search(pattern)
        or repeats > _MOST_REPEATS
        or number > _MOST_EXPRESSIONS
        or len(module) > _LONGEST_NAME
    ):
        raise LayoutError(
            f"{source} has {pattern!r:.80}, a regular expression that may take for ever (repeated "
            f"groups, more than {_MOST_REPEATS} repeats, or more than {_MOST_EXPRESSIONS} of "
            "them): write the modules' names out there, or use --to peft."
        )
