"""Run the micro-batches of a packed batch through Megatron's pipeline schedules.

Megatron's schedules can also divide the loss and finalize gradients at the end of every call. Both
are off: the objective's reduction is the only division, and gradients are finalized once per
update. Finalizing in every call would reduce the same buffers again and again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from temper_engine_api.batch import PackedBatch
from temper_engine_api.errors import BatchError, CapabilityError
from temper_engine_api.metrics import Metric, compute_load_metrics
from temper_engine_api.objective import (
    ROUTED_EXPERTS,
    HeadOutput,
    HeadOutputs,
    MicroBatchLoss,
    check_routed_experts,
)
from temper_engine_megatron.bridge_compat.bridge_translation import find_sparse_layers
from temper_engine_megatron.model.gpt_chunks import ModelChunks
from temper_engine_megatron.model.micro_batch_layout import (
    LocalMicroBatch,
    MicroBatchLayout,
    build_local_micro_batch,
)
from temper_engine_megatron.model.moe_router import (
    LOAD_BALANCING_LOSS,
    Z_LOSS,
    discard_router_records,
    pop_choices,
    pop_loads,
    pop_router_losses,
)
from temper_engine_megatron.model.output_head import OutputHead
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings
from temper_engine_megatron.runtime.process_groups import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallOptions:
    """Options of one call, for all of its micro-batches."""

    requested_outputs: frozenset[HeadOutput]
    micro_batch_loss: MicroBatchLoss | None
    forward_only: bool


class ScheduleRunner:
    """Runs forward and backward passes of this rank's model chunks."""

    def __init__(self, chunks: ModelChunks, *, membership: Membership, is_packed: bool) -> None:
        self._chunks = chunks
        self._membership = membership
        topology = membership.topology
        self._layout = MicroBatchLayout(
            cp_size=topology.cp.size,
            cp_rank=topology.cp.rank,
            token_multiple=topology.plan_constraints.token_multiple,
            is_packed=is_packed,
            device=membership.device,
        )
        self.has_unreduced_gradients = False
        """True if this rank has accumulated gradients that are not reduced yet."""

    def run(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
    ) -> list[HeadOutputs] | None:
        """Return the detached outputs per micro-batch on the last stage, None elsewhere."""
        returns_experts = HeadOutput.ROUTED_EXPERTS in requested_outputs
        options = _CallOptions(
            requested_outputs=requested_outputs - {HeadOutput.ROUTED_EXPERTS},
            micro_batch_loss=micro_batch_loss,
            forward_only=forward_only,
        )
        if self._chunks.head is not None:
            self._chunks.head.check_outputs(options.requested_outputs)
        if returns_experts and not self._chunks.transformer_config.num_moe_experts:
            raise CapabilityError(
                f"output {HeadOutput.ROUTED_EXPERTS.value!r} was requested, but the model has no "
                "experts: do not request it."
            )
        trained_tokens = batch.denominators.tokens
        local_batches = [
            build_local_micro_batch(
                micro,
                self._layout,
                trained_tokens=trained_tokens,
                records_choices=returns_experts,
            )
            for micro in batch.iterate_micro_batches()
        ]
        if not forward_only:
            # Set before the pass, because a pass that fails may have accumulated some gradients.
            self.has_unreduced_gradients = True
        if returns_experts:
            # A call that raised may have left some.
            for layer in self._sparse_layers():
                layer.mlp.router.choices.clear()
        with self._run_pass(trains=not forward_only), support_missing_cuda():
            outputs = self._run_micro_batches(local_batches, options)
        if returns_experts:
            outputs = self._add_experts(outputs, local_batches)
        return outputs if self._membership.is_last_stage else None

    def _add_experts(
        self, outputs: list[HeadOutputs], local_batches: list[LocalMicroBatch]
    ) -> list[HeadOutputs]:
        """Add the chosen experts to the outputs of the last stage. Collective over a replica."""
        membership = self._membership
        config = self._chunks.transformer_config
        columns = pop_choices(
            self._sparse_layers(),
            local_batches,
            sparse_layers=find_sparse_layers(config),
            topk=config.moe_router_topk,
        )
        for column in columns:
            # Each rank has -1 for what others have chosen.
            for group in (membership.pg_collection.tp_cp, membership.pp):
                dist.all_reduce(column, op=dist.ReduceOp.MAX, group=group)
        if not membership.is_last_stage:
            return outputs
        return [
            HeadOutputs(columns={**each.columns, HeadOutput.ROUTED_EXPERTS: column.float()})
            for each, column in zip(outputs, columns, strict=True)
        ]

    def _sparse_layers(self) -> list[Any]:
        """Return this rank's layers with experts."""
        sparse_layers = find_sparse_layers(self._chunks.transformer_config)
        return [
            layer
            for chunk in self._chunks.unwrapped
            for layer in chunk.decoder.layers
            # Megatron counts layers from 1.
            if layer.layer_number - 1 in sparse_layers
        ]

    def check_routed_experts(self, batch: PackedBatch) -> None:
        """Check a batch's column of experts; see `BaseEngine._check_routed_experts`."""
        config = self._chunks.transformer_config
        if not config.num_moe_experts:
            raise BatchError(
                f"the batch has column {ROUTED_EXPERTS!r}, but the model has no experts: remove it."
            )
        check_routed_experts(
            batch,
            num_layers=len(find_sparse_layers(config)),
            num_experts=config.num_moe_experts,
        )
        num_chosen = batch.columns[ROUTED_EXPERTS].shape[2]
        if num_chosen != config.moe_router_topk:
            raise BatchError(
                f"column {ROUTED_EXPERTS!r} has {num_chosen} experts for each token and layer, "
                f"but the model chooses {config.moe_router_topk}: record the choices with the same "
                "model."
            )

    def _run_micro_batches(
        self, local_batches: list[LocalMicroBatch], options: _CallOptions
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
            )
            # Megatron calls the second value with the output on the last stage.
            return output, lambda hidden: self._compute_loss(hidden, local, options)

        iterators = [iter(local_batches) for _ in chunks]
        schedule = get_forward_backward_func()
        outputs: list[HeadOutputs] = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(local_batches),
            # With variable_seq_lengths each stage sends the true shape to the next.
            seq_length=local_batches[0].tokens.shape[1],
            # A micro-batch is one pack; its rows are part of the shape that stages exchange.
            micro_batch_size=1,
            forward_only=options.forward_only,
        )
        return outputs

    def _compute_loss(
        self, output: Tensor, local: LocalMicroBatch, options: _CallOptions
    ) -> tuple[Tensor, Tensor, HeadOutputs]:
        """Compute the loss in the form that Megatron's schedules expect from the last stage.

        Returns:
            (loss, number of tokens, outputs). The number of tokens is always 0, as it is not used.
        """
        head = self._head
        if self._chunks.transformer_config.sequence_parallel:
            # From here on, every rank has all tokens. The gradient that the head returns is already
            # summed over ranks. The backward pass of the gather must not sum it again (argument
            # False); each rank takes its rows of it.
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        hidden = output.flatten(0, 1)
        is_training = options.micro_batch_loss is not None and not options.forward_only
        outputs = head.compute_outputs(
            hidden, local, requested_outputs=options.requested_outputs, trained_only=is_training
        )
        if options.micro_batch_loss is None:
            loss = hidden.new_zeros((), dtype=torch.float32)
        else:
            # The empty sum connects the loss to the graph even if it ignores every output: the
            # earlier stages wait for a gradient.
            loss = options.micro_batch_loss(outputs, local.micro_batch) + hidden[:0].float().sum()
        # Return three values. Given two, the schedule would divide the loss by the number of
        # micro-batches. Nothing reads the number of tokens, since the engine finalizes gradients.
        return loss, torch.zeros((), dtype=torch.int), outputs.detach()

    @property
    def _head(self) -> OutputHead:
        assert self._chunks.head is not None, "schedules compute losses on the last stage only"
        return self._chunks.head

    def reduce_gradients(self) -> None:
        """Sum accumulated gradients over ranks; call once per update.

        Covers data and context parallelism, tied embeddings, and the norms under sequence
        parallelism.
        """
        with ignore_known_warnings(), support_missing_cuda(), torch.no_grad():
            # Pass None as the number of tokens, because the objective's reduction has divided
            # already.
            finalize_model_grads(
                list(self._chunks.wrapped), None, pg_collection=self._membership.pg_collection
            )
        self.has_unreduced_gradients = False

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients by a factor."""
        for chunk in self._data_parallel_chunks():
            chunk.scale_gradients(factor)

    def zero_gradients(self) -> None:
        """Drop all gradients, reduced or not."""
        for chunk in self._data_parallel_chunks():
            chunk.zero_grad_buffer()
        self.has_unreduced_gradients = False

    def discard_call(self) -> None:
        """Drop what a training call that raised has left outside of the gradient buffers."""
        for chunk in self._chunks.wrapped:
            for parameter in chunk.parameters():
                # Megatron's hook moves this to `main_grad`, unless the exception came in between.
                parameter.grad = None
            discard_router_records(chunk.modules())

    def _data_parallel_chunks(self) -> Iterator[DistributedDataParallel]:
        for chunk in self._chunks.wrapped:
            assert isinstance(chunk, DistributedDataParallel), (
                "engines with an optimizer wrap their chunks"
            )
            yield chunk

    def pop_router_metrics(self) -> dict[str, Metric]:
        """Return and clear the metrics of routers since the last call. Collective.

        Losses are summed over the ranks of this replica; only those with a coefficient are
        included. Loads of experts are counted over all ranks.
        """
        config, membership = self._chunks.transformer_config, self._membership
        if not config.num_moe_experts:
            return {}
        coefficients = {
            LOAD_BALANCING_LOSS: config.moe_aux_loss_coeff,
            Z_LOSS: config.moe_z_loss_coeff,
        }
        names = tuple(name for name, coefficient in coefficients.items() if coefficient)
        layers, sparse_layers = self._sparse_layers(), find_sparse_layers(config)
        loads = pop_loads(
            layers, sparse_layers=sparse_layers, num_experts=config.num_moe_experts
        ).to(membership.device)
        dist.all_reduce(loads)
        metrics = compute_load_metrics(loads)
        if names:
            losses = pop_router_losses(layers, names=names, num_layers=len(sparse_layers)).to(
                membership.device
            )
            # Ranks in tp_cp have terms for different tokens, and pipeline stages have terms for
            # different layers: sum over both.
            for group in (membership.pg_collection.tp_cp, membership.pp):
                dist.all_reduce(losses, group=group)
            for name, loss in zip(names, losses, strict=True):
                metrics[f"router/{name}"] = Metric(value=loss, reduction="sum")
        return metrics

    @contextmanager
    def _run_pass(self, *, trains: bool) -> Iterator[None]:
        for chunk in self._chunks.wrapped:
            chunk.train(trains)
        with torch.set_grad_enabled(trains):
            yield
