"""Runs the micro-batches of a plan through Megatron's own schedules, and back; gradients stay on this rank until they are finalised.

Megatron's schedules divide a loss and finalise gradients only where they are told to. They are told to do neither: the objective's
reduction is the only division, and the engine finalises once per update.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from temper_engine_api.batch import PackedBatch
from temper_engine_api.engine import MicroBatchLoss
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_megatron.model.gpt_chunks import ModelChunks
from temper_engine_megatron.model.micro_batch_layout import (
    LocalMicroBatch,
    MicroBatchLayout,
    build_local_micro_batch,
)
from temper_engine_megatron.model.moe_router import LOAD_BALANCING_LOSS, Z_LOSS, pop_router_losses
from temper_engine_megatron.model.output_head import OutputHead
from temper_engine_megatron.runtime.cpu_device import megatron_on_cpu
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings
from temper_engine_megatron.runtime.process_groups import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What one call asks of every micro-batch."""

    requested_outputs: frozenset[HeadOutput]
    micro_batch_loss: MicroBatchLoss | None
    forward_only: bool


class ScheduleRunner:
    """Forward and backward passes over this rank's chunks."""

    def __init__(self, chunks: ModelChunks, *, membership: Membership, is_packed: bool) -> None:
        self._chunks = chunks
        self._membership = membership
        topology = membership.topology
        self._slicing = MicroBatchLayout(
            cp_size=topology.cp.size,
            cp_rank=topology.cp.rank,
            token_multiple=topology.plan_constraints.token_multiple,
            is_packed=is_packed,
            device=membership.device,
        )
        self.has_unreduced_gradients = False
        """Whether gradients wait on this rank to be reduced."""

    def run(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
    ) -> list[HeadOutputs] | None:
        """Detached answers of each micro-batch on the last stage, None elsewhere."""
        asked = _Pass(
            requested_outputs=requested_outputs,
            micro_batch_loss=micro_batch_loss,
            forward_only=forward_only,
        )
        if self._chunks.head is not None:
            self._chunks.head.check(requested_outputs)
        trained_tokens = batch.denominators.tokens
        prepared = [
            build_local_micro_batch(micro, self._slicing, trained_tokens=trained_tokens)
            for micro in batch.micro_batches()
        ]
        if not forward_only:
            self.has_unreduced_gradients = True
        with self._mode(trains=not forward_only), megatron_on_cpu():
            found = self._run_micro_batches(prepared, asked)
        return found if self._membership.is_last_stage else None

    def _run_micro_batches(
        self, prepared: list[LocalMicroBatch], asked: _Pass
    ) -> list[HeadOutputs]:
        chunks = list(self._chunks.wrapped)

        def forward_step(
            micro_batches: Iterator[LocalMicroBatch], chunk: nn.Module
        ) -> tuple[Tensor, object]:
            local = next(micro_batches)
            output: Tensor = chunk(
                input_ids=local.tokens,
                position_ids=local.positions,
                packed_seq_params=local.attention,
                padding_mask=local.is_padding,
            )
            return output, lambda hidden: self._finish(hidden, local, asked)

        iterators = [iter(prepared) for _ in chunks]
        schedule = get_forward_backward_func()
        head_outputs: list[HeadOutputs] = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(prepared),
            # Each pair of stages tells the other the true shape.
            seq_length=prepared[0].tokens.shape[1],
            micro_batch_size=1,
            forward_only=asked.forward_only,
        )
        return head_outputs

    def _finish(
        self, output: Tensor, local: LocalMicroBatch, asked: _Pass
    ) -> tuple[Tensor, Tensor, HeadOutputs]:
        """The scalar to differentiate, no number of tokens, and the answers: what a schedule wants of the last stage."""
        head = self._head
        if self._chunks.settings.sequence_parallel:
            # Every rank goes on with all tokens and sums gradients where it splits matrices, so each takes back its own rows.
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        hidden = output.flatten(0, 1)
        is_training = asked.micro_batch_loss is not None and not asked.forward_only
        head_outputs = head.compute_outputs(
            hidden, local, requested_outputs=asked.requested_outputs, trained_only=is_training
        )
        if asked.micro_batch_loss is None:
            loss = hidden.new_zeros((), dtype=torch.float32)
        else:
            # An empty sum: a loss that ignores every answer still sends gradients of zero to the stages before.
            loss = asked.micro_batch_loss(head_outputs, local.whole) + hidden[:0].float().sum()
        return loss, torch.zeros((), dtype=torch.int), head_outputs.detach()

    @property
    def _head(self) -> OutputHead:
        assert self._chunks.head is not None, "schedules ask the last stage only"
        return self._chunks.head

    def reduce(self) -> None:
        """Sum what lies on this rank with the others', once: over data and context parallel, tied embeddings, sequence-parallel norms."""
        with ignore_known_warnings(), megatron_on_cpu(), torch.no_grad():
            finalize_model_grads(
                list(self._chunks.wrapped), None, pg_collection=self._membership.collection
            )
        self.has_unreduced_gradients = False

    def scale_gradients(self, factor: float) -> None:
        """Multiply what has been reduced."""
        for chunk in self._chunks.wrapped:
            assert isinstance(chunk, DistributedDataParallel), (
                "an engine that trains wraps its chunks"
            )
            chunk.scale_gradients(factor)

    def zero(self) -> None:
        """Drop gradients, local and reduced."""
        for chunk in self._chunks.wrapped:
            assert isinstance(chunk, DistributedDataParallel), (
                "an engine that trains wraps its chunks"
            )
            chunk.zero_grad_buffer()
        self.has_unreduced_gradients = False

    def pop_router_losses(self) -> dict[str, Tensor]:
        """By name, the losses of routers in the calls since the last one, over this replica; those that are trained. Collective."""
        settings, membership = self._chunks.settings, self._membership
        weights = {
            LOAD_BALANCING_LOSS: settings.moe_aux_loss_coeff,
            Z_LOSS: settings.moe_z_loss_coeff,
        }
        names = tuple(
            name for name, weight in weights.items() if settings.num_moe_experts and weight
        )
        if not names:
            return {}
        layers = [layer for chunk in self._chunks.bare for layer in chunk.decoder.layers]
        losses = pop_router_losses(layers, names=names, num_layers=settings.num_layers).to(
            membership.device
        )
        for group in (membership.collection.tp_cp, membership.pp):
            dist.all_reduce(losses, group=group)
        return dict(zip(names, losses, strict=True))

    @contextmanager
    def _mode(self, *, trains: bool) -> Iterator[None]:
        for chunk in self._chunks.wrapped:
            chunk.train(trains)
        with torch.set_grad_enabled(trains):
            yield
