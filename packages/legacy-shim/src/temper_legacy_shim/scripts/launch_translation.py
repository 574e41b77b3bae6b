"""Translate a launch through ``configs.translate``; unchanged values keep their text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from temper_legacy_shim.bash.values.shell_values import Piece, Text, literal
from temper_legacy_shim.configs import Cluster, Finding, Outcome, Setting, Translation, translate
from temper_legacy_shim.configs.mapping.builder import Level
from temper_legacy_shim.configs.reading.config_files import (
    OldFile,
    entry_of,
    read_old_file,
    with_missing,
)
from temper_legacy_shim.configs.reading.config_values import Plain, hydra_text
from temper_legacy_shim.configs.reading.trees import own_configs
from temper_legacy_shim.configs.translate import make_cpu_trial
from temper_legacy_shim.scripts.launches import Launch, Override

_NAMED_PART = re.compile(r"\$\{\w+\}")
_PLAIN_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_PLAIN_PATH = re.compile(r"(?:[\w./:@+-]|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})+")
_TORCHRUN_NUMBERS = ("nnodes", "nproc_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the user in addition to the script."""

    version: str | None = None
    """The old release; None infers it."""
    numerics: str = "temper"
    """Numerics of the result: legacy or temper."""
    cluster: Cluster | None = None
    """Nodes and GPUs, where neither the configuration nor the launcher says them."""
    cpu_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewArgument:
    key: str
    text: Text
    """``key=value`` as temper-train gets it."""
    source: str
    at: int
    """Position of the token in the script, or -1."""
    comment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedLaunch:
    launch: Launch
    translation: Translation
    arguments: tuple[NewArgument, ...]
    unknowns: dict[str, str]
    """Names that stood for unknown parts while translating, and how the shell writes those."""
    own_config: Path | None
    """The user's YAML file the launch includes, if it was found."""

    @property
    def persons(self) -> list[Finding]:
        """Decisions to make before the run."""
        return [finding for finding in self.translation.findings if finding.level == "person"]

    def missing_config(self) -> str:
        """Describe a configuration file that was not found; empty if none is missing."""
        if self.own_config is not None or not uses_own_config(self.launch):
            return ""
        where = self.launch.config_path or "the folder of the entry"
        return (
            f"{self.launch.config_name} in {where} is a configuration of your own, and is not in "
            "the script's folder or above it: its values are missing from the translation; run the "
            "command in your project."
        )

    @property
    def is_writable(self) -> bool:
        """True if there is a new command."""
        return bool(self.translation.settings)

    def readable(self, sentence: str) -> str:
        """Replace unknown values in a sentence by the shell's expressions."""
        for name, source in self.unknowns.items():
            sentence = sentence.replace(f"${{{name}}}", source)
        return sentence


def translate_launch(
    launch: Launch,
    options: Options,
    *,
    folder: Path | None = None,
    literal_keys: frozenset[str] = frozenset(),
) -> TranslatedLaunch:
    """Translate one launch.

    Args:
        launch: the launch in the script.
        options: options of the user.
        folder: of the script, around which the user's own configuration is looked for.
        literal_keys: keys whose value is written out although the script's own token would do.
    """
    unknowns: dict[str, str] = {}
    tokens = [_shown(override.text, unknowns) for override in launch.overrides]
    own = None if folder is None else find_own_config(launch, folder)
    groups = [] if own is None else [f"{name}={choice}" for name, choice in own.groups.items()]
    given = {override.key for override in launch.overrides}
    translation = translate(
        [*tokens, *(group for group in groups if group.partition("=")[0] not in given)],
        entry=launch.entry,
        config_name=launch.config_name,
        version=options.version,
        base=None if own is None else own.values,
        expanded={
            override.key.lstrip("+~"): inside
            for override in launch.overrides
            if (inside := _expanded(override.value()))
        },
        cluster=_cluster(launch) or options.cluster,
        numerics="legacy" if options.numerics == "legacy" else "temper",
    )
    translation = translation if own is None else with_missing(translation, own)
    translation = _with_processes(translation, launch, unknowns)
    translation = make_cpu_trial(translation) if options.cpu_trial else translation
    arguments = tuple(
        _argument(setting, launch.overrides, unknowns, literal_keys)
        for setting in translation.settings
    )
    return TranslatedLaunch(
        launch=launch,
        translation=translation,
        arguments=arguments,
        unknowns=unknowns,
        own_config=None if own is None else own.path,
    )


