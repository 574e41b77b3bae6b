"""Load weights from safetensors module by module while the model is being sharded.

The model is built on the meta device. Before a module is sharded it gets memory, rank 0 reads its
tensors one by one, and the other ranks receive them. No rank holds more than its shards and one
full module.
"""

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_api.file_names import FileNames
from temper_engine_api.model_files import ModelFiles
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.model.huggingface_model import build_model, is_lm_head, is_value_head
from temper_engine_fsdp.model.weight_names import find_model_files, read_file_names
from temper_engine_fsdp.runtime.numerics import fork_rng
from temper_engine_fsdp.runtime.process_group import Membership

logger = logging.getLogger(__name__)


class WeightStreamer:
    """Materializes the parameters of a meta-device model from its weight files."""

    def __init__(
        self,
        hf: PreTrainedModel,
        files: ModelFiles,
        *,
        file_names: FileNames,
        membership: Membership,
    ) -> None:
        self._files = files
        self._file_names = file_names
        self._membership = membership
        self._names = {id(parameter): name for name, parameter in hf.named_parameters()}
        # Keyed by id so that tied parameters are materialized once; the list keeps the ids valid.
        self._hf_parameters = list(hf.parameters())
        self._materialized: dict[int, nn.Parameter] = {}

    def materialize(self, module: nn.Module) -> None:
        """Allocate and load every meta parameter in a module. Collective."""
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.is_meta:
                    setattr(owner, name, self._instantiate(parameter))

    def _instantiate(self, parameter: nn.Parameter) -> nn.Parameter:
        key = id(parameter)
        if key not in self._materialized:
            filled = self._load(self._names[key], like=parameter)
            self._materialized[key] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
        return self._materialized[key]

    def load_buffers(self, hf: PreTrainedModel) -> None:
        """Load the buffers that files contain, such as biases of routers. Collective."""
        for name, buffer in _iterate_persistent_buffers(hf):
            buffer.copy_(self._load(name, like=buffer))

    def _load(self, name: str, *, like: Tensor) -> Tensor:
        """Read a tensor on rank 0 and return it on all ranks."""
        filled = torch.empty_like(like, device=self._membership.device)
        if self._membership.rank == 0:
            with self._files.open() as read:
                for part_name, part in self._file_names.split(name, filled):
                    part.copy_(read(part_name))
        if self._membership.world_size > 1:
            dist.broadcast(filled, src=0)
        return filled

    def release(self) -> None:
        """Drop the references to materialized parameters, which the sharded model now owns."""
        self._materialized, self._hf_parameters = {}, []


def build_streaming_model(
    spec: ModelSpec, *, attention: str, membership: Membership
) -> tuple[PreTrainedModel, WeightStreamer] | None:
    """Build the model on the meta device, with a streamer for its weights. Collective.

    Experts are read one by one into the tensor that transformers joins them in. Files with other
    names or shapes need the conversions of transformers, which work on a full model.

    Returns:
        The model and its streamer; None if the files do not match the model name by name, which is
        logged.
    """
    files = find_model_files(spec)
    if files is None:
        return None
    with use_meta_parameters():
        hf = build_model(spec, attention=attention, load_weights=False)
    head = {
        name
        for name, _ in hf.named_parameters()
        if spec.model_type != "language_model" and is_value_head(name)
    } - files.keys()
    # Rank 0 decides: other ranks may see another state of a network file system.
    file_names = read_file_names(hf, files=files)
    difference = None
    if membership.rank == 0:
        difference = _find_difference(hf, files, file_names=file_names, head=head)
    if membership.world_size > 1:
        difference = gather_objects(difference)[0]
    if difference is not None:
        if membership.rank == 0:
            logger.warning(
                "each rank builds the full model in float32, because the files in %s %s",
                spec.path,
                difference,
            )
        return None
    _initialize_head(hf, head, seed=spec.seed)
    streamer = WeightStreamer(hf, files, file_names=file_names, membership=membership)
    streamer.load_buffers(hf)
    return hf, streamer


def _initialize_head(hf: PreTrainedModel, names: Collection[str], *, seed: int) -> None:
    """Allocate and initialize a value head that the files lack, as transformers would."""
    # Every rank draws the same values, so the head needs no broadcast.
    with fork_rng(seed):
        for name in sorted(names, reverse=True):  # weight before bias, as transformers
            module, _, kind = name.rpartition(".")
            values = torch.zeros(hf.get_parameter(name).shape)
            if kind != "bias":
                values.normal_(std=hf.config.initializer_range)
            setattr(hf.get_submodule(module), kind, nn.Parameter(values))


@contextmanager
def use_meta_parameters() -> Iterator[None]:
    """Create parameters on the meta device inside the context; buffers are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            # transformers does not initialize parameters with this mark. On the meta device that
            # would change nothing, and took a third of the time of building a small model.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        register(module, name, parameter)

    # Buffers stay real because the weight files do not contain them; that rules out
    # torch.device('meta').
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _find_difference(
    hf: PreTrainedModel, files: ModelFiles, *, file_names: FileNames, head: Collection[str]
) -> str | None:
    """Return in what the files differ from the model; None if the model can be streamed.

    Raises:
        WeightError: If a file is damaged, or has FP8 weights without scales.
    """
    tensors = {name: p.shape for name, p in hf.named_parameters() if name not in head}
    tensors |= {name: buffer.shape for name, buffer in _iterate_persistent_buffers(hf)}
    expected = {
        part: part_shape
        for name, shape in tensors.items()
        for part, part_shape in file_names.list_shapes(name, shape)
    }
    # Layers for multi-token prediction, for example.
    ignored = [re.compile(pattern) for pattern in hf._keys_to_ignore_on_load_unexpected or ()]
    # A value model that is made from a language model has no use for its output projection.
    surplus = [
        name
        for name in files.keys() - expected.keys()
        if not any(pattern.search(name) for pattern in ignored) and not (head and is_lm_head(name))
    ]
    missing = expected.keys() - files.keys()
    if surplus or missing:
        return f"have no {min(missing)}" if missing else f"have {min(surplus)} in addition"
    if not all(path.is_file() for path in files.values()):
        return "are incomplete"
    shapes = files.read_shapes()
    other = min((name for name in expected if shapes[name] != expected[name]), default=None)
    return None if other is None else f"have {other} in another shape"


def _iterate_persistent_buffers(hf: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are in files; rotary tables, for example, are recomputed."""
    persistent = hf.state_dict().keys()
    return ((name, buffer) for name, buffer in hf.named_buffers() if name in persistent)
