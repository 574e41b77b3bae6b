"""What a job sees on a rank: which rank it is, and engines built from recipes, kept for the next job where that is safe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from temper_engine_api.engine import BaseEngine
from temper_engine_api.layout import Layout, default_layout
from temper_engine_api.specs import (
    EngineConfig,
    LoraSpec,
    ModelSpec,
    ModelType,
    OptimizerSpec,
    PrecisionSpec,
    ResidencySpec,
    ScheduleSpec,
)
from temper_engine_api.training_specs import Compute, Dtype

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[Concatenate["Rank", P], T]
"""A module-level function that every rank runs: its first argument is the rank, the others travel by pickle."""

READ_GRADIENTS = OptimizerSpec(lr=0.0, betas=(0.0, 0.999), weight_decay=0.0, clip_grad_norm=None)
"""Updates nothing and, with a first decay of 0, leaves exactly the last gradient as first moment: how the kit reads gradients."""

ADAMW = OptimizerSpec(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, clip_grad_norm=0.5)
"""Every term of the update is large enough to be missed."""

ONE_RANK = default_layout(1)
"""One rank."""

COLLECTIVE_TIMEOUT_S = 60.0
"""Longest wait of a collective: a rank that waits in vain fails with its own traceback before the fleet loses patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """How an engine is configured: fields that every engine's configuration has. Hashable, so that built engines can be kept."""

    model_path: str
    """Hugging Face directory."""
    model_type: ModelType = "language_model"
    """The head."""
    optimizer: OptimizerSpec | None = READ_GRADIENTS
    """See OptimizerSpec."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """See ScheduleSpec."""
    compute: Compute | None = None
    """Of matmuls and activations; None is what the run is held in: fp32, where a wrong number can't hide behind rounding, unless asked."""
    parameters: Dtype = "fp32"
    """Of master weights."""
    residency: ResidencySpec = field(default_factory=ResidencySpec)
    """See ResidencySpec."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    """See LoraSpec."""

    def build_config(
        self,
        engine_class: type[BaseEngine],
        *,
        device: Literal["cpu", "cuda"],
        layout_fields: Mapping[str, Any],
        compute: Compute = "fp32",
    ) -> EngineConfig:
        """The engine's own configuration class, filled with base fields and those of a layout, which prevail."""
        base = EngineConfig(
            model=ModelSpec(path=self.model_path, model_type=self.model_type),
            optimizer=self.optimizer,
            schedule=self.schedule,
            precision=PrecisionSpec(compute=self.compute or compute, parameters=self.parameters),
            residency=self.residency,
            lora=self.lora,
            device=device,
            deterministic=True,
            collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        )
        return engine_class.config_class(
            **({item.name: getattr(base, item.name) for item in fields(base)} | dict(layout_fields))
        )


class Rank:
    """One rank of the engine under test, or the oracle in the test's own process."""

    def __init__(
        self,
        engine_class: type[BaseEngine],
        *,
        index: int = 0,
        layout: Layout = ONE_RANK,
        device: Literal["cpu", "cuda"] = "cpu",
        compute: Compute = "fp32",
    ) -> None:
        self.engine_class = engine_class
        self.index = index
        self.layout = layout
        self._device: Literal["cpu", "cuda"] = device
        self._compute: Compute = compute
        self._cached: dict[EngineSetup, BaseEngine] = {}
        self._temporary: list[BaseEngine] = []

    @property
    def world_size(self) -> int:
        """Ranks of the process group."""
        return self.layout.world_size

    def cached_engine(self, setup: EngineSetup) -> BaseEngine:
        """An engine that later jobs will meet again: for jobs that leave its weights as they were."""
        if setup not in self._cached:
            self._cached[setup] = self._start_engine(setup)
        engine = self._cached[setup]
        engine.optimizer_zero_grad()
        return engine

    def temporary_engine(self, setup: EngineSetup) -> BaseEngine:
        """An engine of this job's own, closed when the job ends."""
        engine = self._start_engine(setup)
        self._temporary.append(engine)
        return engine

    def construct_engine(self, setup: EngineSetup) -> BaseEngine:
        """Constructed, ``init_model`` not called; never closed."""
        config = setup.build_config(
            self.engine_class,
            device=self._device,
            layout_fields=self.layout.fields,
            compute=self._compute,
        )
        return self.engine_class(config)

    def close_temporary_engines(self) -> None:
        """At the end of a job."""
        while self._temporary:
            self._temporary.pop().close()

    def close_all(self) -> None:
        """At the end of a process group, or after a job that failed."""
        self.close_temporary_engines()
        while self._cached:
            self._cached.popitem()[1].close()

    def _start_engine(self, setup: EngineSetup) -> BaseEngine:
        engine = self.construct_engine(setup)
        engine.init_model()
        return engine
