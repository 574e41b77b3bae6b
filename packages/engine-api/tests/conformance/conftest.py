"""The kit runs inside its own tests: one fleet of two ranks and one oracle for all of them."""

import sys
from pathlib import Path

import pytest

from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache

# Rank processes import the broken engines by name; they start with this session's path.
sys.path.insert(0, str(Path(__file__).parent))

from kit_runner import Kit, SharedKitResources


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    shared = SharedKitResources(
        rank_pool=RankPool(2, folder=folder), oracle=OracleCache(folder=folder)
    )
    yield shared
    shared.rank_pool.close()


@pytest.fixture
def kit(shared, tmp_path):
    return Kit(shared=shared, folder=tmp_path)
