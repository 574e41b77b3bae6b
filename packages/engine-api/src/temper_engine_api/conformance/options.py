"""Options of the conformance kit: declaration, validation, and the file of expected failures."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_lookup import load_engine_class, load_layouts
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.results import GROUPS
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineNotFoundError
from temper_engine_api.layout import Layout, default_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailure:
    """A test that is known to fail. If it passes, the run fails."""

    test: str
    """Name of the test without its parameters."""
    reason: str
    """Reason for the failure, and who will fix it; shown in the report."""
    layouts: tuple[str, ...] = ()
    """Names of layouts in which it fails; empty means all."""
    parameters: str = ""
    """Only instances whose parameters contain this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KitOptions:
    """The validated options of a run."""

    engine: str
    """Entry point name or `module:Class`, as on the command line."""
    capabilities: frozenset[Capability]
    """Capabilities that the engine's class claims."""
    config_fields: frozenset[str]
    """Fields of the engine's configuration class."""
    layouts: tuple[Layout, ...]
    """Sorted by number of ranks; for equal numbers, `--world-sizes` come before `--layouts`."""
    groups: frozenset[str]
    """Groups to run; all of them unless `--groups` is given."""
    families: tuple[str, ...]
    """Names of the model families that the test group `family` runs on."""
    report: Path | None
    """Markdown file to write."""
    results: Path | None
    """JSON file to write."""
    is_resumed: bool
    """Keep the tests of `results` that passed, and run the others."""
    expected: tuple[ExpectedFailure, ...]
    device: Literal["cpu", "cuda"]
    compute: Literal["fp32", "bf16"]
    """Compute dtype of tests that do not set one."""
    is_thorough: bool
    """Also run the slow tests, marked `thorough`."""


def add_options(parser: pytest.Parser) -> None:
    """Declare the kit's command-line options."""
    group = parser.getgroup("temper conformance", "conformance of a Temper engine")
    group.addoption(
        "--engine", help="required: entry point of the group temper.engines, or module:Class"
    )
    group.addoption(
        "--world-sizes",
        help="numbers of ranks for the engine's default layout, such as 1,2,4; default 1 if no "
        "--layouts are given",
    )
    group.addoption(
        "--layouts", help="names of layouts that the engine offers, comma-separated, or all"
    )
    group.addoption(
        "--groups",
        help="run the tests of these groups only, comma-separated; the run is then partial",
    )
    group.addoption(
        "--families",
        help="run the tests of the group family on these models, comma-separated, or all",
    )
    group.addoption("--report", help="write the report to this markdown file")
    group.addoption(
        "--results",
        help="write the results to this JSON file; python -m temper_engine_api.conformance.report "
        "combines several",
    )
    group.addoption(
        "--resume",
        action="store_true",
        help="keep the tests that passed in the file of --results, which is written after each "
        "test, and run the others",
    )
    group.addoption(
        "--expected-failures",
        help="TOML file of [[expected]] tables: test, reason, layouts, parameters",
    )
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of the engine; default cpu",
    )
    group.addoption(
        "--compute",
        choices=("fp32", "bf16"),
        default="fp32",
        help="compute dtype; default fp32; bf16 has wider tolerances",
    )
    group.addoption(
        "--thorough", action="store_true", help="also run the slow tests, for example every night"
    )


