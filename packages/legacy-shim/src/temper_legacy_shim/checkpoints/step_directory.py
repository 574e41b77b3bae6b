"""Writing a resumable step directory: what ``--to temper`` leaves, whole or absent, and checked."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from temper_engine_api.checkpoint import ENGINE_PART, ManifestInfo, begin, report_part, write_json
from temper_engine_api.errors import TemperError
from temper_legacy_shim.checkpoints import receipt as receipts
from temper_legacy_shim.checkpoints.convert import Job, check_nan, check_space, nan_note, source_record, tool_version
from temper_legacy_shim.checkpoints.dcp import write_folder
from temper_legacy_shim.checkpoints.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.extra_state import OldExtra
from temper_legacy_shim.checkpoints.lazy import LazyTensor, num_bytes
from temper_legacy_shim.checkpoints.model import OldModel, described
from temper_legacy_shim.checkpoints.names import check_names
from temper_legacy_shim.checkpoints.plan import Options, companions
from temper_legacy_shim.checkpoints.receipt import Receipt
from temper_legacy_shim.checkpoints.safetensors_files import WrittenFile
from temper_legacy_shim.checkpoints.staging import Staging, fingerprint
from temper_legacy_shim.checkpoints.temper import ResumableState, resumable
from temper_legacy_shim.checkpoints.torch_tensors import as_torch
from temper_legacy_shim.errors import OutputError, UsageError, VerificationError

_DESCRIPTION = "huggingface"
"""The folder of config and tokenizer in what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a step directory will hold, decided before anything is read or written."""

    state: ResumableState
    """With what is carried and what is not."""
    config: Mapping[str, object]
    """config.json."""
    tensors: Mapping[str, LazyTensor]
    """By kind and name."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(num_bytes(tensor) for tensor in self.tensors.values())


def plan_step(model: OldModel, options: Options) -> StepPlan:
    """Decide what is written.

    Raises:
        UsageError: no engine can go on from such a checkpoint, or something that no file says is missing.
    """
    if options.dtype is not None:
        raise UsageError("--dtype has no effect with --to temper: masters and moments are float32.")
    state = resumable(model)
    return StepPlan(state=state, config=described(state.model, dtype="float32"), tensors=state.tensors())


def write_temper(job: Job, model: OldModel, options: Options, *, progress: Callable[[str, int, int], None]) -> Receipt:
    """Write a step directory below the output, with its manifest, and the receipt beside it.

    Raises:
        ShimError: says what was wrong; nothing is at the output then.
    """
    plan = plan_step(model, options)
    work = fingerprint({"source": str(job.role.path), "options": asdict(options)})
    with Staging(job.out, fingerprint=work) as staging:
        check_space(staging.folder.parent, plan.num_bytes)
        directory, with_nan = _write_step(staging.folder, job, plan, progress=progress)
        check_nan(with_nan, options)
        files = [staging.adopt(str(path.relative_to(staging.folder))) for path in sorted(directory.rglob("*")) if path.is_file()]
        verified = [_read_back(directory, plan.tensors)]
        if options.checks_names and model.adapter is None:
            written = plan.state.model
            verified.append(check_names(directory / ENGINE_PART / _DESCRIPTION, written.weights, head=written.head))
        made = replace(_receipt(job, plan, options, files), verified=tuple(verified))
        made = replace(made, notes=(*made.notes, *nan_note(with_nan)))
        staging.produce_text(receipts.NAME, made.to_json())
        staging.commit()
    return made


def _write_step(root: Path, job: Job, plan: StepPlan, *, progress: Callable[[str, int, int], None]) -> tuple[Path, tuple[str, ...]]:
    """The step's directory, and names of tensors that hold NaN."""
    state, done, total = plan.state, 0, plan.num_bytes

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress("dcp", done, total)

    step = job.role.step or 0
    try:
        with begin(root, step) as transaction:
            part = transaction.part(ENGINE_PART)
            content = write_folder(part / "dcp", plan.tensors, progress=tell)
            written = [f"dcp/{name}" for name in content.files]
            written += _write_random(part, state.extra)
            written += _write_description(part, state.model, plan.config)
            counters = {"num_updates": state.num_updates, "num_nonfinite_updates": 0, "consecutive_skips": 0}
            counters["num_schedule_steps"] = state.num_updates if state.extra.num_schedule_steps is None else state.extra.num_schedule_steps
            written.append(write_json(part, "progress.json", counters))
            info = ManifestInfo(topology={"world_size": job.role.world_size}, config_hash=f"converted by {tool_version()}")
            return transaction.commit({ENGINE_PART: [report_part(part, written)]}, info=info), content.with_nan
    except TemperError as error:
        raise OutputError(f"the step directory could not be written: {error}") from error


def _write_random(part: Path, extra: OldExtra) -> list[str]:
    """Torch's states by rank; a run of another world size goes on with streams of its own."""
    written = []
    for rank, states in extra.random_states.items():
        (part / "random").mkdir(exist_ok=True)
        torch.save({device: as_torch(tensor) for device, tensor in states.items()}, part / "random" / f"rank_{rank}.pt")
        written.append(f"random/rank_{rank}.pt")
    return written


def _write_description(part: Path, model: OldModel, config: Mapping[str, object]) -> list[str]:
    folder = part / _DESCRIPTION
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    written = [f"{_DESCRIPTION}/config.json"]
    for name, source in companions(model).items():
        (folder / name).write_bytes(source.read_bytes())
        written.append(f"{_DESCRIPTION}/{name}")
    return written


def _read_back(directory: Path, tensors: Mapping[str, LazyTensor]) -> str:
    found = DistCheckpoint(directory / ENGINE_PART / "dcp").tensors
    for name, tensor in tensors.items():
        if name not in found or found[name].shape != tensor.shape:
            raise VerificationError(f"{directory} lacks {name} with shape {tensor.shape} after writing: convert again.")
    if len(found) != len(tensors):
        raise VerificationError(f"{directory} holds {len(found)} tensors instead of {len(tensors)}: convert again.")
    return f"{len(tensors)} tensors found again in the step directory with their shapes; its manifest has every checksum"


def _receipt(job: Job, plan: StepPlan, options: Options, files: list[WrittenFile]) -> Receipt:
    state = plan.state
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
        num_tensors=len(plan.tensors),
        num_bytes=plan.num_bytes,
        dtypes=tuple(sorted({tensor.dtype.name for tensor in plan.tensors.values()})),
        carried=state.carried,
        not_carried=state.not_carried,
        notes=tuple(notes),
        tool=tool_version(),
    )
