"""Test the overview of modules in the package's README."""

import re
from pathlib import Path

import temper_engine_api

README = Path(__file__).parents[1] / "README.md"


def test_readme_lists_every_module_once() -> None:
    (folder,) = temper_engine_api.__path__
    modules = {
        path.stem
        for path in Path(folder).iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem != "__init__"
    }
    rows = re.findall(r"^\| (`.*?`) \|", README.read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(modules)
