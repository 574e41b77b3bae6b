"""Converting one role: read, plan, write through a staging folder, verify, and leave a receipt."""

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from temper_legacy_shim.checkpoints import receipt as receipts
from temper_legacy_shim.checkpoints.files.hashed_files import WrittenFile
from temper_legacy_shim.checkpoints.files.safetensors_files import write
from temper_legacy_shim.checkpoints.huggingface.names import NamesCheck
from temper_legacy_shim.checkpoints.layouts import Kind, Role
from temper_legacy_shim.checkpoints.model import Sources, read_model
from temper_legacy_shim.checkpoints.plan import (
    Job,
    Options,
    Plan,
    Progress,
    check_nan,
    nan_note,
    plan_conversion,
    recorded,
)
from temper_legacy_shim.checkpoints.receipt import (
    Receipt,
    source_files,
    source_record,
    tool_version,
)
from temper_legacy_shim.checkpoints.staging import Staging, check_space, fingerprint
from temper_legacy_shim.errors import OutputError


def convert(
    job: Job, options: Options, sources: Sources, *, progress: Progress | None = None
) -> Receipt:
    """Convert a role; the output with the receipt is complete, or it does not exist.

    Raises:
        ShimError: the conversion failed; no output exists then, and a second run continues
            with the finished files.
    """
    _check_apart(job)
    model = read_model(job.role, sources)
    if options.target == "temper":
        # Imported here, because it takes a tenth of a second that the other targets do not need.
        from temper_legacy_shim.checkpoints.temper.step_directory import write_temper

        return write_temper(job, model, options, sources, progress=progress or _silent)
    plan = plan_conversion(model, options)
    return _write_plan(job, plan, options, sources, progress=progress or _silent)


def finished(job: Job, options: Options, sources: Sources) -> Receipt | None:
    """Return the receipt of an earlier run with the same files, options and output, or None."""
    if not os.path.isfile(job.out / receipts.NAME):
        return None
    made = receipts.read_receipt(job.out)
    is_same = (made.source, made.target, made.options) == (
        source_record(job.role),
        options.target,
        recorded(options, sources),
    )
    # A file that is newer than the receipt was changed after the conversion. The optimizer's files
    # count too, for --to temper, and so do config and tokenizer.
    folders = [job.role.path.rglob("*")]
    folders += [job.role.step_directory.glob("*")] if job.role.step_directory else []
    files = (path for folder in folders for path in folder if path.is_file())
    newest = max((path.stat().st_mtime_ns for path in files), default=0)
    if not is_same or newest > (job.out / receipts.NAME).stat().st_mtime_ns:
        return None
    # Sizes only: reading all bytes again would take as long as the conversion.
    receipts.check_receipt(job.out, made, with_content=False)
    return made


def _silent(what: str, done: int, total: int) -> None:
    """Tell no one."""


def _check_apart(job: Job) -> None:
    source, out = Path(os.path.realpath(job.role.path)), Path(os.path.realpath(job.out))
    if source == out or source in out.parents or out in source.parents:
        raise OutputError(
            f"the output {job.out} and the source {job.role.path} lie in one another: choose an "
            "output elsewhere."
        )


