"""The module that FSDP shards: a Hugging Face model composed with a head that answers queries, and how it is sharded.

In: a micro-batch and what is asked about it. Out: one float32 column per query. Gradients of all ranks are summed, never averaged,
because the denominators of a loss already belong to the whole mini-batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import Query
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.heads import Head, HeadRequest, LanguageHead, ScalarHead
from temper_engine_fsdp.packing import PackLayout

PREFIX = "hf."
"""What our module puts before every Hugging Face name."""


class PackedModel(nn.Module):
    """A Hugging Face decoder over sequences laid end to end, and the head that answers from its hidden states."""

    def __init__(self, hf: PreTrainedModel, *, head: Head) -> None:
        super().__init__()
        self.hf = hf
        self._head = head

    def forward(self, batch: SequenceBatch, request: HeadRequest, packing: PackLayout) -> tuple[Tensor, ...]:
        """Answers in the order of ``sorted(request.queries)``, and last an empty sum that ties every layer to the graph.

        The last one gives a loss a gradient of zero even where the loss ignores every answer, so that all ranks run the same
        collectives.
        """
        positions = batch.positions()
        output = self.hf.base_model(
            input_ids=batch.tokens[None],
            position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
            attention_mask=None,
            use_cache=False,
            packing=packing,
        )
        hidden: Tensor = output.last_hidden_state[0]
        answers = self._head(hidden, batch, request)
        return (*(answers[query] for query in sorted(request.queries)), hidden[:0].float().sum())


def build_head(hf: PreTrainedModel, *, config: FSDPConfig) -> Head:
    """The head of this model type over the model's own projection.

    Raises:
        ConfigError: a language model whose output is no plain linear projection.
    """
    kind = config.model.model_type
    if kind != "language_model":
        return ScalarHead(hf.score, query=Query.VALUE if kind == "value_model" else Query.SCORE)
    linear = hf.get_output_embeddings()
    if not isinstance(linear, nn.Linear) or len(list(linear.parameters())) != 1:
        raise ConfigError(f"{type(hf).__name__} has no plain linear output projection, which the fused log-prob needs.")
    return LanguageHead(linear, chunk_tokens=config.head_chunk_tokens)


def shard(model: PackedModel, *, config: FSDPConfig, mesh: DeviceMesh) -> None:
    """Shard each decoder layer, then the rest as one; sums gradients on every FSDP module.

    Raises:
        ConfigError: a class named in wrap_modules does not occur.
    """
    if config.activation_checkpointing:
        model.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    dtype = torch.bfloat16 if config.precision.compute == "bf16" else None
    # Inputs are cast nowhere: temperatures and rotary tables stay as they are computed.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in _layers(model.hf, names=config.wrap_modules):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    # The root holds the embedding and the head, which the backward pass needs first.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # On the root alone this would be silently wrong, and gloo has no scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Every module that fully_shard was applied to, the root first."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def _layers(hf: PreTrainedModel, *, names: tuple[str, ...]) -> list[nn.Module]:
    wanted = set(names) or set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in wanted]
    if names and wanted - {type(layer).__name__ for layer in layers}:
        present = sorted({type(module).__name__ for module in hf.modules()})
        raise ConfigError(f"wrap_modules names {sorted(wanted)}, but {type(hf).__name__} consists of {present}.")
    return layers
