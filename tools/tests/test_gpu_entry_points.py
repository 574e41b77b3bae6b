"""GPU scripts find the engines of a checkout that is not installed."""

import os
import sys
from importlib.metadata import PathDistribution, distributions, entry_points, version

import pytest

from tools.gpu import engine_fsdp


def test_engines_of_a_checkout_are_found_in_this_process_and_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "sources")
    # As on a machine where the engines are not installed.
    monkeypatch.setattr(engine_fsdp, "entry_points", lambda **_: ())
    before = list(sys.path)
    with engine_fsdp.provide_entry_points():
        folder = os.environ["PYTHONPATH"].removesuffix(f"{os.pathsep}sources")
        assert sys.path == [folder, *before]
        (entry_point,) = entry_points(group="temper.engines", name="megatron")
        assert isinstance(entry_point.dist, PathDistribution)
        assert str(entry_point.dist.locate_file("")) == folder
        assert entry_point.value.startswith("temper_engine_megatron.")
        versions = {each.name: each.version for each in distributions(path=[folder])}
        # temper-train prints the version of its package.
        assert versions == {
            "temper-engine-api": version("temper-engine-api"),
            "temper-engine-fsdp": version("temper-engine-fsdp"),
            "temper-engine-megatron": version("temper-engine-megatron"),
            "temper-trainer": version("temper-trainer"),
        }
    assert sys.path == before
    assert os.environ["PYTHONPATH"] == "sources"
    assert not os.path.exists(folder)


def test_installed_engines_are_used_as_they_are() -> None:
    before = list(sys.path)
    with engine_fsdp.provide_entry_points():
        assert sys.path == before
