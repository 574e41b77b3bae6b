"""Test that a wheel must contain all source files, including data files."""

import zipfile
from pathlib import Path

import pytest

from tools.distributions import find_missing_files

SOURCES = ("__init__.py", "py.typed", "conf/one.yaml", "data/rules.tsv", "data/trees.json")


@pytest.mark.parametrize("lost", SOURCES)
def test_source_file_missing_from_the_wheel_is_reported(tmp_path: Path, lost: str) -> None:
    inside = tmp_path / "example" / "src" / "temper_example"
    wheel = tmp_path / "temper_example-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr("temper_example-0.1.0.dist-info/licenses/LICENSE", "")
        for name in (*SOURCES, "__pycache__/one.pyc", ".mypy_cache/one.json"):
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            (inside / name).touch()
            if name in SOURCES and name != lost:
                written.write(inside / name, f"temper_example/{name}")
    assert find_missing_files(wheel, tmp_path / "example") == {f"temper_example/{lost}"}
