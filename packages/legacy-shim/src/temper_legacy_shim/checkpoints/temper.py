"""Resumable state: an old role as a step directory that an engine's ``load_checkpoint`` reads, or as the portable training state.

Inside is what the FSDP engine writes: float32 master weights, both moments and update counts under Hugging Face names, each rank's torch
random-number state, and the counters of updates and of the schedule. The same tensors, one parameter at a time, are the portable state
(``training_state``) that every engine's ``load_state`` takes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from temper_engine_api.checkpoint import ENGINE_PART, ManifestInfo, begin, find_step, report_part, write_json
from temper_engine_api.errors import TemperError
from temper_engine_api.weights import TrainingState
from temper_legacy_shim.checkpoints import receipt as receipts
from temper_legacy_shim.checkpoints.adapter_state import adapter_optimizer, adapter_weights
from temper_legacy_shim.checkpoints.adapters import Adapter
from temper_legacy_shim.checkpoints.convert import Job, check_space, source_record, tool_version
from temper_legacy_shim.checkpoints.dcp import write_folder
from temper_legacy_shim.checkpoints.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.dtypes import FLOAT32
from temper_legacy_shim.checkpoints.extra_state import OldExtra, read_extra
from temper_legacy_shim.checkpoints.lazy import Cast, InMemory, LazyTensor, num_bytes
from temper_legacy_shim.checkpoints.megatron_flat import has_flat_optimizer, read_flat_optimizer
from temper_legacy_shim.checkpoints.megatron_moments import read_megatron_optimizer
from temper_legacy_shim.checkpoints.model import LANGUAGE_HEAD, OldModel, described
from temper_legacy_shim.checkpoints.moments import OldMoments, OldOptimizer, is_buffer, read_optimizer
from temper_legacy_shim.checkpoints.plan import Options, companions
from temper_legacy_shim.checkpoints.receipt import Receipt
from temper_legacy_shim.checkpoints.safetensors_files import WrittenFile
from temper_legacy_shim.checkpoints.staging import Staging, fingerprint
from temper_legacy_shim.checkpoints.torch_tensors import as_torch
from temper_legacy_shim.errors import LayoutError, UsageError, VerificationError

_TRL_HEAD = {"v_head.summary.weight": "score.weight", "v_head.summary.bias": "score.bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableState:
    """Everything of an old role that training can go on from."""

    model: OldModel
    """Weights in float32 under the engine's names."""
    moments: Mapping[str, OldMoments]
    """By the same names; empty where the old checkpoint has none that can be carried."""
    settings: Mapping[str, object]
    """Of the old optimiser's group."""
    extra: OldExtra
    """Schedule and random-number states."""
    carried: tuple[str, ...]
    """For the receipt."""
    not_carried: tuple[str, ...]
    """For the receipt."""

    @property
    def num_updates(self) -> int:
        """Updates that the parameters have seen; 0 where no moments are carried."""
        return max((kept.update_count for kept in self.moments.values()), default=0)

    def tensors(self) -> dict[str, LazyTensor]:
        """By kind and name, as the engine's checkpoint has them."""
        found: dict[str, LazyTensor] = {}
        for name, tensor in self.model.weights.items():
            found[f"{'buffer' if is_buffer(name) else 'parameter'}.{name}"] = tensor
        for name, tensor in self.model.weights.items():
            if is_buffer(name) or not self.moments:
                continue
            kept = self.moments.get(name)
            zeros = _Zeros(tensor.shape)
            found[f"first_moment.{name}"] = zeros if kept is None else _in_float32(kept.first)
            found[f"second_moment.{name}"] = zeros if kept is None else _in_float32(kept.second)
            count = 0 if kept is None else kept.update_count
            found[f"update_count.{name}"] = InMemory(np.asarray(count, np.float32))
        return found


class _Zeros:
    """A float32 tensor of zeros."""

    dtype = FLOAT32

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self, start: int, stop: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
        """Rows."""
        return np.zeros((stop - start, *self.shape[1:]), np.float32)


