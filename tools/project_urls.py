"""Keep the project URLs of all packages in line with `REPOSITORY_URL`.

`python -m tools.project_urls` writes them to every pyproject.toml after a change; a test compares
them. They are static metadata, so that a build from an sdist has them too.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools.environment import PACKAGES

ROOT = Path(__file__).resolve().parent.parent

REPOSITORY_URL = ""
"""Address of the public repository, without a slash at the end. Empty while there is none.

Then packages have no project URLs, and the site has no link to the repository.
"""

_TABLE = re.compile(r"(?ms)^\[project\.urls\]\n.*?\n\n")
_NEXT_TABLE = re.compile(r"(?m)^\[(?:project\.|tool\.)")


def build_urls(package: str, *, repository: str) -> dict[str, str]:
    """Return the project URLs of a package by label; empty without a repository."""
    if not repository:
        return {}
    folder = f"{repository}/tree/main/packages/{package}"
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Source": folder,
        "Changelog": f"{repository}/blob/main/packages/{package}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def set_urls(text: str, urls: dict[str, str]) -> str:
    """Return the text of a pyproject.toml with these project URLs instead of its own."""
    text = _TABLE.sub("", text)
    if not urls:
        return text
    table = "".join(f'{label} = "{url}"\n' for label, url in urls.items())
    # Before the next table, because the keys of [project] must stay together.
    return _NEXT_TABLE.sub(lambda match: f"[project.urls]\n{table}\n{match.group()}", text, count=1)


def main() -> None:
    """Write the project URLs to every pyproject.toml."""
    for package in PACKAGES:
        file = ROOT / "packages" / package / "pyproject.toml"
        file.write_text(set_urls(file.read_text(), build_urls(package, repository=REPOSITORY_URL)))


if __name__ == "__main__":
    main()
