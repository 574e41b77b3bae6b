"""The transformers model of the `hf` sampler: build it, load weights, run and record full passes.

A full pass has no KV cache. `kv_cache` has the attention that continues from earlier keys.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.file_names import find_file_names
from temper_engine_api.model_files import ModelFiles, drop_quantization
from temper_engine_api.specs import ModelSpec
from temper_engine_api.vision_language import has_image_encoder
from temper_engine_api.weights import NamedWeight, WeightEntry, check_weight_entries
from temper_trainer.rollout.kv_cache import SLOT_ATTENTION, CausalAttention, ScoreRule
from temper_trainer.rollout.weight_delta import (
    DeltaBucket,
    apply_tensor_delta,
    check_delta_buckets,
    unpack_delta,
)

_MAX_LOGITS = 1 << 25
"""Largest number of logits in a forward pass, which bounds its memory."""
_ATTENTION_TYPES = frozenset(("full_attention", "sliding_attention"))
"""`layer_types` values for layers where tokens only interact in attention that `kv_cache`
computes."""
_TOKENWISE_TYPES = frozenset(("mlp", "moe"))
"""`layer_types` values for layers that process each token by itself."""
_UNSUPPORTED_TYPES = frozenset(("chunked_attention",))
"""Values of `layer_types` with a mask that `kv_cache` does not compute."""


def build_model(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a causal language model in eval mode. The module `kv_cache` computes its attention.

    Raises:
        ConfigError: If model.path cannot be loaded, or transformers does not know
            model.architecture.
        CapabilityError: If the quantization of the weights is not supported.
    """
    if spec.path is not None and not Path(spec.path).is_dir():
        raise ConfigError(
            f"the sampler cannot load a model from model.path = {spec.path!r}: no such directory."
        )
    try:
        if spec.path is not None:
            config = AutoConfig.from_pretrained(
                spec.path, local_files_only=True, trust_remote_code=spec.trust_remote_code
            )
            source: str | None = spec.path
            model_class, weights = get_language_model_class(config), {}
            if drop_quantization(config):
                source, model_class = None, model_class._model_mapping[type(config)]
                files = ModelFiles(spec.path, open_file=safe_open)
                with files.open() as read:
                    weights = {"state_dict": {name: read(name) for name in files}}
            model = model_class.from_pretrained(
                source,
                config=config,
                **weights,
                dtype=dtype,
                attn_implementation=SLOT_ATTENTION,
                local_files_only=True,
                trust_remote_code=spec.trust_remote_code,
            )
        else:
            config = AutoConfig.for_model(**spec.to_config_fields())
            # The global generator stays as it is: an engine in this process may draw from it.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)
                model = get_language_model_class(config).from_config(
                    config, dtype=dtype, attn_implementation=SLOT_ATTENTION
                )
    except (OSError, ValueError) as error:
        origin = spec.path or dict(spec.architecture)
        raise ConfigError(f"the sampler cannot build a model from {origin!r}: {error}") from error
    assert isinstance(model, PreTrainedModel)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        _copy_mapped_weights(model)
    return model


def get_language_model_class(
    config: PretrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return the transformers class that builds a language model, with its encoder of images."""
    auto: type[AutoModelForCausalLM | AutoModelForImageTextToText] = AutoModelForCausalLM
    if has_image_encoder(config.model_type):
        auto = AutoModelForImageTextToText
    return auto


def _copy_mapped_weights(model: PreTrainedModel) -> None:
    """Copy every tensor into separate, aligned memory.

    transformers maps weights from their file, so they would change with the file. Mapped tensors
    can also start at any offset, but matrix products are the same bit for bit in every run only if
    memory is aligned.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def find_end_token_ids(
    model: PreTrainedModel, spec: ModelSpec, *, tokenizer_end: int | None
) -> frozenset[int]:
    """Return the end tokens from the tokenizer and a loaded model's generation config.

    The config of a model from scratch is ignored: its default end token belongs to another
    tokenizer.

    Raises:
        ConfigError: If there is no end token.
    """
    has_config = spec.path is not None and model.generation_config is not None
    return _collect_end_tokens(
        model.generation_config if has_config else None, tokenizer_end=tokenizer_end
    )


def read_end_token_ids(spec: ModelSpec, *, tokenizer_end: int | None) -> frozenset[int]:
    """Return the same as `find_end_token_ids` without loading the model.

    Raises:
        ConfigError: If there is no end token.
    """
    generation = None
    if spec.path is not None:
        try:
            generation = GenerationConfig.from_pretrained(spec.path, local_files_only=True)
        except OSError:  # no generation_config.json: transformers uses the model's config
            generation = GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
            )
    return _collect_end_tokens(generation, tokenizer_end=tokenizer_end)


