"""Encoding of the values that ranks gather: JSON, followed by the bytes of tensors.

The object collectives of torch.distributed pickle values, so anyone who can write to one of the
process group's connections could run code on every rank. Decoding this format calls nothing but the
constructors of classes that are marked as `gatherable`. Field names are checked, value types are
not.

A message is the JSON text's length (8 bytes, little-endian), the JSON text, and the tensor contents
in the order in which the text lists them. Numbers, strings, booleans, None and lists are JSON; any
other value is an object with one entry, whose key is the kind: `{"tuple": [1, 2]}`.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api import errors
from temper_engine_api.distributed.gatherable import CLASSES, format_full_name
from temper_engine_api.errors import MessageError, TemperError

_HEADER_BYTES = 8
_SCALARS = frozenset({str, int, bool, float, type(None)})
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


def encode_value(value: object) -> Tensor:
    """Encode a value as bytes [N] uint8 on the CPU.

    Supported are None, bool, int, float, str, list, tuple, mappings, dense tensors, paths, Temper's
    errors, and instances of `gatherable` classes. Mappings become dicts.

    Raises:
        MessageError: If the value or a part of it is something else.

    Example:
        >>> decode_value(encode_value({"rank": 1, "shape": (2, 3)}))
        {'rank': 1, 'shape': (2, 3)}
    """
    tensors: list[Tensor] = []
    try:
        text = json.dumps(_encode(value, tensors), separators=(",", ":")).encode()
    except RecursionError as error:
        raise MessageError(
            f"a value of type {format_full_name(type(value))} cannot be gathered from ranks: "
            "it is nested too deeply, or contains itself. Gather a flat value."
        ) from error
    header = len(text).to_bytes(_HEADER_BYTES, "little")
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([torch.frombuffer(bytearray(header + text), dtype=torch.uint8), *parts])


def decode_value(message: Tensor) -> object:
    """Return the value that `encode_value` encoded; its tensors are copies on the CPU.

    Raises:
        MessageError: If the bytes are not such a message.
    """
    try:
        start = _HEADER_BYTES + int.from_bytes(_to_bytes(message[:_HEADER_BYTES]), "little")
        if not _HEADER_BYTES < start <= len(message):
            raise ValueError(f"the length of its text is {start - _HEADER_BYTES}")
        tensors = _TensorReader(message[start:])
        value = _decode(json.loads(_to_bytes(message[_HEADER_BYTES:start])), tensors)
        tensors.check_end()
    except (
        # Damaged bytes may raise any of these errors, either in this decoder or in the constructor
        # of a decoded object, which gets invalid fields.
        *(ArithmeticError, AttributeError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise MessageError(
            f"{len(message)} bytes are not a value of Temper ({type(error).__name__}: {error}); "
            "nothing of it was executed. Run the same version of Temper on all ranks, and check "
            "who can reach the run's network."
        ) from error
    return value


def _encode(value: object, tensors: list[Tensor]) -> object:
    """Return a value as JSON; append its tensors to the list."""
    kind = type(value)
    if kind in _SCALARS:
        return value  # first, because most parts of a value are these
    if CLASSES.get(format_full_name(kind)) is kind:
        if isinstance(value, Enum):
            return {"enum": [format_full_name(kind), value.value]}
        assert is_dataclass(value)
        content = {each.name: _encode(getattr(value, each.name), tensors) for each in fields(value)}
        return {"object": [format_full_name(kind), content]}
    if isinstance(value, int | float | str) and not isinstance(value, Enum):
        return value  # a subclass, such as numpy's float64
    if kind is list or kind is tuple:
        assert isinstance(value, list | tuple)
        # Long lists of numbers and strings are common: no call per item.
        is_flat = _SCALARS.issuperset(map(type, value))
        items = list(value) if is_flat else [_encode(item, tensors) for item in value]
        return items if kind is list else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, TemperError):
        return {"error": [_error_class(value), str(value)]}
    if isinstance(value, Tensor) and _is_plain(value):
        # The message has no strides, so the bytes must follow the shape's order.
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": [str(value.dtype), list(value.shape)]}
    raise MessageError(
        f"a value of type {format_full_name(kind)} cannot be gathered from ranks: convert it to "
        "numbers, strings, lists, tuples, dicts or tensors, or mark its dataclass with "
        "temper_engine_api.distributed.gatherable.gatherable."
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a dense tensor, but not for subclasses such as DTensor."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and str(tensor.dtype) in _DTYPES
    )


def _decode(node: object, tensors: "_TensorReader") -> object:
    """Return the value of a JSON node."""
    if isinstance(node, list):
        is_flat = _SCALARS.issuperset(map(type, node))
        return node if is_flat else [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "path":
        return Path(content)
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "dict":
        # Pairs and not a JSON object, whose keys could only be strings.
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    name, rest = content
    if kind == "tensor":
        return tensors.read(_DTYPES[name], rest)
    if kind == "error":
        return _find_error_class(name)(str(rest))
    if kind == "enum":
        return CLASSES[name](rest)
    if kind == "object":
        return _decode_object(CLASSES[name], rest, tensors)
    raise ValueError(f"it has a value of kind {kind!r}")


def _decode_object(cls: type, content: dict[str, object], tensors: "_TensorReader") -> object:
    expected = [each.name for each in fields(cls)]
    # Defaults of the constructor would hide a field that a rank with another version lacks.
    if list(content) != expected:
        raise ValueError(f"a {cls.__name__} has the fields {list(content)} instead of {expected}")
    return cls(**{name: _decode(item, tensors) for name, item in content.items()})


class _TensorReader:
    """Reads tensor contents from the end of a message, one after the other."""

    def __init__(self, content: Tensor) -> None:
        self._content = content
        self._position = 0

    def read(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """Return a copy of the next tensor."""
        num_bytes = dtype.itemsize
        for size in shape:
            # isinstance would accept True as the size 1.
            if type(size) is not int or not 0 <= size < 2**63:
                raise ValueError(f"a tensor has the shape {shape}")
            num_bytes *= size
        end = self._position + num_bytes
        if end > len(self._content):
            raise ValueError(f"a tensor has {num_bytes} bytes, more than are left")
        # A copy: bytes at any offset cannot be viewed as another dtype.
        data = self._content[self._position : end].clone()
        self._position = end
        return data.view(dtype).reshape(shape)

    def check_end(self) -> None:
        """Raise ValueError unless everything was read."""
        if self._position != len(self._content):
            raise ValueError(f"{len(self._content) - self._position} bytes are left over")


def _error_class(error: TemperError) -> str:
    """Return an error's class name, or that of its nearest base class in `errors`."""
    names = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(names)


def _find_error_class(name: str) -> type[TemperError]:
    cls: object = vars(errors)[name]
    if not (isinstance(cls, type) and issubclass(cls, TemperError)):
        raise ValueError(f"{name!r} is not an error of Temper")
    return cls


def _to_bytes(message: Tensor) -> bytes:
    # engine-api does not depend on numpy, and tolist() is slow.
    content = bytearray(len(message))
    if content:
        torch.frombuffer(content, dtype=torch.uint8).copy_(message)
    return bytes(content)
