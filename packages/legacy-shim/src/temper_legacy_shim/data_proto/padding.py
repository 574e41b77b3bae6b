"""Rows repeated so that a batch divides evenly over workers, and taken off again."""

from temper_engine_api.errors import BatchError
from temper_legacy_shim.data_proto.proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with its first rows repeated at the end until its length divides by ``size_divisor``, and how many were added.

    Raises:
        BatchError: the batch is empty, so there is no row to repeat.
    """
    if size_divisor < 1:
        raise BatchError(f"size_divisor is {size_divisor}, but must be at least 1.")
    missing = -len(data) % size_divisor
    if missing == 0:
        return data, 0
    if len(data) == 0:
        raise BatchError("an empty batch can't be padded: there is no row to repeat.")
    rows = [i % len(data) for i in range(missing)]
    return DataProto.concat([data, data.select_idxs(rows)]), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Without the last ``pad_size`` rows."""
    return data if pad_size == 0 else data[:-pad_size]
