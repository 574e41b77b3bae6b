"""Building blocks of settings: ranges, tagged unions and import paths. Does not import torch."""
