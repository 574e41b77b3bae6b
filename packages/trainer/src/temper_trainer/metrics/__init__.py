"""What a person sees of a run: metrics in files and trackers, a line a step, bars, tables of samples, the curves, the report."""
