"""Draw the reward of a run, as README.md shows it: `python -m tools.site.reward_figure RUN FILE`.

The picture is the first panel of the run's curves.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from temper_trainer.metrics.curves import PANELS, STYLE, _draw_panel
from temper_trainer.metrics.run_files import METRICS_FILE, read_latest_rows

SIZE = (8.4, 3.0)
"""Inches."""
RESOLUTION = 120
"""Pixels per inch; the file stays below 100 KB."""


def draw_reward(run: Path, file: Path, *, title: str) -> None:
    """Write the reward panel of a run folder to a file; its suffix selects the format."""
    (panel,) = (panel for panel in PANELS if panel.title == "reward")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_panel(axes, panel, rows=read_latest_rows(run / METRICS_FILE))
        axes.set_title(title)
        figure.savefig(file, dpi=RESOLUTION)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("file", type=Path, help="picture to write, such as docs/quickstart.png")
    parser.add_argument("--title", default="reward")
    chosen = parser.parse_args(arguments)
    draw_reward(chosen.run, chosen.file, title=chosen.title)


if __name__ == "__main__":
    main()
