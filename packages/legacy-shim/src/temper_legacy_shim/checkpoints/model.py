"""One role of an old checkpoint: lazy weights by Hugging Face name, adapter and config."""

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from temper_legacy_shim.checkpoints import adapters, rank_files
from temper_legacy_shim.checkpoints.adapters import Adapter, is_alpha
from temper_legacy_shim.checkpoints.files.dtypes import to_float32
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, read_all
from temper_legacy_shim.checkpoints.files.sharded import is_equal
from temper_legacy_shim.checkpoints.huggingface import model_directory
from temper_legacy_shim.checkpoints.layouts import Kind, Role, check_own, read_object
from temper_legacy_shim.checkpoints.one_save import check_copy, check_one_save
from temper_legacy_shim.errors import DamagedFileError, LayoutError, ShimError, UsageError

LANGUAGE_HEAD = "lm_head.weight"
CLASSIFIER = "classifier"
"""The head of a critic in GPT-2, GPT-NeoX, Bloom and Falcon."""
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
)
"""Embedding names of decoders, oldest first."""
_TRL = "pretrained_model."
_ROTARY = ".rotary_emb.inv_freq"
_ROTARY_TOLERANCE = 2.0**-6
"""Relative error of values in bfloat16, or in float16 below the normal numbers."""
_MOST_FREQUENCIES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Inputs by the user in addition to the checkpoint."""

    hf_config: Path | None = None
    """Folder or file of the config.json to use instead of the checkpoint's."""
    base_model: Path | None = None
    """Hugging Face directory of the base, for checkpoints that hold an adapter alone."""
    lora_alpha: float | None = None
    """Alpha of adapters whose files lack it."""
    accepts_partial_adapter: bool = False
    """Convert an adapter that lacks layers."""
    num_updates: int | None = None
    """Updates of the optimizer, if no file has the number."""

    def __post_init__(self) -> None:
        if self.lora_alpha is not None and not is_alpha(self.lora_alpha):
            raise UsageError(
                f"--lora-alpha is {self.lora_alpha}, but must be a number above 0: lora_alpha of "
                "the run's configuration."
            )

    def recorded(self) -> dict[str, object]:
        given = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        return {
            name: str(value.absolute()) if isinstance(value, Path) else value
            for name, value in given.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OldModel:
    role: Role
    weights: Mapping[str, LazyTensor]
    """The base model under Hugging Face names, without tied duplicates; may be empty."""
    adapter: Adapter | None
    config: Mapping[str, object] | None
    """config.json, or None."""
    config_folder: Path | None
    head: str
    """language_model, value_model (token classification), trl_value_model or reward_model."""
    notes: tuple[str, ...] = ()
    num_updates: int | None = None


def read_model(role: Role, sources: Sources) -> OldModel:
    """Find names, shapes and positions of all tensors of a role, without loading them.

    Raises:
        ShimError: the role is damaged; the message shows file and key.
    """
    # Before anything is read: files of different saves give misleading errors later.
    notes = [*check_one_save(role)]
    config, folder = _config(role, sources)
    raw, adapter = _weights_and_adapter(role, sources, config=config, folder=folder)
    notes += _compare_exports(role, raw, adapter)
    if adapter is not None:
        adapter = adapters.with_alpha(adapter, role, given=sources.lora_alpha)
        adapter = adapters.around(adapter, model_type=(config or {}).get("model_type"))
    elif sources.lora_alpha is not None:
        raise UsageError("--lora-alpha has no effect: this checkpoint has no adapter.")
    full = {} if adapter is None else adapter.full
    if raw.keys() <= full.keys():  # an adapter alone, perhaps with modules that were trained whole
        raw = {}
    if sources.base_model is not None:
        if raw and (adapter is None or folder != sources.base_model):
            extra = "" if adapter is None else ", next to its adapter"
            raise UsageError(
                "--base-model has no effect: this checkpoint holds a whole model of its "
                f"own{extra}."
            )
        if not raw:
            _check_biases(role, adapter)
            raw = model_directory.read_weights(sources.base_model)
            notes.append(f"the base model comes from {sources.base_model}")
    splits_tied_weights = adapter is not None and _splits_tied_weights(adapter)
    if raw:
        raw = _with_full(
            _with_tied_head(raw, config)
            if splits_tied_weights and "score.weight" not in full
            else raw,
            full,
        )
    if sources.num_updates is not None and not role.rank_files:
        raise UsageError(
            "--num-updates has no effect: only Megatron's per-rank optimizer files do not say it "
            "themselves."
        )
    # TRL's value model holds the language model below this name, next to v_head.
    weights = {name.removeprefix(_TRL): tensor for name, tensor in raw.items()}
    head = _head(weights or full)
    weights, dropped = _drop_frequencies(weights, config)
    notes += dropped
    weights, stated = (
        (weights, ()) if splits_tied_weights else _drop_tied_copy(role, weights, config)
    )
    return OldModel(
        role=role,
        weights=weights,
        adapter=adapter,
        config=config,
        config_folder=folder,
        head=head,
        notes=(*notes, *stated),
        num_updates=sources.num_updates,
    )


def _check_biases(role: Role, adapter: Adapter | None) -> None:
    if adapter is not None and adapter.lacks_biases:
        raise UsageError(
            f"{role.path} trained biases next to its adapter ({adapter.config.get('bias')!r:.40}), "
            "which the base does not have and no "
            "file of the adapter holds: give the checkpoint with its whole model."
        )


def _splits_tied_weights(adapter: Adapter) -> bool:
    """Check if an adapter changes only one of two tables that may be tied."""
    names = [*(f"{module}.weight" for module in adapter.pairs), *adapter.full]
    touched = [name for name in names if name == LANGUAGE_HEAD or name in _EMBEDDINGS]
    return bool(touched) and not adapter.config.get("ensure_weight_tying")


def _with_tied_head(
    base: Mapping[str, LazyTensor], config: Mapping[str, object] | None
) -> dict[str, LazyTensor]:
    """Add the head to the base, equal to the embedding, if tied weights were saved once."""
    embedding = _embedding_in(base)
    if (
        embedding is None
        or LANGUAGE_HEAD in base
        or "score.weight" in base
        or not _says_tied(config)
    ):
        return dict(base)
    return {**base, LANGUAGE_HEAD: base[embedding]}


def _with_full(
    base: Mapping[str, LazyTensor], full: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Replace the base's modules by those that were trained in full, a critic's head too."""
    result = {**base, **full}
    if "score.weight" in full and LANGUAGE_HEAD not in full:
        result.pop(LANGUAGE_HEAD, None)
    return result


def _config(role: Role, sources: Sources) -> tuple[Mapping[str, object] | None, Path | None]:
    """Return the model's config and its folder: the given one, the role's, or the base model's."""
    if sources.hf_config is not None:
        path = (
            sources.hf_config / "config.json" if sources.hf_config.is_dir() else sources.hf_config
        )
        if not path.is_file():
            raise UsageError(
                f"--hf-config is {sources.hf_config}, which has no config.json: give a Hugging "
                "Face model's folder or config."
            )
        return read_object(path), path.parent
    folder = role.described_in()
    if (
        folder is None
        and sources.base_model is not None
        and (sources.base_model / "config.json").is_file()
    ):
        folder = sources.base_model
    if folder is None:
        return None, role.tokenizer_in()
    check_own(folder / "config.json", role)
    return read_object(folder / "config.json"), folder


def _weights_and_adapter(
    role: Role, sources: Sources, *, config: Mapping[str, object] | None, folder: Path | None
) -> tuple[dict[str, LazyTensor], Adapter | None]:
    if role.kind == Kind.FSDP:
        return adapters.split(
            rank_files.read_weights(role.fsdp_files["model"], where=role.path), where=role.path
        )
    if role.kind == Kind.HUGGINGFACE:
        weights_in = next(
            (f for f in _weight_folders(role) if model_directory.has_weights(f)), None
        )
        base = model_directory.read_weights(weights_in) if weights_in else {}
        return base, _exported_adapter(role)
    return _megatron(role, sources, config=config, folder=folder)


def _compare_exports(
    role: Role, weights: Mapping[str, LazyTensor], adapter: Adapter | None
) -> list[str]:
    """Compare what the ranks' files hold with an exported model or adapter next to them.

    Returns:
        A note for each export that cannot be read: nothing else needs it.

    Raises:
        DamagedFileError: they differ, so that they are of different steps.
    """
    if role.kind == Kind.HUGGINGFACE:
        return []
    if role.kind == Kind.FSDP:
        files = next(iter(role.fsdp_files["model"].values()))
    else:
        files = role.dist_folders[0] if role.dist_folders else role.path / "model"
    notes = []
    # An export of a model with an adapter may have it merged.
    exports = () if adapter is not None else _weight_folders(role)
    for folder in filter(model_directory.has_weights, exports):
        try:
            copy = model_directory.read_weights(folder)
        except ShimError as error:
            notes.append(f"{folder} was not compared with the ranks' files: {error}")
            continue
        check_copy(weights, copy, folder=folder, files=files)
    if adapter is not None and role.kind == Kind.FSDP:
        folder = role.path / "lora_adapter"
        try:
            exported = _exported_adapter(role)
        except ShimError as error:
            return [*notes, f"{folder} was not compared with the ranks' files: {error}"]
        if exported is not None:
            check_copy(_halves(adapter), _halves(exported), folder=folder, files=files)
    return notes


def _halves(adapter: Adapter) -> dict[str, LazyTensor]:
    return {
        f"{module}.lora_{side}": tensor
        for module, pair in adapter.pairs.items()
        for side, tensor in (("A", pair.down), ("B", pair.up))
    }


def _weight_folders(role: Role) -> tuple[Path, ...]:
    return (role.path, role.path / "huggingface", role.path / "model/huggingface")


def _exported_adapter(role: Role) -> Adapter | None:
    """Return an adapter in PEFT's own format next to the weights."""
    for folder in (
        role.path,
        role.path / "lora_adapter",
        *(f / "adapter" for f in _weight_folders(role)),
    ):
        if (folder / "adapter_model.safetensors").is_file():
            return adapters.exported(
                model_directory.read_safetensors(folder / "adapter_model.safetensors"), where=folder
            )
        if (folder / "adapter_model.bin").is_file():
            return adapters.exported(
                rank_files.read_weights({0: folder / "adapter_model.bin"}, where=folder),
                where=folder,
            )
    return None


def _megatron(
    role: Role, sources: Sources, *, config: Mapping[str, object] | None, folder: Path | None
) -> tuple[dict[str, LazyTensor], Adapter | None]:
    """Return the weights and the adapter of a Megatron checkpoint.

    A save without weights of its own may have exported them to huggingface/, next to dist_ckpt.
    """
    from temper_legacy_shim.checkpoints.megatron import weights as megatron_model

    if config is None and role.kind == Kind.MEGATRON_ADAPTER:
        raise no_base(role, adapters.with_alpha(Adapter(pairs={}), role, given=sources.lora_alpha))
    if config is None:
        raise UsageError(
            f"{role.path} has no config.json, without which Megatron's fused matrices stay closed: "
            "give --hf-config, the folder of the model that was trained."
        )
    weights, adapter = megatron_model.read(
        role,
        config,
        source=f"{folder}/config.json",
        accepts_partial_adapter=sources.accepts_partial_adapter,
    )
    if not weights:
        exported = next((f for f in _weight_folders(role) if model_directory.has_weights(f)), None)
        weights = model_directory.read_weights(exported) if exported else {}
    if not weights and adapter is None:
        raise LayoutError(
            f"{role.path} holds no weights: its dist_ckpt has optimizer and random states only, "
            "and huggingface/ none."
        )
    return weights, adapter or _exported_adapter(role)


def _head(weights: Mapping[str, LazyTensor]) -> str:
    # First, because a TRL value model also has the language model's lm_head.
    if any(name.startswith("v_head.") for name in weights):
        return "trl_value_model"
    if "score.weight" in weights:
        # In transformers, the head of token classification (critics) has a bias, and that of
        # sequence classification (reward models) has none.
        return "value_model" if "score.bias" in weights else "reward_model"
    if f"{CLASSIFIER}.weight" in weights:
        return "value_model"
    return "language_model"


def _drop_tied_copy(
    role: Role, weights: Mapping[str, LazyTensor], config: Mapping[str, object] | None
) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Drop the head's copy of tied embeddings: Hugging Face's files hold them once."""
    result = dict(weights)
    embedding = _embedding_in(result)
    if embedding is None or LANGUAGE_HEAD not in result:
        return result, ()
    says_tied = _says_tied(config)
    # Trained apart, they may be equal by chance at step 0; dropping one would tie them for good.
    if says_tied is False:
        return result, ()
    if is_equal(result[embedding], result[LANGUAGE_HEAD]):
        if says_tied:
            del result[LANGUAGE_HEAD]
        return result, ()
    # Megatron's ranks hold copies on the first and the last stage, which training keeps equal.
    if says_tied and role.kind == Kind.MEGATRON_RANKS:
        raise DamagedFileError(
            f"{role.path / 'model'}: output_layer.weight differs from "
            "embedding.word_embeddings.weight, though the config ties them: the "
            "files are not of one save, or folders of tensor ranks are swapped in a stage; copy "
            "every rank's folder of one step here."
        )
    if says_tied:
        return result, (
            (
                "the config ties embeddings and head, but their weights differ: both are kept, and "
                "the config is written untied"
            ),
        )
    return result, ()


def _drop_frequencies(
    weights: dict[str, LazyTensor], config: Mapping[str, object] | None
) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Drop rotary frequencies that equal the config's; old transformers saved them."""
    stated = (config or {}).get("rope_parameters")
    base = {**(config or {}), **(stated if isinstance(stated, dict) else {})}.get(
        "rope_theta", 10_000.0
    )
    if config is None or not isinstance(base, int | float) or not 1 < base < 1e30:
        return weights, ()
    matches = [
        name
        for name in weights
        if name.endswith(_ROTARY) and _has_frequencies(weights[name], base=float(base))
    ]
    if not matches:
        return weights, ()
    kept = {name: tensor for name, tensor in weights.items() if name not in matches}
    return kept, (
        (
            f"{len(matches)} tables of rotary frequencies (inv_freq) are left out: they are what "
            "the config's rope_theta gives"
        ),
    )


def _has_frequencies(tensor: LazyTensor, *, base: float) -> bool:
    if (
        len(tensor.shape) != 1
        or not 0 < tensor.shape[0] <= _MOST_FREQUENCIES
        or not tensor.dtype.is_float
    ):
        return False
    # theta ** (-2 i / d) for i below d / 2 (Su et al. 2021, arXiv:2104.09864, section 3.2.2).
    expected = base ** -(np.arange(tensor.shape[0]) / tensor.shape[0])
    return bool(
        np.allclose(
            to_float32(read_all(tensor), tensor.dtype), expected, rtol=_ROTARY_TOLERANCE, atol=0
        )
    )


def _says_tied(config: Mapping[str, object] | None) -> bool | None:
    return (
        None
        if config is None
        else bool(
            config.get("tie_word_embeddings", str(config.get("model_type")) in _TIED_BY_DEFAULT)
        )
    )


def _embedding_in(names: Container[str]) -> str | None:
    return next((name for name in _EMBEDDINGS if name in names), None)


_TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3_text", "gpt2", "bloom", "opt", "gpt_neo", "falcon", "gpt_bigcode"}
)
"""Architectures whose config.json leaves tie_word_embeddings out when it is true."""


def described(model: OldModel, *, dtype: str) -> dict[str, object]:
    """Return the config.json of the output.

    The architecture that the keys show, tying as the weights are, and the dtype.

    Raises:
        UsageError: there is no config.
    """
    if model.config is None:
        raise UsageError(
            f"{model.role.path} has no config.json (0.3.0 wrote none, and only the model itself "
            "knows it): give --hf-config, the folder of the model that was trained."
        )
    config = dict(model.config)
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    stem = next(
        (architecture.removesuffix(end) for end in _ARCHITECTURES if architecture.endswith(end)),
        None,
    )
    if model.head in ("value_model", "reward_model"):
        kind = (
            "ForTokenClassification" if model.head == "value_model" else "ForSequenceClassification"
        )
        config |= {} if stem is None else {"architectures": [stem + kind]}
        rows = next(
            model.weights[name].shape[0]
            for name in ("score.weight", f"{CLASSIFIER}.weight")
            if name in model.weights
        )
        config |= {"num_labels": rows, "id2label": {str(i): f"LABEL_{i}" for i in range(rows)}}
        config |= {"label2id": {f"LABEL_{i}": i for i in range(rows)}}
    if _embedding_in(model.weights) is not None and LANGUAGE_HEAD in model.weights:
        # Both tables are in the output; a tied model would ignore one of them.
        config["tie_word_embeddings"] = False
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = dtype
    # transformers before 4.56 reads only torch_dtype, and later versions read both.
    if "dtype" not in config and "torch_dtype" not in config:
        config["torch_dtype"] = dtype
    return config


_ARCHITECTURES = (
    "ForCausalLM",
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForConditionalGeneration",
    "LMHeadModel",
)


def merged(model: OldModel) -> OldModel:
    """Return the model with its adapter added to the weights.

    Raises:
        UsageError: there is no base, or no alpha.
    """
    if model.adapter is None:
        return model
    if not model.weights:
        raise no_base(model.role, model.adapter)
    return replace(model, weights=adapters.merged(model.weights, model.adapter), adapter=None)


def no_base(role: Role, adapter: Adapter | None) -> UsageError:
    """Build the error for an adapter without its base; it lists the options to give."""
    alpha = (
        ""
        if adapter is None or adapter.alpha is not None
        else ", and --lora-alpha, the value of lora_alpha in the run's configuration"
    )
    return UsageError(
        f"{role.path} holds an adapter alone: give --base-model, the Hugging Face folder that it "
        f"was trained on{alpha}. --to peft needs "
        "only that folder's config.json as --hf-config, if no file says it."
    )
