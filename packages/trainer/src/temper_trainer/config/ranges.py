"""What numbers and addresses of the configuration may be."""

import math
from ipaddress import IPv4Address

from temper_engine_api.errors import ConfigError

LOOPBACK = "127.0.0.1"
"""Reached by processes of the same machine only."""


def check_listen_address(key: str, value: str, *, may_be_any: bool = False) -> None:
    """Refuse an address that nothing should listen on.

    Args:
        key: Dotted.
        value: IPv4 address.
        may_be_any: Whether 0.0.0.0, every address of the machine, is allowed.

    Raises:
        ConfigError: If it is no IPv4 address, or 0.0.0.0 where that is not allowed.
    """
    try:
        address = IPv4Address(value)
    except ValueError as error:
        raise ConfigError(
            f"{key} is {value!r}, but must be an IPv4 address of this machine, such as {LOOPBACK}."
        ) from error
    if address.is_unspecified and not may_be_any:
        raise ConfigError(
            f"{key} is {value}, which opens every port on all networks of this machine: name the one "
            f"address at which other machines reach it, or leave {LOOPBACK}."
        )


def check_range(
    key: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> None:
    """Refuse a number outside its range; NaN and infinity are outside of every one, None (nothing set) inside.

    Args:
        key: what the sentence calls it: dotted, or bare in a block that stands under several keys.

    Raises:
        ConfigError: key, value, and what is expected.
    """
    if value is None:
        return
    is_inside = (
        math.isfinite(value)
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
    )
    if is_inside:
        return
    bounds = {"at least": at_least, "above": above, "at most": at_most}
    expected = " and ".join(
        f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None
    )
    raise ConfigError(f"{key} is {value}, but must be {expected or 'a finite number'}.")
