"""FSDPEngine with float8 products as its default, so that the conformance kit tests them.

    python -m temper_engine_api.conformance --engine tools.gpu.float8_engine:Float8Engine \
        --device cuda --compute bf16

`TensorwiseEngine` has one scale per tensor instead of one per row.
Tests that configure float32 or an adapter fail, because float8 refuses both.
"""

from dataclasses import dataclass
from typing import ClassVar

from temper_engine_api.specs import EngineConfig
from temper_engine_fsdp.config import Float8Scaling, FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Config(FSDPConfig):
    """FSDPConfig with another default."""

    float8: Float8Scaling = "rowwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorwiseConfig(FSDPConfig):
    """FSDPConfig with another default."""

    float8: Float8Scaling = "tensorwise"


class Float8Engine(FSDPEngine):
    """FSDPEngine that multiplies in float8 unless it is told otherwise."""

    config_class: ClassVar[type[EngineConfig]] = Float8Config


class TensorwiseEngine(FSDPEngine):
    """FSDPEngine that multiplies in float8 with one scale per tensor, unless told otherwise."""

    config_class: ClassVar[type[EngineConfig]] = TensorwiseConfig
