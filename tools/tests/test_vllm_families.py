"""Test which families are measured in vLLM, and when the tool fails, without vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from tools import vllm_families
from tools.vllm_families import RECORD, STATE, compare, list_failures, measure_missing

EXACT = {"difference": 0.0}
WRONG = {"difference": 1.0}
VERSIONS = {"vllm": "1"}


class Measurement:
    """Results of vLLM, which end with an error at the first family without one."""

    def __init__(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        self.results = results
        self.requested: list[str] = []

    def __call__(
        self, families: Sequence[str], **_: object
    ) -> Iterator[tuple[Mapping[str, str], str, Mapping[str, Any]]]:
        self.requested = list(families)
        for family in families:
            yield VERSIONS, family, self.results[family]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / RECORD).parent.mkdir(parents=True)
    return tmp_path


def test_stopped_run_continues_and_keeps_its_failures(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others = FAMILIES
    stopped = Measurement({first: WRONG, second: EXACT})
    monkeypatch.setattr(vllm_families, "measure", stopped)
    with pytest.raises(KeyError, match=others[0]):
        measure_missing([], torchvision=None, root=root)
    monkeypatch.setattr(vllm_families, "measure", rest := Measurement(dict.fromkeys(others, EXACT)))
    assert measure_missing([], torchvision=None, root=root) == [f"{first} differs by 1.0e+00"]
    assert rest.requested == others
    assert json.loads((root / RECORD).read_text())["families"].keys() == FAMILIES.keys()
    assert not (root / STATE).exists()


def test_named_families_are_measured_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_families, "measure", Measurement({"mixtral": EXACT}))
    for _ in range(2):
        assert measure_missing(["mixtral"], torchvision=None, root=root) == []
    assert not (root / STATE).exists()


@pytest.mark.parametrize(
    ("old", "new", "failure"),
    [
        ({}, {"difference": 0.9e-5}, []),
        ({}, {"difference": 1.1e-5}, ["mixtral differs by 1.1e-05"]),
        ({}, {"difference": float("nan")}, ["mixtral differs by nan"]),
        ({}, {"difference": 0.1, "rounding": 0.06}, []),
        ({}, {"difference": 0.13, "rounding": 0.06}, ["mixtral differs by 1.3e-01"]),
        ({}, {"error": "no kernel"}, []),
        (EXACT, {"error": "no kernel"}, ["mixtral does not load any more: no kernel"]),
    ],
)
def test_family_that_differs_or_no_longer_loads_fails(
    old: dict[str, Any], new: dict[str, Any], failure: list[str]
) -> None:
    assert list_failures({"mixtral": old}, {"mixtral": new}) == failure


def test_one_token_with_other_experts_moves_the_mean_only() -> None:
    expected = torch.zeros(5)
    actual = torch.tensor([0.1, 0.1, 0.2, 0.1, 4.5])
    assert compare(actual, expected, is_median=False) == pytest.approx(1.0)
    assert compare(actual, expected, is_median=True) == pytest.approx(0.1)
