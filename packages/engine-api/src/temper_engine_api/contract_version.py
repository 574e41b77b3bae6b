"""Check that an engine was built for the installed version of temper-engine-api.

The check reads the requirements in the engine's metadata and imports nothing. pip resolves them at
installation, but a later `pip install` of one package may break them with only a warning.
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, version

from temper_engine_api.errors import ContractVersionError

ENGINE_API = "temper-engine-api"
"""Name of this distribution. Engines declare in their requirements which versions they support."""

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")


def check_contract(distribution: Distribution, *, engine: str) -> None:
    """Check that the installed temper-engine-api is one that an engine's distribution requires.

    A distribution that requires no particular version passes. Every engine passes if
    temper-engine-api is only on the path and not installed, because it has no version then.

    Args:
        distribution: Distribution of the engine.
        engine: Name of the engine, for the message.

    Raises:
        ContractVersionError: If the installed version is outside the bounds.
    """
    try:
        installed = version(ENGINE_API)
    except PackageNotFoundError:
        return
    for bounds in read_contract_bounds(distribution):
        if not satisfies_bounds(installed, bounds):
            name = distribution.name
            # Our packages are not on an index, so pip would not find them without --find-links.
            install = "pip install --find-links DIR"
            raise ContractVersionError(
                f"engine {engine!r} of {name} {distribution.version} is built for "
                f"{ENGINE_API}{bounds}, and {ENGINE_API} {installed} is installed: with the wheels "
                f'of both in DIR, run either {install} "{ENGINE_API}{bounds}", or '
                f'{install} "{ENGINE_API}=={installed}" --upgrade {name} '
                f"for the release of {name} that goes with {installed}."
            )


def read_contract_bounds(distribution: Distribution) -> list[str]:
    """Return a distribution's bounds on temper-engine-api, such as `>=0.1,<0.2`.

    Requirements with a marker, such as extras, are ignored.
    """
    requirements = (_REQUIREMENT.fullmatch(line) for line in distribution.requires or ())
    return [
        requirement.group(2).strip()
        for requirement in requirements
        if requirement is not None
        and not requirement.group(3)
        and re.sub(r"[._-]+", "-", requirement.group(1)).lower() == ENGINE_API
    ]


_CLAUSE = re.compile(r"(~=|===|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?[^,\s]*")


def parse_version(version: str) -> tuple[int, int, int]:
    """Parse a version to three numbers: `0.3` and `0.3.0rc1` give (0, 3, 0).

    This is as much of PEP 440 as the checks need, without a dependency: suffixes such as `rc1`,
    `.dev0` and `+cpu` are ignored.

    Raises:
        ValueError: If the text does not start with a number.
    """
    numbers = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if numbers is None:
        raise ValueError(f"{version!r} is no version: expected numbers with dots, such as 0.3.0.")
    major, minor, patch = (int(number or 0) for number in numbers.groups())
    return major, minor, patch


def satisfies_bounds(version: str, bounds: str) -> bool:
    """Return True if a version satisfies all bounds, such as `>=0.1,<0.2`; empty bounds allow any.

    Raises:
        ValueError: If a bound can't be parsed.
    """
    return all(
        _satisfies_bound(parse_version(version), clause.strip())
        for clause in bounds.split(",")
        if clause.strip()
    )


def _satisfies_bound(version: tuple[int, int, int], clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"{clause!r} is no bound on a version: expected one such as >=0.1.")
    operator, text, has_star = match.groups()
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
