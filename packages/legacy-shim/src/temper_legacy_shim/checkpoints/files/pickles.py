"""Reading and writing pickles without executing them, as plain values and inert nodes.

No global is ever imported and no callable ever called. Where a pickle asks for
``module.name(*arguments)``, the result is an ``Inert`` node that says so; what the node means is
decided by whoever asked (``tensors.py``). A global outside the allow-list is refused by name. Work
and memory are bounded by the file's size: keys of mappings are scalars, memo entries are
references, nothing is copied twice.
"""

import io
import pickletools
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources

from temper_legacy_shim.errors import DamagedFileError, UnsafeFileError

MAX_PICKLE_BYTES = 1 << 30
"""Maximum size of a pickle; the index of a checkpoint of 100,000 tensors takes 50 MB."""


_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Global:
    """A name a pickle asks for; never imported."""

    module: str
    """Module name as pickled by the version that wrote it."""
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class Inert:
    """A call in a pickle, recorded and never executed, with the operations on its result."""

    function: Global
    """Name of the function the pickle would call."""
    arguments: tuple[object, ...]
    state: object = None
    """State that BUILD would set: a mapping of attributes, or any other value."""
    items: dict[object, object] = field(default_factory=dict)
    elements: list[object] = field(default_factory=list)
    """Elements that APPENDS or ADDITEMS would add."""

    def __repr__(self) -> str:
        """Return the function alone: a few hundred bytes of pickle can nest without end."""
        return f"<{self.function}>"


def abbreviate(node: object) -> str:
    """Return a node for an error message: scalars as they are, else the type."""
    if isinstance(node, int) and node.bit_length() > _LONGEST_NUMBER:
        return f"a number of {node.bit_length()} bits"  # Python refuses to write very long ones
    return (
        repr(node)[:80]
        if isinstance(node, (*_SCALARS, Inert, Global))
        else f"a {type(node).__name__}"
    )


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent id: a storage of torch, outside the pickle."""

    key: tuple[object, ...]
    """Persistent id: ("storage", type, name, location, number of elements)."""


_MARK = object()
# Python raises ValueError for the decimal form of numbers above 4,300 digits, and an error message
# must not raise.
_LONGEST_NUMBER = 256
# PROTO and FRAME only help a reader that streams; the data are all in memory here.
_SKIPPED = frozenset({"PROTO", "FRAME"})
_CONSTANTS = {"MARK": _MARK, "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUSHED = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)


def load_inert(data: bytes, *, source: str) -> object:
    """Return the value of a pickle, with ``Inert`` nodes where it would have called something.

    Mappings of ``collections.OrderedDict`` come back as dict, sets as frozenset of scalars or as a
    list.

    Args:
        data: the pickle.
        source: names it in errors.

    Raises:
        UnsafeFileError: it asks for a global outside the allow-list; names it.
        DamagedFileError: it is not a whole pickle, or has a construct that no checkpoint needs.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise DamagedFileError(
            f"{source}: its pickle has {len(data)} bytes; no checkpoint's has more than "
            f"{MAX_PICKLE_BYTES}."
        )
    machine = _Machine(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of odd escapes in strings of the oldest protocol
            if machine.run(data):
                return machine.result()
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        struct.error,
        OverflowError,
        EOFError,
        UnicodeError,
    ) as error:
        # DamagedFileError is a ValueError, so it also gets here.
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(
            f"{source}: damaged pickle ({type(error).__name__}: {error}): copy the file again."
        ) from error
    raise DamagedFileError(
        f"{source}: the pickle ends before its last opcode: copy the file again."
    )


def dump_inert(value: object) -> bytes:
    """Return the pickle of plain values, ``Inert`` nodes, globals and persistent ids.

    A node with a state is an object without its constructor's call, as pickle makes dataclasses.

    Raises:
        TypeError: there is a value of another type.
    """
    result = bytearray(b"\x80\x02")
    _dump(value, result, {})
    return bytes(result + b".")


def _dump(value: object, result: bytearray, memo: dict[object, int]) -> None:
    if isinstance(value, bool | None):
        result += _WRITTEN_CONSTANTS[value]
    elif isinstance(value, int):
        number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        result += b"\x8a" + bytes((len(number),)) + number
    elif isinstance(value, str | Global | Inert):
        # Nodes hash by identity: a node that occurs twice is one object on reading, too.
        if value in memo:
            result += b"j" + memo[value].to_bytes(4, "little")
            return
        _dump_new(value, result, memo)
        memo[value] = len(memo)
        result += b"r" + memo[value].to_bytes(4, "little")
    elif isinstance(value, tuple | list):
        result += b"("
        for element in value:
            _dump(element, result, memo)
        result += b"t" if isinstance(value, tuple) else b"l"
    elif isinstance(value, dict):
        result += b"}("
        for key, content in value.items():
            _dump(key, result, memo)
            _dump(content, result, memo)
        result += b"u"
    elif isinstance(value, Persistent):
        _dump(value.key, result, memo)
        result += b"Q"
    else:
        raise TypeError(f"a {type(value).__name__} can't be pickled here")


