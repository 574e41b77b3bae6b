"""Run the micro-batches of a packed batch, and decide when gradients are reduced.

Every training pass runs the same collectives on every rank. Empty sums connect each layer and the
head to the loss, so a rank without trained tokens contributes gradients of zero.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.errors import CapabilityError
from temper_engine_api.objective import HeadOutput, HeadOutputs, MicroBatchLoss
from temper_engine_api.updates import LossScale
from temper_engine_fsdp.model.expert_routers import ExpertRouters
from temper_engine_fsdp.model.output_head import build_head_request
from temper_engine_fsdp.model.pack_layout import PackLayout
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup
from temper_engine_fsdp.runtime.collective_tracer import CollectiveTracer
from temper_engine_fsdp.sharding.sharded_module import ShardedModule


class MicroBatchRunner:
    """Runs forward and backward passes of one sharded module."""

    def __init__(
        self,
        sharded: ShardedModule,
        *,
        device: torch.device,
        dummy_output: HeadOutput,
        loss_scale: LossScale,
        tracer: CollectiveTracer,
        sequence_group: SequenceGroup | None,
        routers: ExpertRouters | None,
    ) -> None:
        self._routers = routers
        self._tracer = tracer
        self._sequence_group = sequence_group
        self._sharded = sharded
        self._loss_scale = loss_scale
        self._dummy_output = dummy_output
        self._device = device
        self.has_unreduced_gradients = False
        """True if this rank has accumulated gradients that are not reduced yet."""

    def run(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        with_gradient: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs]:
        """Return each micro-batch's detached outputs; see `BaseEngine._run_micro_batches`."""
        returns_experts = HeadOutput.ROUTED_EXPERTS in requested_outputs
        if returns_experts and self._routers is None:
            raise CapabilityError(
                "the model has no routers whose choices can be returned as "
                f"{HeadOutput.ROUTED_EXPERTS.value!r}: do not request it, and set compile_layers "
                "to false."
            )
        # The layout is computed on the host: reading it from the device would sync.
        micro_batches = list(batch.to("cpu").iterate_micro_batches())
        outputs = []
        with self._run_pass(trains=not forward_only):
            for i, micro in enumerate(micro_batches):
                is_last = i == len(micro_batches) - 1
                reduces = is_last and reduce_gradients
                self._tracer.detail = f"micro-batch {i + 1} of {len(micro_batches)}"
                with self._micro_batch_context(
                    trains=not forward_only, reduces=reduces, is_last=is_last
                ):
                    if self._routers is not None:
                        self._routers.start_micro_batch(
                            micro,
                            num_trained=batch.denominators.tokens,
                            gradient_factor=None if forward_only else self._factor,
                            device=self._device,
                            records_choices=returns_experts,
                        )
                    columns, zero_loss, on_device = self._forward(
                        micro,
                        requested_outputs=requested_outputs - {HeadOutput.ROUTED_EXPERTS},
                        with_gradient=with_gradient,
                        trained_only=micro_batch_loss is not None and not forward_only,
                    )
                    if micro_batch_loss is not None:
                        loss = micro_batch_loss(columns, on_device)
                        if not forward_only:
                            # The factor includes the loss scale of fp16 and FSDP1's averaging.
                            (loss * self._factor + zero_loss).backward()
                            self.has_unreduced_gradients = not reduces
                if returns_experts and self._routers is not None:
                    experts = {HeadOutput.ROUTED_EXPERTS: self._routers.pop_choices(micro)}
                    columns = HeadOutputs(columns={**columns.columns, **experts})
                outputs.append(columns.detach())
        return outputs

    def reduce_gradients(self) -> None:
        """Reduce the gradients that earlier calls accumulated on this rank.

        Runs a dummy pass over a single token with a loss of zero, because FSDP reduces gradients
        only in a backward pass.
        """
        head_output = self._dummy_output
        micro = from_sequences(
            [torch.zeros(1, dtype=torch.int64)], loss_masks=[torch.zeros(1, dtype=torch.bool)]
        )
        with self._run_pass(trains=True):
            # eval mode: the dummy pass must not consume RNG state for dropout.
            self._sharded.root.eval()
            with self._micro_batch_context(trains=True, reduces=True, is_last=True):
                _, zero_loss, _ = self._forward(
                    micro,
                    requested_outputs=frozenset({head_output}),
                    with_gradient=frozenset({head_output}),
                    trained_only=True,
                )
                zero_loss.backward()
        self.has_unreduced_gradients = False

    def discard_gradients(self) -> None:
        """Drop the gradients that are not in `.grad` after a training call raised."""
        self._sharded.discard_gradients()
        self.has_unreduced_gradients = False

    def _forward(
        self,
        micro: SequenceBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        with_gradient: frozenset[HeadOutput],
        trained_only: bool,
    ) -> tuple[HeadOutputs, Tensor, SequenceBatch]:
        # Built from the CPU batch, so that no index is read back from the device.
        request = build_head_request(
            micro,
            requested_outputs=requested_outputs,
            with_gradient=with_gradient,
            trained_only=trained_only,
            device=self._device,
            bounds=None
            if self._sequence_group is None
            else self._sequence_group.slice_bounds(micro.num_tokens),
        )
        packing = PackLayout(
            micro.lengths.tolist(),
            device=self._device,
            rounds_lengths=self._device.type == "cuda",
            sequence_group=self._sequence_group,
        )
        on_device = micro if self._device.type == "cpu" else micro.to(self._device)
        *columns, zero_loss = self._sharded.root(on_device, request, packing)
        by_output = dict(zip(sorted(requested_outputs), columns, strict=True))
        for head_output, column in by_output.items():
            # Connect the outputs to the graph, even if the loss ignores them. Not the entropy: its
            # backward pass is costly, and most objectives only report it. A loss that uses no
            # output is connected to it by the base class.
            if head_output != HeadOutput.ENTROPY:
                zero_loss = zero_loss + column[:0].sum()
        return (
            HeadOutputs(columns=by_output),
            zero_loss,
            on_device,
        )

    @property
    def _factor(self) -> float:
        return self._sharded.loss_factor * self._loss_scale.value

    def _micro_batch_context(
        self, *, trains: bool, reduces: bool, is_last: bool
    ) -> AbstractContextManager[None]:
        return (
            self._sharded.micro_batch(reduces=reduces, is_last=is_last) if trains else nullcontext()
        )

    @contextmanager
    def _run_pass(self, *, trains: bool) -> Iterator[None]:
        self._sharded.root.train(trains)
        try:
            with torch.set_grad_enabled(trains), _pause_garbage_collection():
                yield
        except BaseException:
            # Gradients stay, because earlier calls' gradients are still needed after a forward
            # call.
            self._sharded.reset()
            if self._routers is not None:
                self._routers.discard()
            raise
        finally:
            if self._routers is not None:
                self._routers.stop()
            self._sharded.reshard()


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the context.

    Reference counting still frees objects as usual.
    """
    # A collection during a pass delays kernel launches by tens of milliseconds, on one rank at a
    # time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
