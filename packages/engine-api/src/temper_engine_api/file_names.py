"""Names of a model's tensors in its files, derived from transformers' conversions.

transformers joins tensors of files in memory, such as the experts of a layer, and renames others.
The rules are in its conversion mapping, by model type. The caller passes its function, because
engine-api works without transformers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.errors import CapabilityError

_PROBE_ROWS = 8
"""Rows of a probe; a multiple of any number of matrices that files join by rows."""
_PROBE_COLUMNS = 2
_VALUES_PER_PROBE = 1 << 24
"""Distance between the values of two probes. A probe has fewer, even with many experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A tensor in a file, as part of a tensor in memory.

    Example:
        The `up_proj` of expert 3, where memory has gate above up for all experts:

        >>> FilePart(name="experts.3.up_proj.weight", expert=3, chunk=1, num_chunks=2).expert
        3
    """

    name: str
    """Name in the file."""
    expert: int | None = None
    """Index in the first dimension; None takes all rows."""
    chunk: int = 0
    """Index of the chunk of rows."""
    num_chunks: int = 1
    """Number of equal chunks into which the rows are divided."""

    def take(self, tensor: Tensor) -> Tensor:
        """Return the part as a view of the tensor in memory."""
        owner = tensor if self.expert is None else tensor[self.expert]
        return owner if self.num_chunks == 1 else owner.chunk(self.num_chunks)[self.chunk]


class FileNames:
    """Maps a model's tensors in memory to those in its files.

    Unknown tensors, such as adapter tensors, keep their names.
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[FilePart, ...]],
        *,
        model_type: str,
        unsupported: Sequence[str],
    ) -> None:
        self._parts = parts
        self._owners = {
            part.name: (name, part) for name, own_parts in parts.items() for part in own_parts
        }
        self._model_type = model_type
        self._unsupported = unsupported

    def find_owner(self, file_name: str) -> tuple[str, FilePart] | None:
        """Return the name of the tensor in memory that a tensor of a file is a part of.

        Returns:
            The name and the part; None if no tensor in memory has such a part.
        """
        return self._owners.get(file_name)

    def check_known(self) -> None:
        """Check that the names of all tensors in files are known.

        Raises:
            CapabilityError: If transformers saves one in parts that `FilePart` cannot describe.
        """
        if self._unsupported:
            raise CapabilityError(
                f"transformers saves {self._unsupported[0]} of this {self._model_type} model "
                "neither whole nor split by experts and rows, so its weights cannot be exported or "
                "loaded: choose a model whose files have one tensor per matrix, such as qwen3_moe."
            )

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that files have for a tensor in memory, as views, with their names."""
        for part in self._parts.get(name, (FilePart(name=name),)):
            yield part.name, part.take(tensor)

    def list_shapes(self, name: str, shape: Sequence[int]) -> list[tuple[str, torch.Size]]:
        """Return names and shapes of the tensors that files have for a tensor in memory."""
        return [
            (file_name, part.shape)
            for file_name, part in self.split(name, torch.empty(tuple(shape), device="meta"))
        ]


def find_file_names(
    shapes: Mapping[str, torch.Size],
    *,
    model_type: str,
    revert: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    files: Collection[str] = (),
) -> FileNames:
    """Find out how the tensors of a model are saved.

    Args:
        shapes: Shape of each tensor in memory, by name.
        model_type: Type of the model, for messages.
        revert: Converts tensors by name from their form in memory to that in files.
        files: Tensor names in the model's files. If they contain a tensor's name in memory, the
            tensor is saved under that name: some models exist both with joined and with separate
            experts.

    Returns:
        The names. `FileNames.check_known` reports tensors whose conversion is not understood.
    """
    converted = {name: shape for name, shape in shapes.items() if name not in files}
    probes = {
        name: _make_probe(shape, number=number)
        for number, (name, shape) in enumerate(converted.items())
    }
    names = list(probes)
    parts: dict[str, list[FilePart]] = {name: [] for name in names}
    unsupported = set()
    # Convert probes in place of weights. A value names the tensor and the position that it comes
    # from, so the result shows what transformers has split, joined or renamed.
    for file_name, values in revert(dict(probes)).items():
        owners = (values.flatten() // _VALUES_PER_PROBE).unique().tolist()
        part = _find_part(file_name, values, probes[names[owners[0]]]) if len(owners) == 1 else None
        if part is None:
            unsupported |= {names[owner] for owner in owners}
        else:
            parts[names[owners[0]]].append(part)
    # A part that is missing or doubled would lose or overwrite weights in an export.
    unsupported |= {name for name, known in parts.items() if not _is_complete(known, probes[name])}
    return FileNames(
        {
            name: tuple(sorted(known, key=lambda part: (part.expert or 0, part.chunk)))
            for name, known in parts.items()
            if name not in unsupported
        },
        model_type=model_type,
        unsupported=sorted(unsupported),
    )


def _make_probe(shape: torch.Size, *, number: int) -> Tensor:
    """Return a small tensor with one value per entry, used to recognize its parts.

    The first dimension of three is kept, because files have one tensor per expert.
    """
    small = {0: (), 1: (_PROBE_ROWS,), 2: (_PROBE_ROWS, _PROBE_COLUMNS)}.get(
        len(shape), (*shape[:1], *([_PROBE_ROWS, _PROBE_COLUMNS] * len(shape))[: len(shape) - 1])
    )
    probe = torch.empty(small, dtype=torch.int64)
    return number * _VALUES_PER_PROBE + torch.arange(probe.numel()).reshape(small)


def _find_part(file_name: str, values: Tensor, probe: Tensor) -> FilePart | None:
    """Return which part of a probe a file's tensor is; None if it is none."""
    if torch.equal(values, probe):
        return FilePart(name=file_name)
    owner = probe[0] if probe.ndim == 3 else probe
    rows = values.shape[0] if values.ndim else 0
    if not rows or values.shape[1:] != owner.shape[1:] or owner.shape[0] % rows:
        return None
    num_chunks = owner.shape[0] // rows
    # Values are positions in the probe, so the first one says which part it can be. Trying all
    # parts would take seconds for a hundred experts.
    number = int(values.flatten()[0] - probe.flatten()[0]) // values.numel()
    expert, chunk = divmod(number, num_chunks) if probe.ndim == 3 else (None, number)
    part = FilePart(name=file_name, expert=expert, chunk=chunk, num_chunks=num_chunks)
    return part if torch.equal(part.take(probe), values) else None


def _is_complete(parts: Collection[FilePart], probe: Tensor) -> bool:
    """Return True if the parts cover the probe exactly once."""
    taken = [part.take(probe).flatten() for part in parts]
    return bool(taken) and torch.equal(torch.cat(taken).sort().values, probe.flatten())
