"""The kit's side of pytest: options, fixtures, which laws an engine is held to, expected failures, and the report at the end."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol, cast

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_lookup import load_engine_class
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.harness.tolerances import use_tolerances_for
from temper_engine_api.conformance.options import (
    ExpectedFailure,
    KitOptions,
    add_options,
    read_options,
)
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.report import format_summary, render_report
from temper_engine_api.conformance.results import (
    GROUPS,
    ConformanceResult,
    ConformanceRun,
    Outcome,
    collect_versions,
    to_json,
)
from temper_engine_api.layout import Layout

SHARED_RESOURCES_PLUGIN = "temper-conformance-shared"
"""Name of a plugin that lends what is costly to start; the kit's own tests run the kit many times in one process."""
OPTIONS = pytest.StashKey[KitOptions]()
RUN = pytest.StashKey[ConformanceRun]()
_KIT = Path(__file__).parent / "tests"


class SharedResources(Protocol):
    """What the plugin named LENT has."""

    rank_pool: RankPool
    oracle: OracleCache


def pytest_addoption(parser: pytest.Parser) -> None:
    """See ``settings``."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run without an engine before anything is collected."""
    config.addinivalue_line(
        "markers", "if_claimed(*capabilities): a law for engines that claim all of these"
    )
    config.addinivalue_line(
        "markers", "if_not_claimed(*capabilities): a law for engines that claim none of these"
    )
    config.addinivalue_line(
        "markers", "bitwise: compares two results bit for bit; worth repeating, also under load"
    )
    config.addinivalue_line(
        "markers",
        "moe: a law about mixtures of experts, for an engine's defaults and layouts with experts",
    )
    if config.option.help:
        return
    settings = read_options(config)
    module = load_engine_class(settings.engine).__module__
    config.stash[OPTIONS] = settings
    names = tuple(layout.name for layout in settings.layouts)
    config.stash[RUN] = ConformanceRun(
        engine=settings.engine,
        layouts=names,
        versions=collect_versions(module),
        compute=settings.compute,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every law runs in every layout."""
    if "layout" in metafunc.fixturenames:
        layouts = metafunc.config.stash[OPTIONS].layouts
        metafunc.parametrize(
            "layout", layouts, ids=[layout.name for layout in layouts], scope="session"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out laws that are not about this engine's claims, mark expected failures, sort by layout.

    What is not claimed is not skipped: its refusal is a law of its own, which only such engines are held to.
    """
    settings = config.stash[OPTIONS]
    tests = [
        item for item in items if isinstance(item, pytest.Function) and item.path.parent == _KIT
    ]
    for test in tests:
        test.user_properties += [
            ("group", test.path.stem.removeprefix("test_")),
            ("layout", _layout_of(test).name),
        ]
    unclaimed = {
        test for test in tests if not _capabilities_of(test, "if_claimed") <= settings.capabilities
    }
    config.stash[RUN].unclaimed += [test.name for test in tests if test in unclaimed]
    needless = {
        test for test in tests if _capabilities_of(test, "if_not_claimed") & settings.capabilities
    }
    _expect_failures(settings.expected, tests)
    needless |= {
        test
        for test in tests
        if test.get_closest_marker("moe") and not _may_have_experts(_layout_of(test))
    }
    left_out = [
        test
        for test in tests
        if test not in unclaimed | needless and _property(test, "group") not in settings.groups
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    kept = [item for item in items if item not in unclaimed | needless | set(left_out)]
    place = {layout.name: str(number) for number, layout in enumerate(settings.layouts)}
    items[:] = sorted(kept, key=lambda item: int(place.get(_property(item, "layout") or "", "0")))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """What -k and -m leave out makes the run a partial one."""
    for item in items:
        item.config.stash[RUN].num_deselected += 1


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
        item.config.stash[RUN].results.append(_make_result(item, report, is_expected=is_expected))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the matrix, and write the report where asked."""
    run, settings = config.stash[RUN], config.stash[OPTIONS]
    terminalreporter.section("conformance")
    for line in format_summary(run):
        terminalreporter.line(line)
    if settings.report is not None:
        settings.report.parent.mkdir(parents=True, exist_ok=True)
        settings.report.write_text(render_report([run]))
        terminalreporter.line(f"report: {settings.report}")
    if settings.results is not None:
        settings.results.parent.mkdir(parents=True, exist_ok=True)
        settings.results.write_text(to_json(run))


@pytest.fixture(scope="session")
def rank_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    """The rank processes."""
    shared = _shared_resources(request.config)
    if shared is not None:
        yield shared.rank_pool
        return
    settings = request.config.stash[OPTIONS]
    most = max(layout.world_size for layout in settings.layouts)
    own = RankPool(
        most,
        folder=tmp_path_factory.mktemp("rank_pool"),
        device=settings.device,
        compute=settings.compute,
    )
    yield own
    own.close()


@pytest.fixture(scope="session")
def dense_oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> OracleCache:
    """The oracle, the tiny models and the batches."""
    shared = _shared_resources(request.config)
    return (
        shared.oracle
        if shared is not None
        else OracleCache(folder=tmp_path_factory.mktemp("models"))
    )


@pytest.fixture(scope="session")
def moe_oracle(dense_oracle: OracleCache) -> OracleCache:
    """The same with a mixture of experts in every layer."""
    return dense_oracle.with_experts()


@pytest.fixture
def oracle(request: pytest.FixtureRequest, layout: Layout) -> OracleCache:
    """What this layout is compared with."""
    is_of_mixtures = layout.has_experts or request.node.get_closest_marker("moe") is not None
    found: OracleCache = request.getfixturevalue("moe_oracle" if is_of_mixtures else "dense_oracle")
    return found


@pytest.fixture
def engine_under_test(
    request: pytest.FixtureRequest, rank_pool: RankPool, layout: Layout
) -> Iterator[EngineUnderTest]:
    """The engine under test in this layout."""
    settings = request.config.stash[OPTIONS]
    with use_tolerances_for(rank_pool.compute):
        yield EngineUnderTest(
            engine=settings.engine,
            capabilities=settings.capabilities,
            layout=layout,
            all_layouts=settings.layouts,
            rank_pool=rank_pool,
        )


def _shared_resources(config: pytest.Config) -> SharedResources | None:
    return cast(SharedResources | None, config.pluginmanager.get_plugin(SHARED_RESOURCES_PLUGIN))


def _may_have_experts(layout: Layout) -> bool:
    """Other layouts may ask more of a model with experts: Megatron's tensor parallelism, for one, that sequences are split too."""
    return layout.has_experts or not layout.fields


def _layout_of(test: pytest.Function) -> Layout:
    return cast(Layout, test.callspec.params["layout"])


def _capabilities_of(test: pytest.Function, marker: str) -> frozenset[Capability]:
    return frozenset(capability for mark in test.iter_markers(marker) for capability in mark.args)


def _property(item: pytest.Item, name: str) -> str | None:
    found = dict(item.user_properties).get(name)
    return None if found is None else str(found)


def _expect_failures(expected: tuple[ExpectedFailure, ...], tests: list[pytest.Function]) -> None:
    for entry in expected:
        matching = [
            test
            for test in tests
            if test.originalname == entry.test
            and entry.parameters in test.name
            and (not entry.layouts or _layout_of(test).name in entry.layouts)
        ]
        if not matching:
            raise pytest.UsageError(
                f"--expected-failures names {entry.test!r}, which no collected law matches."
            )
        for test in matching:
            test.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))


def _make_result(
    item: pytest.Item, report: pytest.TestReport, *, is_expected: bool
) -> ConformanceResult:
    failed = report.outcome == "failed"
    outcome = (
        Outcome.FAILED if failed else Outcome.EXPECTED_FAILURE if is_expected else Outcome.PASSED
    )
    detail = report.longreprtext.strip().splitlines() if failed else []
    errors = [line.removeprefix("E").strip() for line in detail if line.startswith("E ")]
    return ConformanceResult(
        test=item.name,
        group=str(_property(item, "group")),
        layout=str(_property(item, "layout")),
        outcome=outcome,
        detail=report.wasxfail
        if is_expected and not failed
        else " ".join((errors or detail[-1:])[:1])[:300],
    )
