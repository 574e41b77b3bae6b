"""Gather all pages in .temper/site: `python -m tools.site`.

Then run `mkdocs build --strict -f .temper/site/mkdocs.yml`.

Pages keep their paths (CONTRIBUTING.md, docs/, packages/*/README.md), so that their links stay
valid. Only docs/index.md moves, because the landing page must be at the top; README.md is for
readers of the repository, so links to it lead to the landing page. Files that pages link to are
copied too; a link to a folder is replaced by its text. The reference pages are generated.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import griffe

from tools.api import public_modules
from tools.environment import PACKAGES
from tools.pages import PAGES
from tools.project_urls import REPOSITORY_URL
from tools.site.compatibility import build_compatibility_page
from tools.site.configuration import build_configuration_pages
from tools.site.navigation import format_navigation

ROOT = Path(__file__).resolve().parents[2]

LANDING = Path("docs") / "index.md"
"""The page that becomes the site's landing page."""

RARELY_SOUGHT = (
    "docs/benchmarks/*.md",
    "docs/decisions/*.md",
    "docs/migration/config-rules.md",
    "docs/records/*.md",
    *(f"reference/{package}/*.md" for package in PACKAGES),
)
"""Pages that the search lists after all others.

A user who searches for a setting finds guides and configuration before modules and decisions.
"""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def gather_pages(root: Path, folder: Path) -> None:
    """Write the pages and mkdocs.yml to a folder, which is deleted first."""
    if folder.exists():
        shutil.rmtree(folder)
    pages = folder / "pages"
    for page in sorted({page for pattern in PAGES for page in root.glob(pattern)}):
        if page == root / "README.md":
            continue
        target = pages / ("index.md" if page == root / LANDING else page.relative_to(root))
        _write(target, _rewrite_links(page, root=root, pages=pages))
    for name, text in build_configuration_pages().items():
        _write(pages / "reference" / "configuration" / name, text)
    _write(pages / "reference" / "compatibility.md", build_compatibility_page(root))
    for package in PACKAGES:
        for name, text in _build_reference_pages(root, package).items():
            _write(pages / "reference" / package / name, text)
    for pattern in RARELY_SOUGHT:
        for page in pages.glob(pattern):
            # A title counts 1000 times as much as text, so a factor such as 0.5 changes nothing.
            page.write_text(f"---\nsearch: {{boost: 0.0001}}\n---\n{page.read_text()}")
    shutil.copy(Path(__file__).with_name("stylesheet.css"), pages)
    repository = f"repo_url: {REPOSITORY_URL}\n" if REPOSITORY_URL else ""
    _write(
        folder / "mkdocs.yml",
        f"INHERIT: {root / 'mkdocs.yml'}\ndocs_dir: pages\nsite_dir: html\n{repository}"
        f"{_format_plugins(root)}nav:\n{format_navigation(pages)}",
    )


def _rewrite_links(page: Path, *, root: Path, pages: Path) -> str:
    """Return the text of a page with links that are valid in the site; copy files it links to."""
    is_landing = page == root / LANDING
    folder = root if is_landing else page.parent

    def replace(match: re.Match[str]) -> str:
        image, text, link, anchor = match.groups(default="")
        if "://" in link:
            return match.group(0)
        target = (page.parent / link).resolve()
        if target.is_dir():
            return f"`{link}`" if text in ("", link) else text
        if target in (root / "README.md", root / LANDING):
            return f"{image}[{text}]({os.path.relpath(root / 'index.md', folder)})"
        if target.suffix != ".md":
            # mkdocs copies no files whose names begin with a dot or have no suffix.
            copy = pages / target.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)
        return f"{image}[{text}]({os.path.relpath(target, folder)}{anchor})"

    return _LINK.sub(replace, page.read_text())


def _build_reference_pages(root: Path, package: str) -> dict[str, str]:
    """Build a page for each public module of a package, by file name, and a list of them.

    mkdocstrings replaces the line that starts with `:::` by the module's documentation.
    """
    top = griffe.load(
        "temper_" + package.replace("-", "_"),
        search_paths=[root / "packages" / package / "src"],
        allow_inspection=False,
    )
    assert isinstance(top, griffe.Module)
    modules = [module for module in public_modules(top, package) if module.docstring]
    rows = [
        f"| [{module.path}]({module.path}.md) | {_read_summary(module)} |" for module in modules
    ]
    index = "\n".join(
        [
            f"# {top.path}",
            "",
            f"The public modules of `temper-{package}`.",
            "",
            "| module | contents |",
            "|---|---|",
            *rows,
            "",
        ]
    )
    return {"index.md": index} | {
        f"{module.path}.md": f"# {_shorten(module.path)}\n\n::: {module.path}\n"
        for module in modules
    }


def _shorten(path: str) -> str:
    """Return the path of a module without its package, as the navigation shows it."""
    return path.partition(".")[2] or path


def _read_summary(module: griffe.Module) -> str:
    assert module.docstring is not None
    paragraph = module.docstring.value.partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def _format_plugins(root: Path) -> str:
    sources = ", ".join(str(root / "packages" / package / "src") for package in PACKAGES)
    # The page's own heading is the module's name. Keys such as algorithm.group_size are found by
    # their parts.
    return f"""\
plugins:
  - search:
      separator: '[\\s\\-,:!=\\[\\]()"`/.|<>]+'
  - mkdocstrings:
      handlers:
        python:
          paths: [{sources}]
          options:
            show_root_toc_entry: false
            members_order: source
            heading_level: 2
            extensions: [{root / "tools" / "site" / "example_sections.py"}]
"""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    gather_pages(ROOT, ROOT / ".temper" / "site")
    print(
        "wrote the pages to .temper/site; next: mkdocs build --strict -f .temper/site/mkdocs.yml",
        file=sys.stderr,
    )
