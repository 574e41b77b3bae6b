"""Build Hugging Face models from a ModelSpec, in float32 on the CPU, and reject unsupported models.

Weights are loaded strictly, or initialized from a seed.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypedDict

import torch
from huggingface_hub.errors import (
    StrictDataclassError,
)  # raised by the configs of transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from temper_engine_api.errors import CapabilityError, ConfigError, WeightError
from temper_engine_api.model_files import drop_quantization
from temper_engine_api.settings_check import (
    check_head_counts,
    check_number_ranges,
    check_yarn_head_dim,
)
from temper_engine_api.specs import ModelSpec
from temper_engine_api.vision_language import has_image_encoder, list_encoder_modules
from temper_engine_fsdp.model.token_mixers import (
    ATTENTION_TYPES,
    MIXER_TYPES,
    TOKENWISE_TYPES,
    list_layer_types,
    read_declared,
    separate_sequences,
)
from temper_engine_fsdp.model.weight_names import find_model_files
from temper_engine_fsdp.runtime.numerics import fork_rng

_AutoClass: TypeAlias = (
    type[AutoModelForCausalLM]
    | type[AutoModelForImageTextToText]
    | type[AutoModelForTokenClassification]
)


class LoadingReport(TypedDict):
    """Differences between weight files and a model, as transformers reports them."""

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]
    """Name, shape in the files, and shape of the model."""


LENGTH_DEPENDENT_ROPES = frozenset(("dynamic", "longrope"))
"""Rotary embeddings whose frequencies depend on the longest position in a call.

