"""Test that an engine built for another temper-engine-api is refused before it is imported."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from temper_engine_api.contract_version import parse_version, satisfies_bounds
from temper_engine_api.errors import ContractVersionError
from temper_engine_api.registry import (
    find_import_errors,
    list_engines,
    load_conformance_layouts,
    load_engine_class,
    load_engine_config_class,
)

INSTALLED = version("temper-engine-api")


def _install(folder: Path, *requirements: str, name: str = "acme") -> None:
    """Write the metadata that pip installs for a distribution acme-engines 7.1 with one engine."""
    info = folder / "acme_engines-7.1.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: acme-engines",
        "Version: 7.1",
        *(f"Requires-Dist: {line}" for line in requirements),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    groups = {
        "temper.engines": "AcmeEngine",
        "temper.engine_configs": "AcmeConfig",
        "temper.conformance_layouts": "LAYOUTS",
    }
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{name} = acme_everything:{what}\n" for group, what in groups.items())
    )
    (folder / "acme_everything.py").write_text(
        "from temper_engine_api.engine import BaseEngine\n"
        "class AcmeEngine(BaseEngine):\n    pass\nLAYOUTS = ()\n"
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_everything", raising=False)
    return tmp_path


def test_an_engine_of_a_later_contract_is_refused_with_both_versions_and_what_to_install(
    folder: Path,
) -> None:
    _install(folder, "numpy>=1.26", "temper-engine-api<9,>=8.3")
    with pytest.raises(ContractVersionError) as refused:
        load_engine_class("acme")
    assert str(refused.value) == (
        "engine 'acme' of acme-engines 7.1 is built for temper-engine-api<9,>=8.3, and "
        f"temper-engine-api {INSTALLED} is installed: "
        "with the wheels of both in DIR, run either "
        'pip install --find-links DIR "temper-engine-api<9,>=8.3", or '
        f'pip install --find-links DIR "temper-engine-api=={INSTALLED}" --upgrade acme-engines '
        f"for the release of acme-engines that goes with {INSTALLED}."
    )
    assert "acme_everything" not in sys.modules


def test_no_part_of_such_an_engine_is_imported(folder: Path) -> None:
    _install(folder, "Temper_Engine.API (==0.0.1)")
    for look_up in (load_engine_class, load_engine_config_class, load_conformance_layouts):
        with pytest.raises(ContractVersionError, match=r"is built for temper-engine-api==0\.0\.1"):
            look_up("acme")
    assert "acme_everything" not in sys.modules


def test_it_is_listed_with_the_reason(folder: Path) -> None:
    _install(folder, "temper-engine-api>=8")
    assert "acme" in {entry.name for entry in list_engines()}
    assert "is built for temper-engine-api>=8" in find_import_errors()["acme"]


@pytest.mark.parametrize(
    "requirements",
    [
        [f"temper-engine-api[conformance]<9999,>={INSTALLED}"],
        ["temper-engine-api"],
        ["torch>=2.11"],
        ["temper-engine-api>=9999; extra == 'next'"],
    ],
)
def test_an_engine_that_fits_or_asks_for_nothing_is_let_in(
    folder: Path, requirements: list[str]
) -> None:
    _install(folder, *requirements)
    assert load_engine_class("acme").__name__ == "AcmeEngine"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.3", (0, 3, 0)), ("0.3.0rc1", (0, 3, 0)), ("2.13.0+cpu", (2, 13, 0)), ("1", (1, 0, 0))],
)
def test_a_version_is_its_three_numbers(text: str, expected: tuple[int, int, int]) -> None:
    assert parse_version(text) == expected


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (">=0.1,<0.2", ["0.1.0", "0.1.9"], ["0.0.9", "0.2.0"]),
        ("<0.2,>=0.1", ["0.1.0"], ["0.2.0"]),
        ("~=0.1.2", ["0.1.2", "0.1.9"], ["0.1.1", "0.2.0"]),
        ("~=0.1", ["0.1.0", "0.9.0"], ["0.0.9", "1.0.0"]),
        ("==0.1.*", ["0.1.0", "0.1.7"], ["0.2.0"]),
        ("==0.1", ["0.1.0"], ["0.1.1"]),
        ("!=0.1.1,>0.1", ["0.1.2"], ["0.1.0", "0.1.1"]),
        ("<=0.2.0", ["0.2.0"], ["0.2.1"]),
        ("!=0.1.*", ["0.2.0"], ["0.1.5"]),
        ("", ["9.9.9"], []),
    ],
)
def test_a_bound_lets_in_what_pip_lets_in(
    bounds: str, inside: list[str], outside: list[str]
) -> None:
    assert [satisfies_bounds(version, bounds) for version in [*inside, *outside]] == [True] * len(
        inside
    ) + [False] * len(outside)


def test_what_can_not_be_read_is_named() -> None:
    with pytest.raises(ValueError, match="'newest' is no version"):
        parse_version("newest")
    with pytest.raises(ValueError, match=r"'=>0\.1' is no bound"):
        satisfies_bounds("0.1.0", "=>0.1")
