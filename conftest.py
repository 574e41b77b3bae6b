"""Settings of every test of this repository, and of the conformance kit where it is run from here."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.environment import DEFAULT_TEST_DATA, TEST_DATA

# At import, because pytest loads the conftest.py of subfolders, which read it, before it configures.
os.environ.setdefault(TEST_DATA, str(DEFAULT_TEST_DATA))

_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
_POINT_INTO_HOME = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare `timeout` where pytest-timeout is not installed.

    Where the conformance kit alone is installed, pytest would otherwise refuse this folder's settings.
    """
    if not pluginmanager.hasplugin("timeout"):
        parser.addini(
            "timeout", "seconds per test, enforced by pytest-timeout, which is not installed"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Give the session an empty home directory, so that no result depends on the user's settings.

    This happens before test modules are imported, because libraries read these variables then. Tests
    share one home: matplotlib, for example, caches its list of fonts there, which takes seconds to make.
    """
    # Installing is a tool of some tests, not what they test: keep where it finds Pythons and packages.
    for name, path in (("PYENV_ROOT", ".pyenv"), ("PIP_CONFIG_FILE", ".config/pip/pip.conf")):
        if (Path.home() / path).exists():
            os.environ.setdefault(name, str(Path.home() / path))
    # As `pythonpath` in pyproject.toml does for this process: Ray's workers import test modules by their
    # path from the root, which they would otherwise find only where it is the working directory.
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    config.stash[_HOME] = tempfile.TemporaryDirectory(
        prefix="temper-tests-home-", ignore_cleanup_errors=True
    )
    os.environ["HOME"] = config.stash[_HOME].name
    for name in _POINT_INTO_HOME:
        os.environ.pop(name, None)


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
    """Run each test in an empty working directory, so that it can't meet what an earlier run left."""
    directory = tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield directory
