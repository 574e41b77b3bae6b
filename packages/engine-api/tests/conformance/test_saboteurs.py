"""Every engine that is broken on purpose is caught, by the laws that say so."""

import inspect

import pytest
import saboteurs_of_numbers
import saboteurs_of_replicas
import saboteurs_of_state
from data_parallel_oracle import DataParallelOracle
from saboteur_table import PAGE, SABOTEURS
from staged_oracle import StagedOracle

from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda saboteur: saboteur.engine.__name__)
def test_a_broken_engine_is_caught_by_its_laws(kit, saboteur):
    for law in saboteur.laws:
        found = kit.run(saboteur.name, "--maxfail=1", tests=[law], **saboteur.where)
        assert found.broken, f"{law} holds for {saboteur.name}: {saboteur.engine.__doc__}"


def test_every_broken_engine_is_in_the_table():
    classes = [
        member
        for module in (saboteurs_of_numbers, saboteurs_of_replicas, saboteurs_of_state)
        for name, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert {saboteur.engine for saboteur in SABOTEURS} == set(classes)


def test_laws_that_catch_saboteurs_at_one_rank_hold_for_the_oracle(kit):
    laws = sorted(
        {
            law
            for saboteur in SABOTEURS
            if saboteur.world_size == 1 and not saboteur.layout
            for law in saboteur.laws
        }
    )
    found = kit.run(
        f"{OracleEngine.__module__}:{OracleEngine.__name__}", tests=laws, world_sizes="1"
    )
    assert not found.broken
    assert {law.partition("[")[0] for law in found.held} == {law.partition("::")[2] for law in laws}


def test_laws_that_catch_saboteurs_at_two_ranks_hold_for_the_engine_that_they_break(kit):
    laws = sorted(
        {law for saboteur in SABOTEURS if saboteur.world_size == 2 for law in saboteur.laws}
    )
    name = f"{DataParallelOracle.__module__}:{DataParallelOracle.__name__}"
    found = kit.run(name, tests=laws, world_sizes="2")
    assert not found.broken
    assert {law.partition("[")[0] for law in found.held} == {law.partition("::")[2] for law in laws}


@pytest.mark.parametrize(
    "layout", sorted({saboteur.layout for saboteur in SABOTEURS if saboteur.layout})
)
def test_laws_that_catch_saboteurs_in_a_layout_hold_for_the_engine_that_they_break(kit, layout):
    laws = sorted(
        {law for saboteur in SABOTEURS if saboteur.layout == layout for law in saboteur.laws}
    )
    name = f"{StagedOracle.__module__}:{StagedOracle.__name__}"
    found = kit.run(name, tests=laws, layouts=layout)
    assert not found.broken
    assert {law.partition("[")[0] for law in found.held} == {law.partition("::")[2] for law in laws}


def test_the_published_table_names_every_broken_engine_and_its_laws():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    published = {cells[1].strip(): cells[4] for cells in rows}
    assert published.keys() == {saboteur.engine.__name__ for saboteur in SABOTEURS}
    for saboteur in SABOTEURS:
        for law in saboteur.laws:
            assert f"**{law.partition('::')[2]}**" in published[saboteur.engine.__name__]
