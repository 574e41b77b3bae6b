"""The sub-commands ``config`` and ``explain``: options in; YAML, a table or JSON out."""

import json
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
from temper_legacy_shim.errors import OutputError, UsageError

if TYPE_CHECKING:
    from temper_legacy_shim.configs import Translation


def register(app: typer.Typer) -> None:
    """Add the sub-commands."""
    app.command("config", context_settings={"ignore_unknown_options": True})(config)
    app.command("explain")(explain)


def config(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...] [OVERRIDE...]",
            help="YAML files or folders; old overrides, KEY=VALUE.",
        ),
    ] = None,
    from_version: FromVersion = None,
    entry: Annotated[
        str,
        typer.Option(
            help="What was started, such as verl.trainer.main_ppo or recipe.dapo.main_dapo."
        ),
    ] = "",
    config_name: Annotated[
        str | None, typer.Option(help="Hydra's config name, such as ppo_megatron_trainer.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Machines, where the configuration does not say it (torchrun)."),
    ] = None,
    gpus_per_node: GpusPerNode = None,
    numerics: Numerics = NumericsChoice.TEMPER,
    out: Annotated[
        Path | None,
        typer.Option(help="A new file (for one input) or a new folder. Nothing is overwritten."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing and print one line for each input; for CI."),
    ] = False,
    as_json: AsJson = False,
    table: HasTable = False,
) -> None:
    """Translate an old configuration.

    Exit code 0: clean; 10: behavior pinned, or with hazards; 20: needs a person; 1: it failed;
    2: wrong arguments.
    """
    from temper_legacy_shim.configs import EXIT_CODES

    cluster = read_cluster(nodes, gpus_per_node)
    given = list(paths or [])
    results = _translate_all(
        given,
        from_version=from_version,
        entry=entry,
        name=config_name,
        cluster=cluster,
        numerics=numerics.value,
    )
    written = {} if check or out is None else _write(results, out)
    if as_json:
        _print_json(results)
    else:
        for path, translation in results:
            _show(
                path,
                translation,
                check=check,
                table=table,
                written=written.get(path),
                prints_yaml=not check and out is None,
            )
    raise typer.Exit(max(EXIT_CODES[translation.outcome] for _, translation in results))


def _translate_all(
    given: list[str],
    *,
    from_version: str | None,
    entry: str,
    name: str | None,
    cluster: object,
    numerics: str,
) -> list[tuple[str, "Translation"]]:
    """Translate each file that is given with the overrides, or the overrides alone."""
    from temper_legacy_shim.configs.reading.config_files import old_files, translate_file
    from temper_legacy_shim.configs.reading.entry_points import is_program
    from temper_legacy_shim.configs.translate import translate

    if not is_program(entry):
        raise UsageError(
            f"--entry {entry} is no program of the old releases: give its module, such as "
            "verl.trainer.main_ppo or recipe.dapo.main_dapo, "
            "or a kind: ppo, sft, generation, evaluation."
        )
    files = [text for text in given if _is_path(text)]
    overrides = [text for text in given if not _is_path(text)]
    options = {"version": from_version, "cluster": cluster, "numerics": numerics}
    if not files:
        if not overrides:
            raise UsageError(
                "there is nothing to translate: give a YAML file, a folder, or old overrides "
                "(KEY=VALUE)."
            )
        _check_config(name, overrides)
        return [("command line", translate(overrides, entry=entry, config_name=name, **options))]  # type: ignore[arg-type]
    results = []
    for file in files:
        result = old_files(Path(file))
        for old in result:
            translation = translate_file(
                old,
                overrides,
                entry=entry,
                config_name=name,
                **options,  # type: ignore[arg-type]
            )
            results.append((str(old.path), translation))
    if not results:
        raise UsageError(f"{', '.join(files)}: no file there looks like an old configuration.")
    return results


def _check_config(name: str | None, overrides: list[str]) -> None:
    """Refuse the name of a file of the user's own without the file: its values would be missing.

    Raises:
        UsageError: no old release has a configuration of that name.
    """
    from temper_legacy_shim.configs.reading.config_values import read_overrides
    from temper_legacy_shim.configs.reading.entry_points import config_named, is_config

    named = config_named(name, read_overrides(overrides))
    if named and not is_config(named):
        raise UsageError(
            f"--config-name {named}: no old release has a configuration of that name, and its "
            "values would be missing here. Give the file itself before the overrides: "
            f"temper-migrate config PATH/{named.removesuffix('.yaml')}.yaml KEY=VALUE..."
        )


