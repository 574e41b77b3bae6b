"""Every setting of a run as frozen dataclasses: the only home of a default. Nothing here imports torch, Hydra or Ray."""
