"""Checks of numbers and addresses in the configuration."""

from ipaddress import IPv4Address

from temper_engine_api.errors import ConfigError
from temper_trainer.settings.ranges import Range

LOOPBACK = "127.0.0.1"
"""Reachable only from processes on the same host."""


def check_listen_address(key: str, value: str, *, may_be_any: bool = False) -> None:
    """Raise unless a value is an IPv4 address that the run may listen on.

    Args:
        key: Dotted key, for the message.
        value: IPv4 address.
        may_be_any: True to allow 0.0.0.0, all addresses of the host.

    Raises:
        ConfigError: If it is not an IPv4 address, or is 0.0.0.0 where that is not allowed.
    """
    try:
        address = IPv4Address(value)
    except ValueError as error:
        raise ConfigError(
            f"{key} is {value!r}, but must be an IPv4 address of this host, such as {LOOPBACK}."
        ) from error
    if address.is_unspecified and not may_be_any:
        raise ConfigError(
            f"{key} is {value}, which opens every port on all networks of this host: give the "
            f"address at which other hosts reach it, or keep {LOOPBACK}."
        )


def check_range(
    key: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise if a number is outside its range, or NaN or infinite; None passes.

    Args:
        key: Key for the message: dotted, or relative in a block that is used under several keys.
        value: Number to check.
        at_least: Inclusive lower bound.
        above: Exclusive lower bound.
        at_most: Inclusive upper bound.

    Raises:
        ConfigError: With key, value and bounds.
    """
    bounds = Range(at_least=at_least, above=above, at_most=at_most)
    if value is not None and value not in bounds:
        raise ConfigError(f"{key} is {value}, but must be {bounds}.")
