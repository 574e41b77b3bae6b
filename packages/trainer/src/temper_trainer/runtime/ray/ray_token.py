"""Keep the token of a Ray cluster readable by its user only."""

import logging
import os
import secrets
import stat
from pathlib import Path

from temper_engine_api.errors import ConfigError

logger = logging.getLogger(__name__)

_PRIVATE = 0o600


def protect_token_file(*, is_starting: bool) -> None:
    """Let only this user read Ray's token file, and create it if Ray would do so.

    Whoever knows the token can run code in the cluster, as the user who started it. Ray writes the
    file with the usual permissions of new files, with which all users of the host can read it.

    Args:
        is_starting: True before Ray is started on this host, False before a cluster is joined.

    Raises:
        ConfigError: If the file cannot be written.
    """
    path = Path.home() / ".ray" / "auth_token"
    try:
        if path.exists():
            _remove_access_of_others(path)
        elif is_starting and _needs_token_file():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # Exclusive, so that of two runs that start at once neither replaces the other's token.
            with open(path, "x", opener=lambda name, flags: os.open(name, flags, _PRIVATE)) as file:
                file.write(secrets.token_hex(32))
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            return  # another run has just created it
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Ray's token belongs there: make the "
            "folder writable, or set RAY_AUTH_TOKEN to a random text (openssl rand -hex 32)."
        ) from error


def _needs_token_file() -> bool:
    """Return True if Ray reads its token from the file and not from a variable."""
    is_enabled = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
    return is_enabled and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()


def _remove_access_of_others(path: Path) -> None:
    state = path.stat()
    if state.st_uid != os.getuid() or not stat.S_IMODE(state.st_mode) & 0o077:
        return
    path.chmod(_PRIVATE)
    logger.warning(
        "%s, Ray's token, could be read by other users of this host: now only you can read it. If "
        "one of them may have read it, delete the file while no cluster of yours runs.",
        path,
    )
