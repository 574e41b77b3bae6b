"""The module that FSDP shards: a Hugging Face model composed with a head that answers queries.

In: a micro-batch and what is asked about it. Out: one float32 column per query.
"""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import Query
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.activation_checkpointing import maybe_offload_activations
from temper_engine_fsdp.model.output_head import (
    Head,
    HeadRequest,
    LanguageHead,
    LinearGetter,
    ScalarHead,
)
from temper_engine_fsdp.model.packed_attention import PackLayout

PREFIX = "hf."
"""What our module puts before every Hugging Face name."""


class PackedModel(nn.Module):
    """A Hugging Face decoder over sequences laid end to end, and the head that answers from its hidden states."""

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        head: Head,
        offloads_activations: bool = False,
        is_compiled: bool = False,
    ) -> None:
        super().__init__()
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
        """Answers in the order of ``sorted(request.queries)``, and last an empty sum that ties every layer to the graph.

        The last one gives a loss a gradient of zero even where the loss ignores every answer, so that all ranks run the same
        collectives.
        """
        tokens, positions = batch.tokens, batch.positions()
        if packing.sequence_group is not None:
            tokens, positions = (
                packing.sequence_group.take_slice(tokens),
                packing.sequence_group.take_slice(positions),
            )
        with maybe_offload_activations(
            tokens.device, enabled=self._offloads_activations and self.training
        ):
            output = self.hf.base_model(
                input_ids=tokens[None],
                position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
                attention_mask=None,
                use_cache=False,
                packing=packing,
            )
        if not self._attention_is_checked:
            self._check_attention(packing)
        if self._window is not None:
            self._check_window(packing)
        hidden: Tensor = output.last_hidden_state[0]
        answers = self._head(hidden, batch, request)
        if packing.sequence_group is not None:
            # Sorted, since sets have another order on each rank, and a sum would mix what was asked.
            answers = {
                query: packing.sequence_group.sum_outputs(answers[query])
                for query in sorted(answers)
            }
        return (*(answers[query] for query in sorted(request.queries)), hidden[:0].float().sum())

    def _check_attention(self, packing: PackLayout) -> None:
        """After the first pass: a layer whose tokens met elsewhere has mixed the sequences of the pack.

        Raises:
            CapabilityError: fewer attentions than layers were told where the sequences lie.
        """
        num_layers = self.hf.config.get_text_config(decoder=True).num_hidden_layers
        if packing.num_attention_calls < num_layers:
            raise CapabilityError(
                f"{packing.num_attention_calls} attentions of {type(self.hf).__name__} went "
                "through transformers' AttentionInterface, but it has "
                f"{num_layers} layers: the others would mix the sequences of a pack. Choose a "
                "model whose tokens meet there alone."
            )
        self._attention_is_checked = True

    def _check_window(self, packing: PackLayout) -> None:
        """A window that a model only draws into a mask, which packed attention has none of, would be passed over.

        Raises:
            CapabilityError: a sequence is longer than a window that no attention was told of.
        """
        if (
            self._window is not None
            and not packing.has_window
            and packing.max_length > self._window
        ):
            raise CapabilityError(
                f"{type(self.hf).__name__} has a sliding window of {self._window}, which its "
                "layers do not tell their attention, and a "
                f"sequence here has {packing.max_length} tokens: keep sequences within the window, "
                "or choose another model."
            )


def _sliding_window(config: PretrainedConfig) -> int | None:
    """Positions that some layers see at most; None also where a configuration has the field by chance, and its model does not read it."""
    declared = (
        hasattr(type(config), "sliding_window")
        or "sliding_window" in signature(type(config).__init__).parameters
    )
    has_windows = "sliding_attention" in (
        getattr(config, "layer_types", None) or ("sliding_attention",)
    )
    return getattr(config, "sliding_window", None) if declared and has_windows else None


def build_head(
    hf: PreTrainedModel,
    *,
    config: FSDPConfig,
    make_getter: Callable[[nn.Module], Callable[[], nn.Module]],
) -> Head:
    """The head of this model type over the model's own projection.

    Args:
        hf: the model, with its adapter if it has one.
        config: the engine's.
        choose: turns the projection into what gives the one in use now, which an adapter may have a copy of.

    Raises:
        ConfigError: a language model whose output is no plain linear projection.
    """
    kind = config.model.model_type
    get_linear = make_getter(hf.get_output_embeddings() if kind == "language_model" else hf.score)
    if not isinstance(get_linear(), nn.Linear) or (
        kind == "language_model" and len(list(get_linear().parameters())) != 1
    ):
        raise ConfigError(
            f"{type(hf).__name__} has no plain linear output projection, which the head needs."
        )
    linear = cast(LinearGetter, get_linear)
    if kind == "language_model":
        return LanguageHead(
            linear,
            chunk_tokens=config.head_chunk_tokens,
            keeps_logits=config.head_keeps_logits,
            is_compiled=config.compile_layers,
        )
    return ScalarHead(linear, query=Query.VALUE if kind == "value_model" else Query.SCORE)


def make_constant_getter(module: nn.Module) -> Callable[[], nn.Module]:
    """The module itself, whenever it is asked for."""
    return lambda: module


def find_layers(hf: PreTrainedModel, *, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules that are sharded one by one: of these classes, or those that the model says must not be split.

    Raises:
        ConfigError: a class does not occur.
    """
    class_names = set(names) or set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in class_names]
    if names and class_names - {type(layer).__name__ for layer in layers}:
        present = sorted({type(module).__name__ for module in hf.modules()})
        raise ConfigError(
            f"wrap_modules names {sorted(class_names)}, but {type(hf).__name__} consists of "
            f"{present}."
        )
    return layers


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Let torch.compile make kernels of each layer's forward and backward pass.

    What FSDP and activation checkpointing do around a layer stays outside, and so do the names of its parameters.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
