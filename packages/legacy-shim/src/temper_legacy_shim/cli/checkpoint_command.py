"""The sub-commands ``checkpoint`` and ``verify``: options in, tables, progress or JSON out."""

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from temper_legacy_shim.cli.shared import print_facts
from temper_legacy_shim.errors import ShimError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from temper_legacy_shim.checkpoints.layouts import Role
    from temper_legacy_shim.checkpoints.model import OldModel, Sources
    from temper_legacy_shim.checkpoints.plan import Job, Options, Progress
    from temper_legacy_shim.checkpoints.receipt import Receipt

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""A URL as a path, in which the second slash is lost."""


class To(StrEnum):
    HF = "hf"
    PEFT = "peft"
    TEMPER = "temper"


class KeptAdapter(StrEnum):
    MERGE = "merge"
    KEEP = "keep"


Directory = Annotated[
    Path,
    typer.Argument(help="A run, a step (global_step_N) or a role (actor, critic) directory."),
]
TargetFormat = Annotated[
    To,
    typer.Option(
        "--to", help="hf: safetensors. peft: the adapter alone. temper: resumable by an engine."
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="A new directory; several roles get a folder each in it.")
]
Step = Annotated[int | None, typer.Option(help="Step of a run; the tracker's by default.")]
RoleName = Annotated[str | None, typer.Option(help="Only this role.")]
ConfigFolder = Annotated[
    Path | None,
    typer.Option(help="Folder with the model's config.json, where the checkpoint has none."),
]
BaseModel = Annotated[
    Path | None, typer.Option(help="Base model's folder, for checkpoints of an adapter alone.")
]
LoraAlpha = Annotated[
    float | None, typer.Option(help="The adapter's alpha, where no file says it.")
]
NumUpdates = Annotated[
    int | None,
    typer.Option(min=1, help="temper: updates that were made, where no optimizer file says it."),
]
PartialAdapter = Annotated[bool, typer.Option(help="Convert an adapter of which layers are lost.")]
AdapterTreatment = Annotated[
    KeptAdapter,
    typer.Option(help="hf: add the adapter to the weights, or keep it next to them."),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; kept as it is by default.")
]
MaxShardSize = Annotated[float, typer.Option(help="Of one safetensors file, in GB.")]
Strict = Annotated[bool, typer.Option(help="NaN and infinity are errors.")]
VerifyNames = Annotated[
    bool, typer.Option(help="Compare names and shapes with transformers' model.")
]
VerifyLogits = Annotated[
    bool, typer.Option(help="Load the output with transformers and compare logits.")
]
OnlyCheck = Annotated[
    bool,
    typer.Option(
        "--check", help="Say what is there and whether it can be converted; write nothing."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print receipts as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the sub-commands."""
    app.command("checkpoint")(checkpoint)
    app.command("verify")(verify)


