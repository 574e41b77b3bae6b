"""The kit's side of pytest: options, fixtures, which laws an engine is held to, expected failures, and the report at the end."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol, cast

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.fleet import Fleet
from temper_engine_api.conformance.naming import engine_named
from temper_engine_api.conformance.reference import Reference
from temper_engine_api.conformance.report import GROUPS, Finding, Findings, Outcome, render, summary_of
from temper_engine_api.conformance.settings import ExpectedFailure, Settings, add_options, read_settings
from temper_engine_api.conformance.subject import Subject

LENT = "temper-conformance-lent"
"""Name of a plugin that lends what is costly to start; the kit's own tests run the kit many times in one process."""
SETTINGS = pytest.StashKey[Settings]()
FINDINGS = pytest.StashKey[Findings]()
_KIT = Path(__file__).parent


class Lender(Protocol):
    """What the plugin named LENT has."""

    fleet: Fleet
    reference: Reference


def pytest_addoption(parser: pytest.Parser) -> None:
    """See ``settings``."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run without an engine before anything is collected."""
    config.addinivalue_line("markers", "claims(*capabilities): a law for engines that claim all of these")
    config.addinivalue_line("markers", "disclaims(*capabilities): a law for engines that claim none of these")
    if config.option.help:
        return
    settings = read_settings(config)
    module = engine_named(settings.engine).__module__
    config.stash[SETTINGS] = settings
    config.stash[FINDINGS] = Findings(engine=settings.engine, module=module, world_sizes=settings.world_sizes)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every law runs at every world size."""
    if "world_size" in metafunc.fixturenames:
        sizes = metafunc.config.stash[SETTINGS].world_sizes
        ids = [f"{n}-rank{'s' if n > 1 else ''}" for n in sizes]
        metafunc.parametrize("world_size", sizes, ids=ids, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out laws that are not about this engine's claims, mark expected failures, sort by world size.

    What is not claimed is not skipped: its refusal is a law of its own, which only such engines are held to.
    """
    settings = config.stash[SETTINGS]
    laws = [item for item in items if isinstance(item, pytest.Function) and item.path.parent == _KIT]
    for law in laws:
        group, world_size = law.path.stem.removeprefix("test_"), law.callspec.params["world_size"]
        law.user_properties += [("group", group), ("world_size", world_size)]
    unclaimed = {law for law in laws if not _capabilities_of(law, "claims") <= settings.claims}
    config.stash[FINDINGS].unclaimed += [law.name for law in laws if law in unclaimed]
    needless = {law for law in laws if _capabilities_of(law, "disclaims") & settings.claims}
    _expect_failures(settings.expected, laws)
    kept = [item for item in items if item not in unclaimed | needless]
    items[:] = sorted(kept, key=lambda item: int(_property(item, "world_size") or 0))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """What -k and -m leave out makes the run a partial one."""
    for item in items:
        item.config.stash[FINDINGS].num_deselected += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what was found; laws don't skip, so a skip in a mandatory group is a failure."""
    report = yield
    group = _property(item, "group")
    if group is None:
        return report
    is_expected = "wasxfail" in vars(report)
    if report.skipped and not is_expected and GROUPS[group].is_mandatory:
        report.outcome = "failed"
        report.longrepr = f"a law of the mandatory group {group!r} was skipped: laws hold or fail, they don't skip."
    if report.when == "call" or report.outcome == "failed":
        item.config.stash[FINDINGS].found.append(_finding(item, report, is_expected=is_expected))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix, and write the report where asked."""
    findings, settings = config.stash[FINDINGS], config.stash[SETTINGS]
    terminalreporter.section("conformance")
    for line in summary_of(findings):
        terminalreporter.line(line)
    if settings.report is not None:
        settings.report.parent.mkdir(parents=True, exist_ok=True)
        settings.report.write_text(render(findings))
        terminalreporter.line(f"report: {settings.report}")


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The rank processes."""
    lender = _lender(request.config)
    if lender is not None:
        yield lender.fleet
        return
    settings = request.config.stash[SETTINGS]
    own = Fleet(max(settings.world_sizes), folder=tmp_path_factory.mktemp("fleet"), device=settings.device)
    yield own
    own.close()


@pytest.fixture(scope="session")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The oracle, the tiny models and the batches."""
    lender = _lender(request.config)
    return lender.reference if lender is not None else Reference(folder=tmp_path_factory.mktemp("models"))


@pytest.fixture
def subject(request: pytest.FixtureRequest, fleet: Fleet, world_size: int) -> Subject:
    """The engine under test at this world size."""
    settings = request.config.stash[SETTINGS]
    return Subject(
        engine=settings.engine,
        claims=settings.claims,
        world_size=world_size,
        all_world_sizes=settings.world_sizes,
        fleet=fleet,
    )


def _lender(config: pytest.Config) -> Lender | None:
    return cast(Lender | None, config.pluginmanager.get_plugin(LENT))


def _capabilities_of(law: pytest.Function, marker: str) -> frozenset[Capability]:
    return frozenset(capability for mark in law.iter_markers(marker) for capability in mark.args)


def _property(item: pytest.Item, name: str) -> str | None:
    found = dict(item.user_properties).get(name)
    return None if found is None else str(found)


def _expect_failures(expected: tuple[ExpectedFailure, ...], laws: list[pytest.Function]) -> None:
    for entry in expected:
        matching = [
            law
            for law in laws
            if law.originalname == entry.law
            and entry.parameters in law.name
            and (not entry.world_sizes or law.callspec.params["world_size"] in entry.world_sizes)
        ]
        if not matching:
            raise pytest.UsageError(f"--expected-failures names {entry.law!r}, which no collected law matches.")
        for law in matching:
            law.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))


def _finding(item: pytest.Item, report: pytest.TestReport, *, is_expected: bool) -> Finding:
    failed = report.outcome == "failed"
    outcome = Outcome.BROKEN if failed else Outcome.EXPECTED if is_expected else Outcome.HELD
    detail = report.longreprtext.strip().splitlines() if failed else []
    errors = [line.removeprefix("E").strip() for line in detail if line.startswith("E ")]
    return Finding(
        law=item.name,
        group=str(_property(item, "group")),
        world_size=int(str(_property(item, "world_size"))),
        outcome=outcome,
        detail=report.wasxfail if is_expected and not failed else " ".join((errors or detail[-1:])[:1])[:300],
    )
