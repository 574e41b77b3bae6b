"""The kit's side of pytest: options, fixtures, which laws an engine is held to, expected failures, and the report at the end."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol, cast

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_lookup import engine_named
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.rank_pool import Fleet
from temper_engine_api.conformance.harness.tolerances import computing_in
from temper_engine_api.conformance.options import (
    ExpectedFailure,
    Settings,
    add_options,
    read_settings,
)
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.conformance.report import render, summary_of
from temper_engine_api.conformance.results import (
    GROUPS,
    Finding,
    Findings,
    Outcome,
    to_json,
    versions_of,
)
from temper_engine_api.layout import Layout

LENT = "temper-conformance-lent"
"""Name of a plugin that lends what is costly to start; the kit's own tests run the kit many times in one process."""
SETTINGS = pytest.StashKey[Settings]()
FINDINGS = pytest.StashKey[Findings]()
_KIT = Path(__file__).parent / "tests"


class Lender(Protocol):
    """What the plugin named LENT has."""

    fleet: Fleet
    reference: Reference


def pytest_addoption(parser: pytest.Parser) -> None:
    """See ``settings``."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run without an engine before anything is collected."""
    config.addinivalue_line(
        "markers", "claims(*capabilities): a law for engines that claim all of these"
    )
    config.addinivalue_line(
        "markers", "disclaims(*capabilities): a law for engines that claim none of these"
    )
    config.addinivalue_line(
        "markers", "bitwise: compares two results bit for bit; worth repeating, also under load"
    )
    config.addinivalue_line(
        "markers",
        "mixtures: a law about mixtures of experts, for an engine's defaults and layouts with experts",
    )
    if config.option.help:
        return
    settings = read_settings(config)
    module = engine_named(settings.engine).__module__
    config.stash[SETTINGS] = settings
    names = tuple(layout.name for layout in settings.layouts)
    config.stash[FINDINGS] = Findings(
        engine=settings.engine,
        layouts=names,
        versions=versions_of(module),
        compute=settings.compute,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every law runs in every layout."""
    if "layout" in metafunc.fixturenames:
        layouts = metafunc.config.stash[SETTINGS].layouts
        metafunc.parametrize(
            "layout", layouts, ids=[layout.name for layout in layouts], scope="session"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out laws that are not about this engine's claims, mark expected failures, sort by layout.

    What is not claimed is not skipped: its refusal is a law of its own, which only such engines are held to.
    """
    settings = config.stash[SETTINGS]
    laws = [
        item for item in items if isinstance(item, pytest.Function) and item.path.parent == _KIT
    ]
    for law in laws:
        law.user_properties += [
            ("group", law.path.stem.removeprefix("test_")),
            ("layout", _layout_of(law).name),
        ]
    unclaimed = {law for law in laws if not _capabilities_of(law, "claims") <= settings.claims}
    config.stash[FINDINGS].unclaimed += [law.name for law in laws if law in unclaimed]
    needless = {law for law in laws if _capabilities_of(law, "disclaims") & settings.claims}
    _expect_failures(settings.expected, laws)
    needless |= {
        law
        for law in laws
        if law.get_closest_marker("mixtures") and not _may_have_experts(_layout_of(law))
    }
    left_out = [
        law
        for law in laws
        if law not in unclaimed | needless and _property(law, "group") not in settings.groups
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    kept = [item for item in items if item not in unclaimed | needless | set(left_out)]
    place = {layout.name: str(number) for number, layout in enumerate(settings.layouts)}
    items[:] = sorted(kept, key=lambda item: int(place.get(_property(item, "layout") or "", "0")))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """What -k and -m leave out makes the run a partial one."""
    for item in items:
        item.config.stash[FINDINGS].num_deselected += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
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


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the matrix, and write the report where asked."""
    findings, settings = config.stash[FINDINGS], config.stash[SETTINGS]
    terminalreporter.section("conformance")
    for line in summary_of(findings):
        terminalreporter.line(line)
    if settings.report is not None:
        settings.report.parent.mkdir(parents=True, exist_ok=True)
        settings.report.write_text(render([findings]))
        terminalreporter.line(f"report: {settings.report}")
    if settings.findings is not None:
        settings.findings.parent.mkdir(parents=True, exist_ok=True)
        settings.findings.write_text(to_json(findings))


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The rank processes."""
    lender = _lender(request.config)
    if lender is not None:
        yield lender.fleet
        return
    settings = request.config.stash[SETTINGS]
    most = max(layout.world_size for layout in settings.layouts)
    own = Fleet(
        most,
        folder=tmp_path_factory.mktemp("fleet"),
        device=settings.device,
        compute=settings.compute,
    )
    yield own
    own.close()


@pytest.fixture(scope="session")
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The oracle, the tiny models and the batches."""
    lender = _lender(request.config)
    return (
        lender.reference
        if lender is not None
        else Reference(folder=tmp_path_factory.mktemp("models"))
    )


@pytest.fixture(scope="session")
def mixtures(dense: Reference) -> Reference:
    """The same with a mixture of experts in every layer."""
    return dense.with_experts()


@pytest.fixture
def reference(request: pytest.FixtureRequest, layout: Layout) -> Reference:
    """What this layout is compared with."""
    is_of_mixtures = layout.has_experts or request.node.get_closest_marker("mixtures") is not None
    found: Reference = request.getfixturevalue("mixtures" if is_of_mixtures else "dense")
    return found


@pytest.fixture
def subject(request: pytest.FixtureRequest, fleet: Fleet, layout: Layout) -> Iterator[Subject]:
    """The engine under test in this layout."""
    settings = request.config.stash[SETTINGS]
    with computing_in(fleet.compute):
        yield Subject(
            engine=settings.engine,
            claims=settings.claims,
            layout=layout,
            all_layouts=settings.layouts,
            fleet=fleet,
        )


def _lender(config: pytest.Config) -> Lender | None:
    return cast(Lender | None, config.pluginmanager.get_plugin(LENT))


def _may_have_experts(layout: Layout) -> bool:
    """Other layouts may ask more of a model with experts: Megatron's tensor parallelism, for one, that sequences are split too."""
    return layout.has_experts or not layout.fields


def _layout_of(law: pytest.Function) -> Layout:
    return cast(Layout, law.callspec.params["layout"])


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
            and (not entry.layouts or _layout_of(law).name in entry.layouts)
        ]
        if not matching:
            raise pytest.UsageError(
                f"--expected-failures names {entry.law!r}, which no collected law matches."
            )
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
        layout=str(_property(item, "layout")),
        outcome=outcome,
        detail=report.wasxfail
        if is_expected and not failed
        else " ".join((errors or detail[-1:])[:1])[:300],
    )
