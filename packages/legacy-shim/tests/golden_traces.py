"""Location and reader of the golden traces. They come from running the genuine classes.

See their README.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

GOLDEN = Path(os.environ["TEMPER_TEST_DATA"]) / "legacy" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"needs the golden traces in {GOLDEN}: set TEMPER_TEST_DATA"
)


@cache
def tensors_of(path: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@cache
def json_of(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def core_calls(version: str, group: str) -> list[str]:
    path = GOLDEN / f"core_{version}" / group / "case.json"
    return list(json_of(path)["calls"]) if path.exists() else []  # type: ignore[call-overload]


def core_inputs() -> Mapping[str, Tensor]:
    return tensors_of(GOLDEN / "inputs" / "core_inputs.safetensors")


def assert_numbers(
    result: Mapping[str, float], expected: Mapping[str, object], *, tolerance: float = 2e-5
) -> None:
    """Compare names and numbers; NaN and infinities are words in the files."""
    assert set(result) == set(expected)
    for name, value in expected.items():
        required = float(value)  # type: ignore[arg-type]
        assert result[name] == pytest.approx(required, rel=tolerance, abs=tolerance, nan_ok=True), (
            name
        )


def assert_close(result: Tensor, expected: Tensor, *, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