A sequence would then depend on the sequences it is packed with.
"""


def build_model(spec: ModelSpec, *, attention: str, load_weights: bool = True) -> PreTrainedModel:
    """Build the model with a registered attention kernel.

    Args:
        spec: The model's path or architecture.
        attention: Name of the attention kernel.
        load_weights: Load the weights from `spec.path`. Pass False to load them later by other
            means; the model then has initial values.

    Returns:
        The model on the CPU in float32.

    Raises:
        CapabilityError: If the model mixes packed sequences, has layers between its last hidden
            state and its head, does not allow its attention to be replaced, or has weights with a
            quantization that is not supported.
        ConfigError: If transformers does not know the architecture or needs a package that is not
            installed, or the model needs code from its directory and `trust_remote_code` is False.
        WeightError: If weights are missing or unexpected.
    """
    config = read_config(spec)
    _check_packable(config)
    is_language_model = spec.model_type == "language_model"
    auto: _AutoClass = AutoModelForTokenClassification
    if is_language_model:
        has_encoder = has_image_encoder(config.model_type)
        auto = AutoModelForImageTextToText if has_encoder else AutoModelForCausalLM
    if not is_language_model:
        _check_has_token_head(config)
        # One output per token: a value or a score.
        config.num_labels = 1
        # Dropout before the value head would make values random during training.
        config.classifier_dropout = 0.0
    with fork_rng(spec.seed):
        try:
            model, report = _instantiate(
                auto, spec, config, attention=attention, loads_weights=load_weights
            )
        except ImportError as error:
            raise ConfigError(
                f"transformers cannot import what this {config.model_type} model needs: "
                f"{_first_sentence(error)} Install or update the package that it names."
            ) from error
        except (
            ValueError,
            KeyError,
        ) as error:  # KeyError: models with a dict of attention classes
            raise CapabilityError(
                f"transformers cannot build a {spec.model_type} with packed attention from this "
                f"{config.model_type} model: {_first_sentence(error)} Choose a model whose "
                "attention goes through transformers' AttentionInterface, such as qwen3 or llama."
            ) from error
    if spec.path is not None and report is not None:
        check_loading_report(spec.path, report, has_new_head=not is_language_model)
    _check_attention_interface(model)
    _check_weights_have_elements(model)
    _check_output_head(model, is_language_model=is_language_model)
    separate_sequences(model)
    for name in list_encoder_modules(model, model_type=config.model_type):
        # Text batches do not use the encoder, so it has no gradients.
        model.get_submodule(name).requires_grad_(False)
    # Name the class that was built in exported config.json files, not the one that was loaded.
    model.config.architectures = [type(model).__name__]
    return model


def _check_has_token_head(config: PretrainedConfig) -> None:
    """Check that transformers has a class with one output per token for the model.

    Raises:
        CapabilityError: If it has none.
    """
    # transformers has such a class for qwen3_5, which reads the text part's config only.
    if (
        has_image_encoder(config.model_type)
        or type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    ):
        raise CapabilityError(
            f"transformers has no {config.model_type} model with a head for tokens, which a value "
            "or reward model needs: choose another model for it, such as qwen3 or llama."
        )


def _instantiate(
    auto: _AutoClass,
    spec: ModelSpec,
    config: PretrainedConfig,
    *,
    attention: str,
    loads_weights: bool,
) -> tuple[PreTrainedModel, LoadingReport | None]:
    """Return the model, and the loading report if weights were loaded."""
    allow_code = spec.trust_remote_code
    if spec.path is None or not loads_weights:
        return auto.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=allow_code
        ), None
    loader: _AutoClass | type[PreTrainedModel] = auto
    path: str | None = spec.path
    weights = {}
    files = find_model_files(spec)
    if files is not None:
        files.read_shapes()  # refuses FP8 without scales, which transformers would cast
    if files is not None and files.is_quantized:
        with torch.device("meta"):
            # The auto classes look for files even if they get all weights.
            loader = type(auto.from_config(config, trust_remote_code=allow_code))
        with files.open() as read:
            path, weights = None, {"state_dict": {name: read(name) for name in files}}
    model, report = loader.from_pretrained(
        path,
        config=config,
        **weights,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=allow_code,
        output_loading_info=True,
        # Report all wrong shapes, for `check_loading_report`, instead of raising at the first.
        ignore_mismatched_sizes=True,
    )
    return model, report


def read_config(spec: ModelSpec) -> PretrainedConfig:
    """Read a model's Hugging Face config, without the quantization of its weights.

    Raises:
        CapabilityError: If the quantization of the weights is not supported.
        ConfigError: If the path is not a directory, the config needs code that may not run, or
            transformers does not know the architecture.
    """
    if spec.path is not None:
        if not Path(spec.path).is_dir():
            raise ConfigError(
                f"model.path is {spec.path!r}, which is not a local directory: download the model "
                "from the Hub first and set its directory."
            )
        loaded = _load_config(spec.path, allow_code=spec.trust_remote_code)
        text_config = loaded.get_text_config(decoder=True)
        check_number_ranges(text_config, source=f"{spec.path}/config.json")
        check_yarn_head_dim(text_config, source=f"{spec.path}/config.json")
        return loaded
    fields = spec.to_config_fields()
    name = str(fields.pop("model_type"))
    try:
        config: PretrainedConfig = AutoConfig.for_model(name, **fields)
    except (ValueError, StrictDataclassError) as error:
        if name in CONFIG_MAPPING:
            raise ConfigError(
                f"model.architecture is not valid for model type {name}: {_first_sentence(error)}"
            ) from error
        raise ConfigError(
            f"model.architecture.model_type is {name!r}, which the installed version of "
            "transformers does not know: use a model type such as qwen2, qwen3 or llama."
        ) from error
    check_number_ranges(config, source="model.architecture")
    check_head_counts(config, architecture=spec.architecture)
    check_yarn_head_dim(config, source="model.architecture")
    return config


def read_attention_dropout(config: PretrainedConfig) -> float:
    """Return the largest dropout probability of the attention weights in training.

    Models call it `attention_dropout`, `attn_pdrop` or `attention_probs_dropout_prob`, for example.
    """
    values = vars(config.get_text_config(decoder=True)).items()
    probabilities = [
        float(value)
        for name, value in values
        if name.startswith("att") and "drop" in name and isinstance(value, int | float)
    ]
    return max(probabilities, default=0.0)


def _load_config(path: str, *, allow_code: bool) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=allow_code)
    except StrictDataclassError as error:
        raise ConfigError(
            f"{path}/config.json has an invalid setting: {_first_sentence(error)} Correct it, or "
            "copy or download the file again."
        ) from error
    except ValueError as error:
        if allow_code:
            raise
        raise ConfigError(
            f"transformers cannot read the config of the model in {path}: {_first_sentence(error)} "
            "If you trust the Python files in it, set model.trust_remote_code."
        ) from error
    drop_quantization(config)
    return config


def _first_sentence(error: Exception) -> str:
    """Return an error's first sentence; the rest addresses callers of transformers."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".") + "."


def _check_attention_interface(model: PreTrainedModel) -> None:
    """Reject models that do not declare that their attention can be replaced."""
    if not (model._supports_sdpa or model._supports_attention_backend):
        raise CapabilityError(
            f"{type(model).__name__} does not declare that it supports another attention: choose a "
            "model whose attention goes through transformers' AttentionInterface, such as qwen3 or "
            "llama."
        )


