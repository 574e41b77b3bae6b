"""Write and check a resumable step directory, the output of ``--to temper``."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from temper_engine_api.checkpoint import (
    ENGINE_PART,
    FileRecord,
    ManifestInfo,
    PartReport,
    begin_checkpoint,
    report_part,
    write_json,
)
from temper_engine_api.errors import TemperError
from temper_legacy_shim.checkpoints import receipt as receipts
from temper_legacy_shim.checkpoints.files.archive import write_archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DESCRIPTION, DistCheckpoint
from temper_legacy_shim.checkpoints.files.hashed_files import WrittenFile
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, num_bytes, read_all
from temper_legacy_shim.checkpoints.files.pickles import dump_inert
from temper_legacy_shim.checkpoints.files.safetensors_files import grouped
from temper_legacy_shim.checkpoints.files.tensors import describe_tensor
from temper_legacy_shim.checkpoints.huggingface.names import NamesCheck
from temper_legacy_shim.checkpoints.layouts import Role
from temper_legacy_shim.checkpoints.model import OldModel, Sources, described
from temper_legacy_shim.checkpoints.plan import (
    Job,
    Options,
    check_nan,
    companions,
    nan_note,
    recorded,
)
from temper_legacy_shim.checkpoints.receipt import (
    Receipt,
    source_files,
    source_record,
    tool_version,
)
from temper_legacy_shim.checkpoints.staging import Staging, check_space, fingerprint
from temper_legacy_shim.checkpoints.temper.dcp import DATA, find_copies, join, write_group
from temper_legacy_shim.checkpoints.temper.extra_state import OldExtra
from temper_legacy_shim.checkpoints.temper.training_state import ResumableState, resumable
from temper_legacy_shim.errors import OutputError, UsageError, VerificationError

_DESCRIPTION = "huggingface"
"""Folder of config and tokenizer in the output."""
_GROUPS = "groups"
"""Folder of finished files, before it becomes a step directory."""
_GROUP_BYTES = 1 << 30
"""Bytes of tensors written at once, which a stopped run may lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Content of a step directory, decided before any read or write."""

    state: ResumableState
    """State, with the converted and the omitted parts."""
    config: Mapping[str, object]
    tensors: Mapping[str, LazyTensor]
    copies: Mapping[str, Path]
    """Tokenizer and the like, by name."""

    @property
    def shared_zeros(self) -> Mapping[str, str]:
        """Tensors without bytes of their own, with the name of one that has them."""
        return find_copies(self.tensors)

    @property
    def written(self) -> Mapping[str, LazyTensor]:
        shared = self.shared_zeros
        return {name: tensor for name, tensor in self.tensors.items() if name not in shared}

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(tensor) for tensor in self.written.values())


def plan_step(model: OldModel, options: Options) -> StepPlan:
    """Plan the output.

    Raises:
        UsageError: no engine can continue from such a checkpoint, or something that no file says is
            missing.
    """
    if options.dtype is not None:
        raise UsageError("--dtype has no effect with --to temper: masters and moments are float32.")
    state = resumable(model)
    # The engine builds the model around the adapter, so its config is written.
    full = state.model if model.adapter is None else model
    return StepPlan(
        state=state,
        config=described(full, dtype="float32"),
        tensors=state.tensors(),
        copies=companions(state.model),
    )


def write_temper(
    job: Job,
    model: OldModel,
    options: Options,
    sources: Sources,
    *,
    progress: Callable[[str, int, int], None],
) -> Receipt:
    """Write a step directory below the output, with its manifest, and the receipt next to it.

    Raises:
        ShimError: the conversion failed; no output exists then.
    """
    plan = plan_step(model, options)
    with (
        Staging(job.out, fingerprint=_fingerprint(job.role, plan, options)) as staging,
        _names_check(plan, model, options) as names,
    ):
        check_space(staging.folder.parent, plan.num_bytes - staging.num_kept_bytes)
        groups = _write_groups(
            staging, plan, progress=names.watched(progress) if names else progress
        )
        with_nan = [name for files in groups.values() for file in files for name in file.with_nan]
        check_nan(with_nan, options)
        directory, tensor_files = _join(staging.folder, job, plan, groups)
        paths = [
            str(path.relative_to(staging.folder))
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        ]
        files = [tensor_files.get(path) or staging.adopt(path) for path in paths]
        compared, not_compared = names.outcome() if names else ((), ())
        made = replace(
            _receipt(job, plan, recorded(options, sources), files),
            verified=(_read_back(directory, plan.tensors), *compared),
        )
        made = replace(made, notes=(*made.notes, *not_compared, *nan_note(with_nan)))
        staging.produce_text(receipts.NAME, made.to_json())
        staging.commit()
    return made


def _names_check(
    plan: StepPlan, model: OldModel, options: Options
) -> AbstractContextManager[NamesCheck | None]:
    if not options.checks_names or model.adapter is not None:
        return nullcontext()
    weights = {
        name.partition(".")[2]: t
        for name, t in plan.tensors.items()
        if name.startswith(("parameter.", "buffer."))
    }
    return NamesCheck(json.dumps(plan.config), weights, head=plan.state.model.head)


def _fingerprint(role: Role, plan: StepPlan, options: Options) -> str:
    sources = {*source_files(role), *(path for path in role.path.rglob("*") if path.is_file())}
    return fingerprint(
        {
            "sources": [
                (str(path), path.stat().st_size, path.stat().st_mtime_ns)
                for path in sorted(sources)
            ],
            "options": asdict(options),
            "tensors": {
                name: (tensor.shape, tensor.dtype.name) for name, tensor in plan.tensors.items()
            },
            "config": plan.config,
            "tool": tool_version(),
        }
    )


def _write_groups(
    staging: Staging, plan: StepPlan, *, progress: Callable[[str, int, int], None]
) -> dict[Path, list[WrittenFile]]:
    """Return tensors in groups, each finished for itself, so that a run can be resumed."""
    done, total = 0, plan.num_bytes

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress("dcp", done, total)

    written = {}
    for number, tensors in enumerate(grouped(plan.written, max_bytes=_GROUP_BYTES)):
        relative = f"{_GROUPS}/{number}"

        def write(
            folder: Path, tensors: Mapping[str, LazyTensor] = tensors, relative: str = relative
        ) -> list[WrittenFile]:
            return write_group(folder, tensors, relative=relative, progress=report)

        before = done
        written[staging.folder / relative] = staging.produce_folder(
            relative, (DATA, DESCRIPTION), write
        )
        if done == before:
            report(sum(num_bytes(tensor) for tensor in tensors.values()))
    return written


def _join(
    root: Path, job: Job, plan: StepPlan, groups: Mapping[Path, Sequence[WrittenFile]]
) -> tuple[Path, dict[str, WrittenFile]]:
    """Return the step directory, and size and checksum of its tensor files by path."""
    state = plan.state
    try:
        with begin_checkpoint(root, job.role.step or 0) as transaction:
            part = transaction.open_part(ENGINE_PART)
            moved = join(part / "dcp", list(groups), plan.tensors, copies=plan.shared_zeros)
            shutil.rmtree(root / _GROUPS)
            # These files are on disk already, and hashed.
            data = {name: groups[source.parent][0] for source, name in moved.items()}
            records = tuple(
                FileRecord(path=f"dcp/{name}", num_bytes=file.num_bytes, checksum=file.checksum)
                for name, file in data.items()
            )
            written = [f"dcp/{DESCRIPTION}"]
            written += _write_random(part, state.extra)
            written += _write_description(part, plan)
            counters = {
                "num_updates": state.num_updates,
                "num_nonfinite_updates": 0,
                "consecutive_skips": 0,
            }
            counters["num_schedule_steps"] = (
                state.num_updates
                # The old schedule advanced with each RL step or update; without its counter,
                # updates are the closer guess.
                if state.extra.num_schedule_steps is None
                else state.extra.num_schedule_steps
            )
            written.append(write_json(part, "progress.json", counters))
            info = ManifestInfo(
                topology={"world_size": job.role.world_size},
                # No configuration of the trainer exists yet that could be hashed.
                config_hash=f"converted by {tool_version()}",
            )
            report = PartReport(files=(*records, *report_part(part, written).files))
            directory = transaction.commit({ENGINE_PART: [report]}, info=info)
    except TemperError as error:
        raise OutputError(f"the step directory could not be written: {error}") from error
    known = {}
    for name, file in data.items():
        path = str((directory / ENGINE_PART / "dcp" / name).relative_to(root))
        known[path] = replace(file, path=path)
    return directory, known


def _write_random(part: Path, extra: OldExtra) -> list[str]:
    """Return torch's random states by rank; further ranks get their own streams."""
    written = []
    for rank, states in extra.random_states.items():
        (part / "random").mkdir(exist_ok=True)
        nodes = {
            device: describe_tensor(tensor.shape, tensor.dtype, key=device)
            for device, tensor in states.items()
        }
        blocks = {
            device: [np.ascontiguousarray(read_all(tensor)).reshape(-1).view(np.uint8).data]
            for device, tensor in states.items()
        }
        with open(part / "random" / f"rank_{rank}.pt", "xb") as file:
            write_archive(file.write, dump_inert(nodes), blocks)
        written.append(f"random/rank_{rank}.pt")
    return written


