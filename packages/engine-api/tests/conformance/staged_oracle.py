"""The oracle as the last of several stages: ranks of a replica share their data, and only the last one has losses and outputs.

What a pipeline looks like from outside, without one inside: the earlier stages hold copies and wait.
"""

from dataclasses import dataclass

import torch
from data_parallel_oracle import DataParallelOracle

from temper_engine_api.layout import Layout
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Axis, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedConfig(EngineConfig):
    num_stages: int = 1


CONFORMANCE_LAYOUTS = (
    Layout(name="stages2", world_size=2, fields={"num_stages": 2}),
    Layout(name="stages1", world_size=1),
)


class StagedOracle(DataParallelOracle):
    """Data-parallel rank r is made of the ranks r S to r S + S - 1."""

    config_class = StagedConfig

    def _build(self):
        plain = super()._build()
        stages, rank = self.config.num_stages, plain.global_rank
        self.is_last = rank % stages == stages - 1
        return Topology(
            world_size=plain.world_size,
            global_rank=rank,
            dp=Axis(size=plain.world_size // stages, rank=rank // stages),
            pp=Axis(size=stages, rank=rank % stages),
            returns_outputs=self.is_last,
        )

    def _run_schedule(self, batch, *, reduce_gradients, **arguments):
        answers = None
        if self.is_last:
            answers = super()._run_schedule(batch, reduce_gradients=False, **arguments)
        if reduce_gradients:
            self._reduce_pending_gradients()
        return answers

    def _sum_over_data_parallel(self, value):
        return super()._sum_over_data_parallel(value if self.is_last else torch.zeros_like(value))
