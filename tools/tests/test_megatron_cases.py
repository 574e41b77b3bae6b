"""Test the small models whose gradient norms are measured on GPUs."""

import pytest

from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_megatron.config import MegatronConfig
from tools.gpu.megatron_cases import CASES, LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_accepts_every_case_that_a_layout_supports(layout: str) -> None:
    for case in CASES:
        if case.supports(layout):
            # Raises ConfigError if the engine refuses it.
            MegatronConfig(
                model=ModelSpec(architecture=case.architecture),
                optimizer=OptimizerSpec(lr=1e-3),
                device="cuda",
                precision=PrecisionSpec(compute=case.compute),
                lora=case.lora,
                layers=case.layers,
                float8=case.float8,
                **LAYOUTS[layout],  # type: ignore[arg-type]
            )
