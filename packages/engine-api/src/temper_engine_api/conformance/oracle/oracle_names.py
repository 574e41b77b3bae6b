"""Names and shapes of the oracle's tensors in files, as transformers itself saves them."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class FileLayout:
    """Converts tensors of a model between their form in memory and that in files.

    transformers joins the experts of a layer in memory, for example. The conversion runs once, on
    the positions of all entries, so no model's rules are needed here.
    """

    def __init__(
        self, model: PreTrainedModel, tensors: Mapping[str, Tensor], *, is_adapter: bool = False
    ) -> None:
        """Find the layout of tensors; adapter names have the same form in memory and in files.

        Args:
            model: The model, whose type decides about the conversion.
            tensors: Tensors by their name in memory.
            is_adapter: True for names in PEFT files.
        """
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        positions, start = {}, 0
        for name, tensor in tensors.items():
            end = start + tensor.numel()
            positions[name] = torch.arange(start, end).reshape(tensor.shape)
            start = end
        converted = positions if is_adapter else revert_weight_conversion(model, dict(positions))
        self._positions: dict[str, Tensor] = dict(converted)
        self._num_entries = start

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors that files have, by their name in files."""
        flat = torch.cat([tensors[name].detach().flatten() for name in self._shapes])
        return {name: flat[positions] for name, positions in self._positions.items()}

    def from_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in memory, by their name in memory."""
        flat = torch.empty(self._num_entries)
        for name, positions in self._positions.items():
            flat[positions] = tensors[name].float()
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: part.reshape(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def list_owners(self) -> dict[str, str]:
        """Return the name of the in-memory tensor that contains each tensor in the files."""
        ends = torch.tensor([shape.numel() for shape in self._shapes.values()]).cumsum(0)
        names = list(self._shapes)
        return {
            name: names[int(torch.searchsorted(ends, positions.flatten()[0], right=True))]
            for name, positions in self._positions.items()
        }