def _collect_end_tokens(
    generation: GenerationConfig | None, *, tokenizer_end: int | None
) -> frozenset[int]:
    """Return the end tokens from a tokenizer and a generation config; raise if there is none."""
    ends = set() if tokenizer_end is None else {tokenizer_end}
    if generation is not None:
        # Chat models have several end tokens, such as the end of a turn, which only this file
        # lists.
        named = generation.eos_token_id
        ends |= set(named) if isinstance(named, list) else set() if named is None else {named}
    if not ends:
        raise ConfigError(
            "neither the tokenizer nor the model's generation config has an end token, so no "
            "completion could end: set eos_token in the tokenizer's files."
        )
    return frozenset(ends)


class WeightTargets:
    """The tensors of a model that weights are copied into.

    The engine sends weights under the tensor names of Hugging Face files. In these files each
    expert has separate tensors, and families such as Mixtral and Nemotron-H use different names
    than in memory. A tensor may also arrive under its name in memory, such as a layer's joined
    experts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the tensors; tied tensors are listed once, under their first name."""
        tensors = model.state_dict()
        file_names = find_file_names(
            {name: tensor.shape for name, tensor in tensors.items()},
            model_type=model.config.model_type,
            revert=lambda probes: _revert_conversions(model, probes),
        )
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._joined: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in tensors.items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self._joined[name] = tensor
                self._parts[name] = dict(file_names.split(name, tensor))

    def load(self, stream: Iterable[NamedWeight]) -> None:
        """Copy all weights into the model. Tied tensors arrive once.

        All names and shapes are checked before the first copy, so an invalid set leaves the model
        unchanged.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs.
        """
        arrived = list(stream)
        names = {weight.name for weight in arrived}
        targets: dict[str, Tensor] = {}
        for name, parts in self._parts.items():
            targets |= {name: self._joined[name]} if name in names else parts
        check_weight_entries(
            (_make_entry(name, target) for name, target in targets.items()),
            [_make_entry(weight.name, weight.tensor) for weight in arrived],
        )
        with torch.no_grad():
            for weight in arrived:
                targets[weight.name].copy_(weight.tensor)

    def load_delta(self, buckets: Sequence[DeltaBucket]) -> None:
        """Apply a delta to the model in place. Nothing is written before everything is checked.

        Raises:
            WeightError: If a bucket is damaged or missing, a name is unknown, or a shape differs.
        """
        check_delta_buckets(buckets)
        targets = dict(self._joined)
        for parts in self._parts.values():
            targets |= parts
        deltas = [
            pair
            for bucket in buckets
            for pair in unpack_delta(bucket.data, bucket.entries, bucket.counts)
        ]
        for entry in (entry for bucket in buckets for entry in bucket.entries):
            if entry.name not in targets or tuple(targets[entry.name].shape) != entry.shape:
                shape = (
                    tuple(targets[entry.name].shape) if entry.name in targets else "no such tensor"
                )
                raise WeightError(
                    f"the delta has {entry.name} of shape {entry.shape}, but the model has "
                    f"{shape}. Nothing was loaded."
                )
        with torch.no_grad():
            for entry, delta in deltas:
                apply_tensor_delta(targets[entry.name], delta)


