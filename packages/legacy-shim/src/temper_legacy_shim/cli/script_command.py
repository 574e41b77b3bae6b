"""The sub-command ``script``: old launch scripts in; new ones, a table or JSON out."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from temper_legacy_shim.cli.shared import (
    AsJson,
    FromVersion,
    GpusPerNode,
    HasTable,
    Numerics,
    NumericsChoice,
    print_table,
    read_cluster,
)
from temper_legacy_shim.errors import OutputError, ScriptError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from temper_legacy_shim.scripts.launch_translation import Options
    from temper_legacy_shim.scripts.migrate import Migration


def register(app: typer.Typer) -> None:
    """Add the sub-command."""
    app.command("script")(script)


def script(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.sh...", help="Old launch scripts. Nothing in them is executed."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="A new file (for one script) or a new folder. Nothing is overwritten."),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="VAR=VALUE",
            help="Read the script as if VAR were set; 1=VALUE is an argument.",
        ),
    ] = None,
    from_version: FromVersion = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Machines, where neither script nor configuration says it."),
    ] = None,
    gpus_per_node: GpusPerNode = None,
    numerics: Numerics = NumericsChoice.TEMPER,
    cpu_trial: Annotated[
        bool,
        typer.Option(
            "--cpu-trial",
            help=(
                "Make the new script a trial on a CPU: two short steps with the same data, model "
                "and loss."
            ),
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing and print one line for each script; for CI."),
    ] = False,
    as_json: AsJson = False,
    table: HasTable = False,
) -> None:
    """Translate old launch scripts.

    Exit code 0: clean; 10: behavior pinned, or with hazards; 20: needs a person; 1: it failed;
    2: wrong arguments.
    """
    from temper_legacy_shim.configs import EXIT_CODES
    from temper_legacy_shim.scripts.launch_translation import Options

    options = Options(
        version=from_version,
        numerics=numerics.value,
        cluster=read_cluster(nodes, gpus_per_node),
        cpu_trial=cpu_trial,
    )
    settings = _settings(given or [])
    results = [(path, _migrate(path, settings=settings, options=options)) for path in paths]
    written = {} if check or out is None else _write(results, out)
    read = "\n".join(migration.reading.text for _, migration in results)
    for name in settings:
        if not re.search(rf"\b{name}\b", read):
            typer.echo(f"--set {name}: no script names {name}, so it changes nothing.", err=True)
    if as_json:
        _print_json(results, written)
    else:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for path, migration in results:
            _show(
                console, path, migration, is_short=check, has_table=table, written=written.get(path)
            )
        if out is None and not check:
            console.print("nothing was written: --out writes the new script.", markup=False)
    raise typer.Exit(max(EXIT_CODES[migration.outcome] for _, migration in results))


def _migrate(path: Path, *, settings: dict[str, str], options: "Options") -> "Migration":
    """Translate one script; an error names the script."""
    from temper_legacy_shim.scripts.migrate import migrate_script

    try:
        return migrate_script(_text(path), settings=settings, options=options, folder=path.parent)
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from error


def _settings(given: list[str]) -> dict[str, str]:
    out = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or not (name.isidentifier() or name.isdigit()):
            raise UsageError(f"--set {each!r} is no VAR=VALUE: write, for example, --set NNODES=2.")
        out[name] = value
    return out


_OTHER_COMMANDS = {".py": "imports", ".yaml": "config", ".yml": "config"}


def _text(path: Path) -> str:
    other = _OTHER_COMMANDS.get(path.suffix)
    if other is not None:
        raise UsageError(
            f"{path} is no launch script by its name: `temper-migrate {other} {path}` reads it."
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} can't be read ({error.strerror}): give a launch script."
        ) from error
    return content.decode("utf-8", errors="surrogateescape")


def _write(results: list[tuple[Path, "Migration"]], out: Path) -> dict[Path, Path]:
    """Return the new scripts; a name that is taken is an error before anything is written."""
    with_script = [(path, migration) for path, migration in results if migration.script is not None]
    is_file = len(results) == 1 and not out.is_dir()
    targets = {path: out if is_file else out / path.name for path, _ in with_script}
    if len(set(targets.values())) < len(targets):
        raise OutputError(
            f"two scripts have the same name, and would be one file in {out}: give them one after "
            "the other."
        )
    for target in targets.values():
        if target.exists():
            raise OutputError(
                f"{target} exists, and nothing is overwritten: choose another --out, or move it "
                "away."
            )
    for path, migration in with_script:
        assert migration.script is not None
        targets[path].parent.mkdir(parents=True, exist_ok=True)
        targets[path].write_bytes(migration.script.text.encode("utf-8", errors="surrogateescape"))
        targets[path].chmod(path.stat().st_mode & 0o777)
    return targets


def _print_json(results: list[tuple[Path, "Migration"]], written: dict[Path, Path]) -> None:
    from temper_legacy_shim.scripts.script_report import plain_report

    reports = [
        {"input": str(path), "output": str(written.get(path, "")), **plain_report(migration)}
        for path, migration in results
    ]
    typer.echo(json.dumps(reports, indent=1))


def _show(
    console: "Console",
    path: Path,
    migration: "Migration",
    *,
    is_short: bool,
    has_table: bool,
    written: Path | None,
) -> None:
    from temper_legacy_shim.configs.report import COLUMNS, OUTCOMES, table_rows
    from temper_legacy_shim.scripts.script_report import (
        evidence,
        headline,
        persons,
        remarks,
        summary,
    )

    where = f" -> {written}" if written is not None else ""
    console.print(
        f"{path}{where}: {OUTCOMES[migration.outcome]}{headline(migration)}",
        style="bold",
        markup=False,
    )
    for sentence in () if is_short else summary(migration, path, written=written):
        console.print(f"  {sentence}", markup=False)
    for sentence in persons(migration):
        console.print(f"  needs a person: {sentence}", style="red", markup=False)
    if is_short:
        return
    for sentence in evidence(migration):
        console.print(f"  {sentence}", markup=False)
    for sentence in remarks(migration):
        console.print(f"  {sentence}", markup=False)
    if has_table:
        for each in migration.launches:
            rows = [[each.readable(cell) for cell in row] for row in table_rows(each.translation)]
            print_table(console, COLUMNS, rows, has_lines=True)