def read_options(config: pytest.Config) -> KitOptions:
    """Validate the options.

    Raises:
        pytest.UsageError: No or an unknown engine, unknown layouts, or a malformed file.
    """
    name = config.getoption("--engine")
    if not name:
        raise pytest.UsageError(
            "the conformance kit needs --engine NAME: an entry point of the group temper.engines, "
            "or module:Class."
        )
    try:
        engine, offered = load_engine_class(name), load_layouts(name)
    except EngineNotFoundError as error:
        raise pytest.UsageError(str(error)) from error
    sizes, named = config.getoption("--world-sizes"), config.getoption("--layouts")
    plain = _plain_layouts(sizes or ("" if named else "1"), name, engine)
    layouts = dict.fromkeys([*plain, *_named_layouts(named, name, engine, offered)])
    report, results, expected = (
        config.getoption(f"--{option}") for option in ("report", "results", "expected-failures")
    )
    is_resumed = config.getoption("--resume")
    if is_resumed and not results:
        raise pytest.UsageError(
            "--resume continues the run of a results file: give it with --results FILE."
        )
    return KitOptions(
        engine=name,
        capabilities=engine.capabilities,
        config_fields=frozenset(field.name for field in fields(engine.config_class)),
        layouts=tuple(sorted(layouts, key=lambda layout: layout.world_size)),
        groups=_groups(config.getoption("--groups")),
        families=_families(config.getoption("--families")),
        report=Path(report) if report else None,
        results=Path(results) if results else None,
        is_resumed=is_resumed,
        expected=_read_expected(Path(expected)) if expected else (),
        device=config.getoption("--device"),
        compute=config.getoption("--compute"),
        is_thorough=config.getoption("--thorough"),
    )


def _plain_layouts(text: str, name: str, engine: type[BaseEngine]) -> list[Layout]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise pytest.UsageError(
            f"--world-sizes is {text!r}, expected positive numbers such as 1,2,4."
        )
    sizes = sorted({int(part) for part in parts})
    if sizes and max(sizes) > 1 and Capability.DATA_PARALLEL not in engine.capabilities:
        raise pytest.UsageError(
            f"--world-sizes {text}: engine {name!r} does not claim data_parallel; use 1."
        )
    return [default_layout(size) for size in sizes]


def _named_layouts(
    text: str | None, name: str, engine: type[BaseEngine], offered: tuple[Layout, ...]
) -> list[Layout]:
    known = {layout.name: layout for layout in offered}
    requested = (
        []
        if not text
        else list(known)
        if text == "all"
        else [part.strip() for part in text.split(",")]
    )
    if text and not known:
        raise pytest.UsageError(
            f"--layouts {text}: engine {name!r} offers no layouts; declare them in the entry-point "
            "group temper.conformance_layouts."
        )
    if unknown := set(requested) - known.keys():
        raise pytest.UsageError(
            f"--layouts names {', '.join(sorted(unknown))}, but engine {name!r} offers "
            f"{', '.join(known)}."
        )
    config_fields = {field.name for field in fields(engine.config_class)}
    for layout in (known[each] for each in requested):
        if unknown_fields := layout.fields.keys() - config_fields:
            raise pytest.UsageError(
                f"layout {layout.name} sets {sorted(unknown_fields)}, which "
                f"{engine.config_class.__name__} does not have."
            )
    return [known[each] for each in requested]


def _groups(text: str | None) -> frozenset[str]:
    requested = frozenset(part.strip() for part in text.split(",")) if text else frozenset(GROUPS)
    if unknown := requested - GROUPS.keys():
        raise pytest.UsageError(
            f"--groups names {', '.join(sorted(unknown))}, but the groups are {', '.join(GROUPS)}."
        )
    return requested


def _families(text: str | None) -> tuple[str, ...]:
    requested = tuple(part.strip() for part in text.split(",")) if text else ()
    if requested == ("all",):
        return tuple(FAMILIES)
    if unknown := [name for name in requested if name not in FAMILIES]:
        raise pytest.UsageError(
            f"--families names {', '.join(unknown)}, but the families are {', '.join(FAMILIES)}."
        )
    return requested


def _read_expected(path: Path) -> tuple[ExpectedFailure, ...]:
    try:
        rows = tomllib.loads(path.read_text())["expected"]
        return tuple(_expected_failure(row) for row in rows)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise pytest.UsageError(
            f"--expected-failures {path}: {error!r}; expected TOML with [[expected]] tables of "
            "test and reason, and optionally layouts and parameters."
        ) from error


def _expected_failure(row: Mapping[str, object]) -> ExpectedFailure:
    fields_left = dict(row)
    layouts = fields_left.pop("layouts", [])
    if not isinstance(layouts, list) or not str(fields_left.get("reason", "")).strip():
        raise TypeError(f"{row}: a reason is needed, and layouts is a list")
    return ExpectedFailure(
        layouts=tuple(map(str, layouts)),
        **{name: str(value) for name, value in fields_left.items()},
    )
