"""What a run of the kit was asked for: the options, checked, and the expected failures, read."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.naming import engine_named
from temper_engine_api.errors import EngineNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailure:
    """A law that is known not to hold yet. Strict: where it does hold, the run fails."""

    law: str
    """Name of the test, without its parameters."""
    reason: str
    """Why, and who mends it; it stands in the report."""
    world_sizes: tuple[int, ...] = ()
    """Where; empty is everywhere."""
    parameters: str = ""
    """Only instances whose parameters contain this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a run."""

    engine: str
    """As given."""
    claims: frozenset[Capability]
    """What its class says."""
    world_sizes: tuple[int, ...]
    """Ascending."""
    report: Path | None
    """Where the markdown report goes."""
    expected: tuple[ExpectedFailure, ...]
    """Read from the file."""
    device: Literal["cpu", "cuda"]
    """Where the engine computes."""


def add_options(parser: pytest.Parser) -> None:
    """The command line of the kit."""
    group = parser.getgroup("temper conformance", "conformance of a Temper engine")
    group.addoption("--engine", help="entry point of the group temper.engines, or module:Class; required")
    group.addoption("--world-sizes", default="1", help="numbers of ranks, comma-separated, for example 1,2,4")
    group.addoption("--report", help="write the report to this markdown file as well")
    group.addoption("--expected-failures", help="TOML file of [[expected]] tables: law, reason, world_sizes, parameters")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the engine computes; default cpu")


def read_settings(config: pytest.Config) -> Settings:
    """The options, checked.

    Raises:
        pytest.UsageError: no engine, an unknown one, world sizes that it does not claim, or a malformed file.
    """
    name = config.getoption("--engine")
    if not name:
        raise pytest.UsageError("the conformance kit needs --engine NAME: an entry point of the group temper.engines, or module:Class.")
    try:
        claims = engine_named(name).capabilities
    except EngineNotFoundError as error:
        raise pytest.UsageError(str(error)) from error
    sizes = _world_sizes(config.getoption("--world-sizes"))
    if max(sizes) > 1 and Capability.DATA_PARALLEL not in claims:
        raise pytest.UsageError(
            f"--world-sizes {','.join(map(str, sizes))}: engine {name!r} does not claim data_parallel, so only 1 is possible."
        )
    report, expected = config.getoption("--report"), config.getoption("--expected-failures")
    return Settings(
        engine=name,
        claims=claims,
        world_sizes=sizes,
        report=Path(report) if report else None,
        expected=_read_expected(Path(expected)) if expected else (),
        device=config.getoption("--device"),
    )


def _world_sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise pytest.UsageError(f"--world-sizes is {text!r}, expected positive numbers such as 1,2,4.")
    return tuple(sorted({int(part) for part in parts}))


def _read_expected(path: Path) -> tuple[ExpectedFailure, ...]:
    try:
        rows = tomllib.loads(path.read_text())["expected"]
        return tuple(_expected_failure(row) for row in rows)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise pytest.UsageError(
            f"--expected-failures {path}: {error!r}; expected TOML with [[expected]] tables that have law and reason, "
            "and may have world_sizes and parameters."
        ) from error


def _expected_failure(row: Mapping[str, object]) -> ExpectedFailure:
    fields = dict(row)
    sizes = fields.pop("world_sizes", [])
    if not isinstance(sizes, list) or not str(fields.get("reason", "")).strip():
        raise TypeError(f"{row}: a reason is needed, and world_sizes is a list")
    return ExpectedFailure(world_sizes=tuple(sizes), **{name: str(value) for name, value in fields.items()})