def _write_plan(
    job: Job, plan: Plan, options: Options, sources: Sources, *, progress: Progress
) -> Receipt:
    work = fingerprint(
        {
            "sources": [
                (str(path), path.stat().st_size, path.stat().st_mtime_ns)
                for path in source_files(job.role)
            ],
            "options": asdict(options),
            "given": asdict(sources),
            "plan": {
                file: {n: (t.shape, t.dtype.name) for n, t in group.items()}
                for file, group in plan.shards.items()
            },
            "texts": plan.texts,
            "tool": tool_version(),
        }
    )
    with Staging(job.out, fingerprint=work) as staging, _names_check(plan, options) as names:
        check_space(staging.folder.parent, plan.num_bytes - staging.num_kept_bytes)
        files = _write_shards(
            staging, plan, progress=names.watched(progress) if names else progress
        )
        # Files of the previous run were compared at registration.
        compared = {file.path for file in files}
        with_nan = [name for file in files for name in file.with_nan]
        # Known only now, because values are read once, during writing.
        check_nan(with_nan, options)
        files += [staging.produce_text(name, text) for name, text in plan.texts.items()]
        files += [staging.produce_copy(name, path) for name, path in plan.copies.items()]
        verified = _verify(staging.folder, plan, files, options, compared=compared)
        compared_names, not_compared = names.outcome() if names else ((), ())
        made = _receipt(
            job,
            plan,
            options,
            sources,
            files,
            verified=(*verified, *compared_names),
            with_nan=with_nan,
        )
        made = replace(made, notes=(*made.notes, *not_compared))
        staging.produce_text(receipts.NAME, made.to_json())
        staging.commit()
    return made


def _names_check(plan: Plan, options: Options) -> AbstractContextManager[NamesCheck | None]:
    if not options.checks_names or options.target != "hf":
        return nullcontext()
    return NamesCheck(plan.texts["config.json"], plan.model.weights, head=plan.model.head)


def _write_shards(staging: Staging, plan: Plan, *, progress: Progress) -> list[WrittenFile]:
    total, done = plan.num_bytes, 0
    files = []
    for name, group in plan.shards.items():

        def report(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            progress(name, done, total)

        before = done
        written = staging.produce(
            name,
            lambda path, group=group, name=name, report=report: write(
                path, group, relative=name, progress=report
            ),  # type: ignore[misc]
        )
        # The file is of an earlier run, so its bytes count at once.
        if done == before:
            report(written.num_bytes)
        files.append(written)
    return files


def _verify(
    folder: Path,
    plan: Plan,
    files: Sequence[WrittenFile],
    options: Options,
    *,
    compared: Collection[str],
) -> tuple[str, ...]:
    result = receipts.check_files(folder, files, compared=compared)
    given = [
        (
            f"{len(files)} files read back: sizes, every byte or its checksum, and {result} "
            "tensors in their headers"
        )
    ]
    if options.verifies_logits:
        from temper_legacy_shim.checkpoints.huggingface.logits import (
            check_logits,
        )  # needs torch and transformers

        given.append(check_logits(folder, plan))
    return tuple(given)


def _receipt(
    job: Job,
    plan: Plan,
    options: Options,
    sources: Sources,
    files: Sequence[WrittenFile],
    *,
    verified: tuple[str, ...],
    with_nan: Sequence[str],
) -> Receipt:
    tensors = plan.tensors()
    carried = ["adapter" if options.target == "peft" else "weights"]
    carried += ["adapter, next to its base"] if options.keeps_adapter else []
    carried += (
        ["tokenizer"]
        if any(name.startswith(("tokenizer", "vocab")) for name in plan.copies)
        else []
    )
    return Receipt(
        source=source_record(job.role),
        target=options.target,
        options=recorded(options, sources),
        files=tuple(files),
        head=plan.model.head,
        num_tensors=len(tensors),
        num_bytes=plan.num_bytes,
        dtypes=tuple(sorted({tensor.dtype.name for tensor in tensors.values()})),
        carried=tuple(carried),
        not_carried=_left_behind(job.role, options),
        notes=(*plan.notes, *nan_note(with_nan)),
        verified=verified,
        tool=tool_version(),
    )


def _left_behind(role: Role, options: Options) -> tuple[str, ...]:
    left = []
    if "optim" in role.fsdp_files or role.kind in (Kind.MEGATRON_DIST, Kind.MEGATRON_RANKS):
        left.append(f"optimizer state: --to {options.target} has no place for it; see --to temper")
    if "extra_state" in role.fsdp_files:
        left.append(
            f"schedule and random-number states: --to {options.target} has no place for them; see "
            "--to temper"
        )
    return tuple(left)
