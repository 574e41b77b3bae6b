"""Is an engine built for this contract? Its distribution says so by what it requires of ours; nothing of it is imported.

pip keeps the two together when it installs them, and lets a later ``pip install`` of one alone part them with no more than a warning.
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, version

from temper_engine_api.errors import ContractVersionError

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
    for bounds in read_contract_bounds(distribution):
        if not satisfies_bounds(installed, bounds):
            name = distribution.name
            raise ContractVersionError(
                f"engine {engine!r} of {name} {distribution.version} is built for {CONTRACT}{bounds}, and {CONTRACT} {installed} is "
                f'installed: either `pip install "{CONTRACT}{bounds}"`, or `pip install "{CONTRACT}=={installed}" --upgrade {name}` '
                f"for the release of {name} that goes with {installed}."
            )


def read_contract_bounds(distribution: Distribution) -> list[str]:
    """What a distribution requires of the contract, such as ``>=0.1,<0.2``; requirements of its extras are left out."""
    found = (_REQUIREMENT.fullmatch(line) for line in distribution.requires or ())
    return [
        match.group(2).strip()
        for match in found
        if match is not None
        and not match.group(3)
        and re.sub(r"[._-]+", "-", match.group(1)).lower() == CONTRACT
    ]


_CLAUSE = re.compile(r"(~=|===|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?[^,\s]*")


def parse_version(version: str) -> tuple[int, int, int]:
    """(0, 3, 0) of ``0.3`` and of ``0.3.0rc1``.

    Raises:
        ValueError: the text does not begin with a number.
    """
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if found is None:
        raise ValueError(f"{version!r} is no version: expected numbers with dots, such as 0.3.0.")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def satisfies_bounds(version: str, bounds: str) -> bool:
    """Whether a version satisfies every bound of, say, ``>=0.1,<0.2``; no bound lets every version in.

    Raises:
        ValueError: a bound can't be read.
    """
    return all(
        _satisfies_bound(parse_version(version), clause.strip())
        for clause in bounds.split(",")
        if clause.strip()
    )


def _satisfies_bound(version: tuple[int, int, int], clause: str) -> bool:
    found = _CLAUSE.fullmatch(clause)
    if found is None:
        raise ValueError(f"{clause!r} is no bound on a version: expected one such as >=0.1.")
    operator, text, has_star = found.groups()
    bound, length = parse_version(text), len(text.split(".")) if has_star else 3
    match operator:
        case "==" | "===":
            return version[:length] == bound[:length]
        case "!=":
            return version[:length] != bound[:length]
        case "~=":
            return version >= bound and version[: text.count(".")] == bound[: text.count(".")]
        case ">=":
            return version >= bound
        case "<=":
            return version <= bound
        case ">":
            return version > bound
        case _:
            return version < bound
