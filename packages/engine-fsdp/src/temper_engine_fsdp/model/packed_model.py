"""The module that FSDP shards: a Hugging Face decoder and an output head.

Takes a micro-batch and the requested outputs, and returns one float32 column per output.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.activation_checkpointing import ActivationOffloader
from temper_engine_fsdp.model.output_head import (
    Head,
    HeadRequest,
    LanguageHead,
    LinearGetter,
    ScalarHead,
)
from temper_engine_fsdp.model.pack_layout import PackLayout
from temper_engine_fsdp.model.token_mixers import count_mixing_layers, read_declared

PREFIX = "hf."
"""Our module's prefix in front of every Hugging Face parameter name."""


class PackedModel(nn.Module):
    """A Hugging Face decoder over packed sequences, with an output head."""

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        head: Head,
        offloads_activations: bool = False,
        is_compiled: bool = False,
    ) -> None:
        super().__init__()
        # Compiled layers do not count attention calls.
        self._attention_is_checked = is_compiled
        self._window = (
            None if is_compiled else _sliding_window(hf.config.get_text_config(decoder=True))
        )
        self._offloads_activations = offloads_activations
        self.hf = hf
        self._head = head

    def forward(
        self, batch: SequenceBatch, request: HeadRequest, packing: PackLayout
    ) -> tuple[Tensor, ...]:
        """Run the decoder and the head.

        Returns:
            Columns in the order of `sorted(request.requested_outputs)`, then a zero that depends on
            the hidden states. Adding it to the loss gives every layer a gradient even if the loss
            ignores all outputs, so that all ranks run the same collectives.
        """
        tokens, positions = batch.tokens, batch.get_position_ids()
        if packing.sequence_group is not None:
            tokens, positions = (
                packing.sequence_group.take_slice(tokens),
                packing.sequence_group.take_slice(positions),
            )
        offloads = self._offloads_activations and self.training and torch.is_grad_enabled()
        with (
            ActivationOffloader(tokens.device).offload_saved_tensors()
            if offloads
            else nullcontext()
        ):
            output = self.hf.base_model(
                input_ids=tokens[None],
                position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
                # Packed attention gets its layout from `packing`, never from a mask.
                attention_mask=None,
                use_cache=False,
                packing=packing,
            )
        if not self._attention_is_checked:
            self._check_attention(packing)
            self._check_softcap(packing)
            self._attention_is_checked = True
        if self._window is not None:
            self._check_window(packing)
        hidden: Tensor = output.last_hidden_state[0]
        head_outputs = self._head(hidden, batch, request)
        if packing.sequence_group is not None:
            # Sorted, since set order differs between ranks and the sums must match.
            head_outputs = {
                head_output: packing.sequence_group.sum_outputs(head_outputs[head_output])
                for head_output in sorted(head_outputs)
            }
        return (
            *(head_outputs[head_output] for head_output in sorted(request.requested_outputs)),
            hidden[:0].float().sum(),
        )

    def _check_attention(self, packing: PackLayout) -> None:
        """Check after the first pass that all layers used the registered attention.

        Raises:
            CapabilityError: If fewer attention calls than layers received the layout. The other
                layers have mixed the pack's sequences.
        """
        num_layers = count_mixing_layers(self.hf.config)
        num_calls = packing.num_attention_calls + packing.num_mixer_calls
        if num_calls < num_layers:
            raise CapabilityError(
                f"{num_calls} attention calls of {type(self.hf).__name__} went "
                f"through transformers' AttentionInterface, but it has {num_layers} layers: the "
                "others would mix the sequences of a pack. Choose a model in which all layers use "
                "that interface."
            )

    def _check_softcap(self, packing: PackLayout) -> None:
        """Check after the first pass that a cap of attention scores was passed to the attention.

        Raises:
            CapabilityError: If the model has a cap and did not pass it on.
        """
        softcap = read_declared(
            self.hf.config.get_text_config(decoder=True), "attn_logit_softcapping"
        )
        if softcap is not None and not packing.has_softcap:
            raise CapabilityError(
                f"{type(self.hf).__name__} has attn_logit_softcapping {softcap}, which its layers "
                "do not pass to their attention: choose a model without it."
            )

    def _check_window(self, packing: PackLayout) -> None:
        """Check that a sliding window was passed to the attention.

        Some models only draw the window into a mask, which packed attention does not have.

        Raises:
            CapabilityError: If a sequence is longer than a window that was not passed on.
        """
        if (
            self._window is not None
            and not packing.has_window
            and packing.max_length > self._window
        ):
            raise CapabilityError(
                f"{type(self.hf).__name__} has a sliding window of {self._window}, which its "
                f"layers do not pass to their attention, and a sequence has {packing.max_length} "
                "tokens: keep sequences within the window, or choose another model."
            )


