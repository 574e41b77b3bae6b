"""Test that every faulty engine is caught by the conformance tests of its table row."""

import inspect

import faulty_adapters
import faulty_copies
import faulty_failures
import faulty_inputs
import faulty_numerics
import faulty_replicas
import faulty_state
import faulty_training
import pytest
from faulty_engine_table import FAULTY_ENGINES, PAGE, read_rows, select_engines


def mark_repetitions():
    """Mark the engines as nightly all of whose tests an earlier engine fails, too."""
    seen, marked = set(), []
    for faulty_engine in FAULTY_ENGINES:
        tests = {test.partition("[")[0] for test in faulty_engine.tests}
        # Nightly: other bugs that a test finds. Every pull request shows that each test can fail.
        marks = [pytest.mark.nightly] if tests <= seen else []
        seen |= tests
        marked.append(pytest.param(faulty_engine, id=faulty_engine.engine.__name__, marks=marks))
    return marked


@pytest.mark.parametrize("faulty_engine", mark_repetitions())
def test_each_faulty_engine_fails_its_tests(kit, faulty_engine):
    for test in faulty_engine.tests:
        outcomes = kit.run(faulty_engine.name, "--maxfail=1", tests=[test], **faulty_engine.where)
        assert outcomes.failed, (
            f"{test} passed on {faulty_engine.name}: {faulty_engine.engine.__doc__}"
        )


def test_every_faulty_engine_is_in_the_table():
    classes = [
        member
        for module in (
            faulty_adapters,
            faulty_copies,
            faulty_failures,
            faulty_inputs,
            faulty_numerics,
            faulty_replicas,
            faulty_state,
            faulty_training,
        )
        for name, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert {faulty_engine.engine for faulty_engine in FAULTY_ENGINES} == set(classes)


# Nightly, because it repeats up to a hundred tests: those of the kit change more often than the
# oracle, and the step kit-on-fsdp runs them on a healthy engine in every pull request.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("healthy", "where"),
    sorted({(each.healthy, tuple(each.where.items())) for each in FAULTY_ENGINES}),
    ids=lambda value: value if isinstance(value, str) else value[0][1],
)
def test_the_engine_without_the_bug_passes_the_tests(kit, healthy, where):
    tests = sorted(
        {
            test
            for each in FAULTY_ENGINES
            if (each.healthy, tuple(each.where.items())) == (healthy, where)
            for test in each.tests
        }
    )
    outcomes = kit.run(healthy, tests=tests, **dict(where))
    assert not outcomes.failed
    assert {test.partition("[")[0] for test in outcomes.passed} == {
        test.partition("::")[2] for test in tests
    }


def test_incomplete_rows_are_selected():
    complete, incomplete, *others = (each.engine.__name__ for each in FAULTY_ENGINES)
    rows = read_rows(
        f"# Title\n\n| engine | bug | ranks or layout | failing tests |\n|---|---|---|---|\n"
        f"| {complete} | Bug. | 1 | **test_a** (1) |\n"
        f"| {incomplete} | Bug. | 1 | **test_a** (1), others not run |\n"
    )

    def names(*arguments):
        return [each.engine.__name__ for each in select_engines(arguments, rows=rows)]

    assert names("--incomplete") == [incomplete]
    assert names("--incomplete", complete) == [complete, incomplete]
    assert names("--required", others[0]) == [others[0]]
    assert len(names()) == len(FAULTY_ENGINES)


def test_the_published_table_names_every_faulty_engine_and_its_tests():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    published = {cells[1].strip(): cells[4] for cells in rows}
    assert published.keys() == {faulty_engine.engine.__name__ for faulty_engine in FAULTY_ENGINES}
    for faulty_engine in FAULTY_ENGINES:
        for test in faulty_engine.tests:
            assert f"**{test.partition('::')[2]}**" in published[faulty_engine.engine.__name__]
