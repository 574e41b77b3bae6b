"""pytest plugin of the kit: options, fixtures, selection of tests, results and report."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol, cast

import pytest
from transformers.utils.logging import disable_progress_bar

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_lookup import load_engine_class
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.harness.tolerances import use_tolerances_for
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_models import has_experts
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
    from_json,
    to_json,
)
from temper_engine_api.layout import Layout

SHARED_RESOURCES_PLUGIN = "temper-conformance-shared"
"""Name of a plugin whose rank pool and oracle are reused.

The kit's own tests register it, because they run the kit many times in one process.
"""
OPTIONS = pytest.StashKey[KitOptions]()
"""Key of the options in pytest's stash."""
RUN = pytest.StashKey[ConformanceRun]()
"""Key of the results in pytest's stash."""
NO_FAMILY = "none"
"""Parameter for the family tests when none are requested."""
_TESTS = Path(__file__).parent / "tests"


class SharedResources(Protocol):
    """Attributes of the plugin SHARED_RESOURCES_PLUGIN."""

    rank_pool: RankPool
    oracle: OracleCache


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the kit's options."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Validate the options before anything is collected."""
    config.addinivalue_line(
        "markers", "if_claimed(*capabilities): run if the engine claims all of them"
    )
    config.addinivalue_line(
        "markers", "if_refused_in_layout: runs in layouts that refuse a claimed capability"
    )
    config.addinivalue_line(
        "markers", "if_not_claimed(*capabilities): run if the engine claims none of them"
    )
    config.addinivalue_line(
        "markers", "bitwise: compares two results bit for bit; repeat it to find rare differences"
    )
    config.addinivalue_line(
        "markers",
        "moe: uses MoE models; runs in the default layout and in layouts with experts",
    )
    config.addinivalue_line(
        "markers", "if_configurable(*fields): run if the engine's configuration has these fields"
    )
    config.addinivalue_line("markers", "thorough: slow; runs with --thorough only")
    if config.option.help:
        return
    options = read_options(config)
    # Those of the oracle would stand between the failures.
    disable_progress_bar()
    module = load_engine_class(options.engine).__module__
    config.stash[OPTIONS] = options
    names = tuple(layout.name for layout in options.layouts)
    run = ConformanceRun(
        engine=options.engine,
        layouts=names,
        versions=collect_versions(module),
        compute=options.compute,
    )
    if options.is_resumed and options.results is not None and options.results.exists():
        run.results += _read_passed(options.results, run)
    config.stash[RUN] = run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test in every layout."""
    if "layout" in metafunc.fixturenames:
        layouts = metafunc.config.stash[OPTIONS].layouts
        metafunc.parametrize(
            "layout", layouts, ids=[layout.name for layout in layouts], scope="session"
        )
    if "family" in metafunc.fixturenames:
        # Without families, one instance is made and then left out.
        families = metafunc.config.stash[OPTIONS].families or (NO_FAMILY,)
        metafunc.parametrize("family", families)


# This hook runs before pytest applies -k and -m, so that `unclaimed` does not depend on them.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests for the engine's capabilities, mark expected failures, sort by layout.

    If the engine does not claim a capability, the tests of that capability are removed from the
    session and not reported as skipped. Another test, marked `if_not_claimed`, runs in their place
    and checks that the engine rejects requests for the capability.
    """
    options = config.stash[OPTIONS]
    tests = [
        item for item in items if isinstance(item, pytest.Function) and item.path.parent == _TESTS
    ]
    for test in tests:
        test.user_properties += [
            ("group", test.path.stem.removeprefix("test_")),
            ("layout", _get_layout(test).name),
        ]
    unclaimed = {
        test
        for test in tests
        if not _get_marked_capabilities(test, "if_claimed")
        <= options.capabilities - _get_layout(test).without
        or not {name for mark in test.iter_markers("if_configurable") for name in mark.args}
        <= options.config_fields
    }
    config.stash[RUN].unclaimed += [test.name for test in tests if test in unclaimed]
    inapplicable = {
        test
        for test in tests
        if _get_marked_capabilities(test, "if_not_claimed") & options.capabilities
    }
    _expect_failures(options.expected, tests)
    inapplicable |= {
        test
        for test in tests
        if test.get_closest_marker("if_refused_in_layout") and not _get_layout(test).without
    }
    inapplicable |= {
        test
        for test in tests
        if test.get_closest_marker("moe") and not _may_have_experts(_get_layout(test))
    }
    if not options.is_thorough:
        inapplicable |= {test for test in tests if test.get_closest_marker("thorough")}
    inapplicable |= {test for test in tests if not _has_applicable_family(test)}
    not_requested = [
        test
        for test in tests
        if test not in unclaimed | inapplicable and _property(test, "group") not in options.groups
    ]
    if not_requested:
        config.hook.pytest_deselected(items=not_requested)
    passed = {(result.test, result.layout) for result in config.stash[RUN].results}
    done = {test for test in tests if (test.name, _get_layout(test).name) in passed}
    left_out = unclaimed | inapplicable | set(not_requested) | done
    selected = [item for item in items if item not in left_out]
    # One layout after the other, since each change builds a new process group and new engines.
    position = {layout.name: str(number) for number, layout in enumerate(options.layouts)}
    items[:] = sorted(
        selected, key=lambda item: int(position.get(_property(item, "layout") or "", "0"))
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests to run."""
    session.config.stash[RUN].num_waiting = len(session.items)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what -k and -m leave out, which makes the run partial."""
    for item in items:
        item.config.stash[RUN].num_deselected += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the result; a skipped test of a mandatory group is a failure."""
    report = yield
    if report.when == "teardown":
        item.config.stash[RUN].num_waiting -= 1
    group = _property(item, "group")
    if group is None:
        return report
    is_expected = "wasxfail" in vars(report)
    if report.skipped and not is_expected and GROUPS[group].is_mandatory:
        report.outcome = "failed"
        report.longrepr = (
            f"a test of the mandatory group {group!r} was skipped; it must pass, fail, or be "
            "listed in --expected-failures."
        )
    engine = item.funcargs.get("engine_under_test") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(engine, EngineUnderTest) and engine.model_paths:
        report.sections.append(("What was computed", engine.describe()))
    # An error in a fixture is reported in the setup phase, and counts as a test failure.
    if report.when == "call" or report.outcome == "failed":
        item.config.stash[RUN].results.append(_make_result(item, report, is_expected=is_expected))
        # Write the results after each test, so that --resume can continue a run that was stopped.
        _write_results(item.config)
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table of results, and write the requested files."""
    run, options = config.stash[RUN], config.stash[OPTIONS]
    terminalreporter.section("conformance")
    for line in format_summary(run):
        terminalreporter.line(line)
    _write_results(config)  # written here too for a run in which no test was started
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(render_report([run]))
        terminalreporter.line(f"report: {options.report}")


@pytest.fixture(scope="session")
def rank_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    """Start the session's rank processes."""
    shared = _shared_resources(request.config)
    if shared is not None:
        yield shared.rank_pool
        return
    options = request.config.stash[OPTIONS]
    num_processes = max(layout.world_size for layout in options.layouts)
    pool = RankPool(
        num_processes,
        folder=tmp_path_factory.mktemp("rank_pool"),
        device=options.device,
        compute=options.compute,
    )
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def dense_oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> OracleCache:
    """Make the oracle with dense models."""
    shared = _shared_resources(request.config)
    return (
        shared.oracle
        if shared is not None
        else OracleCache(folder=tmp_path_factory.mktemp("models"))
    )


@pytest.fixture(scope="session")
def moe_oracle(request: pytest.FixtureRequest, dense_oracle: OracleCache) -> OracleCache:
    """Make the oracle with MoE models; in bf16, its batches prescribe experts if engines can."""
    options = request.config.stash[OPTIONS]
    return dense_oracle.with_experts(
        prescribes_experts=options.compute == "bf16"
        and Capability.ROUTING_REPLAY in options.capabilities
    )


@pytest.fixture
def oracle(request: pytest.FixtureRequest, layout: Layout) -> OracleCache:
    """Return the oracle whose models suit the layout and the test."""
    needs_experts = layout.has_experts or request.node.get_closest_marker("moe") is not None
    value: OracleCache = request.getfixturevalue("moe_oracle" if needs_experts else "dense_oracle")
    return value


@pytest.fixture
def engine_under_test(
    request: pytest.FixtureRequest, rank_pool: RankPool, layout: Layout
) -> Iterator[EngineUnderTest]:
    """Provide the engine under test in this layout."""
    options = request.config.stash[OPTIONS]
    with use_tolerances_for(rank_pool.compute):
        yield EngineUnderTest(
            engine=options.engine,
            capabilities=options.capabilities,
            layout=layout,
            all_layouts=options.layouts,
            rank_pool=rank_pool,
        )


def _shared_resources(config: pytest.Config) -> SharedResources | None:
    return cast(SharedResources | None, config.pluginmanager.get_plugin(SHARED_RESOURCES_PLUGIN))


def _may_have_experts(layout: Layout) -> bool:
    """Return whether a MoE model can run in the layout without further settings.

    Megatron, for example, needs sequence parallelism if it combines tensor parallelism with
    experts.
    """
    return layout.has_experts or not layout.fields


def _has_applicable_family(test: pytest.Function) -> bool:
    """Return False for NO_FAMILY, and for dense families in layouts or tests with experts."""
    family = test.callspec.params.get("family")
    if family is None:
        return True
    if family == NO_FAMILY:
        return False
    needs_experts = _get_layout(test).has_experts or test.get_closest_marker("moe") is not None
    return not needs_experts or has_experts(FAMILIES[cast(str, family)])


def _get_layout(test: pytest.Function) -> Layout:
    return cast(Layout, test.callspec.params["layout"])


def _get_marked_capabilities(test: pytest.Function, marker: str) -> frozenset[Capability]:
    return frozenset(capability for mark in test.iter_markers(marker) for capability in mark.args)


def _property(item: pytest.Item, name: str) -> str | None:
    value = dict(item.user_properties).get(name)
    return None if value is None else str(value)


def _expect_failures(expected: tuple[ExpectedFailure, ...], tests: list[pytest.Function]) -> None:
    for entry in expected:
        matching = [
            test
            for test in tests
            if test.originalname == entry.test
            and entry.parameters in test.name
            and (not entry.layouts or _get_layout(test).name in entry.layouts)
        ]
        if not matching:
            raise pytest.UsageError(
                f"--expected-failures names {entry.test!r}, but no collected test matches it."
            )
        for test in matching:
            # Strict, so that a test which passes again has to leave the list.
            test.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))


def _read_passed(path: Path, run: ConformanceRun) -> list[ConformanceResult]:
    """Return the passed tests of a results file.

    Raises:
        pytest.UsageError: If the file is of another engine, compute dtype or version.
    """
    try:
        former = from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--resume: {path} cannot be read: {error}") from error
    for name in ("engine", "compute", "versions"):
        if getattr(former, name) != getattr(run, name):
            raise pytest.UsageError(
                f"--resume: {path} has {name} {getattr(former, name)}, but this run has "
                f"{getattr(run, name)}; choose another --results file."
            )
    return [
        result for result in former.with_outcome(Outcome.PASSED) if result.layout in run.layouts
    ]


def _write_results(config: pytest.Config) -> None:
    """Replace the results file, if one is requested."""
    path = config.stash[OPTIONS].results
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(to_json(config.stash[RUN]))
        partial.replace(path)


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
