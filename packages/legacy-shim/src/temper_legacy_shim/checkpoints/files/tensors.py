"""Tensors from inert nodes.

A tensor is in a storage, or it is one rank's part of a distributed tensor with placements. The
forms are those in which every torch from 2.4 on pickles ``Tensor``, ``Parameter``, ``DTensor`` and
``ShardedTensor``. None of these classes is imported.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.dtypes import BY_NAME, BY_STORAGE, Dtype
from temper_legacy_shim.checkpoints.files.lazy import (
    LazyTensor,
    Piece,
    Shape,
    Stored,
    Strided,
    read_all,
)
from temper_legacy_shim.checkpoints.files.pickles import Global, Inert, Persistent, abbreviate
from temper_legacy_shim.errors import DamagedFileError

_LARGEST = 1 << 48
"""Elements of the largest tensor that is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Split of a tensor along one mesh axis."""

    dim: int | None = None
    """Dimension it splits; None replicates."""
    split_factor: int = 1
    """Above 1 for a split that goes over an earlier one (torch's ``_StridedShard``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """One rank's part of a DTensor."""

    local: LazyTensor
    shape: Shape
    placements: tuple[Placement, ...]
    """Placement per mesh axis."""
    mesh_shape: Shape | None
    """Sizes of the axes; None where this torch wrote the mesh in a way we do not know."""
    coordinate: Shape | None
    """This rank's place on each axis; None likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """One rank's boxes of a ShardedTensor."""

    pieces: tuple[Piece, ...]
    """Pieces with their offsets in the full tensor."""
    shape: Shape
    dtype: Dtype


_MOST_AXES = 64
_MOST_RANKS = 1 << 20

Entry = LazyTensor | Distributed | Sharded


class TensorReader:
    """Turns nodes of one archive into lazy tensors."""

    def __init__(self, archive: Archive, *, rank: int = 0) -> None:
        self.archive = archive
        self._rank = rank
        self._meshes: dict[int, tuple[Shape | None, Shape | None]] = {}

    def is_tensor(self, node: object) -> bool:
        return isinstance(node, Inert) and (
            node.function.name.startswith("_rebuild") or node.function.name == "ShardedTensor"
        )

    def distributed_form(self, node: object) -> tuple[str, ...]:
        """List the classes and fields of a pickled DTensor and its mesh, for each torch version."""
        if (
            not isinstance(node, Inert)
            or node.function.name != "_rebuild_from_type_v2"
            or len(node.arguments) < 4
        ):
            return ()
        spec = (
            attributes_of(node.arguments[3]).get("_spec")
            if isinstance(node.arguments[3], dict)
            else None
        )
        mesh = attributes_of(spec.state).get("mesh") if isinstance(spec, Inert) else None
        fields = (
            sorted(map(abbreviate, attributes_of(mesh.state))) if isinstance(mesh, Inert) else []
        )
        return (str(node.arguments[1]), *fields)

    def entry(self, node: object, *, key: str) -> Entry:
        """Return the tensor a node stands for.

        Args:
            node: of the archive's value.
            key: names it in errors.

        Raises:
            DamagedFileError: it is no tensor, or contradicts its storage.
        """
        try:
            return self._entry(node, key=key)
        except (
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            if isinstance(error, DamagedFileError):
                raise
            raise self._damaged(key, f"is malformed ({type(error).__name__}: {error})") from error

    def plain(self, node: object, *, key: str) -> LazyTensor:
        """Return an ordinary tensor; see ``entry``."""
        entry = self.entry(node, key=key)
        if isinstance(entry, Distributed | Sharded):
            raise self._damaged(key, "is a distributed tensor where an ordinary one should be")
        return entry

    def _damaged(self, key: str, what: str) -> DamagedFileError:
        return DamagedFileError(f"{self.archive.path}: {key} {what}: copy the file again.")

    def _entry(self, node: object, *, key: str) -> Entry:
        if not isinstance(node, Inert):
            raise self._damaged(key, f"is a {type(node).__name__} where a tensor should be")
        name, arguments = node.function.name, node.arguments
        if name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._stored(
                arguments[0],
                offset=arguments[1],
                shape=arguments[2],
                stride=arguments[3],
                dtype=None,
                key=key,
            )
        # It has the dtype as an argument, because its storage is untyped.
        if name == "_rebuild_tensor_v3":
            return self._stored(
                arguments[0],
                offset=arguments[1],
                shape=arguments[2],
                stride=arguments[3],
                dtype=arguments[6],
                key=key,
            )
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return self._entry(arguments[0], key=key)
        if name == "_rebuild_from_type_v2":
            return self._typed(arguments, key=key)
        raise self._damaged(key, f"is a {node.function} where a tensor should be")

    def _typed(self, arguments: tuple[object, ...], *, key: str) -> Entry:
        function, kind, inner, state = arguments[:4]
        if (
            not isinstance(function, Global)
            or not isinstance(kind, Global)
            or not isinstance(inner, tuple)
        ):
            raise self._damaged(key, "is a tensor of a kind that is not known")
        attributes = attributes_of(state)
        if kind.name == "DTensor":
            # torch._utils._rebuild_wrapper_subclass takes class, dtype, size, ...
            size = inner[2]
            return self._distributed(attributes, shape=sizes_of(size), key=key)
        if kind.name == "ShardedTensor":
            return self._sharded(state, key=key)
        return self._entry(Inert(function, inner), key=key)

    def _stored(
        self,
        storage: object,
        *,
        offset: object,
        shape: object,
        stride: object,
        dtype: object,
        key: str,
    ) -> LazyTensor:
        if (
            not isinstance(storage, Persistent)
            or len(storage.key) < 5
            or storage.key[0] != "storage"
        ):
            raise self._damaged(key, "has no storage in its file")
        _, kind, name, _, count = storage.key[:5]
        element = _dtype(dtype) if dtype is not None else _storage_dtype(kind)
        if element is None or not isinstance(count, int) or not isinstance(offset, int):
            raise self._damaged(
                key,
                "has elements of a type that is not known "
                f"({abbreviate(kind if dtype is None else dtype)})",
            )
        stretch = self.archive.storage(str(name))
        if _storage_dtype(kind) is None:  # untyped: counted in bytes
            count //= element.num_bytes
        if stretch.num_bytes != count * element.num_bytes:
            raise self._damaged(
                key,
                f"has a storage of {stretch.num_bytes} bytes, but {count} elements of "
                f"{element.name} are announced",
            )
        sizes, strides = sizes_of(shape), sizes_of(stride)
        extent = _extent(sizes, strides)
        # The pickle is not trusted. Without this check, a shape or stride could reach the bytes of
        # other tensors, or ask for more memory than the file has bytes.
        if offset < 0 or offset + extent > count or math.prod(sizes) > max(count, 0):
            raise self._damaged(
                key, f"has shape {sizes}, which does not fit its storage of {count} elements"
            )
        start = stretch.offset + offset * element.num_bytes
        if strides == _contiguous(sizes) or math.prod(sizes) <= 1:
            return Stored(file=stretch.file, offset=start, shape=sizes, dtype=element)
        span = Stored(file=stretch.file, offset=start, shape=(extent,), dtype=element)
        return Strided(span=span, shape=sizes, stride=strides)

    def _distributed(
        self, attributes: Mapping[object, object], *, shape: Shape, key: str
    ) -> Distributed:
        spec = attributes["_spec"]
        described = attributes_of(spec.state if isinstance(spec, Inert) else None)
        placements = described["placements"]
        if not isinstance(placements, tuple | list):
            raise self._damaged(key, "has no placements")
        mesh_shape, coordinate = self._mesh(described.get("mesh"), key=key)
        placed = tuple(self._placement(placement, key=key) for placement in placements)
        if any(p.dim is not None and not 0 <= p.dim < len(shape) for p in placed):
            raise self._damaged(
                key, f"is sharded along a dimension that its shape {shape} does not have"
            )
        if mesh_shape is not None and len(mesh_shape) != len(placed):
            raise self._damaged(
                key, f"has {len(placed)} placements on a mesh of shape {mesh_shape}"
            )
        return Distributed(
            local=self.plain(attributes["_local_tensor"], key=key),
            shape=shape,
            placements=placed,
            mesh_shape=mesh_shape,
            coordinate=coordinate,
        )

    def _placement(self, node: object, *, key: str) -> Placement:
        if not isinstance(node, Inert):
            raise self._damaged(key, "has a placement that is not known")
        attributes = attributes_of(node.state)
        if node.function.name == "Replicate":
            return Placement()
        if node.function.name in ("Shard", "_StridedShard"):
            dim = attributes.get("dim", node.arguments[0] if node.arguments else None)
            factor = attributes.get(
                "split_factor", node.arguments[1] if len(node.arguments) > 1 else 1
            )
            if isinstance(dim, int) and isinstance(factor, int):
                return Placement(
                    dim=dim, split_factor=factor if node.function.name == "_StridedShard" else 1
                )
        raise self._damaged(
            key,
            f"is placed as {node.function.name}, of which the full tensor can't be put together",
        )

    def _mesh(self, node: object, *, key: str) -> tuple[Shape | None, Shape | None]:
        if not isinstance(node, Inert):
            return None, None
        if id(node) not in self._meshes:
            self._meshes[id(node)] = self._read_mesh(attributes_of(node.state), key=key)
        return self._meshes[id(node)]

    def _read_mesh(
        self, attributes: Mapping[object, object], *, key: str
    ) -> tuple[Shape | None, Shape | None]:
        ranks = self._mesh_ranks(attributes, key=key)
        if ranks is None:
            return None, None
        result = np.argwhere(ranks == self._rank)
        if len(result) != 1:
            raise self._damaged(
                key,
                f"lies on a mesh of ranks {sorted(ranks.reshape(-1).tolist())}, but the file is "
                f"rank {self._rank}'s",
            )
        position = tuple(int(along) for along in result[0])
        # The position of the file's own rank on the mesh follows from the file name. The position
        # that torch wrote into the file must agree, or the file was renamed or copied over another
        # one.
        written = attributes.get(
            "_coordinate_on_dim"
        )  # every torch from 2.4 on says where the rank was that wrote the file
        if isinstance(written, tuple | list) and tuple(written) != position:
            given, is_at = (
                ", ".join(abbreviate(along) for along in at[:_MOST_AXES])
                for at in (written, position)
            )
            raise self._damaged(
                key,
                f"was written at ({given}) of its mesh, but rank {self._rank} is at ({is_at}): "
                "another rank's file",
            )
        return ranks.shape, position

    def _mesh_ranks(
        self, attributes: Mapping[object, object], *, key: str
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
        # torch stored a tensor of that shape until 2.8, and since then a flat one with its layout.
        for name in ("mesh", "_mesh"):
            if self.is_tensor(attributes.get(name)):
                return read_all(self.plain(attributes[name], key=f"{key} (its mesh)")).astype(
                    np.int64
                )
        flat, layout = attributes.get("_rank_map"), attributes.get("_layout")
        if not self.is_tensor(flat) or not isinstance(layout, Inert):
            return None
        axes = list(_layout_axes(attributes_of(layout.state), layout.arguments))
        if not axes:
            return None
        ranks = read_all(self.plain(flat, key=f"{key} (its mesh)")).astype(np.int64).reshape(-1)
        offsets = np.zeros((), np.int64)
        # Checked before the ranks are computed, because a few bytes of a pickle can announce a huge
        # mesh.
        if math.prod(len(steps) for steps in axes) > _MOST_RANKS:
            raise self._damaged(key, "lies on a mesh of too many ranks")
        for steps in axes:
            offsets = np.add.outer(offsets, np.asarray(steps, np.int64))
        return ranks[offsets]

    def _sharded(self, state: object, *, key: str) -> Sharded:
        # ShardedTensor.__getstate__: local shards, metadata, process group's state, sharding spec,
        # whether RPC was used.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], tuple):
            state = state[0]
        if (
            not isinstance(state, tuple)
            or not isinstance(state[0], list)
            or not isinstance(state[1], Inert)
        ):
            raise self._damaged(key, "is a ShardedTensor of a form that is not known")
        described = attributes_of(state[1].state)
        shape = sizes_of(described["size"])
        pieces = []
        for shard in state[0]:
            parts = attributes_of(shard.state)
            box = parts["metadata"]
            where = attributes_of(box.state if isinstance(box, Inert) else None)
            pieces.append(
                Piece(
                    offsets=sizes_of(where["shard_offsets"]),
                    tensor=self.plain(parts["tensor"], key=key),
                )
            )
        properties = described["tensor_properties"]
        dtype = properties_dtype(properties)
        if dtype is None:
            raise self._damaged(key, "has elements of a type that is not known")
        return Sharded(pieces=tuple(pieces), shape=shape, dtype=dtype)


def _layout_axes(
    attributes: Mapping[object, object], arguments: tuple[object, ...]
) -> Iterator[list[int]]:
    """Yield each mesh axis's steps in the list of ranks, from the layout of any torch."""
    axes = attributes.get("axes")
    if isinstance(axes, tuple | list):
        described = [attributes_of(axis.state) for axis in axes if isinstance(axis, Inert)]
        pairs = [(each.get("shape"), each.get("stride")) for each in described]
    else:
        shape = attributes.get(
            "shape", attributes.get("_shape", arguments[0] if arguments else None)
        )
        stride = attributes.get(
            "stride", attributes.get("_stride", arguments[1] if len(arguments) > 1 else None)
        )
        if shape is None or stride is None:
            return
        pairs = list(zip(_listed(shape), _listed(stride), strict=True))
    for sizes, strides in pairs:
        flat = list(zip(_flattened(sizes), _flattened(strides), strict=True))
        if math.prod(max(size, 0) for size, _ in flat) > _MOST_RANKS:
            raise ValueError(f"a mesh of more than {_MOST_RANKS} ranks")
        yield [
            sum(steps)
            for steps in product(*([i * stride for i in range(size)] for size, stride in flat))
        ]


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple | list) else (value,)


