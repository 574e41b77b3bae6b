"""What a run of the kit was asked for: the options, checked, and the expected failures, read."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_lookup import load_engine_class, load_layouts
from temper_engine_api.conformance.results import GROUPS
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineNotFoundError
from temper_engine_api.layout import Layout, default_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailure:
    """A law that is known not to hold yet. Strict: where it does hold, the run fails."""

    test: str
    """Name of the test, without its parameters."""
    reason: str
    """Why, and who mends it; it stands in the report."""
    layouts: tuple[str, ...] = ()
    """Where, by name; empty is everywhere."""
    parameters: str = ""
    """Only instances whose parameters contain this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KitOptions:
    """The options of a run."""

    engine: str
    """As given."""
    capabilities: frozenset[Capability]
    """What its class says."""
    layouts: tuple[Layout, ...]
    """The plain ones first; by number of ranks."""
    groups: frozenset[str]
    """Whose laws run; all of them unless the run is a partial one."""
    report: Path | None
    """Where the markdown report goes."""
    results: Path | None
    """Where the results go for a report with those of other runs."""
    expected: tuple[ExpectedFailure, ...]
    """Read from the file."""
    device: Literal["cpu", "cuda"]
    """Where the engine computes."""
    compute: Literal["fp32", "bf16"]
    """In what, where a law does not say."""


def add_options(parser: pytest.Parser) -> None:
    """The command line of the kit."""
    group = parser.getgroup("temper conformance", "conformance of a Temper engine")
    group.addoption(
        "--engine", help="entry point of the group temper.engines, or module:Class; required"
    )
    group.addoption(
        "--world-sizes",
        help="numbers of ranks in the engine's plain layout, for example 1,2,4; 1 where no layout is named",
    )
    group.addoption(
        "--layouts", help="layouts that the engine offers by name, comma-separated, or all"
    )
    group.addoption(
        "--groups", help="run only the laws of these groups, comma-separated: a partial run"
    )
    group.addoption("--report", help="write the report to this markdown file as well")
    group.addoption(
        "--results",
        help="write what was found to this JSON file, for a report that sets several runs side by side",
    )
    group.addoption(
        "--expected-failures",
        help="TOML file of [[expected]] tables: test, reason, layouts, parameters",
    )
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the engine computes; default cpu",
    )
    group.addoption(
        "--compute",
        choices=("fp32", "bf16"),
        default="fp32",
        help="in what it computes; default fp32, and wider tolerances with bf16",
    )


def read_options(config: pytest.Config) -> KitOptions:
    """The options, checked.

    Raises:
        pytest.UsageError: no engine, an unknown one, layouts that it does not have, or a malformed file.
    """
    name = config.getoption("--engine")
    if not name:
        raise pytest.UsageError(
            "the conformance kit needs --engine NAME: an entry point of the group temper.engines, or module:Class."
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
    return KitOptions(
        engine=name,
        capabilities=engine.capabilities,
        layouts=tuple(sorted(layouts, key=lambda layout: layout.world_size)),
        groups=_groups(config.getoption("--groups")),
        report=Path(report) if report else None,
        results=Path(results) if results else None,
        expected=_read_expected(Path(expected)) if expected else (),
        device=config.getoption("--device"),
        compute=config.getoption("--compute"),
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
            f"--world-sizes {text}: engine {name!r} does not claim data_parallel, so only 1 is possible."
        )
    return [default_layout(size) for size in sizes]


def _named_layouts(
    text: str | None, name: str, engine: type[BaseEngine], offered: tuple[Layout, ...]
) -> list[Layout]:
    known = {layout.name: layout for layout in offered}
    wanted = (
        []
        if not text
        else list(known)
        if text == "all"
        else [part.strip() for part in text.split(",")]
    )
    if text and not known:
        raise pytest.UsageError(
            f"--layouts {text}: engine {name!r} offers no layouts; see the entry-point group temper.conformance_layouts."
        )
    if unknown := set(wanted) - known.keys():
        raise pytest.UsageError(
            f"--layouts names {', '.join(sorted(unknown))}, but engine {name!r} offers {', '.join(known)}."
        )
    config_fields = {field.name for field in fields(engine.config_class)}
    for layout in (known[each] for each in wanted):
        if unknown_fields := layout.fields.keys() - config_fields:
            raise pytest.UsageError(
                f"layout {layout.name} sets {sorted(unknown_fields)}, which {engine.config_class.__name__} does not have."
            )
    return [known[each] for each in wanted]


def _groups(text: str | None) -> frozenset[str]:
    wanted = frozenset(part.strip() for part in text.split(",")) if text else frozenset(GROUPS)
    if unknown := wanted - GROUPS.keys():
        raise pytest.UsageError(
            f"--groups names {', '.join(sorted(unknown))}, but the groups are {', '.join(GROUPS)}."
        )
    return wanted


def _read_expected(path: Path) -> tuple[ExpectedFailure, ...]:
    try:
        rows = tomllib.loads(path.read_text())["expected"]
        return tuple(_expected_failure(row) for row in rows)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise pytest.UsageError(
            f"--expected-failures {path}: {error!r}; expected TOML with [[expected]] tables that have test and reason, "
            "and may have layouts and parameters."
        ) from error


def _expected_failure(row: Mapping[str, object]) -> ExpectedFailure:
    given = dict(row)
    layouts = given.pop("layouts", [])
    if not isinstance(layouts, list) or not str(given.get("reason", "")).strip():
        raise TypeError(f"{row}: a reason is needed, and layouts is a list")
    return ExpectedFailure(
        layouts=tuple(map(str, layouts)), **{name: str(value) for name, value in given.items()}
    )
