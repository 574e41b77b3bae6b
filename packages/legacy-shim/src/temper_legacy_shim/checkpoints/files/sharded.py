"""Every rank's part of a tensor, put together.

Which box of the full tensor each shard is, and whether the boxes cover it.

A DTensor's axis of size n cuts a dimension of size s into chunks of ceil(s / n), the last ones
shorter or empty (torch's chunk rule).
"""

import math
from collections.abc import Mapping

from temper_legacy_shim.checkpoints.files.lazy import (
    Assembled,
    LazyTensor,
    Piece,
    Shape,
    blocks,
    num_bytes,
    num_rows,
)
from temper_legacy_shim.checkpoints.files.tensors import Distributed, Entry, Placement, Sharded
from temper_legacy_shim.errors import DamagedFileError

_COMPARED_BYTES = 1 << 20
"""Buffers up to this size are compared over ranks; comparing models would read all files."""
_COPY_BYTES = 1 << 16
"""First bytes of a tensor that are compared with those of its copies."""


def assemble(key: str, entries: Mapping[int, Entry], *, where: str) -> LazyTensor:
    """Return the full tensor of one key.

    Args:
        key: its name, for errors.
        entries: every rank's entry of that name.
        where: the directory, for errors.

    Raises:
        DamagedFileError: the parts do not fit together, or some are missing.
    """
    kinds = {
        type(entry) if isinstance(entry, Distributed | Sharded) else LazyTensor
        for entry in entries.values()
    }
    if len(kinds) != 1:
        raise DamagedFileError(
            f"{where}: {key} is distributed in some ranks' files and whole in others: they are not "
            "of one save."
        )
    first = next(iter(entries.values()))
    if isinstance(first, Distributed):
        return _from_mesh(
            key,
            {rank: entry for rank, entry in entries.items() if isinstance(entry, Distributed)},
            where=where,
        )
    if isinstance(first, Sharded):
        return _from_boxes(
            key,
            {rank: entry for rank, entry in entries.items() if isinstance(entry, Sharded)},
            where=where,
        )
    return _replicated(
        key,
        {
            rank: entry
            for rank, entry in entries.items()
            if not isinstance(entry, Distributed | Sharded)
        },
        where=where,
    )


def _replicated(key: str, entries: Mapping[int, LazyTensor], *, where: str) -> LazyTensor:
    """Return one copy of a replicated tensor; small ones are checked for equality."""
    first_rank, first = next(iter(entries.items()))
    for rank, entry in entries.items():
        if entry.shape != first.shape or entry.dtype != first.dtype:
            raise DamagedFileError(
                f"{where}: {key} has shape {first.shape} on rank {first_rank} and {entry.shape} on "
                f"rank {rank}, and neither says how it is "
                "sharded: the files are not of one save, or of a program that we do not know."
            )
        if num_bytes(first) <= _COMPARED_BYTES and not is_equal(first, entry):
            raise DamagedFileError(
                f"{where}: {key} differs between ranks {first_rank} and {rank}, but it is not "
                "sharded, so that every rank should hold the same: the files are not of one save."
            )
    return first


def is_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Check if two tensors have the same bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return all(a.tobytes() == b.tobytes() for a, b in zip(blocks(one), blocks(other), strict=True))


def check_replica(key: str, entries: Mapping[int, LazyTensor], *, where: str) -> None:
    """Reject replicas of a shard if the first rows differ.

    Args:
        key: the tensor's name, for errors.
        entries: two ranks' copies.
        where: the directory, for errors.

    Raises:
        DamagedFileError: they differ, so the ranks are of different steps.
    """
    (first_rank, first), (rank, entry) = entries.items()
    rows = num_compared_rows(first)
    if (
        first.shape != entry.shape
        or first.dtype != entry.dtype
        or first.read(0, rows).tobytes() != entry.read(0, rows).tobytes()
    ):
        raise DamagedFileError(
            f"{where}: {key} differs between ranks {first_rank} and {rank}, which hold the same "
            "shard: the files are not of one save."
        )


