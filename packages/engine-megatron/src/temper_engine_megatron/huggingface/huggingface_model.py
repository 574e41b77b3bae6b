"""Hugging Face models: their config, module names and initial weights as float32 tensors."""

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import (
    StrictDataclassError,
)  # raised by the configs of transformers
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from temper_engine_api.errors import CapabilityError, ConfigError, WeightError
from temper_engine_api.file_names import FileNames, find_file_names
from temper_engine_api.model_files import ModelFiles, drop_quantization
from temper_engine_api.settings_check import (
    check_head_counts,
    check_number_ranges,
    check_yarn_head_dim,
)
from temper_engine_api.specs import ModelSpec

logger = logging.getLogger(__name__)

SCALAR_HEAD_PREFIX = "score."

TensorReader = Callable[[str], Tensor]
"""Returns a full float32 tensor by name."""


def load_hf_config(spec: ModelSpec) -> PretrainedConfig:
    """Load the model's config from its directory, or build it from the architecture.

    Returns:
        The config without the quantization of the weights, which is undone when they are read.

    Raises:
        CapabilityError: If the quantization of the weights is not supported.
        ConfigError: If transformers does not know the architecture or rejects its fields, or remote
            code is requested.
    """
    if spec.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code is True, but the Megatron engine runs Megatron's own models: "
            "set it to False."
        )
    if spec.path is not None:
        if not Path(spec.path).is_dir():
            raise ConfigError(
                f"model.path is {spec.path!r}, which is not a local directory: download the model "
                "from the Hugging Face Hub first, and set model.path to its directory."
            )
        try:
            read_config: PretrainedConfig = AutoConfig.from_pretrained(spec.path)
        except StrictDataclassError as error:
            raise ConfigError(
                f"{spec.path}/config.json has an invalid setting: {_first_sentence(error)} Correct "
                "it, or copy or download the file again."
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"transformers cannot read the config of the model in {spec.path}: "
                f"{_first_sentence(error)} Set model.path to a directory with a complete "
                "config.json."
            ) from error
        drop_quantization(read_config)
        text_config = read_config.get_text_config(decoder=True)
        check_number_ranges(text_config, source=f"{spec.path}/config.json")
        check_yarn_head_dim(text_config, source=f"{spec.path}/config.json")
        return read_config
    fields = spec.to_config_fields()
    model_type = str(fields.pop("model_type"))
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    except (ValueError, StrictDataclassError) as error:
        if model_type in CONFIG_MAPPING:
            raise ConfigError(
                f"model.architecture is not valid for model type {model_type}: "
                f"{_first_sentence(error)}"
            ) from error
        raise ConfigError(
            f"model.architecture.model_type is {model_type!r}, which this version of transformers "
            "does not know: use a model type such as qwen2, qwen3, qwen3_moe, llama or mistral."
        ) from error
    check_number_ranges(config, source="model.architecture")
    check_head_counts(config, architecture=spec.architecture)
    check_yarn_head_dim(config, source="model.architecture")
    return config


def check_has_head(spec: ModelSpec, hf_config: PretrainedConfig) -> None:
    """Check that transformers has a token classifier for a value or reward model.

    Raises:
        CapabilityError: If it has none.
    """
    is_language_model = spec.model_type == "language_model"
    if not is_language_model and type(hf_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise CapabilityError(
            f"transformers has no {hf_config.model_type} model with a head for tokens, which a "
            "value or reward model needs: choose another model for it, such as qwen3 or llama."
        )


def has_tied_head(hf_config: PretrainedConfig) -> bool:
    """Return True if the head of transformers' language model is its embedding.

    Nemotron-H has a head of its own, even if its config ties them.
    """
    if not hf_config.tie_word_embeddings:
        return False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))
    head: torch.nn.Module = model.get_output_embeddings()
    return head.weight is model.get_input_embeddings().weight


def find_padding_token(spec: ModelSpec, hf_config: PretrainedConfig) -> int | None:
    """Return the token whose embedding gets no gradient as an input; None if all get one.

    Some models, such as Nemotron-H, train the embedding of their padding token.
    """
    if hf_config.pad_token_id is None:
        return None
    embedding: torch.nn.Embedding = _build_on_meta(spec, hf_config).get_input_embeddings()
    return embedding.padding_idx


def _first_sentence(error: Exception) -> str:
    """Return an error's first sentence; the rest addresses callers of transformers."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".") + "."


def list_weight_modules(spec: ModelSpec, hf_config: PretrainedConfig) -> tuple[str, ...]:
    """List the transformers modules with own parameters, in model order.

    Builds the model on the meta device, which allocates no memory.
    """
    return tuple(
        name
        for name, module in _build_on_meta(spec, hf_config).named_modules()
        if next(module.parameters(recurse=False), None) is not None
    )


def read_file_names(spec: ModelSpec, hf_config: PretrainedConfig) -> FileNames:
    """Find out how transformers saves the tensors of the model; see `find_file_names`."""
    return _read_file_names(_build_on_meta(spec, hf_config))


def _read_file_names(model: PreTrainedModel) -> FileNames:
    return find_file_names(
        {name: tensor.shape for name, tensor in model.state_dict().items()},
        model_type=model.config.model_type,
        revert=lambda tensors: _revert_conversions(model, tensors),
    )


def _build_on_meta(spec: ModelSpec, hf_config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return _build_model(spec, hf_config)


def _build_model(spec: ModelSpec, hf_config: PretrainedConfig) -> PreTrainedModel:
    # Building a model changes its config.
    model_config = copy.deepcopy(hf_config)
    auto_class = AutoModelForCausalLM
    if spec.model_type != "language_model":
        auto_class, model_config.num_labels = AutoModelForTokenClassification, 1
    model: PreTrainedModel = auto_class.from_config(model_config, dtype=torch.float32)
    return model


def _revert_conversions(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors from their form in memory to that in files."""
    # Imported here, because it is not part of transformers' documented interface.
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted


