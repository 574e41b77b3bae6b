"""What a person sees of a run: metrics files and trackers, a line a step, progress bars, tables of samples, and the picture of the curves."""
