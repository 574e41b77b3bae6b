"""Release numbers: compared by their three numbers, and held against the bounds that a distribution declares.

What a handshake and a deprecation need of PEP 440, without a dependency: suffixes (``rc1``, ``.dev0``, ``+cpu``) count for nothing.
"""

import re

_CLAUSE = re.compile(r"(~=|===|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?[^,\s]*")


def numbers(version: str) -> tuple[int, int, int]:
    """(0, 3, 0) of ``0.3`` and of ``0.3.0rc1``.

    Raises:
        ValueError: the text does not begin with a number.
    """
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if found is None:
        raise ValueError(f"{version!r} is no version: expected numbers with dots, such as 0.3.0.")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def fits(version: str, bounds: str) -> bool:
    """Whether a version satisfies every bound of, say, ``>=0.1,<0.2``; no bound lets every version in.

    Raises:
        ValueError: a bound can't be read.
    """
    return all(
        _fits_one(numbers(version), clause.strip())
        for clause in bounds.split(",")
        if clause.strip()
    )


def _fits_one(version: tuple[int, int, int], clause: str) -> bool:
    found = _CLAUSE.fullmatch(clause)
    if found is None:
        raise ValueError(f"{clause!r} is no bound on a version: expected one such as >=0.1.")
    operator, text, has_star = found.groups()
    bound, length = numbers(text), len(text.split(".")) if has_star else 3
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
