"""Runs the kit in this process, with a fleet and an oracle that many runs share."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from temper_engine_api.conformance import KIT
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.plugin import SHARED_RESOURCES_PLUGIN


@dataclass
class OutcomeRecorder:
    """Which laws a run of the kit found to hold, and which broken; a pytest plugin."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])
        elif report.when == "call":
            self.passed.append(report.nodeid.rpartition("::")[2])


@dataclass
class SharedKitResources:
    """What is costly to start."""

    rank_pool: RankPool
    oracle: OracleCache


@dataclass
class Kit:
    """Runs the kit in this process."""

    shared: SharedKitResources
    folder: Path

    def run(self, engine, *arguments, tests=(), world_sizes="1", layouts=None, status=None):
        """The outcome by law; ``tests`` are ``test_file::test_name``, all of them by default. Layouts stand in for world sizes."""
        where = ("--layouts", layouts) if layouts else ("--world-sizes", world_sizes)
        ini = self.folder / "empty.ini"
        ini.write_text("[pytest]\n")
        found = OutcomeRecorder()
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
                *("--engine", engine, *where, *arguments),
            ],
            plugins=[found, _Lender(self.shared)],
        )
        if status is not None:
            assert code == status
        return found


class _Lender:
    def __init__(self, shared):
        self._lent = shared

    def pytest_configure(self, config):
        config.pluginmanager.register(self._lent, SHARED_RESOURCES_PLUGIN)