def _check_weights_have_elements(model: PreTrainedModel) -> None:
    """Reject models with an empty weight, which FSDP2 cannot reduce."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise CapabilityError(
                f"{name} has shape {list(parameter.shape)}, and FSDP cannot shard a weight without "
                f"elements: choose another {model.config.model_type} model."
            )


def _check_packable(config: PretrainedConfig) -> None:
    """Reject models where a sequence depends on other sequences in its pack."""
    ropes = {
        str(settings.get(key))
        for settings in _nested_mappings(config.to_dict())
        for key in ("rope_type", "type")
    } & LENGTH_DEPENDENT_ROPES
    if ropes:
        raise CapabilityError(
            f"this {config.model_type} model has a rotary embedding of type {min(ropes)}, whose "
            "frequencies depend on the longest sequence of a call, so packed sequences would "
            "affect each other: choose a model with type default, linear, yarn or llama3."
        )
    known = ATTENTION_TYPES | MIXER_TYPES | TOKENWISE_TYPES
    other = sorted({*(list_layer_types(config) or ())} - known)
    if other or read_declared(config, "alibi"):
        raise CapabilityError(
            f"this {config.model_type} model has "
            f"{'layers of type ' + ', '.join(other) if other else 'ALiBi'}, which would mix the "
            "sequences of a pack: full, sliding and linear attention, state-space layers and "
            "convolutions are supported."
        )


def _check_output_head(model: PreTrainedModel, *, is_language_model: bool) -> None:
    """Reject models whose outputs are not one projection of the last hidden state.

    The model must also accept the positions that we pass.
    """
    kind = model.config.model_type
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise CapabilityError(
            f"this {kind} model takes no position_ids and would number positions through the full "
            "pack: choose a model that takes them."
        )
    if not is_language_model and "score" not in dict(model.named_children()):
        raise CapabilityError(
            f"this {kind} model has no projection named score, from which values are read: choose "
            "another model."
        )
    head = model.get_output_embeddings() if is_language_model else model.score
    known = {
        id(parameter)
        for part in (model.base_model, head)
        if part is not None
        for parameter in part.parameters()
    }
    offending = next(
        (name for name, parameter in model.named_parameters() if id(parameter) not in known), None
    )
    if offending is not None:
        raise CapabilityError(
            f"this {kind} model has {offending} between its last hidden state and its output "
            "projection, but heads of this engine begin at the projection: choose a model whose "
            "projection reads the last hidden state."
        )


def _nested_mappings(value: object) -> Iterator[Mapping[str, object]]:
    """Yield a mapping and all mappings inside it."""
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _nested_mappings(inner)


def is_value_head(name: str) -> bool:
    """Return True for a value or reward model's head parameters."""
    return name.startswith("score.")


def is_lm_head(name: str) -> bool:
    """Return True for a language model's head parameters."""
    return name.startswith("lm_head.")


def check_loading_report(path: str, report: LoadingReport, *, has_new_head: bool) -> None:
    """Check that weights have the names and shapes of their model.

    Args:
        path: Directory of the weights, for the message.
        report: What `from_pretrained` returned with ``output_loading_info``.
        has_new_head: True for a value or reward model, whose head may be missing in the files.
            They may have the head of a language model instead.

    Raises:
        WeightError: If names or shapes differ.
    """
    faults = {
        "missing": {
            name for name in report["missing_keys"] if not (has_new_head and is_value_head(name))
        },
        "unexpected": {
            name for name in report["unexpected_keys"] if not (has_new_head and is_lm_head(name))
        },
        "of another shape": {
            f"{name} ({list(actual)} instead of {list(expected)})"
            for name, actual, expected in report["mismatched_keys"]
        },
    }
    if any(faults.values()):
        listed = "; ".join(
            f"{len(names)} {fault}, such as {', '.join(sorted(names)[:3])}"
            for fault, names in faults.items()
            if names
        )
        raise WeightError(
            f"the weights in {path} do not match their config.json: {listed}. Use the config.json "
            "that was saved with them, or copy or download the directory again."
        )


def check_weight_headers(hf: PreTrainedModel, *, spec: ModelSpec) -> None:
    """Check that a directory's weights have the model's names and shapes.

    Directories without safetensors files are not checked, because other formats have no header.

    Args:
        hf: The model, which may be on the meta device.
        spec: Its path and type.

    Raises:
        WeightError: If names or shapes differ; the message is that of `check_loading_report`.
        CapabilityError: If the quantization of the weights is not supported.
    """
    files = find_model_files(spec)
    if spec.path is None or files is None:
        return
    weights = {
        name: torch.empty(shape, device="meta") for name, shape in files.read_shapes().items()
    }
    with _quiet_transformers():
        # transformers compares them, because it renames and joins the tensors of many models.
        _, report = type(hf).from_pretrained(
            None,
            config=hf.config,
            state_dict=weights,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    has_new_head = spec.model_type != "language_model"
    check_loading_report(spec.path, report, has_new_head=has_new_head)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the progress bar and the table of differences, which the exception describes."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