def _flattened(value: object) -> list[int]:
    """Return the numbers of a nested tuple, in order; a mesh has few axes."""
    waiting: list[object] = [value]
    result: list[int] = []
    for _ in range(_MOST_AXES):
        if not waiting:
            return result
        part = waiting.pop()
        if isinstance(part, int):
            result.append(part)
        else:
            waiting += reversed(_listed(part))
    raise ValueError(f"a mesh of more than {_MOST_AXES} axes")


def attributes_of(state: object) -> Mapping[object, object]:
    """Return the attributes of a state, a mapping or (mapping or None, mapping of slots)."""
    if isinstance(state, dict):
        return state
    if isinstance(state, tuple) and len(state) == 2:
        merged: dict[object, object] = {}
        for part in state:
            if isinstance(part, dict):
                merged |= part
        return merged
    return {}


def properties_dtype(node: object) -> Dtype | None:
    """Return the element type in a ``TensorProperties`` node; None if it is not known."""
    if not isinstance(node, Inert):
        return None
    if isinstance(node.state, tuple) and node.state:
        return _dtype(node.state[0])
    return _dtype(attributes_of(node.state).get("dtype"))


def _dtype(node: object) -> Dtype | None:
    return BY_NAME.get(node.name) if isinstance(node, Global) and node.module == "torch" else None


