"""A GPU buffer that another process maps through CUDA IPC, described by plain fields.

torch.multiprocessing would send a pickled function with arguments, and a forged pickle runs any
code. Here only numbers and handles are sent, as JSON, and all are checked before torch uses them.
"""

import hmac
import json
import re
from dataclasses import asdict, dataclass, fields
from inspect import signature

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from temper_engine_api.errors import WeightError

_MAX_BYTES = 1 << 48
"""Above the memory of any GPU."""
_EVENT_BYTES = 64
"""sizeof(cudaIpcEventHandle_t)."""
_HANDLE_BYTES = range(64, 4097)
"""Size of cudaIpcMemHandle_t, or of torch's description for expandable segments."""
_COUNTER_NAME = re.compile(r"/torch_[0-9A-Za-z_]{1,200}")
"""Name of the shared memory file in which torch counts the buffer's users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer:
    """Everything that another process needs to map a buffer: arguments of `rebuild_cuda_tensor`."""

    nonce: str
    """Secret of the channel, which its members know from its spec. It authenticates the sender."""
    handle: str
    """The allocation's IPC handle; hexadecimal."""
    storage_bytes: int
    storage_offset: int
    """Byte offset in the allocation."""
    tensor_offset: int
    """Byte offset in the storage."""
    counter: str
    """Name of torch's reference count file."""
    counter_offset: int
    """Offset of this buffer's count in that file."""
    event: str
    """Handle of a CUDA event that the sender records; hexadecimal."""
    must_sync: bool
    """True if the receiver has to wait for that event."""

    def to_json(self) -> bytes:
        """Return the message for the receivers."""
        return json.dumps(asdict(self)).encode()

    def map(self, num_bytes: int, *, device: torch.device) -> Tensor:
        """Map the sender's buffer into this process as [num_bytes] uint8."""
        # The device of this process: with another CUDA_VISIBLE_DEVICES the GPU has another index
        # here.
        shared: Tensor = rebuild_cuda_tensor(
            tensor_cls=Tensor,
            tensor_size=torch.Size([num_bytes]),
            tensor_stride=(1,),
            tensor_offset=self.tensor_offset,
            storage_cls=TypedStorage,
            dtype=torch.uint8,
            storage_device=device.index,
            storage_handle=bytes.fromhex(self.handle),
            storage_size_bytes=self.storage_bytes,
            storage_offset_bytes=self.storage_offset,
            requires_grad=False,
            ref_counter_handle=self.counter.encode(),
            ref_counter_offset=self.counter_offset,
            event_handle=bytes.fromhex(self.event),
            event_sync_required=self.must_sync,
        )
        return shared


def describe_buffer(buffer: Tensor, *, nonce: str) -> SharedBuffer:
    """Describe a [num_bytes] uint8 buffer on a GPU; keep the buffer alive while others map it."""
    rebuild, arguments = reduce_tensor(buffer)
    # torch returns positional arguments. Names make a changed order in another release harmless,
    # and a changed number of arguments fails here.
    given = dict(zip(signature(rebuild).parameters, arguments, strict=True))
    return SharedBuffer(
        nonce=nonce,
        handle=given["storage_handle"].hex(),
        storage_bytes=given["storage_size_bytes"],
        storage_offset=given["storage_offset_bytes"],
        tensor_offset=given["tensor_offset"],
        counter=given["ref_counter_handle"].decode(),
        counter_offset=given["ref_counter_offset"],
        event=given["event_handle"].hex(),
        must_sync=given["event_sync_required"],
    )


def parse_shared_buffer(message: bytes, *, nonce: str, num_bytes: int) -> SharedBuffer:
    """Parse and check the output of `SharedBuffer.to_json`.

    Args:
        message: The received bytes.
        nonce: Secret of the channel.
        num_bytes: Expected buffer size.

    Raises:
        WeightError: If the message has another nonce, other fields, or values out of their range.
    """
    try:
        values = json.loads(message)
    except ValueError as error:
        raise WeightError(_refusal(f"{len(message)} bytes that are not JSON")) from error
    kinds = {each.name: each.type for each in fields(SharedBuffer)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise WeightError(_refusal(f"not exactly the fields {', '.join(kinds)}"))
    for name, kind in kinds.items():
        if type(values[name]) is not kind:  # not isinstance: True is an int
            raise WeightError(_refusal(f"{name} = {values[name]!r:.40}"))
    buffer = SharedBuffer(**values)
    # The duration of "!=" would reveal how many characters are right.
    if not hmac.compare_digest(buffer.nonce.encode(), nonce.encode()):
        raise WeightError(_refusal("the nonce of another channel"))
    ranges = {
        "storage_bytes": range(num_bytes, _MAX_BYTES),
        "storage_offset": range(_MAX_BYTES),
        "tensor_offset": range(buffer.storage_bytes - num_bytes + 1),
        "counter_offset": range(1 << 32),
    }
    for name, allowed in ranges.items():
        if getattr(buffer, name) not in allowed:
            raise WeightError(_refusal(f"{name} = {getattr(buffer, name)}"))
    if (
        _count_hex_bytes(buffer.handle) not in _HANDLE_BYTES
        or _count_hex_bytes(buffer.event) != _EVENT_BYTES
    ):
        raise WeightError(_refusal("a handle of another length"))
    if _COUNTER_NAME.fullmatch(buffer.counter) is None:
        raise WeightError(_refusal(f"counter = {buffer.counter!r:.40}"))
    return buffer


def _count_hex_bytes(text: str) -> int:
    """Return the number of bytes in a hexadecimal text; -1 if it is not hexadecimal."""
    return len(text) // 2 if re.fullmatch(r"([0-9a-f]{2})*", text) else -1


def _refusal(problem: str) -> str:
    return (
        f"the description of the sender's buffer has {problem}, so it is not mapped. Another "
        "program may have used the channel's port: check who can reach it (SECURITY.md), and start "
        "the run again."
    )