_WRITTEN_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def _dump_new(value: str | Global | Inert, result: bytearray, memo: dict[object, int]) -> None:
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        result += b"X" + len(text).to_bytes(4, "little") + text
    elif isinstance(value, Global):
        result += f"c{value.module}\n{value.name}\n".encode()
    else:
        _dump(value.function, result, memo)
        _dump(value.arguments, result, memo)
        result += b"R" if value.state is None else b"\x81"
        if value.state is not None:
            _dump(value.state, result, memo)
            result += b"b"


_OPCODES = {
    each.code.encode("latin-1"): (each.name, None if each.arg is None else each.arg.reader)
    for each in pickletools.opcodes
}
"""Name and argument reader of each opcode byte."""
_STOP = next(code for code, (name, _) in _OPCODES.items() if name == "STOP")


class _Machine:
    """The stack machine of the pickle protocol, which neither imports nor calls anything."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}
        self._operations = {
            code: (read, self._operation(name)) for code, (name, read) in _OPCODES.items()
        }

    def _operation(self, name: str) -> Callable[[object], None]:
        if name in _PUSHED:
            return self._stack.append
        if name in _SKIPPED:
            return lambda _: None
        if name in _CONSTANTS:
            return lambda _: self._stack.append(_CONSTANTS[name])
        if name in _TUPLES:
            return partial(self._push_tuple, _TUPLES[name])
        # Refused only when it occurs, because files contain only some of the opcodes.
        return getattr(self, f"_op_{name}", None) or partial(self._refuse, name)

    def run(self, data: bytes) -> bool:
        """Run all opcodes, and return True if STOP was reached."""
        # ``pickletools.genops`` and a call for each opcode take twice as long.
        stream = io.BytesIO(data)
        while (code := stream.read(1)) and code != _STOP:
            read, operate = self._operations[code]
            operate(None if read is None else read(stream))
        return code == _STOP

    def _refuse(self, name: str, _: object) -> None:
        raise UnsafeFileError(
            f"{self._source}: the pickle uses {name}, which no checkpoint needs; nothing of it was "
            "executed."
        )

    def result(self) -> object:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise DamagedFileError(
                f"{self._source}: the pickle leaves {len(self._stack)} values instead of one: copy "
                "the file again."
            )
        return self._stack[0]

    def _pop(self) -> object:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def _pop_mark(self) -> list[object]:
        # The stack is searched from its end, because marks are near it. A search from the start
        # takes quadratic time.
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i] is _MARK:
                values = self._stack[i + 1 :]
                del self._stack[i:]
                return values
        raise ValueError("no mark on the stack")

    def _top(self) -> object:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark where a value should be")
        return self._stack[-1]

    def _op_POP(self, _: object) -> None:
        self._stack.pop()

    def _op_POP_MARK(self, _: object) -> None:
        self._pop_mark()

    def _op_DUP(self, _: object) -> None:
        self._stack.append(self._top())

    def _op_EMPTY_LIST(self, _: object) -> None:
        self._stack.append([])

    def _op_EMPTY_DICT(self, _: object) -> None:
        self._stack.append({})

    def _op_EMPTY_SET(self, _: object) -> None:
        # A Python set would hash its elements, which may be nodes that a hostile file has nested
        # deeply.
        self._stack.append(Inert(Global("builtins", "set"), ()))

    def _op_TUPLE(self, _: object) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def _push_tuple(self, count: int, _: object) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def _op_LIST(self, _: object) -> None:
        self._stack.append(self._pop_mark())

    def _op_DICT(self, _: object) -> None:
        items = self._pop_mark()
        made: dict[object, object] = {}
        self._stack.append(made)
        self._set_items(items)

    def _op_FROZENSET(self, _: object) -> None:
        self._stack.append(Inert(Global("builtins", "frozenset"), (), elements=self._pop_mark()))

    def _op_APPEND(self, _: object) -> None:
        self._extend([self._pop()])

    def _op_APPENDS(self, _: object) -> None:
        self._extend(self._pop_mark())

    _op_ADDITEMS = _op_APPENDS

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Inert):
            target.elements.extend(values)
        else:
            raise ValueError(f"elements for a {type(target).__name__}")

    def _op_SETITEM(self, _: object) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _op_SETITEMS(self, _: object) -> None:
        self._set_items(self._pop_mark())

    def _set_items(self, items: list[object]) -> None:
        target = self._top()
        into = target.items if isinstance(target, Inert) else target
        if not isinstance(into, dict) or len(items) % 2:
            raise ValueError(f"{len(items)} keys and values for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[_hashable(key)] = value

    def _op_GET(self, argument: object) -> None:
        self._stack.append(self._memo[_index(argument)])

    _op_BINGET = _op_LONG_BINGET = _op_GET

    def _op_PUT(self, argument: object) -> None:
        self._memo[_index(argument)] = self._top()

    _op_BINPUT = _op_LONG_BINPUT = _op_PUT

    def _op_MEMOIZE(self, _: object) -> None:
        # Protocol 4 numbers the memo itself, in the order of its entries.
        self._memo[len(self._memo)] = self._top()

    def _op_GLOBAL(self, argument: object) -> None:
        module, _, name = str(argument).partition(" ")
        self._push_global(module, name)

    def _op_STACK_GLOBAL(self, _: object) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a global whose name is no string")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        expected = Global(module, name)
        # Older pickles ask for a class inside a class as an attribute of it: `_call` sees of which.
        if expected not in _ATTRIBUTE_OF and name not in _allowed_names().get(module, ()):
            raise self._unsafe(expected)
        self._stack.append(expected)

    def _unsafe(self, expected: Global) -> UnsafeFileError:
        return UnsafeFileError(
            f"{self._source} asks for {expected}"[:400]
            + ", which no checkpoint needs; nothing of the file was executed. If you "
            "trust where it comes from, say which program wrote it in a bug report.",
            expected=f"{expected.module}.{expected.name}",
        )

    def _op_REDUCE(self, _: object) -> None:
        arguments, function = self._pop(), self._pop()
        self._call(function, arguments)

    _op_NEWOBJ = _op_REDUCE

    def _op_NEWOBJ_EX(self, _: object) -> None:
        keywords, arguments, function = self._pop(), self._pop(), self._pop()
        self._call(function, arguments)
        made = self._stack[-1]
        if isinstance(made, Inert) and isinstance(keywords, dict):
            made.state = keywords

    def _call(self, function: object, arguments: object) -> None:
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise ValueError(
                f"a call of a {type(function).__name__} with a {type(arguments).__name__}"
            )
        if function in _ATTRIBUTE_OF:
            of, attribute = arguments if len(arguments) == 2 else (None, None)
            if not isinstance(of, Global) or not isinstance(attribute, str):
                raise self._unsafe(function)
            inner = Global(of.module, f"{of.name}.{attribute}")
            if inner != _PROCESS_GROUP_STATE:
                raise self._unsafe(function)
            self._stack.append(inner)
        # State dicts are OrderedDicts. A plain dict keeps the order too, so that readers need one
        # type only.
        elif function == _ORDERED_DICT and arguments in ((), ([],)):
            self._stack.append({})
        else:
            self._stack.append(Inert(function, arguments))

    def _op_BUILD(self, _: object) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Inert):
            # pickle would call __setstate__ or update __dict__; only the value is kept here.
            target.state = state
        elif not isinstance(
            target, dict
        ):  # an OrderedDict's attributes, such as _metadata, are of no use here
            raise ValueError(f"a state for a {type(target).__name__}")

    def _op_BINPERSID(self, _: object) -> None:
        key = self._pop()
        if not isinstance(key, tuple):
            raise ValueError("a persistent id that is no tuple")
        self._stack.append(Persistent(key))


_ORDERED_DICT = Global("collections", "OrderedDict")
_ATTRIBUTE_OF = (Global("builtins", "getattr"), Global("__builtin__", "getattr"))
_PROCESS_GROUP_STATE = Global(
    "torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"
)
"""The only class inside a class that a genuine checkpoint asks for."""


@cache
def _allowed_names() -> dict[str, frozenset[str]]:
    """Read the globals that genuine checkpoints ask for, by module; none is ever imported.

    They are spelled as every torch from 2.4 on and every numpy spell them, so that a class that
    moved stands under each of its addresses.
    """
    file = resources.files("temper_legacy_shim.checkpoints").joinpath("data/allowed_globals.tsv")
    rows = (line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[1:])
    return {module: frozenset(names.split()) for module, names in rows}


def _index(argument: object) -> int:
    if not isinstance(argument, int):
        raise ValueError("a memo index that is no number")
    return argument


def _hashable(key: object) -> object:
    """Return a key that hashes fast: inert nodes by identity, others by value."""
    # Hashing nested tuples could take for ever.
    if isinstance(key, (Inert, Global, *_SCALARS)):
        return key
    if isinstance(key, tuple) and all(isinstance(part, (Global, *_SCALARS)) for part in key):
        return key
    raise ValueError(f"a {type(key).__name__} as the key of a mapping")
