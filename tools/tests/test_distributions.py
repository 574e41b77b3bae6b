"""Test that a wheel must contain all files of its sources, whatever they are called."""

import zipfile
from pathlib import Path

import pytest

from tools.distributions import missing_from_wheel

SOURCES = ("__init__.py", "py.typed", "conf/one.yaml", "data/rules.tsv", "data/trees.json")


@pytest.mark.parametrize("lost", SOURCES)
def test_a_file_of_the_sources_that_a_wheel_lost_is_named(tmp_path: Path, lost: str) -> None:
    inside = tmp_path / "example" / "src" / "temper_example"
    wheel = tmp_path / "temper_example-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr("temper_example-0.1.0.dist-info/licenses/LICENSE", "")
        for name in (*SOURCES, "__pycache__/one.pyc", ".mypy_cache/one.json"):
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            (inside / name).touch()
            if name in SOURCES and name != lost:
                written.write(inside / name, f"temper_example/{name}")
    assert missing_from_wheel(wheel, tmp_path / "example") == {f"temper_example/{lost}"}