@contextmanager
def open_initial_weights(
    spec: ModelSpec,
    hf_config: PretrainedConfig,
    *,
    names: Collection[str],
    file_names: FileNames,
) -> Iterator[TensorReader]:
    """Open the initial weights, from the model's files or drawn at random.

    A scalar head that is not in the files is initialized from the model's seed.

    Args:
        spec: The model.
        hf_config: Its config.
        names: Names of all weights in the model.
        file_names: Names in files of the tensors in memory.

    Raises:
        WeightError: If other names are missing in the files, or unexpected.
        CapabilityError: If transformers' model has other weights than the engine's.
    """
    if spec.path is None:
        new_weights = _initialize_weights(spec, hf_config, file_names=file_names)
        differing = sorted((new_weights.keys() ^ set(names)) - _list_ignored_names(names))
        if differing:
            raise CapabilityError(
                f"only one of the Megatron engine and transformers has the weights "
                f"{differing[:5]} of {type(hf_config).__name__}: use the FSDP engine."
            )
        yield new_weights.__getitem__
        return
    files = _open_files(spec)
    _check_weight_names(spec, hf_config, files=files, names=names)
    with files.open() as read_file:

        def read(name: str) -> Tensor:
            if name not in files:
                return _initialize_scalar_head(spec, hf_config, is_bias=name.endswith("bias"))
            return read_file(name).float()

        yield read


def check_weight_headers(spec: ModelSpec, hf_config: PretrainedConfig) -> None:
    """Check names and shapes in the files of a model with a path, without reading weights.

    Raises:
        WeightError: If they differ from those of transformers' model.
        CapabilityError: If the quantization of the weights is not supported.
    """
    if spec.path is None:
        return
    files = _open_files(spec)
    model = _build_on_meta(spec, hf_config)
    file_names = _read_file_names(model)
    persistent = model.state_dict().keys()
    # Unlike `state_dict`, these list a tied tensor once.
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in persistent
    }
    expected = {
        file_name: part_shape
        for name, tensor in tensors.items()
        for file_name, part_shape in file_names.list_shapes(name, tensor.shape)
    }
    _check_weight_names(spec, hf_config, files=files, names=expected)
    shapes = files.read_shapes()
    other = [name for name in expected if name in shapes and shapes[name] != expected[name]]
    if other:
        raise WeightError(
            f"the weights in {spec.path} do not match their config: {other[0]} has the shape "
            f"{list(shapes[other[0]])} instead of {list(expected[other[0]])}. Use the config.json "
            "that was saved with them."
        )


def _check_weight_names(
    spec: ModelSpec, hf_config: PretrainedConfig, *, files: ModelFiles, names: Collection[str]
) -> None:
    """Check that files have the weights of the model.

    Raises:
        WeightError: If names are missing or unexpected.
    """
    missing = sorted(
        name for name in names if name not in files and not name.startswith(SCALAR_HEAD_PREFIX)
    )
    unexpected = sorted(files.keys() - set(names) - _list_ignored_names(names))
    if unexpected:
        # Layers for multi-token prediction, for example.
        patterns = _build_on_meta(spec, hf_config)._keys_to_ignore_on_load_unexpected or ()
        ignored = re.compile("|".join(f"({pattern})" for pattern in patterns) or "(?!)")
        skipped = [name for name in unexpected if ignored.search(name)]
        unexpected = [name for name in unexpected if not ignored.search(name)]
        if skipped:
            logger.info(
                "%d tensors in %s are not loaded, because transformers' %s does not use them, such "
                "as %s",
                len(skipped),
                spec.path,
                hf_config.model_type,
                skipped[0],
            )
    if missing or unexpected:
        raise WeightError(
            f"the weights in {spec.path} do not match their config: missing {missing[:5]}, "
            f"unexpected {unexpected[:5]}. Check that the directory is complete."
        )


def _list_ignored_names(names: Collection[str]) -> set[str]:
    """List names that files or transformers may have in addition to those of the engine."""
    # A head that a value model does not have, or a copy of a tied embedding.
    return set() if "lm_head.weight" in names else {"lm_head.weight"}


def _open_files(spec: ModelSpec) -> ModelFiles:
    """Return the files of a model with a path.

    Raises:
        WeightError: If there are none.
    """
    assert spec.path is not None
    files = ModelFiles(spec.path, open_file=safe_open)
    if not files:
        raise WeightError(
            f"{spec.path} has no safetensors files: set model.path to a Hugging Face model "
            "directory with weights in that format."
        )
    return files


def _initialize_weights(
    spec: ModelSpec, hf_config: PretrainedConfig, *, file_names: FileNames
) -> dict[str, Tensor]:
    """Return the weights that transformers initializes; they depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        # Seed only the CPU generator: torch.manual_seed would also seed every GPU.
        torch.default_generator.manual_seed(spec.seed)
        model = _build_model(spec, hf_config)
    return dict(
        file_tensor
        for name, tensor in model.state_dict().items()
        for file_tensor in file_names.split(name, tensor)
    )


def _initialize_scalar_head(
    spec: ModelSpec, hf_config: PretrainedConfig, *, is_bias: bool
) -> Tensor:
    if is_bias:
        return torch.zeros(1)
    generator = torch.Generator().manual_seed(spec.seed)
    return torch.randn(1, hf_config.hidden_size, generator=generator) * float(
        hf_config.initializer_range
    )
