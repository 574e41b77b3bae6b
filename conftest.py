"""Settings of all tests of this repository, and of conformance kits that run in it."""

import atexit
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.environment import DEFAULT_TEST_DATA, TEST_DATA

# At import, because pytest loads the conftest.py files of subfolders before it configures, and
# these read the variable.
os.environ.setdefault(TEST_DATA, str(DEFAULT_TEST_DATA))

# Imports make a million objects that live as long as the session: looking for garbage among them
# takes seconds, while they are imported, whenever an engine is closed, and at exit.
gc.disable()
atexit.register(gc.freeze)

_num_modules = 0

_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
_POINT_INTO_HOME = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the setting `timeout` if pytest-timeout is not installed.

    If only the conformance kit is installed, pytest would otherwise refuse this folder's settings.
    """
    if not pluginmanager.hasplugin("timeout"):
        parser.addini(
            "timeout", "seconds per test, enforced by pytest-timeout, which is not installed"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Give the session an empty home directory, so that no result depends on the user's settings.

    This runs before test modules are imported, because libraries read these variables at import.
    All tests share one home: matplotlib, for example, takes seconds to cache its list of fonts
    there.
    """
    # A shell starts background jobs with SIGINT ignored, and processes of the tests inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Some tests install packages, but do not test how: keep where Pythons and packages are found.
    for name, path in (("PYENV_ROOT", ".pyenv"), ("PIP_CONFIG_FILE", ".config/pip/pip.conf")):
        if (Path.home() / path).exists():
            os.environ.setdefault(name, str(Path.home() / path))
    # Has the effect of `pythonpath` in pyproject.toml for child processes: Ray's workers import
    # test modules by their path from the root.
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    config.stash[_HOME] = tempfile.TemporaryDirectory(
        prefix="temper-tests-home-", ignore_cleanup_errors=True
    )
    os.environ["HOME"] = config.stash[_HOME].name
    for name in _POINT_INTO_HOME:
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among the modules that tests have imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Exclude modules that tests have imported since then, such as those of transformers."""
    global _num_modules
    # One collection takes as long as a small test, so wait until many modules are new.
    if len(sys.modules) > _num_modules + 100:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's home directory."""
    if _HOME in config.stash:
        config.stash[_HOME].cleanup()


@pytest.fixture(scope="session", autouse=True)
def _session_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run fixtures that outlive a test in an empty working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("session"))
        yield


@pytest.fixture(autouse=True)
def working_directory(
    tmp_path_factory: pytest.TempPathFactory, _session_directory: None
) -> Iterator[Path]:
    """Run each test in an empty working directory, so that no files of earlier runs affect it."""
    directory = tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield directory