def _revert_conversions(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors from their form in memory to that in files."""
    # Imported here, because it is not part of transformers' documented interface.
    from transformers.core_model_loading import revert_weight_conversion

    # transformers remembers the prefixes of the files that a model was loaded from. Engines send
    # the weights of the class that was built, without them.
    model._weight_conversions = None
    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted


def _make_entry(name: str, tensor: Tensor) -> WeightEntry:
    return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def split_passes(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> list[Sequence[Sequence[int]]]:
    """Split sequences into forward passes of bounded memory, in order."""
    longest = max(len(sequence) for sequence in sequences)
    rows = max(1, _MAX_LOGITS // (longest * model.config.get_text_config().vocab_size))
    return [sequences[first : first + rows] for first in range(0, len(sequences), rows)]


def compute_logits(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return tokens [B, L], padded on the right, and their logits [B, L, V].

    Padding is exact, because all layers are causal: no token depends on the padding after it.
    """
    padded = nn.utils.rnn.pad_sequence(
        [torch.tensor(sequence) for sequence in sequences], batch_first=True
    ).to(model.device)
    positions = torch.arange(padded.shape[1], device=model.device).expand_as(padded)
    logits: Tensor = model(
        input_ids=padded, position_ids=positions, use_cache=False, slots=CausalAttention()
    ).logits
    return padded, logits


@torch.inference_mode()
def check_layers(model: PreTrainedModel) -> bool:
    """Check that the sampler can run all layers of a model, with a pass over two tokens.

    Returns:
        True if keys and values are all that decoding needs from earlier tokens. Otherwise there are
        layers with a state, such as linear attention, Mamba or convolutions.

    Raises:
        ConfigError: If a layer needs another mask, or does not call the sampler's attention.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = _list_layer_kinds(model)
    if kinds is None:
        num_attention_layers = 0 if _has_convolution(model) else config.num_hidden_layers
    else:
        num_attention_layers = sum(kind in _ATTENTION_TYPES for kind in kinds)
    attention = _CountedAttention()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    model(input_ids=tokens, position_ids=tokens, use_cache=False, slots=attention)
    unsupported = sorted(_UNSUPPORTED_TYPES.intersection(kinds or ()))
    if unsupported or attention.num_calls < num_attention_layers:
        reason = (
            f"layers with {unsupported[0]}"
            if unsupported
            else "attention that is not called through transformers' attention interface"
        )
        raise ConfigError(
            f"the hf sampler does not support {type(model).__name__}, which has {reason}: use "
            "rollout=vllm."
        )
    stateless = _ATTENTION_TYPES | _TOKENWISE_TYPES
    return not _has_convolution(model) and all(kind in stateless for kind in kinds or ())


def _list_layer_kinds(model: PreTrainedModel) -> Sequence[str] | None:
    config = model.config.get_text_config(decoder=True)
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    return kinds or getattr(config, "layers_block_type", None)


def _has_convolution(model: PreTrainedModel) -> bool:
    return any(isinstance(module, nn.Conv1d) for module in model.modules())


def build_on_meta(spec: ModelSpec) -> PreTrainedModel:
    """Build a causal language model without weights, to look at its modules."""
    config = build_model_config(spec)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: PreTrainedModel = get_language_model_class(config).from_config(
            config, trust_remote_code=spec.trust_remote_code
        )
    return model


def build_model_config(model: ModelSpec) -> PretrainedConfig:
    """Return the Hugging Face config of a spec, from its model directory or its architecture."""
    if model.path is not None:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
        drop_quantization(config)
        return config
    return AutoConfig.for_model(**model.to_config_fields())


class _CountedAttention(CausalAttention):
    """Counts the layers that call it."""

    def __init__(self) -> None:
        self.num_calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Count the call; see Attention."""
        self.num_calls += 1
        return super().attend(layer, query, key, value, rule=rule)


def check_experts(text_config: PretrainedConfig, *, routing_replay: str) -> None:
    """Check that a model has experts, whose choices a run may replay.

    Args:
        text_config: The text part of its config.
        routing_replay: `rollout.routing_replay`.

    Raises:
        ConfigError: If it has none.
    """
    if routing_replay != "none" and not hasattr(text_config, "num_experts_per_tok"):
        raise ConfigError(
            f"rollout.routing_replay is {routing_replay}, but {text_config.model_type} has no "
            "routers of experts: set it to none."
        )


class ExpertRecorder:
    """Records the experts that all routers of a model choose in a pass, for routing replay."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers, whose outputs include the experts [rows, K].

        Args:
            model: The model, which may be on the meta device.

        Raises:
            ConfigError: If the model has no such routers.
        """
        routers = [
            router
            for module in model.modules()
            if isinstance(getattr(module, "experts", None), nn.Module)
            for name in ("gate", "router")
            if isinstance(router := getattr(module, name, None), nn.Module)
            and type(router).__name__.lower().endswith("router")
        ]
        if not routers:
            raise ConfigError(
                f"rollout.routing_replay is sampler, but {type(model).__name__} has no routers of "
                "experts: set it to none."
            )
        self._choices: list[Tensor | None] = [None] * len(routers)
        for index, router in enumerate(routers):
            router.register_forward_hook(self._make_hook(index))

    def _make_hook(
        self, index: int
    ) -> Callable[[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]], None]:
        def record(router: nn.Module, _: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            # Logits, weights and the ids of the chosen experts, which Granite returns first.
            indices = [each for each in output if not each.is_floating_point()]
            if len(indices) != 1:
                raise ConfigError(
                    f"rollout.routing_replay is sampler, but {type(router).__name__} does not "
                    "return the experts that it chooses: set it to none."
                )
            self._choices[index] = indices[0].to(torch.int16)

        return record

    def take(self, num_rows: int) -> Tensor:
        """Return the choices from the last pass over `num_rows` sequences padded to equal length.

        Returns:
            [num_rows, padded length, layers, K] int16 on the CPU.
        """
        choices = [layer for layer in self._choices if layer is not None]
        assert len(choices) == len(self._choices), "every router runs in every pass"
        self._choices = [None] * len(choices)
        by_row: Tensor = torch.stack(choices, dim=1).cpu().unflatten(0, (num_rows, -1))
        return by_row
