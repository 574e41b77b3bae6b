"""Test that every faulty engine is caught by the conformance tests of its table row."""

import inspect

import faulty_numerics
import faulty_replicas
import faulty_state
import pytest
from data_parallel_oracle import DataParallelOracle
from faulty_engine_table import FAULTY_ENGINES, PAGE
from staged_oracle import StagedOracle

from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine


@pytest.mark.parametrize(
    "faulty_engine", FAULTY_ENGINES, ids=lambda faulty_engine: faulty_engine.engine.__name__
)
def test_each_faulty_engine_fails_its_tests(kit, faulty_engine):
    for test in faulty_engine.tests:
        outcomes = kit.run(faulty_engine.name, "--maxfail=1", tests=[test], **faulty_engine.where)
        assert outcomes.failed, (
            f"{test} passed on {faulty_engine.name}: {faulty_engine.engine.__doc__}"
        )


def test_every_faulty_engine_is_in_the_table():
    classes = [
        member
        for module in (faulty_numerics, faulty_replicas, faulty_state)
        for name, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert {faulty_engine.engine for faulty_engine in FAULTY_ENGINES} == set(classes)


def test_the_oracle_passes_the_tests_that_catch_faulty_engines(kit):
    tests = sorted(
        {
            test
            for faulty_engine in FAULTY_ENGINES
            if faulty_engine.world_size == 1 and not faulty_engine.layout
            for test in faulty_engine.tests
        }
    )
    outcomes = kit.run(
        f"{OracleEngine.__module__}:{OracleEngine.__name__}", tests=tests, world_sizes="1"
    )
    assert not outcomes.failed
    assert {test.partition("[")[0] for test in outcomes.passed} == {
        test.partition("::")[2] for test in tests
    }


def test_the_data_parallel_oracle_passes_the_tests_that_catch_faulty_engines(kit):
    tests = sorted(
        {
            test
            for faulty_engine in FAULTY_ENGINES
            if faulty_engine.world_size == 2
            for test in faulty_engine.tests
        }
    )
    name = f"{DataParallelOracle.__module__}:{DataParallelOracle.__name__}"
    outcomes = kit.run(name, tests=tests, world_sizes="2")
    assert not outcomes.failed
    assert {test.partition("[")[0] for test in outcomes.passed} == {
        test.partition("::")[2] for test in tests
    }


@pytest.mark.parametrize(
    "layout",
    sorted({faulty_engine.layout for faulty_engine in FAULTY_ENGINES if faulty_engine.layout}),
)
def test_the_staged_oracle_passes_the_tests_that_catch_faulty_engines(kit, layout):
    tests = sorted(
        {
            test
            for faulty_engine in FAULTY_ENGINES
            if faulty_engine.layout == layout
            for test in faulty_engine.tests
        }
    )
    name = f"{StagedOracle.__module__}:{StagedOracle.__name__}"
    outcomes = kit.run(name, tests=tests, layouts=layout)
    assert not outcomes.failed
    assert {test.partition("[")[0] for test in outcomes.passed} == {
        test.partition("::")[2] for test in tests
    }


def test_the_published_table_names_every_faulty_engine_and_its_tests():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    published = {cells[1].strip(): cells[4] for cells in rows}
    assert published.keys() == {faulty_engine.engine.__name__ for faulty_engine in FAULTY_ENGINES}
    for faulty_engine in FAULTY_ENGINES:
        for test in faulty_engine.tests:
            assert f"**{test.partition('::')[2]}**" in published[faulty_engine.engine.__name__]
