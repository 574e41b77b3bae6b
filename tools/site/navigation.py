"""The navigation of the site, in the order of a user's work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

SECTIONS: Mapping[str, tuple[str, ...] | Mapping[str, tuple[str, ...]]] = {
    "Home": ("index.md",),
    "Start": ("docs/install.md", "docs/first-run.md", "docs/blank-machine.md"),
    "Guides": {
        "Prepare": (
            "docs/how-to/data.md",
            "docs/how-to/reward.md",
            "docs/models.md",
            "docs/how-to/check.md",
        ),
        "Train": (
            "docs/how-to/sft.md",
            "docs/how-to/dpo.md",
            "docs/how-to/lora.md",
            "docs/algorithms.md",
            "docs/how-to/algorithm.md",
            "docs/distillation.md",
            "docs/how-to/environment.md",
            "docs/how-to/agent.md",
        ),
        "Evaluate and export": ("docs/how-to/evaluate-and-export.md",),
        "GPUs and clusters": (
            "docs/how-to/gpu.md",
            "docs/how-to/scale.md",
            "docs/rollouts.md",
            "docs/cluster.md",
            "docs/how-to/schedulers.md",
        ),
        "Troubleshooting": ("docs/troubleshooting.md",),
        "More": ("docs/how-to/*.md",),
    },
    "Migrating": ("docs/migration/README.md", "docs/migration/*.md"),
    "Engines": (
        "docs/writing-an-engine.md",
        "docs/how-to/own-loop.md",
        "docs/engines/*.md",
        "docs/batch.md",
        "docs/numerics.md",
        "docs/conformance-other-engines.md",
    ),
    "Reference": {
        "About": (
            "docs/comparison.md",
            "docs/architecture.md",
            "docs/glossary.md",
            "docs/metrics.md",
            "reference/compatibility.md",
            "docs/*.md",
        ),
        "Configuration": ("reference/configuration/index.md", "reference/configuration/*.md"),
        "temper_engine_api": ("reference/engine-api/*.md",),
        "temper_engine_fsdp": ("reference/engine-fsdp/*.md",),
        "temper_engine_megatron": ("reference/engine-megatron/*.md",),
        "temper_trainer": ("reference/trainer/*.md",),
        "temper_legacy_shim": ("reference/legacy-shim/*.md",),
        "Packages": ("packages/*/README.md",),
    },
    "Benchmarks": ("docs/benchmarks/README.md", "docs/benchmarks/*.md"),
    "Decisions": {
        "Decisions": ("docs/decisions/*.md",),
        "Notes on measurements": ("docs/records/*.md",),
    },
    "Contributing": ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"),
}
"""Patterns of pages by tab, or by group within a tab, in order.

A page is listed where its path is written in full, or else in the first group that matches.
"""


def format_navigation(pages: Path) -> str:
    """Return the value of `nav` in mkdocs.yml, as YAML with an indent of two spaces."""
    placed: set[str] = set()
    lines: list[str] = []
    for title, content in SECTIONS.items():
        if isinstance(content, tuple):
            lines += _format_group(title, content, pages=pages, placed=placed, indent=2)
        else:
            lines.append(f"  - {title}:")
            for group, patterns in content.items():
                lines += _format_group(group, patterns, pages=pages, placed=placed, indent=6)
    return "\n".join(lines) + "\n"


def _format_group(
    title: str, patterns: tuple[str, ...], *, pages: Path, placed: set[str], indent: int
) -> Iterator[str]:
    paths = []
    for pattern in patterns:
        for path in sorted(pages.glob(pattern)):
            name = path.relative_to(pages).as_posix()
            if name not in placed and (pattern == name or name not in _EXPLICIT):
                placed.add(name)
                paths.append(name)
    if len(paths) == 1:
        yield f"{' ' * indent}- {title}: {paths[0]}"
    elif paths:
        yield f"{' ' * indent}- {title}:"
        yield from (f"{' ' * (indent + 4)}- {path}" for path in paths)


def _list_explicit() -> Iterator[str]:
    for content in SECTIONS.values():
        for patterns in [content] if isinstance(content, tuple) else content.values():
            yield from (pattern for pattern in patterns if "*" not in pattern)


_EXPLICIT = frozenset(_list_explicit())
