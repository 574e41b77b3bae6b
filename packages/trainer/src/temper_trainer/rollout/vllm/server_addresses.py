"""Addresses and the secret of servers that others have started; see `listening_server`."""

import os

from temper_engine_api.errors import ConfigError

TOKEN_VARIABLE = "TEMPER_SERVER_TOKEN"
"""Environment variable with the secret that a run and its servers share."""


def read_token() -> str:
    """Return the secret that a run and its servers share.

    Raises:
        ConfigError: If it is not set.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is not set: set it to the same random text for the run and for its "
            "servers, such as the output of `openssl rand -hex 32`."
        )
    return token


def parse_addresses(text: str) -> list[str]:
    """Return the addresses in a file's text: one a line; text after # is ignored.

    Example:
        >>> parse_addresses("10.0.0.5:8100 # next rack")
        ['10.0.0.5:8100']
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))
