"""Run the kit in this process, with a rank pool and an oracle that many runs share."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from temper_engine_api.conformance import KIT
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.plugin import SHARED_RESOURCES_PLUGIN


# eq=False keeps it hashable, which pytest needs next to a conftest.py.
@dataclass(eq=False)
class OutcomeRecorder:
    """A pytest plugin that records which tests passed and failed."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])
        elif report.when == "call":
            self.passed.append(report.nodeid.rpartition("::")[2])


@dataclass
class SharedKitResources:
    """A rank pool and an oracle, which are slow to start."""

    rank_pool: RankPool
    oracle: OracleCache


@dataclass
class Kit:
    """Runs the kit in this process."""

    shared: SharedKitResources
    folder: Path

    def run(
        self,
        engine,
        *arguments,
        tests=(),
        world_sizes="1",
        layouts=None,
        families=None,
        status=None,
    ):
        """Run tests given as ``test_file::test_name``, by default all; return their outcomes.

        `layouts` replaces `world_sizes`. If `status` is given, pytest's exit status must equal it.
        """
        options = ("--layouts", layouts) if layouts else ("--world-sizes", world_sizes)
        options += ("--families", families) if families else ()
        ini = self.folder / "empty.ini"
        ini.write_text("[pytest]\n")
        outcomes = OutcomeRecorder()
        code = pytest.main(
            [
                *(
                    "-c",
                    str(ini),
                    "--rootdir",
                    str(self.folder),
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:timeout",
                    "-q",
                ),
                *("--tb=short", "--pyargs", *([f"{KIT}.tests.{test}" for test in tests] or [KIT])),
                *("--engine", engine, *options, *arguments),
            ],
            plugins=[outcomes, _SharedResourcesPlugin(self.shared)],
        )
        if status is not None:
            assert code == status
        return outcomes


class _SharedResourcesPlugin:
    def __init__(self, shared):
        self._shared = shared

    def pytest_configure(self, config):
        config.pluginmanager.register(self._shared, SHARED_RESOURCES_PLUGIN)
