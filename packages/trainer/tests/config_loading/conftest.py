"""Overrides of a small valid configuration, and temporary distributions with entry points."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RL = ["data.train.paths=[train.jsonl]", "actor.engine.model.path=model"]
SFT = [*RL, "task=sft"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a distribution with one module and one entry point on the path for one test."""

    def install_distribution(entry_points: str, module: str) -> None:
        info = tmp_path / "third_party-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        (tmp_path / "third_party_engine.py").write_text(module)
        monkeypatch.syspath_prepend(str(tmp_path))
        # An earlier test may have imported another module of this name.
        monkeypatch.delitem(sys.modules, "third_party_engine", raising=False)

    return install_distribution
