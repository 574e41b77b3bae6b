"""MegatronEngine with TransformerEngine's layers as its default, for the conformance kit.

    python -m temper_engine_api.conformance \
        --engine tools.gpu.transformer_engine_engines:TransformerEngineEngine \
        --device cuda --compute bf16 --world-sizes 1

`TensorwiseEngine` and `BlockwiseEngine` multiply in float8 as well. Tests that configure float32
fail, because these layers refuse it, and with float8 so do tests that configure an adapter.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from temper_engine_api.specs import EngineConfig
from temper_engine_megatron.config import Float8Scaling, MegatronConfig
from temper_engine_megatron.engine import MegatronEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerEngineConfig(MegatronConfig):
    """MegatronConfig with another default."""

    layers: Literal["torch", "transformer_engine"] = "transformer_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorwiseConfig(TransformerEngineConfig):
    """MegatronConfig with other defaults."""

    float8: Float8Scaling = "tensorwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseConfig(TransformerEngineConfig):
    """MegatronConfig with other defaults."""

    float8: Float8Scaling = "blockwise"


class TransformerEngineEngine(MegatronEngine):
    """MegatronEngine with TransformerEngine's layers unless it is told otherwise."""

    config_class: ClassVar[type[EngineConfig]] = TransformerEngineConfig


class TensorwiseEngine(MegatronEngine):
    """MegatronEngine that multiplies in float8, with one scale per tensor."""

    config_class: ClassVar[type[EngineConfig]] = TensorwiseConfig


class BlockwiseEngine(MegatronEngine):
    """MegatronEngine that multiplies in float8, with scales per block."""

    config_class: ClassVar[type[EngineConfig]] = BlockwiseConfig
