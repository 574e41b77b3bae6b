"""A pickle is read and never executed."""

import builtins
import io
import os
import pickle
import pickletools
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper_legacy_shim.checkpoints.files.pickles import Global, Inert, load_inert
from temper_legacy_shim.errors import DamagedFileError, ShimError, UnsafeFileError

_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


class _Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@given(value=_PLAIN, protocol=st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back_as_they_were(value: object, protocol: int) -> None:
    assert load_inert(pickle.dumps(value, protocol=protocol), source="f") == value


def test_an_ordered_dict_comes_back_as_a_dict() -> None:
    assert load_inert(pickle.dumps(OrderedDict(a=1, b=2), protocol=2), source="f") == {
        "a": 1,
        "b": 2,
    }


def test_an_allowed_call_becomes_an_inert_node() -> None:
    node = load_inert(pickle.dumps(io.BytesIO(b"xy"), protocol=4), source="f")
    assert isinstance(node, Inert)
    assert node.function == Global("_io", "BytesIO")
    assert node.state == (b"xy", 0, None)


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch {marker}",), "posix.system"),
        (subprocess.check_output, ("touch {marker}",), "check_output"),
        (builtins.eval, ("__import__('os').system('touch {marker}')",), "__builtin__.eval"),
        (builtins.getattr, (os, "system"), "__builtin__.getattr"),
        (open, ("{marker}", "w"), "io.open"),
    ],
)
def test_a_hostile_pickle_is_refused_naming_what_it_requested(
    function: object, arguments: tuple[object, ...], named: str, tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    filled = tuple(
        a.replace("{marker}", str(marker)) if isinstance(a, str) else "os" for a in arguments
    )
    data = pickle.dumps({"weights": _Calls(function, *filled)}, protocol=2)
    with pytest.raises(UnsafeFileError, match=named):
        load_inert(data, source="model.pt")
    assert not marker.exists()


def test_a_class_inside_a_class_is_named_and_any_other_attribute_is_not() -> None:
    requested = (
        b"c__builtin__\ngetattr\n"
        b"(ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nV%s\ntR."
    )
    assert load_inert(requested % b"ProcessGroupState", source="f") == Global(
        "torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"
    )
    with pytest.raises(UnsafeFileError, match=r"__builtin__\.getattr"):
        load_inert(requested % b"__subclasses__", source="f")


def test_opcodes_that_reach_around_the_list_are_refused() -> None:
    for data in (
        b"cos\nsystem\n(S'id'\ntR.",
        b"(S'id'\nios\nsystem\n.",
        b"(cos\nsystem\nS'id'\no.",
        b"\x80\x02\x82\x01.",
    ):
        with pytest.raises(UnsafeFileError):
            load_inert(data, source="model.pt")


def test_a_key_whose_hash_would_take_for_ever_is_refused_at_once() -> None:
    # Sixty pairs of the same pair: a tree of 2 ** 60 leaves in 200 bytes.
    data = b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x01s."
    with pytest.raises(DamagedFileError, match="key of a mapping"):
        load_inert(data, source="model.pt")


def test_a_memo_index_of_four_billion_takes_no_memory() -> None:
    assert load_inert(b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.", source="f") is None


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_pickle_raise_our_error_only(data: bytes) -> None:
    try:
        load_inert(data, source="f")
    except ShimError:
        return
    assert list(pickletools.genops(data)), "it was accepted, so it is a pickle"


def test_every_prefix_of_a_pickle_is_refused() -> None:
    data = pickle.dumps({"a": [1, 2.5, "x"], "b": OrderedDict(c=b"y")}, protocol=2)
    for end in range(len(data)):
        with pytest.raises(DamagedFileError):
            load_inert(data[:end], source="f")
