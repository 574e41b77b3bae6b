"""Metrics of a run: trackers, terminal output, the plotted curves and the HTML report."""
