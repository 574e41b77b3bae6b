"""Fixtures to run the kit inside its own tests: all share one rank pool and one oracle."""

import gc
import sys
from pathlib import Path

import pytest

from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache

# Rank processes inherit sys.path and import the faulty engines by name.
sys.path.insert(0, str(Path(__file__).parent))

from kit_runner import Kit, SharedKitResources


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    shared = SharedKitResources(
        rank_pool=RankPool(2, folder=folder), oracle=OracleCache(folder=folder)
    )
    # Every run of the kit ends with two full garbage collections, which pytest makes to find
    # resources that were not closed. They need not look through the imported modules.
    gc.freeze()
    yield shared
    shared.rank_pool.close()


@pytest.fixture
def kit(shared, tmp_path):
    return Kit(shared=shared, folder=tmp_path)