def resumable(model: OldModel) -> ResumableState:
    """What of a role can be resumed, with reasons for what can not.

    Raises:
        UsageError: no engine can go on from such a checkpoint.
    """
    if model.adapter is not None:
        return _resumable_adapter(model, model.adapter)
    if model.head == "reward_model":
        raise UsageError(f"{model.role.path} has a score head without a bias, which no engine's value or reward model has: use --to hf.")
    optimizer, why_not = _optimizer(model)
    extra = read_extra(model.role)
    names = {name: _TRL_HEAD.get(name, name) for name in model.weights if not (model.head == "trl_value_model" and name == LANGUAGE_HEAD)}
    weights = {new: _in_float32(optimizer.masters.get(old, model.weights[old])) for old, new in names.items()}
    moments = {new: optimizer.moments[old] for old, new in names.items() if old in optimizer.moments}
    carried = ["weights, as float32 masters" + (", the optimizer's own" if optimizer.masters else "")]
    if moments:
        carried.append(f"both moments and the update counts of {len(moments)} parameters")
    absent = [] if not moments else [new for new in weights if new not in moments and not is_buffer(new)]
    if absent:
        why_not = (
            *why_not,
            f"moments of {len(absent)} parameters that were never updated, such as {absent[0]}: they begin at 0",
        )
    return ResumableState(
        model=replace(model, weights=weights, head="value_model" if model.head == "trl_value_model" else model.head),
        moments=moments,
        settings=optimizer.settings,
        extra=extra,
        carried=(*carried, *extra.carried),
        not_carried=(*why_not, *extra.not_carried),
    )


def _resumable_adapter(model: OldModel, adapter: Adapter) -> ResumableState:
    """Of an adapter alone: the base is not part of what an engine saves."""
    weights = adapter_weights(adapter, model)
    moments: Mapping[str, OldMoments] = {}
    settings: Mapping[str, object] = {}
    extra = read_extra(model.role)
    carried, why_not = ["the adapter's weights, as float32 masters"], [*extra.not_carried]
    try:
        optimizer = adapter_optimizer(model, weights)
        moments, settings = optimizer.moments, optimizer.settings
        carried.append(f"both moments and the update counts of {len(moments)} parameters")
    except LayoutError as error:
        why_not.insert(0, f"optimizer moments: {error}")
    note = f"resume it with lora.rank {adapter.rank} and the lora.alpha of the old run around the same base model"
    return ResumableState(
        model=replace(
            model,
            weights={name: _in_float32(tensor) for name, tensor in weights.items()},
            notes=(*model.notes, note),
        ),
        moments=moments,
        settings=settings,
        extra=extra,
        carried=(*carried, *extra.carried),
        not_carried=tuple(why_not),
    )


def _optimizer(model: OldModel) -> tuple[OldOptimizer, tuple[str, ...]]:
    role = model.role
    try:
        if "optim" in role.fsdp_files:
            return read_optimizer(role, model.weights, parameters=list(model.weights)), ()
        if role.dist_folders:
            return read_megatron_optimizer(model), ()
        if role.rank_files and has_flat_optimizer(model):
            return read_flat_optimizer(model, num_updates=model.num_updates), ()
    except LayoutError as error:
        return OldOptimizer(moments={}), (f"optimizer moments: {error}",)
    return OldOptimizer(moments={}), ("optimizer moments: the old checkpoint has none",)


def _in_float32(tensor: LazyTensor) -> LazyTensor:
    return Cast(tensor, FLOAT32) if tensor.dtype.is_float and tensor.dtype != FLOAT32 else tensor


def training_state(model: OldModel) -> Iterator[TrainingState]:
    """The portable training state of an old role, read as it is consumed; for any engine's ``load_state``.

    Raises:
        UsageError: no engine can go on from it, or it has no moments.
    """
    state = resumable(model)
    if not state.moments:
        raise UsageError(f"{model.role.path} has no moments to go on from: {'; '.join(state.not_carried)}.")
    for name, tensor in state.model.weights.items():
        if not is_buffer(name):
            kept = state.moments.get(name)
            zeros = torch.zeros(tensor.shape)
            yield TrainingState(
                name=name,
                master=as_torch(tensor),
                first_moment=zeros if kept is None else as_torch(_in_float32(kept.first)),
                second_moment=zeros.clone() if kept is None else as_torch(_in_float32(kept.second)),
                update_count=0 if kept is None else kept.update_count,
            )


def read_training_state(directory: Path) -> Iterator[TrainingState]:
    """The portable training state from what ``--to temper`` wrote, or an FSDP engine's step directory, without torch.distributed.

    Raises:
        LayoutError: it holds no moments.
    """
    tensors = DistCheckpoint(find_step(directory) / ENGINE_PART / "dcp").tensors
    if not any(name.startswith("first_moment.") for name in tensors):
        raise LayoutError(f"{directory} holds weights without moments: load them with load_checkpoint of an engine without optimizer.")
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "parameter":
            yield TrainingState(
                name=name,
                master=as_torch(tensor),
                first_moment=as_torch(tensors[f"first_moment.{name}"]),
                second_moment=as_torch(tensors[f"second_moment.{name}"]),
                update_count=int(as_torch(tensors[f"update_count.{name}"])),
            )


