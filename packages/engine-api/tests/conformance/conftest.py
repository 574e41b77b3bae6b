"""The kit runs inside its own tests: one fleet of two ranks and one oracle for all of them."""

import sys
from pathlib import Path

import pytest

from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache

# Rank processes import the broken engines by name; they start with this session's path.
sys.path.insert(0, str(Path(__file__).parent))

from kit_runner import Kit, Lent


@pytest.fixture(scope="session")
def lent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    lent = Lent(rank_pool=RankPool(2, folder=folder), oracle=OracleCache(folder=folder))
    yield lent
    lent.rank_pool.close()


@pytest.fixture
def kit(lent, tmp_path):
    return Kit(lent=lent, folder=tmp_path)
