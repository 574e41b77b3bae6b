"""The sub-command ``imports``: Python code in, a diff or the changed files out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from temper_legacy_shim.cli.shared import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temper_legacy_shim.imports.source_files import FileChange

SCHEMA = "temper-migrate/imports/1"
"""Name of the form of ``--json``; docs/migration/imports.md describes it."""
EXIT_CHANGES, EXIT_PERSON = 10, 20


def register(app: typer.Typer) -> None:
    """Add the sub-command."""
    app.command("imports")(imports)


def imports(
    paths: Annotated[
        list[Path], typer.Argument(metavar="SRC...", help="Python files, or folders with some.")
    ],
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Change the files; without it a diff is printed and nothing is written."
        ),
    ] = False,
    keep_legacy: Annotated[
        bool,
        typer.Option(
            "--keep-legacy",
            help="Use the deprecated classes of temper-legacy-shim, which take the old arguments.",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print no diff, write nothing; for CI.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Change old imports.

    Exit code 0: there are none; 10: all have a successor of the same kind; 20: some need a person.
    """
    from temper_legacy_shim.imports.source_files import change_files, copies_below, write_in_place

    copies = copies_below(paths)
    changes = change_files(paths, keeps_legacy=keep_legacy)
    is_written = write and not check
    if is_written:
        for change in changes:
            if change.before != change.after:
                write_in_place(change)
    if as_json:
        _print_json(changes, copies, is_written=is_written)
    else:
        _print_changes(changes, copies, is_written=is_written, has_diff=not (write or check))
    is_left = bool(copies) or any(change.needs_person for change in changes)
    raise typer.Exit(EXIT_PERSON if is_left else EXIT_CHANGES if changes else 0)


def _print_json(
    changes: "Sequence[FileChange]", copies: "Sequence[Path]", *, is_written: bool
) -> None:
    report = [
        {
            "path": str(change.path),
            "is_changed": change.before != change.after,
            "diff": change.diff(),
            "names": [
                {"line": r.line, "old": r.old, "new": r.new, "what_to_do": r.what_to_do}
                for r in change.remarks
            ],
        }
        for change in changes
    ]
    typer.echo(
        json.dumps(
            {
                "schema": SCHEMA,
                "is_written": is_written,
                "files": report,
                "copies": [str(path) for path in copies],
            },
            indent=1,
        )
    )


def _print_changes(
    changes: "Sequence[FileChange]",
    copies: "Sequence[Path]",
    *,
    is_written: bool,
    has_diff: bool,
) -> None:
    """Print the diffs, if wanted, and to standard error what is left to do."""
    for change in changes:
        if has_diff:
            typer.echo(change.diff().encode("utf-8", errors="surrogateescape"), nl=False)
        for remark in change.remarks:
            if remark.what_to_do:
                typer.echo(
                    f"{change.path}:{remark.line}: {remark.label}{remark.what_to_do}", err=True
                )
    for path in copies:
        typer.echo(
            f"{path} is a copy of the old package itself, and stays as it is: what you changed "
            "in it has to be moved by hand",
            err=True,
        )
    num_changed = sum(change.before != change.after for change in changes)
    what = "changed" if is_written else "would change (--write changes them)"
    typer.echo(
        f"{num_changed} file{'s' * (num_changed != 1)} {what}, "
        f"{sum(c.needs_person for c in changes)} with work for a person",
        err=True,
    )