def _cluster(launch: Launch) -> Cluster | None:
    """Return nodes and processes of torchrun if both are known."""
    numbers = [launch.processes.get(name) for name in _TORCHRUN_NUMBERS]
    if "nproc_per_node" not in launch.processes:
        return None
    # torchrun's own default.
    nodes = "1" if numbers[0] is None else numbers[0].known
    gpus = None if numbers[1] is None else numbers[1].known
    if (
        nodes is None
        or gpus is None
        or not (nodes.isdigit() and gpus.isdigit())
        or "0" in (nodes, gpus)
    ):
        return None
    return Cluster(nodes=int(nodes), gpus_per_node=int(gpus))


def _with_processes(
    translation: Translation, launch: Launch, unknowns: dict[str, str]
) -> Translation:
    """Return fine-tuning on one machine with as many processes as the shell says.

    A number that no single variable is becomes a question.
    """
    processes, nodes = launch.processes.get("nproc_per_node"), launch.processes.get("nnodes")
    keys = {setting.key for setting in translation.settings}
    is_open = any(finding.rule == "sft-cluster" for finding in translation.findings)
    if processes is None or not keys or not is_open:
        return translation
    on_one_node = nodes is None or nodes.known == "1"
    if processes.known is not None or not on_one_node or "actor.num_workers" in keys:
        return _ask_for_processes(translation, processes, nodes)
    number = _shown(processes, unknowns)
    on_cpu = any(
        override.key == "trainer.device" and override.value().known == "cpu"
        for override in launch.overrides
    )
    added = [
        _read_torchrun("actor.num_workers", number, is_number=True),
        _read_torchrun("runtime.kind", "ray"),
    ]
    added += [] if on_cpu else [_read_torchrun("runtime.gpus_per_worker", 1.0)]
    translation = _with_finding(
        translation,
        "note",
        f"torchrun started {number} processes, a number that only the shell knows: "
        "actor.num_workers is the same.",
    )
    return replace(translation, settings=(*translation.settings, *added))


def _ask_for_processes(
    translation: Translation, processes: Text, nodes: Text | None
) -> Translation:
    each = "" if nodes is None else f" on each of {nodes.shown()} nodes"
    message = (
        f"torchrun started {processes.shown()} processes{each}, a number that only a run knows: "
        "translate with --nodes N --gpus-per-node M, so that actor.num_workers is N x M."
    )
    return _with_finding(translation, "person", message)


def _with_finding(translation: Translation, level: Level, message: str) -> Translation:
    """Return a translation that says this about its processes."""
    others = [finding for finding in translation.findings if finding.rule != "sft-cluster"]
    new = Finding(level=level, rule="sft-cluster", message=message)
    # Questions come first in a report.
    return replace(translation, findings=(new, *others) if level == "person" else (*others, new))


def _read_torchrun(key: str, value: Plain, *, is_number: bool = False) -> Setting:
    return Setting(
        key=key,
        value=value,
        is_pinned=False,
        rule="sft-cluster",
        old_keys=(),
        sources=(),
        is_verbatim=False,
        comment="torchrun --nproc_per_node [sft-cluster]",
        is_number=is_number,
    )


def _shown(text: Text, unknowns: dict[str, str]) -> str:
    """Return a token for the translator: unknown parts as names it can carry through."""
    out = []
    for piece in _opened(text):
        if piece.is_known:
            out.append(piece.value)
            continue
        match = _PLAIN_NAME.fullmatch(piece.value)
        name = (
            match[1] if match else f"SHELL_{sum(key.startswith('SHELL_') for key in unknowns) + 1}"
        )
        source = piece.source or piece.value
        # The same expression keeps its name, so that equal values stay equal.
        name = next((key for key, value in unknowns.items() if value == source), name)
        unknowns[name] = source
        out.append(f"${{{name}}}")
    return "".join(out)


def _expanded(text: Text) -> str:
    """Return a value with its unknown variables expanded; empty if nothing is added."""
    return (
        ""
        if text.is_known
        else "".join(
            Text(piece.inner).shown() if piece.inner else piece.value for piece in text.pieces
        )
    )


def _opened(text: Text) -> Iterator[Piece]:
    """Yield the pieces, a list variable as the pieces of its translated items."""
    for piece in text.pieces:
        inside = Text(piece.inner).shown().strip()
        if not piece.is_known and (inside[:1], inside[-1:]) in (("[", "]"), ("{", "}")):
            yield from piece.inner
        else:
            yield piece


