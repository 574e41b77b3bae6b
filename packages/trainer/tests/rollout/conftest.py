"""Reference models and samplers with the same weights, made once per session."""

from functools import cache
from pathlib import Path

import pytest

from packages.trainer.tests.rollout.models_for_tests import Pair, make_pair


class Pairs:
    """A reference model and its directory by architecture, made when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.get = cache(lambda name: make_pair(name, directory / name))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def qwen2(pairs: Pairs) -> Pair:
    pair: Pair = pairs.get("qwen2")
    return pair