def num_compared_rows(tensor: LazyTensor) -> int:
    """Return how many first rows to compare with a copy; an update changes nearly all."""
    rows = num_rows(tensor.shape)
    return min(rows, max(1, _COPY_BYTES * rows // max(1, num_bytes(tensor))))


def _from_mesh(key: str, entries: Mapping[int, Distributed], *, where: str) -> LazyTensor:
    """Return a tensor from the shards of all ranks of a mesh.

    Ranks with the same part are replicas, and have to agree.
    """
    first = next(iter(entries.values()))
    for rank, entry in entries.items():
        if (entry.shape, entry.placements, entry.local.dtype) != (
            first.shape,
            first.placements,
            first.local.dtype,
        ):
            raise DamagedFileError(
                f"{where}: {key} differs in shape, placement or dtype between ranks; see rank "
                f"{rank}: not one save."
            )
    coordinates, mesh_shape = _coordinates(key, entries, where=where)
    pieces: dict[Shape, Piece] = {}
    holders: dict[Shape, int] = {}
    for rank, entry in entries.items():
        offsets, sizes = shard_box(
            entry.shape, entry.placements, mesh_shape=mesh_shape, coordinate=coordinates[rank]
        )
        if entry.local.shape != sizes:
            raise DamagedFileError(
                f"{where}: {key} of rank {rank} has shape {entry.local.shape}, but its place on "
                f"the mesh {mesh_shape} gives {sizes}: the file is damaged, or of another save."
            )
        if 0 not in sizes:
            if offsets in holders:
                check_replica(
                    key, {holders[offsets]: pieces[offsets].tensor, rank: entry.local}, where=where
                )
            else:
                pieces[offsets], holders[offsets] = Piece(offsets=offsets, tensor=entry.local), rank
    return covering(key, list(pieces.values()), shape=first.shape, like=first.local, where=where)


def _coordinates(
    key: str, entries: Mapping[int, Distributed], *, where: str
) -> tuple[dict[int, Shape], Shape]:
    shapes = {entry.mesh_shape for entry in entries.values()}
    known = {
        rank: entry.coordinate for rank, entry in entries.items() if entry.coordinate is not None
    }
    if len(shapes) == 1 and len(known) == len(entries):
        shape = next(iter(shapes))
        assert shape is not None
        return known, shape
    if len(shapes) > 1:
        raise DamagedFileError(
            f"{where}: {key} lies on meshes {sorted(map(str, shapes))} in different ranks' files: "
            "not one save."
        )
    return _inferred_coordinates(key, entries, where=where)


def _inferred_coordinates(
    key: str, entries: Mapping[int, Distributed], *, where: str
) -> tuple[dict[int, Shape], Shape]:
    """Infer coordinates on an unknown mesh, whose innermost axis shards, as in both FSDPs."""
    placements = next(iter(entries.values())).placements
    sharding = [axis for axis, placement in enumerate(placements) if placement.dim is not None]
    world = max(entries) + 1
    if not sharding:
        return {rank: (0,) * len(placements) for rank in entries}, (1,) * len(placements)
    if sharding != [len(placements) - 1] or len(placements) > 2:
        raise DamagedFileError(
            f"{where}: the mesh of {key} is written in a way that is not known: say which torch "
            "wrote it in a bug report."
        )
    dim = placements[-1].dim
    assert dim is not None
    shape = next(iter(entries.values())).shape
    for size in (
        [world] if len(placements) == 1 else [n for n in range(1, world + 1) if world % n == 0]
    ):
        if all(
            _chunk(shape[dim], parts=size, index=rank % size)[1] == entry.local.shape[dim]
            for rank, entry in entries.items()
        ):
            return {
                rank: (*((rank // size,) * (len(placements) - 1)), rank % size) for rank in entries
            }, (world // size, size)[-len(placements) :]
    raise DamagedFileError(
        f"{where}: the shards of {key} follow no split over {world} ranks: a file is of another "
        "save."
    )


def _chunk(size: int, *, parts: int, index: int) -> tuple[int, int]:
    """Return (start, length) of one of torch's chunks."""
    full = -(-size // parts)
    start = min(index * full, size)
    return start, min(full, size - start)


def shard_box(
    shape: Shape, placements: tuple[Placement, ...], *, mesh_shape: Shape, coordinate: Shape
) -> tuple[Shape, Shape]:
    """Return (offsets, sizes) of the shard at a coordinate of the mesh.

    Axes cut one after the other, from the outermost; a strided split (FSDP over tensor parallelism)
    cuts the rest of the later axes.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    axes = [axis for axis, placement in enumerate(placements) if placement.dim is not None]
    # FSDP divides what tensor parallelism has left over, although FSDP's mesh axis is the outer
    # one. torch records that as a strided split, so strided axes are applied last.
    sort_by_order = [a for a in axes if placements[a].split_factor == 1] + [
        a for a in reversed(axes) if placements[a].split_factor > 1
    ]
    for axis in sort_by_order:
        dim = placements[axis].dim
        assert dim is not None
        start, length = _chunk(sizes[dim], parts=mesh_shape[axis], index=coordinate[axis])
        offsets[dim] += start
        sizes[dim] = length
    return tuple(offsets), tuple(sizes)


def _from_boxes(key: str, entries: Mapping[int, Sharded], *, where: str) -> LazyTensor:
    first = next(iter(entries.values()))
    pieces = {
        piece.offsets: piece
        for entry in entries.values()
        for piece in entry.pieces
        if 0 not in piece.tensor.shape
    }
    if any(entry.shape != first.shape for entry in entries.values()):
        raise DamagedFileError(
            f"{where}: {key} has another shape in another rank's file: not one save."
        )
    return covering(key, list(pieces.values()), shape=first.shape, like=first, where=where)


def covering(
    key: str, pieces: list[Piece], *, shape: Shape, like: LazyTensor | Sharded, where: str
) -> LazyTensor:
    """Join boxes, which must be inside the tensor, not overlap, and cover it.

    Raises:
        DamagedFileError: they do not.
    """
    for piece in pieces:
        if len(piece.offsets) != len(shape) or any(
            offset + size > complete
            for offset, size, complete in zip(piece.offsets, piece.tensor.shape, shape, strict=True)
        ):
            raise DamagedFileError(
                f"{where}: a shard of {key} at {piece.offsets} with shape {piece.tensor.shape} "
                f"lies outside {shape}."
            )
    have, want = sum(math.prod(piece.tensor.shape) for piece in pieces), math.prod(shape)
    if have != want:
        raise DamagedFileError(
            f"{where}: {have} of {want} elements of {key} are in the files: a shard is missing or "
            "doubled; copy every rank's file here."
        )
    # With as many elements as the full tensor, boxes that do not overlap cover it.
    if _overlap(pieces):
        raise DamagedFileError(f"{where}: shards of {key} overlap: the files are not of one save.")
    if len(pieces) == 1 and pieces[0].tensor.shape == shape:
        return pieces[0].tensor
    return Assembled(tuple(pieces), shape, like.dtype)


def _is_grid(pieces: list[Piece]) -> bool:
    """Check if all boxes have one size and start at its multiples, so that none overlap."""
    # Stacked layers and experts have tens of thousands of them, too many to compare in pairs.
    sizes = {piece.tensor.shape for piece in pieces}
    if len(sizes) != 1:
        return False
    size = sizes.pop()
    if 0 in size:
        return False
    aligned = all(
        offset % n == 0 for piece in pieces for offset, n in zip(piece.offsets, size, strict=True)
    )
    return aligned and len({piece.offsets for piece in pieces}) == len(pieces)


def _overlap(pieces: list[Piece]) -> bool:
    if _is_grid(pieces):
        return False
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            # Boxes are sorted by first row, so no later box overlaps this one either.
            if not one.tensor.shape or other.offsets[0] >= one.offsets[0] + one.tensor.shape[0]:
                break
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(
                    one.offsets, one.tensor.shape, other.offsets, other.tensor.shape, strict=True
                )
            ):
                return True
    return False
