"""Test what an index page shows of a package: URLs, classifiers, keywords and the README."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.environment import PACKAGES
from tools.project_urls import REPOSITORY_URL, build_urls, set_urls

ROOT = Path(__file__).resolve().parents[2]


def read_project(package: str) -> dict[str, Any]:
    file = ROOT / "packages" / package / "pyproject.toml"
    project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
    return project


@pytest.mark.parametrize("package", PACKAGES)
def test_project_urls_follow_the_repository(package: str) -> None:
    expected = build_urls(package, repository=REPOSITORY_URL)
    assert read_project(package).get("urls", {}) == expected, "run python -m tools.project_urls"


@pytest.mark.parametrize("package", PACKAGES)
def test_urls_can_be_set_replaced_and_removed(package: str) -> None:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    first = set_urls(text, build_urls(package, repository="https://example.org/one"))
    second = set_urls(first, build_urls(package, repository="https://example.org/two"))
    project = tomllib.loads(second)["project"]
    assert project["urls"]["Issues"] == "https://example.org/two/issues"
    assert "dependencies" in project
    assert set_urls(second, {}) == set_urls(text, {})


@pytest.mark.parametrize("package", PACKAGES)
def test_classifiers_name_every_supported_python(package: str) -> None:
    pythons = re.search(r"^PYTHONS = (\(.*\))$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert pythons is not None
    for version in re.findall(r'"([\d.]+)"', pythons.group(1)):
        assert (
            f"Programming Language :: Python :: {version}" in read_project(package)["classifiers"]
        )


def test_keywords_differ_between_packages() -> None:
    keywords = [tuple(sorted(read_project(package)["keywords"])) for package in PACKAGES]
    assert len(set(keywords)) == len(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_readme_works_on_an_index_page(package: str) -> None:
    text = (ROOT / "packages" / package / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert len(text.splitlines()) <= 100
    for page in re.findall(r"`(docs/[\w/.-]+\.md)`", text):
        assert (ROOT / page).is_file(), page


def test_no_page_installs_from_an_index() -> None:
    # Nothing is published yet, and anyone could register the names. Records and decisions are left
    # out, because they quote what was run.
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("packages/*/README.md")]
    pages += [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if not {"records", "decisions"} & set(page.parts)
    ]
    wrong = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for line in page.read_text().splitlines()
        if re.search(r"pip install [^`]*(?<![\w/-])temper-", line) and "--no-index" not in line
    ]
    assert wrong == []


def test_citation_has_the_license_of_the_packages_and_their_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == read_project("trainer")["license"]

    assert citation.get("repository-code", "") == REPOSITORY_URL
