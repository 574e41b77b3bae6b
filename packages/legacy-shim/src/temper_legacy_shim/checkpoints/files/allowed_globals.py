"""The globals that genuine checkpoints ask for. None of them is imported.

The list only says which names are not a reason to refuse.

Modules are spelled as every torch from 2.4 on and every numpy spell them; a class that moved stands
under each of its addresses.
"""

_TORCH_DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128"
)
_TORCH_STORAGES = (
    "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage "
    "CharStorage ByteStorage BoolStorage UntypedStorage"
)
_MESH_LAYOUT = "_MeshLayout _FlatLayout"

_ALLOWED: dict[str, str] = {
    "torch": (
        f"{_TORCH_DTYPES} {_TORCH_STORAGES} Size device Tensor strided contiguous_format "
        "preserve_format"
    ),
    "torch.storage": "UntypedStorage TypedStorage _load_from_bytes",
    "torch._utils": (
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_wrapper_subclass"
    ),
    "torch._tensor": "_rebuild_from_type_v2",
    "torch.nn.parameter": "Parameter Buffer",
    "torch.serialization": "_get_layout",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed._tensor.placement_types": (
        "DTensorSpec TensorMeta Shard _StridedShard Replicate Partial _Partial"
    ),
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed.tensor": "DTensor Shard Replicate Partial",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed.tensor.placement_types": (
        "Shard _StridedShard Replicate Partial _Partial _MaskPartial"
    ),
    "torch.distributed.device_mesh": f"DeviceMesh {_MESH_LAYOUT}",
    "torch.distributed._mesh_layout": _MESH_LAYOUT,
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharded_tensor.metadata": (
        "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING"
    ),
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix StorageMeta",
    "torch.distributed.checkpoint.planner": (
        "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"
    ),
    "collections": "OrderedDict defaultdict deque",
    "_codecs": "encode",
    "_io": "BytesIO",
    "io": "BytesIO",
    "argparse": "Namespace",
    "pathlib": "PosixPath PurePosixPath Path",
    "pathlib._local": "PosixPath PurePosixPath Path",
    "copyreg": "_reconstructor",
    "copy_reg": "_reconstructor",
    "builtins": (
        "set frozenset dict list tuple int float bool str bytes bytearray complex slice range "
        "object"
    ),
    "__builtin__": (
        "set frozenset dict list tuple int long float bool str unicode bytes bytearray complex "
        "slice xrange object"
    ),
    "numpy": (
        "ndarray dtype float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 "
        "bool_"
    ),
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.dtypes": "UInt32DType Int64DType Float64DType Float32DType",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "megatron.core.enums": "ModelType",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType ModelType",
    "signal": "Signals",
}
_NESTED = frozenset(
    {("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", "ProcessGroupState")}
)
_NAMES = {module: frozenset(names.split()) for module, names in _ALLOWED.items()}


def is_allowed(module: str, name: str) -> bool:
    """Check if a genuine checkpoint may ask for this global."""
    return name in _NAMES.get(module, ())


def is_nested(module: str, name: str, attribute: str) -> bool:
    """Check if a genuine checkpoint may ask for this class inside a class."""
    return (module, name, attribute) in _NESTED
