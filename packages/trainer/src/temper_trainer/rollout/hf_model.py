"""The sampler's own transformers model: built from a ModelSpec, and given weights whole or not at all."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight, WeightEntry, check_weight_entries
from temper_trainer.rollout.kv_cache import SLOT_ATTENTION
from temper_trainer.rollout.weight_delta import (
    DeltaBucket,
    apply_tensor_delta,
    check_delta_buckets,
    unpack_delta,
)


def build_model(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A causal language model in eval mode whose attention goes through the slot memory.

    Raises:
        ConfigError: nothing can be loaded from model.path, or transformers does not know model.architecture.
    """
    if spec.path is not None and not Path(spec.path).is_dir():
        raise ConfigError(
            f"the sampler can't build a model from {spec.path!r}: there is no such directory."
        )
    try:
        if spec.path is not None:
            model = AutoModelForCausalLM.from_pretrained(
                spec.path,
                dtype=dtype,
                attn_implementation=SLOT_ATTENTION,
                local_files_only=True,
                trust_remote_code=spec.trust_remote_code,
            )
        else:
            config = AutoConfig.for_model(**spec.architecture)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=SLOT_ATTENTION
                )
    except (OSError, ValueError) as error:
        origin = spec.path or dict(spec.architecture)
        raise ConfigError(f"the sampler can't build a model from {origin!r}: {error}") from error
    assert isinstance(model, PreTrainedModel)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        _copy_out_of_file(model)
    return model


def _copy_out_of_file(model: PreTrainedModel) -> None:
    """Give every tensor memory of its own, aligned as torch aligns it.

    transformers leaves weights mapped to their file: they change when somebody writes to it, and begin wherever its header ends, while
    matrix libraries promise the same sums from run to run only for aligned memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def find_end_token_ids(
    model: PreTrainedModel, spec: ModelSpec, *, tokenizer_end: int | None
) -> frozenset[int]:
    """The tokenizer's end token, and those that a loaded model's own generation config names.

    A model from scratch has no say: the end token in its architecture's defaults belongs to another tokenizer.

    Raises:
        ConfigError: there is none.
    """
    ends = set() if tokenizer_end is None else {tokenizer_end}
    if spec.path is not None and model.generation_config is not None:
        named = model.generation_config.eos_token_id
        ends |= set(named) if isinstance(named, list) else set() if named is None else {named}
    if not ends:
        raise ConfigError(
            "neither the tokenizer nor the model's generation config has an end token, so no completion could end."
        )
    return frozenset(ends)


def read_end_token_ids(spec: ModelSpec, *, tokenizer_end: int | None) -> frozenset[int]:
    """As ``end_token_ids``, from a model's directory alone.

    Raises:
        ConfigError: there is none.
    """
    ends = set() if tokenizer_end is None else {tokenizer_end}
    if spec.path is not None:
        try:
            generation = GenerationConfig.from_pretrained(spec.path, local_files_only=True)
        except OSError:  # without generation_config.json, the model's own config speaks
            generation = GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
            )
        named = generation.eos_token_id
        ends |= set(named) if isinstance(named, list) else set() if named is None else {named}
    if not ends:
        raise ConfigError(
            "neither the tokenizer nor the model's generation config has an end token, so no completion could end."
        )
    return frozenset(ends)


def load_weights(model: PreTrainedModel, stream: Iterable[NamedWeight]) -> None:
    """Copy a complete set of weights into the model; tied tensors arrive once, under the first of their names.

    Experts come one by one, under the names that files have, or joined as transformers keeps them.

    The tensors are held until the set is known to be complete, so that a bad set changes nothing.

    Raises:
        WeightError: a name is missing, unexpected or repeated, or a shape differs.
    """
    places: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, place in model.state_dict().items():
        if place.data_ptr() not in seen:
            seen.add(place.data_ptr())
            places |= _split_experts(name, place)
    arrived = [
        NamedWeight(name, tensor)
        for whole in stream
        for name, tensor in _split_experts(*whole).items()
    ]
    check_weight_entries(
        (_make_entry(name, place) for name, place in places.items()),
        [_make_entry(w.name, w.tensor) for w in arrived],
    )
    with torch.no_grad():
        for weight in arrived:
            places[weight.name].copy_(weight.tensor)


def load_delta(model: PreTrainedModel, buckets: Sequence[DeltaBucket]) -> None:
    """Write what changed into the model, in place; nothing is written before everything is known to fit.

    Raises:
        WeightError: a bucket is damaged or missing, a name is unknown, or a shape differs.
    """
    check_delta_buckets(buckets)
    places: dict[str, torch.Tensor] = {}
    for name, place in model.state_dict().items():
        places |= {name: place, **_split_experts(name, place)}
    found = [
        pair
        for bucket in buckets
        for pair in unpack_delta(bucket.data, bucket.entries, bucket.counts)
    ]
    for entry in (entry for bucket in buckets for entry in bucket.entries):
        if entry.name not in places or tuple(places[entry.name].shape) != entry.shape:
            shape = tuple(places[entry.name].shape) if entry.name in places else "no such tensor"
            raise WeightError(
                f"changes do not match the model: {entry.name} of shape {entry.shape}, expected {shape}. Nothing was loaded."
            )
    with torch.no_grad():
        for entry, change in found:
            apply_tensor_delta(places[entry.name], change)


def _split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of what transformers joins in memory, and anything else as it is."""
    layer, _, kind = name.rpartition(".experts.")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if kinds is None:
        return {name: tensor}
    return {
        f"{layer}.experts.{number}.{part_name}.weight": part
        for number, expert in enumerate(tensor)
        for part_name, part in zip(kinds, expert.chunk(len(kinds)), strict=True)
    }


def _make_entry(name: str, tensor: torch.Tensor) -> WeightEntry:
    return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
