"""The training state that another engine keeps as safetensors in its part of a checkpoint, read into this one."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from temper_engine_api.checkpoint.saved_state import COUNT, FILES_FOLDER, FIRST, SECOND, SavedState


def open_files(directory: str) -> SavedState:
    """What lies in ``state/``; no communication: every rank reads whole tensors from the disk."""
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory, FILES_FOLDER).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            places |= dict.fromkeys(names, path)
            masters = [name for name in names if name.startswith("master.")]
            shapes |= {name.removeprefix("master."): tuple(file.get_slice(name).get_shape()) for name in masters}

    def read(kind: str, name: str) -> Tensor:
        key = f"{'master' if kind == 'weight' else kind}.{name}"
        with safe_open(places[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    has_moments = all(f"{kind}.{name}" in places for name in shapes for kind in (FIRST, SECOND, COUNT))
    return SavedState(directory=directory, weights=shapes, has_moments=has_moments, read=read)