def _write_description(part: Path, plan: StepPlan) -> list[str]:
    folder = part / _DESCRIPTION
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
    written = [f"{_DESCRIPTION}/config.json"]
    for name, source in plan.copies.items():
        (folder / name).write_bytes(source.read_bytes())
        written.append(f"{_DESCRIPTION}/{name}")
    return written


def _read_back(directory: Path, tensors: Mapping[str, LazyTensor]) -> str:
    result = DistCheckpoint(directory / ENGINE_PART / "dcp").tensors
    for name, tensor in tensors.items():
        if name not in result or result[name].shape != tensor.shape:
            raise VerificationError(
                f"{directory} lacks {name} with shape {tensor.shape} after writing: convert again."
            )
    if len(result) != len(tensors):
        raise VerificationError(
            f"{directory} holds {len(result)} tensors instead of {len(tensors)}: convert again."
        )
    return (
        f"{len(tensors)} tensors found again in the step directory with their shapes; its "
        "manifest has every checksum"
    )


def _receipt(
    job: Job, plan: StepPlan, options: dict[str, object], files: list[WrittenFile]
) -> Receipt:
    """Return the record of a conversion; its notes are what the new configuration has to repeat."""
    state = plan.state
    model_type = "language_model" if state.model.head == "language_model" else "value_model"
    around = "converted or the base model" if state.model.adapter is None else "base model"
    notes = [
        *state.model.notes,
        f"load it with an engine of model_type {model_type} whose model.path is the {around}",
    ]
    if not state.moments:
        notes.append(
            "it holds moments of 0 and counts of 0 updates, so the optimizer starts from zero with "
            "these weights"
        )
    if state.settings:
        kept = ", ".join(f"{name} {value}" for name, value in state.settings.items())
        vectors = "decayed vectors too" if state.decays_vectors else "did not decay vectors"
        notes.append(
            f"the old optimizer had {kept}, and {vectors}: set these in the new configuration"
        )
    return Receipt(
        source=source_record(job.role),
        target="temper",
        options=options,
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
