"""The oracle with several ranks per data-parallel replica: pipeline stages or context ranks.

Stages: the first ones hold copies and wait; only the last one computes losses and outputs.

Contexts: every rank computes all outputs and the same loss, as if the parts had been gathered. It
keeps the gradient of its own tokens only.
"""

from dataclasses import dataclass

import torch
from data_parallel_oracle import DataParallelOracle

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.oracle.oracle_routers import OracleConfig
from temper_engine_api.errors import CapabilityError
from temper_engine_api.layout import Layout
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.topology import Axis, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedConfig(OracleConfig):
    num_stages: int = 1
    num_contexts: int = 1
    keeps_on_device: bool = False
    """Refuse to offload."""


CONFORMANCE_LAYOUTS = (
    Layout(name="stages2", world_size=2, fields={"num_stages": 2}),
    Layout(name="contexts2", world_size=2, fields={"num_contexts": 2}),
    Layout(name="stages1", world_size=1),
    Layout(
        name="on-device1",
        world_size=1,
        fields={"keeps_on_device": True},
        without=frozenset({Capability.OFFLOAD}),
    ),
)


class StagedOracle(DataParallelOracle):
    """Data-parallel rank r consists of S C consecutive ranks: S stages of C contexts each."""

    config_class = StagedConfig

    def _build(self):
        self._check_offload()
        plain = super()._build()
        stages, contexts, rank = self.config.num_stages, self.config.num_contexts, plain.global_rank
        stage, context = rank // contexts % stages, rank % contexts
        self.is_last = stage == stages - 1
        return Topology(
            world_size=plain.world_size,
            global_rank=rank,
            dp=Axis(size=plain.world_size // (stages * contexts), rank=rank // (stages * contexts)),
            pp=Axis(size=stages, rank=stage),
            cp=Axis(size=contexts, rank=context),
            returns_outputs=self.is_last and context == 0,
        )

    def _check_offload(self):
        if self.config.keeps_on_device and self.config.offload.offloads_anything:
            raise CapabilityError("offload is on, but so is keeps_on_device: turn one off.")

    def _run_micro_batches(self, batch, *, reduce_gradients, **arguments):
        head_outputs = None
        if self.is_last:
            head_outputs = super()._run_micro_batches(batch, reduce_gradients=False, **arguments)
        if reduce_gradients:
            self._reduce_pending_gradients()
        return head_outputs

    def _compute_outputs(self, micro, **arguments):
        """Compute all tokens' outputs; detach those of the other contexts' tokens."""
        cp, (num_tokens,) = self.topology.cp, micro.tokens.shape
        is_own_token = torch.arange(num_tokens) * cp.size // num_tokens == cp.rank
        columns = dict(super()._compute_outputs(micro, **arguments).columns)
        for head_output, column in columns.items():
            is_own = (
                is_own_token[micro.sequence_starts[1:].long() - 1]
                if head_output is HeadOutput.SCORE
                else is_own_token
            )
            columns[head_output] = torch.where(
                is_own if column.ndim == 1 else is_own[:, None], column, column.detach()
            )
        return HeadOutputs(columns=columns)

    def _sum_over_data_parallel(self, value):
        return super()._sum_over_data_parallel(
            value if self.topology.returns_outputs else torch.zeros_like(value)
        )
