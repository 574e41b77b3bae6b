"""Addresses and the secret of servers that others have started; see `listening_server`."""

import os
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import is_address, normalize_address

TOKEN_VARIABLE = "TEMPER_SERVER_TOKEN"
"""Environment variable with the secret that a run and its servers share."""
MIN_TOKEN_LENGTH = 16
"""Minimum number of characters. Someone who has recorded a handshake can try secrets offline, so
only their number protects this one: 16 random hexadecimal digits have 64 bits.
"""


def read_token() -> str:
    """Return the secret that a run and its servers share.

    Raises:
        ConfigError: If it is not set, or too short.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        problem = "is not set"
    elif len(token) < MIN_TOKEN_LENGTH:
        problem = f"has {len(token)} characters, but must have at least {MIN_TOKEN_LENGTH}"
    else:
        return token
    raise ConfigError(
        f"{TOKEN_VARIABLE} {problem}: set it to the same random text for the run and for its "
        "servers, such as the output of `openssl rand -hex 32`."
    )


def parse_addresses(text: str) -> list[str]:
    """Return the addresses in a file's text: one a line; text after # is ignored.

    Example:
        >>> parse_addresses("localhost:8100 # this host")
        ['127.0.0.1:8100']
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return list(dict.fromkeys(normalize_address(line) for line in lines if line))


def read_addresses(file: str) -> list[str]:
    """Return the addresses in `rollout.vllm.servers_file`.

    Raises:
        ConfigError: If it cannot be read, has no address, or something else.
    """
    key = "rollout.vllm.servers_file"
    try:
        addresses = parse_addresses(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key} cannot be read ({error}): give a file with an address HOST:PORT in each line."
        ) from error
    if not addresses:
        raise ConfigError(f"{key} has no address: write HOST:PORT of a server in each line.")
    if wrong := [each for each in addresses if not is_address(each)]:
        raise ConfigError(
            f"{key} has the line {wrong[0]!r}, but must have an address HOST:PORT in each line, "
            "such as 10.0.0.5:8100."
        )
    return addresses
