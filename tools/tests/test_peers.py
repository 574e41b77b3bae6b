"""Running other projects' tests: outcomes, adapters, and comparisons that can fail."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tools.peers.__main__ import _classify, main
from tools.peers.comparisons import Comparison, measure
from tools.peers.padded import build_batch, flatten, unflatten
from tools.peers.random_data import make_data, stretch_ratios
from tools.peers.suites import SUITES


def test_outcomes_are_classified_by_the_committed_reasons() -> None:
    outcomes = {
        "tests/test_a.py::test_sum": {"outcome": "passed", "detail": ""},
        "tests/test_a.py::test_mean": {"outcome": "failed", "detail": "2 != 3"},
        "tests/test_a.py::test_names[x]": {"outcome": "failed", "detail": "KeyError"},
        "tests/test_b.py::test_old": {"outcome": "passed", "detail": ""},
        "tests/test_b.py::test_dro": {
            "outcome": "skipped",
            "detail": "Skipped: no counterpart: compute_dro",
        },
    }
    reasons = {"::test_names*": "names", "test_b.py::test_old": "was different"}
    result = _classify(outcomes, reasons=reasons, commit="abc")
    assert result.passed == 2
    assert result.no_counterpart == ("compute_dro",)
    assert result.deliberate == {"tests/test_a.py::test_names[x]": "names"}
    assert result.failed == {"tests/test_a.py::test_mean": "2 != 3"}
    assert result.unexpected == ("tests/test_b.py::test_old",)


def test_every_adapter_exists() -> None:
    for suite in SUITES.values():
        for replaced in (*suite.replaced.values(), suite.replaced_in_tests):
            for adapter in filter(None, replaced.values()):
                module, _, name = adapter.partition(":")
                assert callable(getattr(importlib.import_module(module), name))


def test_rows_get_one_prompt_token() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    column = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    batch = build_batch(mask, columns={"advantages": column})
    assert batch.loss_mask.tolist() == [False, True, False, False, True, True]
    assert flatten(column).tolist() == [0.0, 1.0, 2.0, 0.0, 3.0, 4.0]
    assert torch.equal(unflatten(batch.columns["advantages"], mask), column)


@pytest.mark.parametrize(
    ("factor", "power", "agrees"), [(1.0, 1, True), (1.001, 1, False), (1.0, 2, False)]
)
def test_comparison_finds_another_value_or_gradient(
    factor: float, power: int, agrees: bool
) -> None:
    comparison = Comparison(
        project="none",
        module="none",
        name="square",
        compute=lambda module, data: (
            # With power 2 the value is the same, and the gradient is not.
            data.logprobs.square() if power == 1 else data.logprobs * data.logprobs.detach(),
            module.square(data.logprobs),
        ),
    )
    module = SimpleNamespace(square=lambda x: factor * x.square())
    assert measure(comparison, module).agrees is agrees


@pytest.mark.parametrize(("difference", "agrees"), [(1e-7, True), (1e-6, False)])
def test_difference_of_a_loss_near_zero_is_relative_to_its_terms(
    difference: float, agrees: bool
) -> None:
    comparison = Comparison(
        project="none",
        module="none",
        name="loss",
        compute=lambda module, data: (torch.tensor(1e-4 + difference), torch.tensor(1e-4)),
    )
    assert measure(comparison, None).agrees is agrees


def test_stretched_data_have_extreme_ratios_and_scaled_gradients() -> None:
    data = make_data(0)
    stretched = stretch_ratios(data)
    assert 50 < float((stretched.logprobs - stretched.old).detach().abs().max()) < 90
    (gradient,) = torch.autograd.grad(stretched.logprobs.sum(), data.logprobs)
    assert gradient.unique().tolist() == [50.0]


def test_data_has_an_empty_row_and_depends_only_on_the_seed() -> None:
    data = make_data(1)
    assert not data.mask[-1].any()
    assert data.mask[:-1].any(dim=1).all()
    assert torch.equal(data.old, make_data(1).old)
    assert not torch.equal(data.old, make_data(2).old)


def test_unknown_project_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trlx=/nowhere"]) == 2
    assert "trlx given: give checkouts as NAME=PATH, of verl" in capsys.readouterr().out