def write_temper(job: Job, model: OldModel, options: Options, *, progress: Callable[[str, int, int], None]) -> Receipt:
    """Write a step directory below the output, with its manifest, and the receipt beside it.

    Raises:
        ShimError: says what was wrong; nothing is at the output then.
    """
    if options.dtype is not None:
        raise UsageError("--dtype has no effect with --to temper: masters and moments are float32.")
    state = resumable(model)
    tensors = state.tensors()
    total = sum(num_bytes(tensor) for tensor in tensors.values())
    work = fingerprint({"source": str(job.role.path), "options": asdict(options)})
    with Staging(job.out, fingerprint=work) as staging:
        check_space(staging.folder.parent, total)
        directory = _write_step(staging.folder, job, state, tensors, total=total, progress=progress)
        files = [staging.adopt(str(path.relative_to(staging.folder))) for path in sorted(directory.rglob("*")) if path.is_file()]
        _read_back(directory, tensors)
        made = _receipt(job, state, options, files, tensors, total=total)
        staging.produce_text(receipts.NAME, made.to_json())
        staging.commit()
    return made


def _write_step(
    root: Path, job: Job, state: ResumableState, tensors: Mapping[str, LazyTensor], *, total: int, progress: Callable[[str, int, int], None]
) -> Path:
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress("dcp", done, total)

    step = job.role.step or 0
    try:
        with begin(root, step) as transaction:
            part = transaction.part(ENGINE_PART)
            written = [f"dcp/{name}" for name in write_folder(part / "dcp", tensors, progress=tell)]
            written += _write_random(part, state.extra)
            written += _write_description(part, state.model)
            counters = {"num_updates": state.num_updates, "num_nonfinite_updates": 0, "consecutive_skips": 0}
            counters["num_schedule_steps"] = state.num_updates if state.extra.num_schedule_steps is None else state.extra.num_schedule_steps
            written.append(write_json(part, "progress.json", counters))
            info = ManifestInfo(topology={"world_size": job.role.world_size}, config_hash=f"converted by {tool_version()}")
            return transaction.commit({ENGINE_PART: [report_part(part, written)]}, info=info)
    except TemperError as error:
        raise VerificationError(f"the step directory could not be written: {error}") from error


def _write_random(part: Path, extra: OldExtra) -> list[str]:
    """Torch's states by rank; a run of another world size goes on with streams of its own."""
    written = []
    for rank, states in extra.random_states.items():
        (part / "random").mkdir(exist_ok=True)
        torch.save({device: as_torch(tensor) for device, tensor in states.items()}, part / "random" / f"rank_{rank}.pt")
        written.append(f"random/rank_{rank}.pt")
    return written


def _write_description(part: Path, model: OldModel) -> list[str]:
    folder = part / "huggingface"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described(model, dtype="float32"), indent=2) + "\n")
    written = ["huggingface/config.json"]
    for name, source in companions(model).items():
        (folder / name).write_bytes(source.read_bytes())
        written.append(f"huggingface/{name}")
    return written


def _read_back(directory: Path, tensors: Mapping[str, LazyTensor]) -> None:
    found = DistCheckpoint(directory / ENGINE_PART / "dcp").tensors
    for name, tensor in tensors.items():
        if name not in found or found[name].shape != tensor.shape:
            raise VerificationError(f"{directory} lacks {name} with shape {tensor.shape} after writing: convert again.")
    if len(found) != len(tensors):
        raise VerificationError(f"{directory} holds {len(found)} tensors instead of {len(tensors)}: convert again.")


def _receipt(
    job: Job, state: ResumableState, options: Options, files: list[WrittenFile], tensors: Mapping[str, LazyTensor], *, total: int
) -> Receipt:
    model_type = "language_model" if state.model.head == "language_model" else "value_model"
    notes = [*state.model.notes, f"load it with an engine of model_type {model_type} whose model.path is the converted or the base model"]
    if state.settings:
        kept = ", ".join(f"{name} {value}" for name, value in state.settings.items())
        notes.append(f"the old optimizer had {kept}, and decayed vectors too: set these in the new configuration")
    return Receipt(
        source=source_record(job.role),
        target=options.target,
        options=asdict(options),
        files=tuple(files),
        head=state.model.head,
        num_tensors=len(tensors),
        num_bytes=total,
        dtypes=tuple(sorted({tensor.dtype.name for tensor in tensors.values()})),
        carried=state.carried,
        not_carried=state.not_carried,
        notes=tuple(notes),
        verified=(f"{len(tensors)} tensors found again in the step directory with their shapes; its manifest has every checksum",),
        tool=tool_version(),
    )