def checkpoint(
    directory: Directory,
    to: TargetFormat = To.HF,
    out: Output = None,
    step: Step = None,
    role: RoleName = None,
    hf_config: ConfigFolder = None,
    base_model: BaseModel = None,
    lora_alpha: LoraAlpha = None,
    num_updates: NumUpdates = None,
    partial_adapter: PartialAdapter = False,
    adapter: AdapterTreatment = KeptAdapter.MERGE,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = 5.0,
    strict: Strict = False,
    verify_names: VerifyNames = True,
    verify_logits: VerifyLogits = False,
    check: OnlyCheck = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint of an older system.

    No pickle is executed, and nothing is overwritten.
    """
    from rich.console import Console

    from temper_legacy_shim.checkpoints.model import Sources
    from temper_legacy_shim.checkpoints.plan import Options, plan_jobs

    _reject_useless(to=to, num_updates=num_updates, max_shard_size=max_shard_size)
    options = Options(
        target=to.value,
        dtype=dtype,
        keeps_adapter=adapter == KeptAdapter.KEEP,
        max_shard_bytes=int(max_shard_size * 1e9),
        is_strict=strict,
        checks_names=verify_names,
        verifies_logits=verify_logits,
    )
    sources = Sources(
        hf_config=hf_config,
        base_model=base_model,
        lora_alpha=lora_alpha,
        accepts_partial_adapter=partial_adapter,
        num_updates=num_updates,
    )
    _reject_urls(directory, out)
    # Standard output has nothing but the JSON, so that a program can parse it.
    console = Console(stderr=as_json, highlight=False)
    if check:
        results = _check(directory, step, role, options, sources, console=console)
        if as_json:
            typer.echo(json.dumps(results, indent=1))
        if not all(result["ok"] for result in results):
            raise typer.Exit(1)
        return
    if out is None:
        raise typer.BadParameter(
            "give the new directory to write, or --check to write nothing.", param_hint="--out"
        )
    jobs = plan_jobs(directory, out, step=step, role=role)
    receipts = _convert_all(jobs, options, sources, console=console)
    if as_json:
        typer.echo(json.dumps([asdict(receipt) for receipt in receipts], indent=1))


def _reject_useless(*, to: To, num_updates: int | None, max_shard_size: float) -> None:
    """Reject values of options that have no meaning.

    Raises:
        UsageError: naming the option.
    """
    if not math.isfinite(max_shard_size):
        raise UsageError(f"--max-shard-size is {max_shard_size}, but must be a number of GB.")
    if num_updates is not None and to != To.TEMPER:
        raise UsageError(
            f"--num-updates has no effect with --to {to}, which writes no optimizer state: leave "
            "it out."
        )


def _reject_urls(directory: Path, out: Path | None) -> None:
    # `Path` drops the second slash, so that `s3://bucket/run` would be a folder `s3:` that is
    # missing, or one that is made.
    for path, expected in (
        (directory, "old checkpoints are read from a disk: download it first, or mount the store."),
        (out, "an --out is written to a disk: give a folder, and upload that."),
    ):
        if _URL.match(str(path)):
            raise UsageError(f"{path} is a URL, but {expected}")


def _convert_all(
    jobs: "list[Job]", options: "Options", sources: "Sources", *, console: "Console"
) -> "list[Receipt]":
    """Convert every role that an earlier run of the command has not finished."""
    from temper_legacy_shim.checkpoints.conversion import convert, finished

    _check_together(jobs, options, sources)
    receipts = []
    for job in jobs:
        _show_role(console, job.role)
        made = finished(job, options, sources) if len(jobs) > 1 else None
        if made is None:
            made = _with_progress(
                console,
                job,
                lambda progress, job=job: convert(  # type: ignore[misc]
                    job, options, sources, progress=progress
                ),
            )
        else:
            console.print(
                f"{job.out} is there already: an earlier run of this command wrote it", markup=False
            )
        receipts.append(made)
        _show_receipt(console, job, made)
    return receipts


def verify(
    directory: Annotated[Path, typer.Argument(help="What `temper-migrate checkpoint` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check a converted checkpoint against its receipt.

    Check size, checksum and tensors of every file.
    """
    from rich.console import Console

    from temper_legacy_shim.checkpoints.receipt import check_receipt, read_receipt

    folders = _converted_in(directory)
    console = Console(stderr=as_json, highlight=False)
    results = []
    for folder in folders:
        receipt = read_receipt(folder)
        matches = check_receipt(folder, receipt)
        counts = {
            "files": len(receipt.files),
            "tensors": matches.num_tensors,
            "surplus": list(matches.surplus),
        }
        results.append({"directory": str(folder), **counts, "ok": True})
        console.print(
            f"{folder}: {len(receipt.files)} files as they were written, {matches.num_tensors} "
            "tensors",
            markup=False,
        )
        if matches.surplus:
            console.print(
                f"{folder}: not of the conversion, and unchecked: {', '.join(matches.surplus)}",
                style="yellow",
                markup=False,
            )
    if as_json:
        typer.echo(json.dumps(results, indent=1))


def _converted_in(directory: Path) -> list[Path]:
    """Return the directory itself, or folders of roles in it."""
    from temper_legacy_shim.checkpoints.receipt import NAME

    if os.path.isfile(directory / NAME):
        return [directory]
    matches = (
        sorted(path.parent for path in directory.glob(f"*/{NAME}"))
        if os.path.isdir(directory)
        else []
    )
    if not matches:
        raise UsageError(
            f"{directory} has no {NAME}: give a directory that `temper-migrate checkpoint` wrote."
        )
    return matches


def _check_together(jobs: "list[Job]", options: "Options", sources: "Sources") -> None:
    """Check all roles before the first one is written."""
    from temper_legacy_shim.checkpoints.conversion import finished
    from temper_legacy_shim.checkpoints.model import read_model
    from temper_legacy_shim.checkpoints.staging import check_absent

    for job in jobs if len(jobs) > 1 else ():
        if finished(job, options, sources) is None:
            check_absent(job.out)
        try:
            _account(read_model(job.role, sources), options)
        except ShimError as error:
            names = ", ".join(each.role.name for each in jobs)
            raise type(error)(
                f"{job.role.name}: {error} Nothing was written; --role converts one of {names} "
                "alone."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """Summary of a conversion before it runs."""

    num_tensors: int
    num_bytes: int
    carried: tuple[str, ...] = ()
    not_carried: tuple[str, ...] = ()


def _account(model: "OldModel", options: "Options") -> _Account:
    if options.target == "temper":
        # Needs temper-engine-api, which other targets do not.
        from temper_legacy_shim.checkpoints.temper.step_directory import plan_step

        step = plan_step(model, options)
        return _Account(
            num_tensors=len(step.tensors),
            num_bytes=step.num_bytes,
            carried=step.state.carried,
            not_carried=step.state.not_carried,
        )
    from temper_legacy_shim.checkpoints.plan import plan_conversion

    plan = plan_conversion(model, options)
    return _Account(num_tensors=len(plan.tensors()), num_bytes=plan.num_bytes)


def _check(
    directory: Path,
    step: int | None,
    role: str | None,
    options: "Options",
    sources: "Sources",
    *,
    console: "Console",
) -> list[dict[str, object]]:
    """Print the layout of every role, and if it can be converted.

    Returns:
        An object for each role. ``ok`` is False if a decision is needed, which is in ``problem``.
    """
    from temper_legacy_shim.checkpoints.layouts import find_roles
    from temper_legacy_shim.checkpoints.model import read_model
    from temper_legacy_shim.checkpoints.receipt import source_record

    results: list[dict[str, object]] = []
    for each in find_roles(directory, step=step, role=role):
        _show_role(console, each)
        try:
            account = _account(read_model(each, sources), options)
        except ShimError as error:
            results.append({**asdict(source_record(each)), "ok": False, "problem": str(error)})
            console.print(f"needs a person: {error}", style="red", markup=False)
            continue
        results.append({**asdict(source_record(each)), "ok": True, **asdict(account)})
        console.print(
            f"can be converted: {account.num_tensors} tensors, {_size(account.num_bytes)}",
            style="green",
            markup=False,
        )
        for title, sentences in (
            ("carried", account.carried),
            ("not carried", account.not_carried),
        ):
            for sentence in sentences:
                console.print(f"{title}: {sentence}", markup=False)
    return results


def _with_progress(
    console: "Console", job: "Job", work: "Callable[[Progress], Receipt]"
) -> "Receipt":
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(job.role.name, total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        return work(report)


def _show_role(console: "Console", role: "Role") -> None:
    where = f", step {role.step}" if role.step is not None else ""
    facts = [
        ("checkpoint", f"{role.path}"),
        ("role", f"{role.name}{where}"),
        ("layout", f"{role.kind}, {role.world_size} rank{'s' * (role.world_size != 1)}"),
        ("version", f"{role.version} ({'; '.join(role.reasons)})"),
    ]
    print_facts(console, facts)


def _show_receipt(console: "Console", job: "Job", receipt: "Receipt") -> None:
    facts = [
        (
            "written",
            (
                f"{job.out}: {receipt.num_tensors} tensors, {_size(receipt.num_bytes)}, "
                f"{', '.join(receipt.dtypes)}"
            ),
        ),
        ("carried", ", ".join(receipt.carried)),
    ]
    for title, sentences in (
        ("not carried", receipt.not_carried),
        ("note", receipt.notes),
        ("verified", receipt.verified),
    ):
        facts += [(title, sentence) for sentence in sentences]
    print_facts(console, facts)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.2f} MB"
