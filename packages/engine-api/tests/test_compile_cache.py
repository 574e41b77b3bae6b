import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from temper_engine_api.compile_cache import CACHE_VARIABLE, protect_compile_cache
from temper_engine_api.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the cache in an empty temporary directory."""
    # Set first, so that the variable is restored after the test.
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"torchinductor-{os.getuid()}"


def test_cache_is_a_folder_of_this_user_also_at_the_second_call(folder: Path) -> None:
    for _ in range(2):
        os.environ.pop(CACHE_VARIABLE, None)
        protect_compile_cache()
        assert os.environ[CACHE_VARIABLE] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_cache_to_which_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="can be changed by other users"):
        protect_compile_cache()
    assert CACHE_VARIABLE not in os.environ


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make a folder of another user")
def test_cache_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match="can be changed by other users"):
        protect_compile_cache()


def test_link_to_another_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="can be changed by other users"):
        protect_compile_cache()


def test_configured_cache_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "chosen"))
    protect_compile_cache()
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "chosen")
    assert not folder.exists()


def test_torch_caches_in_the_protected_folder(folder: Path, tmp_path: Path) -> None:
    program = (
        "import torch._dynamo\n"  # sets the variable to torch's default
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "from temper_engine_api.compile_cache import protect_compile_cache\n"
        "before = cache_dir()\n"
        "protect_compile_cache()\n"
        "print(before, cache_dir())\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    before, after = printed.split()
    assert Path(before).parent == tmp_path
    assert before != after
    assert after == str(folder)
