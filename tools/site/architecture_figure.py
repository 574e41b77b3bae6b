"""Draw docs/architecture.svg from the import contracts in pyproject.toml.

A component is drawn above the components that it may import. Run it with `python -m
tools.site.architecture_figure`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]

FIGURE = Path("docs") / "architecture.svg"

WIDTH, ROW, GAP, MARGIN = 880, 44, 12, 24
PADDING, MAX_FONT_SIZE = 8, 14.0
INK, PAPER, FILLS = "#1f2937", "#ffffff", ("#dbeafe", "#dcfce7", "#fef3c7")


def contract_layers(root: Path, *, name: str) -> list[list[str]]:
    """Return the rows of one layers contract from top to bottom, each a list of components."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    contract = next(contract for contract in contracts if contract["name"].startswith(name))
    return [
        [component.strip(" ()") for component in re.split("[|:]", row)]
        for row in contract["layers"]
    ]


def draw_architecture(root: Path) -> str:
    """Draw the SVG figure: packages on the left, the trainer's components on the right."""
    packages = [
        [component.replace("temper_", "").replace("_", "-") for component in row]
        for row in contract_layers(root, name="Packages import")
    ]
    components = [
        [component.strip("_") if component.startswith("__") else component for component in row]
        for row in contract_layers(root, name="Folders of the trainer")
    ]
    height = MARGIN * 3 + 20 + max(len(packages), len(components)) * (ROW + GAP)
    half = (WIDTH - 3 * MARGIN) / 2
    body = [
        *_column("the packages", packages, left=MARGIN, width=half),
        *_column("inside the trainer", components, left=2 * MARGIN + half, width=half),
        (
            f'<text x="{WIDTH / 2}" y="{height - 10}" text-anchor="middle" font-size="12">'
            "imports go down, never up or sideways</text>"
        ),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" fill="{INK}" role="img">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write the figure to docs/."""
    (ROOT / FIGURE).write_text(draw_architecture(ROOT))


def _column(
    title: str, rows: Sequence[Sequence[str]], *, left: float, width: float
) -> Iterator[str]:
    yield f'<text x="{left}" y="{MARGIN}" font-size="15" font-weight="bold">{escape(title)}</text>'
    for number, row in enumerate(rows):
        top = MARGIN + 14 + number * (ROW + GAP)
        widths = _divide_width(row, width=width)
        font_size = min(map(_fit_font_size, row, widths))
        x = left
        for component, box_width in zip(row, widths, strict=True):
            yield (
                f'<rect x="{x:.1f}" y="{top}" width="{box_width:.1f}" height="{ROW}" rx="6" '
                f'fill="{FILLS[number % 3]}" stroke="{INK}"/>'
            )
            center, baseline = x + box_width / 2, top + ROW / 2 + 5
            yield (
                f'<text x="{center:.1f}" y="{baseline}" text-anchor="middle" '
                f'font-size="{font_size}">{escape(component)}</text>'
            )
            x += box_width + GAP


def _divide_width(row: Sequence[str], *, width: float) -> list[float]:
    """Return equal widths of boxes, or widths by the number of letters if one would be too long."""
    rest = width - GAP * (len(row) - 1)
    equal = rest / len(row)
    if all(_fit_font_size(text, equal) == MAX_FONT_SIZE for text in row):
        return [equal] * len(row)
    num_letters = sum(map(len, row))
    return [PADDING + (rest - PADDING * len(row)) * len(text) / num_letters for text in row]


def _fit_font_size(text: str, width: float) -> float:
    """Return the font size at which a text fits, if a letter is 0.6 times as wide as it is high."""
    return round(min(MAX_FONT_SIZE, (width - PADDING) / (0.6 * len(text))), 1)


if __name__ == "__main__":
    main()
