"""What a person sees of a run: files and trackers of metrics, a line a step, bars, tables of samples, the picture of the curves."""