def _storage_dtype(kind: object) -> Dtype | None:
    return BY_STORAGE.get(kind.name) if isinstance(kind, Global) else None


def sizes_of(node: object) -> Shape:
    """Return a shape or a stride from a node.

    Raises:
        ValueError: it is none.
    """
    if isinstance(node, Inert) and node.function.name == "Size":
        node = node.arguments[0] if node.arguments else ()
    if (
        not isinstance(node, tuple | list)
        or not all(isinstance(size, int) and 0 <= size < _LARGEST for size in node)
        or len(node) > 8
    ):
        raise ValueError(f"{abbreviate(node)} where a shape should be")
    return tuple(int(size) for size in node)


def describe_tensor(shape: Shape, dtype: Dtype, *, key: str) -> Inert:
    """Return the node of a contiguous tensor with a storage of its own."""
    storage = next((name for name, of in BY_STORAGE.items() if of == dtype), None)
    count = math.prod(shape) * (1 if storage else dtype.num_bytes)
    kind = Global("torch", storage) if storage else Global("torch.storage", "UntypedStorage")
    view = (
        Persistent(("storage", kind, key, "cpu", count)),
        *(0, shape, _contiguous(shape), False),
        Inert(Global("collections", "OrderedDict"), ()),
    )
    if storage:
        return Inert(Global("torch._utils", "_rebuild_tensor_v2"), view)
    # torch has no typed storage for these.
    return Inert(Global("torch._utils", "_rebuild_tensor_v3"), (*view, Global("torch", dtype.name)))


def _contiguous(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _extent(shape: Shape, stride: Shape) -> int:
    if len(shape) != len(stride):
        raise ValueError(f"shape {shape} with stride {stride}")
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
