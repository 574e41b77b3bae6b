"""Load weights from safetensors module by module while the model is being sharded.

The model is built on the meta device. Before a module is sharded it gets memory, rank 0 reads its
tensors one by one, and the other ranks receive them. No rank holds more than its shards and one
full module.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_api.file_names import FileNames
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.model.huggingface_model import build_model, is_lm_head, is_value_head
from temper_engine_fsdp.model.weight_names import INDEX_NAME, read_file_names
from temper_engine_fsdp.runtime.numerics import fork_rng
from temper_engine_fsdp.runtime.process_group import Membership


class WeightStreamer:
    """Materializes the parameters of a meta-device model from its weight files."""

    def __init__(
        self,
        hf: PreTrainedModel,
        files: Mapping[str, Path],
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
            filled = torch.empty_like(parameter, device=self._membership.device)
            if self._membership.rank == 0:
                self._read(self._names[key], filled)
            if self._membership.world_size > 1:
                dist.broadcast(filled, src=0)
            self._materialized[key] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
        return self._materialized[key]

    def _read(self, name: str, into: Tensor) -> None:
        # Open each file once: opening parses its header, and a layer may have hundreds of experts.
        with ExitStack() as stack:
            opened = {}
            for part_name, part in self._file_names.split(name, into):
                path = self._files[part_name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                part.copy_(opened[path].get_tensor(part_name))

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
        The model and its streamer; None if the files do not match the parameters name by name.
    """
    files = find_model_files(spec)
    if not files:
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
    can_stream = membership.rank == 0 and _files_match(hf, files, file_names=file_names, head=head)
    if membership.world_size > 1:
        can_stream = gather_objects(can_stream)[0]
    if not can_stream:
        return None
    _initialize_head(hf, head, seed=spec.seed)
    return hf, WeightStreamer(hf, files, file_names=file_names, membership=membership)


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
        register(module, name, parameter)

    # Buffers stay real because the weight files do not contain them; that rules out
    # torch.device('meta').
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def find_model_files(spec: ModelSpec) -> dict[str, Path]:
    """Return the safetensors file for every tensor in a model; empty if there are none."""
    return {} if spec.path is None else find_weight_files(Path(spec.path))


def find_weight_files(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of every tensor; empty if there are none."""
    index, single = folder / INDEX_NAME, folder / "model.safetensors"
    if index.is_file():
        return {
            name: folder / file
            for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _files_match(
    hf: PreTrainedModel,
    files: Mapping[str, Path],
    *,
    file_names: FileNames,
    head: Collection[str],
) -> bool:
    parameters = {name: parameter for name, parameter in hf.named_parameters() if name not in head}
    expected = {
        part: list(shape)
        for name, parameter in parameters.items()
        for part, shape in file_names.list_shapes(name, parameter.shape)
    }
    # Persistent buffers are in the files, too, but only parameters are streamed.
    buffers = {name for name, _ in hf.named_buffers()} & hf.state_dict().keys()
    # A value model that is made from a language model has no use for its output projection.
    available = {name for name in files if not (head and is_lm_head(name))}
    if (
        expected.keys() != available
        or buffers
        or not all(path.is_file() for path in files.values())
    ):
        return False
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if files.get(name) == path and name in available]  # noqa: SIM118
            if any(file.get_slice(name).get_shape() != expected[name] for name in names):
                return False
    return True