def _is_path(text: str) -> bool:
    return (
        "=" not in text and not text.startswith(("+", "~", "$", '"')) and not text.startswith("--")
    )


def _write(results: list[tuple[str, "Translation"]], out: Path) -> dict[str, Path]:
    """Write a YAML file for each input, and return the paths; existing files are an error."""
    from temper_legacy_shim.configs.report import yaml_of

    is_file = len(results) == 1 and out.suffix in (".yaml", ".yml")
    targets = {
        path: out if is_file else out / f"{Path(path).stem.replace(' ', '_')}.yaml"
        for path, _ in results
    }
    if len(set(targets.values())) < len(targets):
        targets = {
            path: out / f"{'_'.join(Path(path).with_suffix('').parts).strip('/._')}.yaml"
            for path, _ in results
        }
    for target in targets.values():
        if target.exists():
            raise OutputError(
                f"{target} exists, and nothing is overwritten: choose another --out, or move it "
                "away."
            )
    written = {}
    for path, translation in results:
        if translation.settings:
            targets[path].parent.mkdir(parents=True, exist_ok=True)
            targets[path].write_text(yaml_of(translation), encoding="utf-8")
            written[path] = targets[path]
    return written


def _print_json(results: list[tuple[str, "Translation"]]) -> None:
    from temper_legacy_shim.configs.report import plain_report, yaml_of

    reports = [
        {"input": path, **plain_report(translation), "yaml": yaml_of(translation)}
        for path, translation in results
    ]
    typer.echo(json.dumps(reports, indent=1, ensure_ascii=False))


def _show(
    path: str,
    translation: "Translation",
    *,
    check: bool,
    table: bool,
    written: Path | None,
    prints_yaml: bool,
) -> None:
    from rich.console import Console

    from temper_legacy_shim.configs.report import (
        COLUMNS,
        OUTCOMES,
        sort_by_severity,
        summary_lines,
        table_rows,
        unmapped_lines,
        yaml_of,
    )

    console = Console(stderr=prints_yaml, highlight=False, soft_wrap=True)
    source = translation.source
    console.print(f"{path}: {OUTCOMES[translation.outcome]}", style="bold", markup=False)
    if check:
        for finding in translation.findings:
            if finding.level == "person":
                console.print(f"  {finding.message}", markup=False)
        return
    for line in (
        summary_lines([translation], next_step=_next_step(path, translation, written=written))
        if translation.settings
        else ()
    ):
        console.print(f"  {line}", markup=False)
    console.print(f"  {source.program} of {source.release}", markup=False)
    if table:
        print_table(console, COLUMNS, table_rows(translation), has_lines=True)
    for finding in sort_by_severity(translation.findings):
        if finding.rule != "unmapped":
            console.print(f"  {finding.level}: {finding.message} [{finding.rule}]", markup=False)
    for line in unmapped_lines(translation):
        console.print(f"  {line}", markup=False)
    if written is not None:
        console.print(f"  written: {written}", markup=False)
    elif prints_yaml and translation.settings:
        typer.echo(yaml_of(translation), nl=False)


def _next_step(path: str, translation: "Translation", *, written: Path | None) -> str:
    from temper_legacy_shim.configs.translation import Outcome

    if written is None:
        return f"temper-migrate config {path} --out NEW"
    first = (
        "decide what needs a person (DECIDE at the head of the file), then "
        if translation.outcome is Outcome.PERSON
        else ""
    )
    return f"{first}temper-train --config-dir {written.parent} --config-name {written.stem} --check"


def explain(
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...", help="Old keys, such as actor_rollout_ref.actor.grad_clip."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Print the history of an old key.

    Location, defaults by release, rule, reason and pull requests.
    """
    from temper_legacy_shim.configs.explanations import explain_key, plain_explanation, sentences

    result = [explain_key(key) for key in keys]
    if as_json:
        typer.echo(
            json.dumps([plain_explanation(item) for item in result], indent=1, ensure_ascii=False)
        )
        return
    for item in result:
        for line in sentences(item):
            typer.echo(line)
