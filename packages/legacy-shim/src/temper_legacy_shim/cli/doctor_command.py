"""The sub-command ``doctor``: a project folder in, a plan or its results out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from temper_legacy_shim.cli.shared import print_table
from temper_legacy_shim.errors import ShimError

if TYPE_CHECKING:
    from temper_legacy_shim.doctor.steps import Step

SCHEMA = "temper-migrate/doctor/1"
"""Name of the form of ``--json``; docs/migration/README.md describes it."""
EXIT_REVIEW, EXIT_PERSON = 10, 20


def register(app: typer.Typer) -> None:
    """Add the sub-command."""
    app.command("doctor")(doctor)


def doctor(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The folder of an old project. Nothing in it is executed or changed.",
        ),
    ],
    apply: Annotated[
        Path | None,
        typer.Option(metavar="NEW", help="Carry the plan out, step by step, into this new folder."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --apply: do not ask before each step.")
    ] = False,
    from_version: Annotated[
        str | None,
        typer.Option(
            help=(
                "The old release of its configurations and scripts, such as v0.7.0; inferred for "
                "each by default."
            )
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan the migration of a project.

    Exit code 0: nothing to decide; 10: reports to read; 20: a person has to decide something.
    """
    from temper_legacy_shim.doctor.examination import examine
    from temper_legacy_shim.doctor.steps import Effort

    steps = examine(folder, version=from_version)
    results: dict[int, str] = {}
    if not as_json:
        _show(folder, steps)
    if apply is not None:
        results = _apply(steps, folder, apply, version=from_version, asks=not yes, is_quiet=as_json)
    if as_json:
        plan = [
            {
                "kind": step.kind,
                "path": str(step.path),
                "what": step.what,
                "effort": step.effort,
                "blockers": list(step.blockers),
                "command": step.command,
                "result": results.get(number),
            }
            for number, step in enumerate(steps)
        ]
        typer.echo(json.dumps({"schema": SCHEMA, "steps": plan}, indent=1))
    efforts = {step.effort for step in steps}
    failed = any(result.startswith("failed") for result in results.values())
    if failed or efforts & {Effort.DECIDE, Effort.REWRITE}:
        raise typer.Exit(EXIT_PERSON)
    raise typer.Exit(EXIT_REVIEW if Effort.REVIEW in efforts else 0)


def _apply(
    steps: "list[Step]", folder: Path, out: Path, *, version: str | None, asks: bool, is_quiet: bool
) -> dict[int, str]:
    from temper_legacy_shim.doctor.steps import carry_out, target_of

    results = {}
    for number, step in enumerate(steps):
        if asks and not typer.confirm(
            f"{number + 1}. {step.kind} {step.path} -> {target_of(step, out)}?",
            default=True,
            err=is_quiet,
        ):
            results[number] = "left out"
            continue
        try:
            results[number] = carry_out(step, folder, out, version=version)
        except ShimError as error:
            results[number] = f"failed: {error}"
        typer.echo(f"{number + 1}. {step.kind} {step.path}: {results[number]}", err=is_quiet)
    return results


def _show(folder: Path, steps: "list[Step]") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not steps:
        console.print(
            f"{folder} holds nothing of an older system that we know.", markup=False, soft_wrap=True
        )
        return
    rows = [
        (str(number), step.kind, str(step.path), step.what, step.effort)
        for number, step in enumerate(steps, 1)
    ]
    print_table(console, ("", "what", "path", "is", "effort"), rows, title=f"Migration of {folder}")
    for number, step in enumerate(steps, 1):
        for blocker in step.blockers:
            console.print(f"{number}. {step.path}: {blocker}", markup=False, soft_wrap=True)
    console.print(
        "Efforts: none; review: read the report; decide: answer what is listed; rewrite: there is "
        "no counterpart.",
        soft_wrap=True,
    )
    console.print("Each step alone, in the project's folder:")
    for number, step in enumerate(steps, 1):
        console.print(f"  {number}. {step.command}", markup=False, soft_wrap=True)
