"""The torch.compile cache folder, which other users on the machine cannot access."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from temper_engine_api.errors import ConfigError

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable with the folder."""


def protect_compile_cache() -> None:
    """Let torch.compile cache its code in a folder that only this user can write to.

    torch unpickles and executes files in its cache. By default that is `torchinductor_USER` in the
    temporary directory, and torch also uses the folder if another user made it. Call this function
    before the first compiled function runs. A folder that the user has set is not changed.

    Raises:
        ConfigError: If other users own the folder or can write to it.
    """
    if CACHE_VARIABLE in os.environ and not _is_default(os.environ[CACHE_VARIABLE]):
        return
    folder = Path(tempfile.gettempdir(), f"torchinductor-{os.getuid()}")
    # An existing folder is checked below.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    if not is_own or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{folder} can be changed by other users, but torch.compile would execute files in it: "
            f"remove it, or set {CACHE_VARIABLE} to a folder of your own."
        )
    os.environ[CACHE_VARIABLE] = str(folder)


def _is_default(folder: str) -> bool:
    """Return True for torch's default. torch sets the variable to it on import."""
    # Imported here, because it takes 3 s unless torch has done so. Private, but torch has no public
    # name for the folder.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return folder == default_cache_dir()
