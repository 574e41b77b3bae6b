import ast
import importlib
import inspect
import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import typing_extensions

import temper_legacy_shim.workers  # noqa: F401  # its classes fill RECORDS
from temper_legacy_shim import deprecation
from temper_legacy_shim.deprecation import (
    RECORDS,
    Deprecation,
    LegacyWorkerWarning,
    deprecated_class,
)

RECORD = Deprecation(
    what="old.Thing",
    since="0.2",
    removed_in="0.4",
    instead="new.place:Thing",
    how="pass it a config",
)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_SEEN", set())
    monkeypatch.setattr(deprecation, "RECORDS", {})


OLD = (
    "tests.Old is deprecated since temper-legacy-shim 0.2 and will be removed in 0.4: use "
    "collections.OrderedDict instead; call it."
)


def make_old() -> type:
    @deprecated_class
    @typing_extensions.deprecated(OLD, category=None)
    class Old:
        def __init__(self, value: int) -> None:
            self.value = value

    # As if it were one of the package's own.
    return Old


def test_the_sentence_says_what_since_until_instead_and_how() -> None:
    assert RECORD.format_warning() == (
        "old.Thing is deprecated since temper-legacy-shim 0.2 and will be removed in 0.4: use "
        "new.place.Thing instead; pass it a config."
    )


def test_a_record_is_read_from_its_sentence_and_another_sentence_is_an_error() -> None:
    assert Deprecation.from_sentence(RECORD.format_warning()) == RECORD
    with pytest.raises(ValueError, match="is not a sentence of a deprecation"):
        Deprecation.from_sentence("old.Thing is deprecated")


@pytest.mark.parametrize(
    ("release", "overdue"),
    [("0.1.0", False), ("0.3.9", False), ("0.4.0", True), ("0.4.0rc1", True), ("1.0", True)],
)
def test_a_record_is_overdue_from_the_release_that_promised_its_removal(
    release: str, overdue: bool
) -> None:
    assert RECORD.is_overdue(release) is overdue


def test_the_warning_names_the_callers_line_and_comes_once_a_position() -> None:
    old = make_old()
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            lines.append(inspect.currentframe().f_lineno + 1)  # type: ignore[union-attr]
            assert old(7).value == 7
        old(8)
    assert [(w.filename, w.lineno) for w in caught] == [
        (__file__, lines[0]),
        (__file__, lines[0] + 1),
    ]
    assert {w.category for w in caught} == {LegacyWorkerWarning}


def test_warning_under_ray_names_the_line_that_makes_the_class_remote() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    old = make_old()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        ray.remote(old)
    assert [(w.filename, w.lineno) for w in caught if w.category is LegacyWorkerWarning] == [
        (__file__, line)
    ]


def test_actor_that_ray_constructs_does_not_warn_again(tmp_path: Path) -> None:
    program = tmp_path / "ray/_private/workers/default_worker.py"
    program.parent.mkdir(parents=True)
    program.write_text(
        "from temper_legacy_shim.deprecation import deprecated_class\n"
        "from typing_extensions import deprecated\n"
        f"@deprecated_class\n@deprecated({OLD!r}, category=None)\nclass Old: pass\nOld()\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_python_shows_the_warning_by_default_wherever_the_caller_is(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "from temper_legacy_shim.deprecation import Deprecation, warn_caller\n"
        "def go():\n    warn_caller(Deprecation(what='old.Thing', since='0.2', removed_in='0.4', "
        "instead='a:B', how='call it'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, "-c", "import library; library.go(); library.go()"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("old.Thing is deprecated since temper-legacy-shim 0.2") == 1
    assert "library.py:3" in done.stderr


def test_a_subclass_of_the_users_warns_too_and_a_deprecated_subclass_once() -> None:
    old = make_old()

    class Derived(old):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(1)

    @deprecated_class
    @typing_extensions.deprecated(OLD.replace("Old", "Newer"), category=None)
    class Newer(old):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(2)

    with pytest.warns(LegacyWorkerWarning, match="Old is deprecated"):
        Derived()
    with pytest.warns(LegacyWorkerWarning) as caught:
        Newer()
    assert len(caught) == 1
    assert "Newer is deprecated" in str(caught[0].message)


def literal_of(name: str) -> str | None:
    """Return the literal of ``typing_extensions.deprecated`` in a class's source."""
    module, _, kind = name.rpartition(".")
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind)
    for call in node.decorator_list:
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "deprecated"
        ):
            return call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    return None


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_type_checkers_and_editors_see_the_sentence_on_the_class(name: str) -> None:
    module, _, kind = name.rpartition(".")
    assert importlib.import_module(module).deprecated is typing_extensions.deprecated
    assert (
        literal_of(name)
        == RECORDS[name].format_warning()
        == getattr(importlib.import_module(module), kind).__deprecated__
    )


# Nightly: starts mypy on all modules. The test above reads what mypy shows from each class.
@pytest.mark.nightly
def test_mypy_names_every_deprecated_class_that_is_constructed(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy: the repository's own environment runs this")
    lines = [f"import {name.rpartition('.')[0]}" for name in sorted(RECORDS)] + [
        f"print({name})" for name in sorted(RECORDS)
    ]
    (tmp_path / "theirs.py").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--enable-error-code",
        "deprecated",
        "--follow-imports",
        "silent",
        "theirs.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    for name in RECORDS:
        assert (
            f"class {name} is deprecated: {name} is deprecated since temper-legacy-shim 0.2"
            in done.stdout
        ), done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_no_deprecation_is_overdue_and_every_replacement_can_be_imported(name: str) -> None:
    record = RECORDS[name]
    assert not record.is_overdue(version("temper-legacy-shim")), (
        f"{name} was promised to be gone in {record.removed_in}: delete it"
    )
    assert callable(record.replacement())
    since, until = (tuple(map(int, v.split("."))) for v in (record.since, record.removed_in))
    assert until >= (since[0], since[1] + 2), (
        "two minor releases at least lie between deprecation and removal"
    )
    assert record.instead.partition(":")[0].split(".")[0] != "temper_legacy_shim", (
        "it must not send people to another deprecated class"
    )