def _argument(
    setting: Setting,
    overrides: tuple[Override, ...],
    unknowns: dict[str, str],
    literal_keys: frozenset[str],
) -> NewArgument:
    origins = [overrides[index] for index in setting.sources if index < len(overrides)]
    at = origins[0].at if origins else -1
    # The user's own text keeps variables, quotes and units readable.
    if setting.is_verbatim and len(origins) == 1 and setting.key not in literal_keys:
        old = origins[0]
        text = literal(f"{setting.key}=") + old.value()
        head = f"{old.key}="
        plain = old.source.startswith(head) and "\n" not in old.source
        source = f"{setting.key}={old.source[len(head) :]}" if plain else text.raw()
        return NewArgument(
            key=setting.key, text=text, source=source, at=at, comment=setting.comment
        )
    if (
        len(origins) == 1
        and setting.key not in literal_keys
        and setting.value == [_shown(origins[0].value(), dict(unknowns))]
    ):
        inner = _quote_in_list(origins[0])
        if inner:
            text = literal(f'{setting.key}=["') + origins[0].value() + literal('"]')
            return NewArgument(
                key=setting.key,
                text=text,
                source=f'"{setting.key}=[\\"{inner}\\"]"',
                at=at,
                comment=setting.comment,
            )
    around = _around(setting, origins, unknowns) if setting.key not in literal_keys else None
    written = f"{setting.key}={setting.value}" if setting.is_number else setting.override
    text = _with_sources(written, unknowns) if around is None else around
    return NewArgument(
        key=setting.key, text=text, source=text.raw(), at=at, comment=setting.comment
    )


def _around(setting: Setting, origins: list[Override], unknowns: dict[str, str]) -> Text | None:
    """Translate a text around values of tokens, such as ``checkpoints/PROJECT/NAME``."""
    if (
        setting.rule != "run-dir"
        or not isinstance(setting.value, str)
        or _NAMED_PART.sub("", setting.value) != hydra_text(_NAMED_PART.sub("", setting.value))
    ):
        return None
    text, rest = literal(f"{setting.key}="), setting.value
    for old in origins:
        before, shown, rest = rest.partition(_shown(old.value(), unknowns) or "$")
        if not shown:
            return None
        text = text + literal(before) + old.value()
    return text + literal(rest)


def _quote_in_list(old: Override) -> str:
    """Return a value as the one item of a list; empty if that is impossible."""
    tail = old.source.partition("=")[2]
    if len(tail) > 1 and tail[0] == tail[-1] == '"':
        tail = tail[1:-1]
    return tail if _PLAIN_PATH.fullmatch(tail) and "$" in tail else ""


def _with_sources(value: str, unknowns: dict[str, str]) -> Text:
    """Replace unknown parts of a new token by the shell's expressions."""
    if not unknowns:
        return literal(value)
    pieces = []
    for part in re.split(
        "(" + "|".join(re.escape(f"${{{name}}}") for name in unknowns) + ")", value
    ):
        source = unknowns.get(part[2:-1]) if part.startswith("${") else None
        if part:
            pieces.append(Piece(part) if source is None else Piece(source, source, is_known=False))
    return Text(tuple(pieces))


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome that counts for several launches; of none, a person's."""
    return max(outcomes, default=Outcome.PERSON)


_PACKAGED = re.compile(
    r"^(?:\./)?config/?$|(?:verl/trainer|recipe/\w+(?:/src)?|verl/experimental/\w+)/config/?$"
)
"""The old package's configuration folders, as its programs or users name them."""


def find_own_config(launch: Launch, folder: Path) -> OldFile | None:
    """Return the file, or None if the launch uses the old package's own, or it is not there.

    The part of the path that only a run would know (``$PROJECT_DIR/...``) is taken to be the
    script's folder or one above it.

    Raises:
        DamagedFileError: it is no YAML.
    """
    if not uses_own_config(launch) or launch.config_name is None:
        return None
    given = launch.config_path or ""
    parts = given.split("/")
    unknown = max(
        (number for number, part in enumerate(parts) if "$" in part or "`" in part), default=-1
    )
    tail = "/".join(parts[unknown + 1 :])
    name = launch.config_name.removesuffix(".yaml") + ".yaml"
    # Projects keep scripts a few levels below the root, and paths in them start at the root.
    for base in (folder, *folder.resolve().parents[:6]):
        path = (
            base / tail / name
            if not (launch.config_path or "").startswith("/") or unknown >= 0
            else Path(launch.config_path or "") / name
        )
        if path.is_file():
            return read_old_file(path)
    return None


def uses_own_config(launch: Launch) -> bool:
    """Check if the file is the user's own, by its name or its folder."""
    name = (launch.config_name or "").removesuffix(".yaml").rpartition("/")[2]
    is_of_a_release = bool(entry_of(name)) or name in own_configs()
    is_packaged = is_of_a_release and _PACKAGED.search(launch.config_path or "config") is not None
    return bool(name) and "$" not in name and not is_packaged
