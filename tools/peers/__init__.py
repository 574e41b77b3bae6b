"""Run the unchanged tests of other projects against our algorithms, and compare numbers with them.

`nox -s peers -- verl=PATH areal=PATH ...` takes checkouts of the projects and prints two tables:
the outcome of each suite, and the largest difference of each comparison. Nothing of these projects
is copied here; the adapters give our functions the signatures of theirs.
"""

REQUIREMENTS = (
    "torch==2.13.0",
    "aiohttp",
    "codetiming",
    "colorlog",
    "flask",
    "jaxtyping",
    "lark",
    "loguru",
    "numba",
    "orjson",
    "ray",
    "tenacity",
    "tensordict",
    "torchdata",
    "uvloop",
)
"""Packages that the projects import and that our packages do not need."""
