"""`Rank`, the argument of every job, and `EngineSetup`, the engines that a job can build."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from temper_engine_api.engine import BaseEngine
from temper_engine_api.layout import Layout, default_layout
from temper_engine_api.specs import (
    Compute,
    Dtype,
    EngineConfig,
    LoraSpec,
    ModelSpec,
    ModelType,
    OffloadSpec,
    OptimizerSpec,
    PrecisionSpec,
    ScheduleSpec,
)

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[Concatenate["Rank", P], T]
"""A module-level function that every rank runs; its first argument is the rank."""

READ_GRADIENTS = OptimizerSpec(lr=0.0, betas=(0.0, 0.999), weight_decay=0.0, clip_grad_norm=None)
"""Leaves all weights unchanged (lr=0) and the gradient in Adam's first moments (beta1=0).

This is how the kit reads the gradients of any engine; see docs/decisions/0002.
"""

ADAMW = OptimizerSpec(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, clip_grad_norm=0.5)
"""AdamW with settings under which every term of the update is large enough to be noticed."""

ONE_RANK = default_layout(1)

COLLECTIVE_TIMEOUT_S = 60.0
"""Timeout of collectives; below the job timeout, so that a rank fails with its own traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The settings of an engine that all backends share.

    Hashable, so that engines can be cached by their setup.
    """

    model_path: str
    """Hugging Face model directory."""
    model_type: ModelType = "language_model"
    optimizer: OptimizerSpec | None = READ_GRADIENTS
    """None builds an engine that cannot train."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    compute: Compute | None = None
    """Dtype of matmuls and activations; None uses `--compute`, which is fp32 by default."""
    parameters: Dtype = "fp32"
    """Dtype of the master weights."""
    reduce: Dtype = "fp32"
    """Dtype used to sum gradients across ranks."""
    buffers: Dtype = "fp32"
    """Dtype of the model's buffers."""
    engine_fields: tuple[tuple[str, Any], ...] = ()
    """Names and values for fields that only some engines' configuration classes have."""
    deterministic: bool = True
    """Several tests compare bits, which nondeterministic kernels would not repeat."""
    offload: OffloadSpec = field(default_factory=OffloadSpec)
    lora: LoraSpec = field(default_factory=LoraSpec)

    def build_config(
        self,
        engine_class: type[BaseEngine],
        *,
        device: Literal["cpu", "cuda"],
        layout_fields: Mapping[str, Any],
        compute: Compute = "fp32",
    ) -> EngineConfig:
        """Fill the engine's configuration class; `layout_fields` override the setup's fields."""
        base = EngineConfig(
            model=ModelSpec(path=self.model_path, model_type=self.model_type),
            optimizer=self.optimizer,
            schedule=self.schedule,
            precision=PrecisionSpec(
                compute=self.compute or compute,
                parameters=self.parameters,
                reduce=self.reduce,
                buffers=self.buffers,
            ),
            offload=self.offload,
            lora=self.lora,
            device=device,
            deterministic=self.deterministic,
            collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        )
        return engine_class.config_class(
            **(
                {item.name: getattr(base, item.name) for item in fields(base)}
                | dict(self.engine_fields)
                | dict(layout_fields)
            )
        )


class Rank:
    """One rank of the engine under test; or the oracle, which runs in the test's process.

    Jobs get it as their first argument and build their engines through it.
    """

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
        self.num_data_ranks = 1
        """Number of data-parallel ranks of the last engine that was built."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group."""
        return self.layout.world_size

    def cached_engine(self, setup: EngineSetup) -> BaseEngine:
        """Return an engine that later jobs reuse; for jobs that leave its weights unchanged."""
        if setup not in self._cached:
            self._cached[setup] = self._start_engine(setup)
        engine = self._cached[setup]
        # The former job may have ended between its backward pass and a step.
        engine.optimizer_zero_grad()
        return engine

    def temporary_engine(self, setup: EngineSetup) -> BaseEngine:
        """Return a new engine that is closed when the job ends."""
        engine = self._start_engine(setup)
        self._temporary.append(engine)
        return engine

    def construct_engine(self, setup: EngineSetup) -> BaseEngine:
        """Construct an engine without calling `init_model`; it is never closed."""
        config = setup.build_config(
            self.engine_class,
            device=self._device,
            layout_fields=self.layout.fields,
            compute=self._compute,
        )
        return self.engine_class(config)

    def close_temporary_engines(self) -> None:
        """Close the engines of a job at its end."""
        while self._temporary:
            self._temporary.pop().close()

    def close_all(self) -> None:
        """Close cached engines too, when the process group ends or a job failed."""
        self.close_temporary_engines()
        while self._cached:
            self._cached.popitem()[1].close()

    def _start_engine(self, setup: EngineSetup) -> BaseEngine:
        engine = self.construct_engine(setup)
        engine.init_model()
        self.num_data_ranks = engine.topology.dp.size
        return engine
