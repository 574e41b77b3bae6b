"""Test the comparison of two checkouts' numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools.equal_numbers import (
    RENAMES,
    compare_kit,
    compare_runs,
    find_new_name,
    read_renames,
)


def write_run(folder: Path, *, metrics: dict[str, float], weight: float) -> Path:
    (folder / "huggingface").mkdir(parents=True)
    row = {"step": 1, "phase": "rl", "time_s": 5.0, **metrics}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    save_file({"w": torch.tensor([weight])}, folder / "huggingface" / "model.safetensors")
    return folder


def test_renamed_metrics_are_compared_and_times_are_not(tmp_path: Path) -> None:
    old = write_run(
        tmp_path / "old", metrics={"rollout/cut_share": 0.5, "time/step_s": 1.0}, weight=1.0
    )
    new = write_run(
        tmp_path / "new",
        metrics={"rollout/truncated_fraction": 0.5, "time/step_s": 2.0},
        weight=1.0,
    )
    renames = read_renames(RENAMES.read_text())
    metrics, tensors, _ = compare_runs(old, new, renames=renames)
    # The step, the phase and the renamed metric.
    assert metrics == "new: 3 metric values of 1 rows equal, 0 differ []; without a new name: []"
    assert tensors == "new: 1 of 1 tensors in huggingface equal []"


def test_last_bit_of_a_metric_or_a_tensor_is_seen(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", metrics={"actor/loss": 0.1}, weight=1.0)
    new = write_run(
        tmp_path / "new", metrics={"actor/loss": 0.10000000000000002}, weight=1.0 + 2**-23
    )
    metrics, tensors, _ = compare_runs(old, new, renames={})
    assert "1 differ ['actor/loss at rl step 1']" in metrics
    assert "0 of 1 tensors in huggingface equal" in tensors


@pytest.mark.parametrize(
    ("name", "new_names", "expected"),
    [("a", {"a"}, "a"), ("a", {"c"}, "c"), ("a", {"d"}, "c"), ("x", {"y"}, "y")],
)
def test_name_is_followed_through_several_renames(
    name: str, new_names: set[str], expected: str
) -> None:
    renames = read_renames(
        "| old | new |\n|---|---|\n| `a` | `b` |\n| `b`, `x` | `c`, `y` |\n| `one`, `two` | `z` |"
    )
    assert renames == {"a": "b", "b": "c", "x": "y"}
    assert find_new_name(name, renames=renames, new_names=new_names) == expected


def test_outcomes_of_renamed_conformance_tests_are_compared(tmp_path: Path) -> None:
    old, new = tmp_path / "fsdp.xml", tmp_path / "new.xml"
    old.write_text(
        '<testsuite><testcase name="test_a[1-old_id]"/><testcase name="test_gone"/>'
        '<testcase name="test_b"><failure/></testcase></testsuite>'
    )
    new.write_text(
        '<testsuite><testcase name="test_c[1-new_id]"/><testcase name="test_b"/></testsuite>'
    )
    line = compare_kit(old, new, renames={"test_a": "test_c", "old_id": "new_id"})
    assert "1 of 3 tests have the same outcome, 1 differ ['test_b']" in line
    assert "without a new name: ['test_gone']" in line