def _sliding_window(config: PretrainedConfig) -> int | None:
    """Return the window of the model, or None."""
    has_windows = "sliding_attention" in (
        read_declared(config, "layer_types") or ("sliding_attention",)
    )
    return read_declared(config, "sliding_window") if has_windows else None


def build_head(
    hf: PreTrainedModel,
    *,
    config: FSDPConfig,
    make_getter: Callable[[nn.Module], Callable[[], nn.Module]],
) -> Head:
    """Build the output head over the model's projection.

    Args:
        hf: The model, with its adapter if it has one.
        config: Engine config.
        make_getter: Turns the projection into a function that returns the module in use, which may
            be an adapter's trained copy.

    Raises:
        ConfigError: If the output of a language model is not a plain linear projection.
    """
    kind = config.model.model_type
    get_linear = make_getter(hf.get_output_embeddings() if kind == "language_model" else hf.score)
    # The head computes log-probs from the weight alone, so a language model must have no bias.
    if not isinstance(get_linear(), nn.Linear) or (
        kind == "language_model" and len(list(get_linear().parameters())) != 1
    ):
        raise ConfigError(
            f"{type(hf).__name__} has no plain linear output projection: choose a model with a "
            "linear lm_head."
        )
    linear = cast(LinearGetter, get_linear)
    if kind == "language_model":
        scale, softcap = _read_logit_settings(hf.config.get_text_config(decoder=True))
        if softcap is not None and config.head_keeps_logits:
            raise ConfigError(
                f"head_keeps_logits is true, but {type(hf).__name__} has final_logit_softcapping "
                f"{softcap}, which only the head in chunks computes: set it to false."
            )
        return LanguageHead(
            linear,
            scale=scale,
            softcap=softcap,
            chunk_tokens=config.head_chunk_tokens,
            keeps_logits=config.head_keeps_logits,
            uses_compile=config.compile_layers,
        )
    return ScalarHead(
        linear, head_output=HeadOutput.VALUE if kind == "value_model" else HeadOutput.SCORE
    )


def _read_logit_settings(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return the logits' factor and the limit applied after it (None without one)."""
    factors = {name: read_declared(config, name) for name in ("logit_scale", "lm_head_multiplier")}
    scale = math.prod(float(factor) for factor in factors.values() if factor is not None)
    scaling = read_declared(config, "logits_scaling")
    if scaling is not None:
        # The Granite models divide by it.
        scale *= scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    softcap = read_declared(config, "final_logit_softcapping")
    return scale, None if softcap is None else float(softcap)


def make_constant_getter(module: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that always returns this module."""
    return lambda: module


def find_layers(hf: PreTrainedModel, *, names: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules to shard one by one.

    These are the modules of the classes in ``names``. If it is empty, they are the modules that the
    model declares as indivisible, without those inside another one.

    Raises:
        ConfigError: If a class does not occur in the model.
    """
    class_names = set(names) or set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in class_names]
    if not names:
        # Aria declares its decoder layers and the experts in them. FSDP would have to shard the
        # inner modules first, and a layer is small enough to be gathered at once.
        inner = {child for layer in layers for child in layer.modules() if child is not layer}
        layers = [layer for layer in layers if layer not in inner]
    if names and class_names - {type(layer).__name__ for layer in layers}:
        present = sorted({type(module).__name__ for module in hf.modules()})
        raise ConfigError(
            f"wrap_modules names {sorted(class_names)}, but {type(hf).__name__} only has "
            f"{present}: name some of these classes."
        )
    return layers


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward of each layer with torch.compile.

    Only the forward is compiled: FSDP hooks, checkpointing and parameter names stay the same.
    """
    for layer in layers:
        # Assign forward instead of wrapping the module, which would add a prefix to every name.
        layer.forward = torch.compile(layer.forward)
