"""Gather all pages in .temper/site: `python -m tools.site`.

Then run `mkdocs build --strict -f .temper/site/mkdocs.yml`.

Pages keep their paths (README.md, CONTRIBUTING.md, docs/, packages/*/README.md), so that their
links stay valid. Files that pages link to are copied too; a link to a folder is replaced by its
text. The reference pages are generated.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import griffe

from tools.api import public_modules
from tools.environment import PACKAGES
from tools.pages import PAGES
from tools.site.compatibility import build_compatibility_page
from tools.site.configuration import build_configuration_page

ROOT = Path(__file__).resolve().parents[2]

TITLES = {
    "Tour": ("README.md",),
    "Concepts": (
        "docs/architecture.md",
        "docs/glossary.md",
        "docs/batch.md",
        "docs/numerics.md",
        "docs/metrics.md",
    ),
    "How to": ("docs/how-to/*.md", "docs/*.md", "docs/migration/*.md"),
    "Packages": ("packages/*/README.md",),
    "Reference": ("reference/*.md",),
    "Benchmarks": ("docs/benchmarks/*.md",),
    "Decisions": ("docs/decisions/*.md",),
    "Records": ("docs/records/*.md",),
    "Contributing": ("CONTRIBUTING.md", "SECURITY.md"),
}
"""Patterns of the pages in each section, in order; a page is in the first section that matches."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def gather_pages(root: Path, folder: Path) -> None:
    """Write the pages and mkdocs.yml to a folder, which is deleted first."""
    if folder.exists():
        shutil.rmtree(folder)
    pages = folder / "pages"
    for page in sorted({page for pattern in PAGES for page in root.glob(pattern)}):
        target = pages / page.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_copy_linked_files(page, root=root, pages=pages))
    _write(pages / "reference" / "configuration.md", build_configuration_page())
    _write(pages / "reference" / "compatibility.md", build_compatibility_page(root))
    for package in PACKAGES:
        _write(pages / "reference" / f"{package}.md", _build_reference_page(root, package))
    _write(
        folder / "mkdocs.yml",
        f"INHERIT: {root / 'mkdocs.yml'}\ndocs_dir: pages\nsite_dir: html\n"
        f"{_format_plugins(root)}nav:\n{_format_navigation(pages)}",
    )


def _copy_linked_files(page: Path, *, root: Path, pages: Path) -> str:
    """Return the text of a page with links to folders replaced; copy files that it links to."""

    def replace(match: re.Match[str]) -> str:
        target = (page.parent / match.group(3)).resolve()
        if "://" in match.group(3) or target.suffix == ".md":
            return match.group(0)
        if target.is_dir():
            return (
                f"`{match.group(3)}`" if match.group(2) in ("", match.group(3)) else match.group(2)
            )
        copy = pages / target.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, copy)
        return match.group(0)

    return _LINK.sub(replace, page.read_text())


def _build_reference_page(root: Path, package: str) -> str:
    """Build the page that makes mkdocstrings document every public module of a package."""
    lines = [f"# temper-{package}", "", "Generated from the docstrings of the public modules.", ""]
    top = griffe.load(
        "temper_" + package.replace("-", "_"),
        search_paths=[root / "packages" / package / "src"],
        allow_inspection=False,
    )
    assert isinstance(top, griffe.Module)
    return (
        "\n".join(
            lines
            + [f"::: {module.path}" for module in public_modules(top, package) if module.docstring]
        )
        + "\n"
    )


def _format_plugins(root: Path) -> str:
    sources = ", ".join(str(root / "packages" / package / "src") for package in PACKAGES)
    # show_root_heading shows the module's name above its contents.
    return f"""\
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: [{sources}]
          options: {{show_root_heading: true}}
"""


def _format_navigation(pages: Path) -> str:
    lines, placed = [], set[Path]()
    for title, patterns in TITLES.items():
        section = [
            path
            for pattern in patterns
            for path in sorted(pages.glob(pattern))
            if path not in placed
        ]
        placed.update(section)
        if len(section) == 1:
            lines.append(f"  - {title}: {section[0].relative_to(pages)}")
        else:
            lines += [f"  - {title}:", *(f"      - {path.relative_to(pages)}" for path in section)]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    gather_pages(ROOT, ROOT / ".temper" / "site")
    print(
        "wrote the pages to .temper/site; next: mkdocs build --strict -f .temper/site/mkdocs.yml",
        file=sys.stderr,
    )
