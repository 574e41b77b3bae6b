"""Is an engine built for this contract? Its distribution says so by what it requires of ours; nothing of it is imported.

pip keeps the two together when it installs them, and lets a later ``pip install`` of one alone part them with no more than a warning.
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, version

from temper_engine_api.errors import ContractVersionError
from temper_engine_api.versions import fits

CONTRACT = "temper-engine-api"
"""The distribution whose releases number the contract."""

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")


def check_contract(distribution: Distribution, *, engine: str) -> None:
    """Refuse an engine whose distribution was built for another release of the contract.

    A distribution that requires no particular contract is let in, and so is every engine where the contract itself was not installed
    but lies on the path.

    Args:
        engine: Its name, for the message.

    Raises:
        ContractVersionError: the installed contract is outside the bounds that the distribution declares.
    """
    try:
        installed = version(CONTRACT)
    except PackageNotFoundError:
        return
    for bounds in contract_bounds(distribution):
        if not fits(installed, bounds):
            name = distribution.name
            raise ContractVersionError(
                f"engine {engine!r} of {name} {distribution.version} is built for {CONTRACT}{bounds}, and {CONTRACT} {installed} is "
                f'installed: either `pip install "{CONTRACT}{bounds}"`, or `pip install "{CONTRACT}=={installed}" --upgrade {name}` '
                f"for the release of {name} that goes with {installed}."
            )


def contract_bounds(distribution: Distribution) -> list[str]:
    """What a distribution requires of the contract, such as ``>=0.1,<0.2``; requirements of its extras are left out."""
    found = (_REQUIREMENT.fullmatch(line) for line in distribution.requires or ())
    return [
        match.group(2).strip()
        for match in found
        if match is not None
        and not match.group(3)
        and re.sub(r"[._-]+", "-", match.group(1)).lower() == CONTRACT
    ]
