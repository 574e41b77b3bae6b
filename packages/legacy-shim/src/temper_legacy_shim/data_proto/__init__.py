"""The old batch: tensors, arrays and a dictionary of settings."""

from temper_legacy_shim.errors import explain_missing_extra

try:
    from temper_legacy_shim.data_proto.columns import Columns
    from temper_legacy_shim.data_proto.proto import (
        DataProto,
        DataProtoItem,
        pad_dataproto_to_divisor,
        unpad_dataproto,
    )
except ModuleNotFoundError as error:
    raise explain_missing_extra("data_proto", "workers", error) from None

__all__ = ["Columns", "DataProto", "DataProtoItem", "pad_dataproto_to_divisor", "unpad_dataproto"]
