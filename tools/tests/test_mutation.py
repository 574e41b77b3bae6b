"""Test that mutants are applied where they were drawn, and that results of runs are merged."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutation.__main__ import main
from tools.mutation.draw import OUTSIDE_CALLS, OUTSIDE_FUNCTIONS
from tools.mutation.mutation_page import PAGE, RECORD, render_page
from tools.mutation.sample import (
    Mutant,
    hash_context,
    locate_sample,
    read_equivalents,
    read_sample,
)
from tools.mutation.sessions import MODULES, SESSIONS, SOURCES
from tools.mutation.state import (
    MutantResult,
    has_finished,
    hash_sources,
    read_states,
    write_state,
)

MUTANT = Mutant(
    id="0123abcd",
    module="engine.py",
    operator="NumberReplacer",
    occurrence=0,
    line=2,
    old=("b = 1",),
    new=("b = 2",),
    context="function",
)


def test_mutant_changes_its_lines_only() -> None:
    assert MUTANT.apply("a = 0\nb = 1\nc = 1\n") == "a = 0\nb = 2\nc = 1\n"


def test_mutant_of_other_sources_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"engine\.py has changed at line 2 .* draw"):
        MUTANT.apply("b = 1\na = 0\n")


def test_mutant_is_located_at_its_new_line() -> None:
    source = "a = 0\n# comment\n\nb = 1\n"
    moved = MUTANT.locate(source)
    assert moved == replace(MUTANT, line=4, context=hash_context(source, line=4))
    assert MUTANT.locate("a = 0\nb = 3\n") is None


def test_mutant_is_located_in_its_function_and_not_at_nearer_equal_lines() -> None:
    source = "def f():\n    b = 1\n    return b\n\ndef g():\n    b = 1\n    return -b\n"
    mutant = replace(MUTANT, old=("    b = 1",), line=6, context=hash_context(source, line=6))
    # With three lines above, the equal line of f is at line 5, which is nearer to line 6 than 9.
    moved = mutant.locate("\n\n\n" + source)
    assert moved == replace(mutant, line=9)


def test_context_is_the_code_of_the_innermost_function() -> None:
    source = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    documented = source.replace("return 1", '"""Return one."""\n\n        return 1  # one')
    assert hash_context(documented, line=5) == hash_context(source, line=3)
    assert hash_context(source.replace("2", "3"), line=3) == hash_context(source, line=3)
    assert hash_context(source.replace("1", "3"), line=3) != hash_context(source, line=3)


def test_sampled_mutants_are_at_their_recorded_lines() -> None:
    mutants = read_sample()
    for mutant in mutants:
        ast.parse(mutant.apply((SOURCES / mutant.module).read_text()))
    changed = [
        (mutant.id, mutant.module)
        for mutant, current in zip(mutants, locate_sample(mutants), strict=True)
        if mutant != current
    ]
    assert not changed, "the sample is not that of the sources: `python -m tools.mutation locate`"


def test_page_has_the_sample_and_the_recorded_results() -> None:
    mutants = read_sample()
    results = {name: MutantResult(**row) for name, row in json.loads(RECORD.read_text()).items()}
    contexts = {mutant.id: mutant.context for mutant in mutants}
    assert {name: result.context for name, result in results.items()}.items() <= contexts.items()
    assert render_page(mutants, results, read_equivalents()) in PAGE.read_text()


def test_finished_result_wins_over_an_unfinished_one(tmp_path: Path) -> None:
    begun = MutantResult(sources=hash_sources(), passed={"one-rank": ["1-rank test_a"]})
    ended = MutantResult(sources=hash_sources(), outcome="survived")
    for name, result in (("a", begun), ("b", ended), ("c", begun)):
        write_state(tmp_path / f"{name}.json", {MUTANT.id: result})
    paths = [tmp_path / f"{name}.json" for name in "abc"]
    assert read_states(paths, mutants=[MUTANT]) == {MUTANT.id: ended}


def test_detected_mutants_stay_detected_while_their_function_is_the_same(tmp_path: Path) -> None:
    detected = MutantResult(context=MUTANT.context, sources="older", outcome="detected")
    path = tmp_path / "state.json"
    write_state(path, {MUTANT.id: detected})
    assert read_states([path], mutants=[MUTANT]) == {MUTANT.id: detected}
    assert read_states([path], mutants=[replace(MUTANT, context="changed")]) == {}


def test_survivors_run_again_with_another_kit(tmp_path: Path) -> None:
    survivor = MutantResult(context=MUTANT.context, sources="older", outcome="survived")
    path = tmp_path / "state.json"
    write_state(path, {MUTANT.id: survivor})
    assert read_states([path], mutants=[MUTANT]) == {}


def test_run_has_finished_when_every_mutant_has_a_result(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert not has_finished(path, ["a"])
    write_state(path, {"a": MutantResult(outcome="detected"), "b": MutantResult()})
    assert has_finished(path, ["a"])
    assert not has_finished(path, ["a", "b"])
    assert not has_finished(path, ["a", "c"])


def test_page_counts_mutants_by_module_and_lists_each() -> None:
    other = replace(MUTANT, id="ffff0000", line=9)
    result = MutantResult(
        outcome="detected", layout="1-rank", test="test_a[1-rank]", detail="1 != 2"
    )
    page = render_page(
        [MUTANT, other], {MUTANT.id: result}, {other.id: ("equivalent", "b is not read.")}
    )
    assert "| `engine.py` | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in page
    assert "| `b = 1` becomes `b = 2` | 1-rank | `test_a` |" in page
    assert "| ffff0000 | `engine.py`, line 9 | `b = 1` becomes `b = 2` | equivalent | b is" in page


def test_page_counts_unfinished_mutants_apart_from_survivors() -> None:
    mutants = [replace(MUTANT, id=f"{number}" * 8) for number in range(3)]
    detected, survived = MutantResult(outcome="detected"), MutantResult(outcome="survived")
    page = render_page(mutants, {"0" * 8: detected, "1" * 8: survived}, {})
    assert "| `engine.py` | 3 | 1 | 0 | 0 | 0 | 1 | 1 |" in page
    assert "Detected: 1 of 3 (33 %). Survived a complete run: 1." in page
    assert "Not run to the end since their functions changed: 1." in page


def test_page_rounds_the_detected_fraction_down() -> None:
    mutants = [replace(MUTANT, id=f"{number}" * 8) for number in range(3)]
    results = {mutant.id: MutantResult(outcome="detected") for mutant in mutants[:2]}
    assert "Detected: 2 of 3 (66 %)." in render_page(mutants, results, {})


def test_sample_and_reasons_are_complete() -> None:
    mutants = read_sample()
    assert len({mutant.id for mutant in mutants}) == len(mutants) >= 60
    assert {mutant.module for mutant in mutants} <= set(MODULES)
    assert read_equivalents().keys() <= {mutant.id for mutant in mutants}
    assert all(
        kind in ("equivalent", "outside", "cuda") and reason
        for kind, reason in read_equivalents().values()
    )


def test_excluded_functions_and_calls_exist() -> None:
    code = "\n".join((SOURCES / module).read_text() for module in MODULES)
    assert all(f"def {name}(" in code for name in OUTSIDE_FUNCTIONS)
    assert all(f"{name}(" in code for name in OUTSIDE_CALLS)


def test_modules_and_layouts_exist() -> None:
    from temper_engine_fsdp.layouts import LAYOUTS

    assert all((SOURCES / module).exists() for module in MODULES)
    known = {layout.name for layout in LAYOUTS} | {"1-rank", "2-ranks"}
    assert all(session.layouts.keys() <= known for session in SESSIONS.values())


# Nightly: runs a part of the conformance kit in a process.
@pytest.mark.nightly
def test_kit_detects_an_optimizer_that_never_decays(tmp_path: Path) -> None:
    decays = next(mutant for mutant in read_sample() if mutant.id == "0d031a6b")
    assert main(["run", "--out", str(tmp_path), "--skip-original", "--only", decays.id]) == 0
    (row,) = json.loads((tmp_path / "mutation.json").read_text()).values()
    assert row["outcome"] == "detected"
