"""Test the page about other projects' engines and their adapters, without those projects."""

import subprocess
import sys

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.results import ConformanceResult, ConformanceRun, Outcome
from tools.other_engines import ENGINES
from tools.other_engines.adapter import align_to_labels
from tools.other_engines.engine_tables import PAGE, ROOT, list_failed_tests, read_runs, update_page
from tools.other_engines.transformers_trainer import pad_inputs


def read_section(project: str) -> str:
    """Return the page's text about the failed tests of a project."""
    return PAGE.read_text().partition(f"### {project}\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("project", ENGINES)
def test_page_names_exactly_the_failed_tests(project: str) -> None:
    failed = list_failed_tests(read_runs()[project])
    named = [part for part in read_section(project).split("`") if part.startswith("test_")]
    assert sorted(named) == sorted(failed)


def test_tables_of_the_page_are_those_of_the_results() -> None:
    text = PAGE.read_text()
    assert update_page(text, read_runs()) == text


def test_table_counts_passed_and_failed_tests_of_a_group() -> None:
    results = [
        ConformanceResult(test="test_a[1]", group="update", layout="1-rank", outcome=outcome)
        for outcome in (Outcome.PASSED, Outcome.PASSED, Outcome.FAILED)
    ]
    run = ConformanceRun(engine="e", layouts=("1-rank",), versions={}, results=results)
    page = update_page(PAGE.read_text(), {"verl": run})
    assert "| 2 passed, 1 failed |\n" in page.partition("| update |")[2]
    assert "| gradient |" not in page


def test_page_without_its_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="the page needs the lines"):
        update_page("# A page\n", {})


def test_adapters_are_imported_without_the_other_projects() -> None:
    modules = ", ".join(engine.partition(":")[0] for engine in ENGINES.values())
    code = (
        f"import sys, {modules}\n"
        "print(sorted({'verl', 'tensordict', 'accelerate', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_values_move_from_the_predicting_position_to_the_token() -> None:
    # Two sequences, of 3 and 2 tokens; position 2 predicts nothing in its own sequence.
    column = torch.tensor([1.0, 2.0, 9.0, 3.0, 9.0])
    mask = torch.tensor([False, True, True, False, True])
    assert align_to_labels(column, mask).tolist() == [0.0, 1.0, 2.0, 0.0, 3.0]


def test_micro_batch_is_padded_on_the_right() -> None:
    tokens = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    batch = from_sequences(tokens, loss_masks=[torch.arange(len(t)) > 0 for t in tokens])
    inputs = pad_inputs(batch)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
