"""Find the old layout of a directory from the files in it, never from the name alone.

A *run* has steps, a *step* has roles (actor, critic), a *role* has the files of one model;
supervised runs have no role level, and in runs of 0.1 each role has its steps.
"""

import json
import os
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from temper_legacy_shim.errors import LayoutError, UsageError

TRACKER = "latest_checkpointed_iteration.txt"
RECEIPT = "temper-receipt.json"
"""File this package writes next to a converted model."""
# At most 18 digits: a hostile name may have thousands, which Python refuses to convert.
_STEP = re.compile(r"global_step_(\d{1,18})")
_FSDP_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_ADAPTER_FILE = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?_adapter\.pt")
_FIRST_ROLES = ("actor", "critic")
"""Roles of 0.1, each in a folder with separate steps."""
_DESCRIPTIONS = ("huggingface", "hf_config_and_tokenizer", "model/huggingface", ".")
"""Folders that may hold a role's Hugging Face files."""


class Kind(StrEnum):
    """On-disk layout of a role's weights."""

    FSDP = "fsdp"
    MEGATRON_RANKS = "megatron-per-rank"
    MEGATRON_DIST = "megatron-dist-ckpt"
    MEGATRON_ADAPTER = "megatron-adapter"
    HUGGINGFACE = "huggingface"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    path: Path
    tp: int
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    path: Path
    name: str
    """actor, critic, ..., or ``model`` where the layout has no role level."""
    kind: Kind
    step: int | None
    """Trainer step, where the layout says it."""
    step_directory: Path | None
    """Directory that also holds the data state; None for a role without a step."""
    fsdp_files: dict[str, dict[int, Path]] = field(default_factory=dict)
    """Files by kind (model, optim, extra_state) and rank."""
    rank_files: tuple[RankFile, ...] = ()
    """Megatron's per-rank model files."""
    adapter_files: tuple[RankFile, ...] = ()
    dist_folders: tuple[Path, ...] = ()
    """Folders of Megatron's distributed format, the model's first."""
    world_size: int = 1
    """Files or ranks that hold the weights."""
    version: str = "unknown"
    """Range of versions that wrote this layout."""
    reasons: tuple[str, ...] = ()

    def described_in(self) -> Path | None:
        """Return the folder with this role's config.json, if any.

        Raises:
            LayoutError: one is a broken link.
        """
        for name in _DESCRIPTIONS:
            check_readable(self.path / name / "config.json")
        return next(
            (
                self.path / name
                for name in _DESCRIPTIONS
                if (self.path / name / "config.json").is_file()
            ),
            None,
        )

    def tokenizer_in(self) -> Path | None:
        """Return the folder with this role's tokenizer, if any."""
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        return next(
            (
                self.path / d
                for d in _DESCRIPTIONS
                if any((self.path / d / name).is_file() for name in names)
            ),
            None,
        )


def _holds_steps(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("global_step_*"))


def find_roles(path: str | Path, *, step: int | None = None, role: str | None = None) -> list[Role]:
    """Return the roles below a run, a step or a role directory.

    Args:
        path: any of the three.
        step: the step to take; None takes the step in the tracker file.
        role: only this one.

    Raises:
        UsageError: there is no such directory.
        LayoutError: no layout matches; the message lists the files that were found.
    """
    path = Path(path)
    if not os.path.isdir(path):  # also for a name that no disk takes
        raise UsageError(
            f"{path} is no directory: give a run, a step (global_step_N) or a role (actor, critic) "
            "directory."
        )
    # A run may also hold converted models; its steps come first.
    result = _roles_of_run(path, step) or [each for each in (_role_at(path),) if each is not None]
    result = result or _roles_of_first_run(path, step) or _roles_of_step(path)
    if step is not None and any(each.step != step for each in result):
        raise LayoutError(
            f"{path} is no run, so that step {step} can't be chosen in it: leave --step out, or "
            "give the run's directory."
        )
    if not result:
        present = sorted(entry.name for entry in path.iterdir())[:12]
        lower = next((each for each in map(path.joinpath, present) if _holds_steps(each)), None)
        hint = "" if lower is None else f" {lower} has steps: give that directory."
        raise LayoutError(
            f"{path} holds no checkpoint that we know: it holds {present or 'nothing'}.{hint}"
        )
    if role is not None:
        names = [each.name for each in result]
        result = [each for each in result if each.name == role]
        if not result:
            raise LayoutError(f"{path} has no role {role!r}: it has {', '.join(names)}.")
    return result


def _roles_of_step(path: Path) -> list[Role]:
    """Return a step's roles; folders of converted output count only if they are alone."""
    children = (
        _role_at(child)
        for child in sorted(path.iterdir())
        if child.is_dir() and not _STEP.fullmatch(child.name)
    )
    result = [role for role in children if role is not None]
    return [role for role in result if not (role.path / RECEIPT).is_file()] or result


def _steps(path: Path) -> dict[int, Path]:
    return {
        int(match[1]): child
        for child in path.iterdir()
        if (match := _STEP.fullmatch(child.name)) and child.is_dir()
    }


def _roles_of_first_run(path: Path, step: int | None) -> list[Role]:
    """Return the roles of 0.1, whose steps are below them, at the newest step of all."""
    of_role = {name: _steps(path / name) for name in _FIRST_ROLES if (path / name).is_dir()}
    of_role = {name: steps for name, steps in of_role.items() if steps}
    if not of_role:
        return []
    common = set.intersection(*(set(steps) for steps in of_role.values()))
    if (step is not None and step not in common) or not common:
        have = "; ".join(
            f"{name} has {', '.join(map(str, sorted(steps)))}" for name, steps in of_role.items()
        )
        raise LayoutError(
            f"{path} has no step {'' if step is None else f'{step} '}of all its roles: {have}. "
            "Give the folder of one role."
        )
    chosen = max(common) if step is None else step
    result = {name: _role_at(steps[chosen]) for name, steps in of_role.items()}
    return [replace(role, name=name) for name, role in result.items() if role is not None]


def _roles_of_run(path: Path, step: int | None) -> list[Role]:
    steps = _steps(path)
    if not steps:
        return []
    chosen = step if step is not None else _tracked(path, steps)
    if chosen not in steps:
        raise LayoutError(
            f"{path} has no step {chosen}: it has {', '.join(map(str, sorted(steps)))}."
        )
    own = _role_at(steps[chosen])
    roles = [own] if own is not None else _roles_of_step(steps[chosen])
    if not roles:
        raise LayoutError(
            f"{steps[chosen]} holds no checkpoint that we know: the step was not saved to its end; "
            "choose another with --step."
        )
    return roles


def _tracked(path: Path, steps: dict[int, Path]) -> int:
    tracker = path / TRACKER
    # A run that was copied without its tracker file is still complete.
    if not tracker.is_file():
        return max(steps)
    # 64 bytes, because the file may be anything, such as a link to a device.
    content = tracker.read_bytes()[:64].decode("ascii", errors="replace").strip()
    if not content.isdecimal():
        raise LayoutError(
            f"{tracker} holds {content!r} instead of a step: choose one of {sorted(steps)} with "
            "--step."
        )
    return int(content)


def _role_at(path: Path) -> Role | None:
    """Return the role that a directory holds itself; None if it holds none."""
    fsdp = _fsdp_files(path)
    ranks = _rank_files(path / "model", _RANK_FOLDER)
    adapters = _rank_files(path / "adapter_checkpoint", _ADAPTER_FILE)
    dist = tuple(
        path / name
        for name in ("model/dist_ckpt", "dist_ckpt")
        if (path / name / ".metadata").is_file()
    )
    # Optimizer and extra state belong to a role only together with its weights, so they do not
    # decide the kind.
    more = tuple(
        path / name
        for name in ("optimizer/dist_ckpt", "extra/dist_ckpt")
        if (path / name / ".metadata").is_file()
    )
    _check_one_layout(path, has_fsdp="model" in fsdp, has_ranks=bool(ranks), dist=dist)
    if "model" in fsdp:
        kind, world = Kind.FSDP, len(fsdp["model"])
    elif ranks:
        kind, world = Kind.MEGATRON_RANKS, len(ranks)
    elif dist:
        kind, world = Kind.MEGATRON_DIST, 1
    elif (
        _has_weights(path)
        or _has_weights(path / "huggingface")
        or _has_weights(path / "model/huggingface")
    ):
        kind, world = Kind.HUGGINGFACE, 1
    elif adapters:
        kind, world = Kind.MEGATRON_ADAPTER, len(adapters)
    else:
        return None
    # A path such as `.`, or a link, has another name than the folder.
    named = _STEP.fullmatch(path.name) or _STEP.fullmatch(path.resolve().name)
    above = _STEP.fullmatch(path.resolve().parent.name)
    version, reasons = _version(path, kind)
    return Role(
        path=path,
        name="model" if named else path.resolve().name,
        kind=kind,
        step=int(named[1]) if named else int(above[1]) if above else None,
        step_directory=path if named else path.resolve().parent if above else None,
        fsdp_files=fsdp,
        rank_files=ranks,
        adapter_files=adapters,
        dist_folders=dist + more,
        world_size=world,
        version=version,
        reasons=reasons,
    )


def _check_one_layout(
    path: Path, *, has_fsdp: bool, has_ranks: bool, dist: tuple[Path, ...]
) -> None:
    """Reject weights in two layouts, of which no release writes more than one for a role."""
    layouts = ["model_world_size_*_rank_*.pt"] if has_fsdp else []
    layouts += ["model/mp_rank_*"] if has_ranks else []
    layouts += [str(folder.relative_to(path)) for folder in dist]
    if len(layouts) > 1:
        raise LayoutError(
            f"{path} holds weights in {' and '.join(layouts)}: move those of the older save "
            "elsewhere."
        )


def _fsdp_files(path: Path) -> dict[str, dict[int, Path]]:
    result: dict[str, dict[int, Path]] = {}
    worlds: dict[str, set[int]] = {}
    for child in path.iterdir():
        match = _FSDP_FILE.fullmatch(child.name)
        if match and child.is_file():
            rank = int(match[3])
            # Rank 01 and rank 1 are both rank 1, such as after a copy that renames.
            if rank in result.get(match[1], {}) and len(worlds[match[1]] | {int(match[2])}) == 1:
                raise LayoutError(
                    f"{path} has two files of rank {rank} ({child.name}): remove the copy."
                )
            result.setdefault(match[1], {})[rank] = child
            worlds.setdefault(match[1], set()).add(int(match[2]))
    for kind, sizes in worlds.items():
        if len(sizes) > 1:
            raise LayoutError(
                f"{path} holds {kind} files of world sizes {sorted(sizes)}: move those of the "
                "older save elsewhere."
            )
        missing = sorted(set(range(next(iter(sizes)))) - set(result[kind]))
        surplus = sorted(set(result[kind]) - set(range(next(iter(sizes)))))
        # Weights do not need optimizer and extra files, whose gaps are reported where used.
        if missing and kind == "model":
            raise LayoutError(
                f"{path} lacks {kind}_world_size_{next(iter(sizes))}_rank_{missing[0]}.pt"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + ": copy every rank's file here; on several nodes each holds its own."
            )
        if surplus:
            raise LayoutError(
                f"{path} holds {result[kind][surplus[0]].name}, whose rank lies outside its world "
                "size: remove it."
            )
    return {kind: dict(sorted(of_kind.items())) for kind, of_kind in result.items()}


def _rank_files(folder: Path, pattern: re.Pattern[str]) -> tuple[RankFile, ...]:
    if not folder.is_dir():
        return ()
    result = []
    for child in sorted(folder.iterdir()):
        match = pattern.fullmatch(child.name)
        file = child / "model.pt" if child.is_dir() else child
        if match and file.is_file():
            result.append((match, file))
    # mp_rank_TT_XXX is a stage, or an expert rank where there are no stages; mp_rank_TT_PPP_EEE is
    # both.
    return tuple(
        RankFile(path=file, tp=int(match[1]), pp=int(match[2] or 0), ep=int(match[3] or 0))
        for match, file in result
    )


def _has_weights(path: Path) -> bool:
    if not path.is_dir():
        return False
    if (path / "adapter_config.json").is_file():
        return True
    names = {child.name for child in path.iterdir()}
    single = {
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    }
    return bool(names & single)


def _version(path: Path, kind: Kind) -> tuple[str, tuple[str, ...]]:
    """Return the range of versions with such files, and the reason."""
    has = {name: (path / name).exists() for name in _MARKS}
    step_data = path.parent / "data.pt"
    if kind == Kind.FSDP:
        if has["fsdp_config.json"]:
            if has["lora_train_meta.json"]:
                return "0.8.0 or newer", (
                    "fsdp_config.json since 0.4.1",
                    "lora_train_meta.json in the role directory since 0.8.0",
                )
            if has["lora_adapter"]:
                return "0.4.1 to 0.7.1", (
                    "fsdp_config.json since 0.4.1",
                    "lora_adapter/ until 0.7.1",
                )
            return "0.4.1 or newer", (f"fsdp_config.json since 0.4.1{_fsdp_version(path)}",)
        if has["config.json"]:
            return "0.4.0", ("config.json at the root of the role directory: 0.4.0 alone",)
        if has["huggingface/config.json"]:
            if _mentions_loader(step_data):
                return "0.2", (
                    "no fsdp_config.json: before 0.4.1",
                    "data.pt is a pickled data loader: 0.2",
                )
            return "0.2 to 0.3.0", (
                "no fsdp_config.json, and a config in huggingface/: before 0.4.0",
            )
        return "0.3.0", ("no config anywhere: 0.3.0 without hf_model among its contents",)
    if has["ckpt_contents.json"] or has["model/dist_ckpt"]:
        return "0.9.0 or newer", ("model/, optimizer/ and extra/ are apart: since 0.9.0",)
    if kind == Kind.MEGATRON_RANKS:
        if has["hf_config_and_tokenizer"]:
            return "0.4.0", (
                "model/mp_rank_* until 0.4.0",
                "hf_config_and_tokenizer/ in 0.4.0 alone",
            )
        return "0.3.0", (
            "model/mp_rank_* until 0.4.0",
            "no hf_config_and_tokenizer/, which 0.4.0 writes",
        )
    if has["adapter_checkpoint"]:
        return "0.7.0 to 0.7.1", ("adapter_checkpoint/ in 0.7 alone",)
    if has["huggingface/adapter"]:
        return "0.8.0", (
            "huggingface/adapter/ since 0.8.0, in one folder with dist_ckpt/ until 0.9",
        )
    if kind == Kind.MEGATRON_DIST:
        return "0.4.1 to 0.8.0", ("dist_ckpt/ at the root of the role directory: 0.4.1 to 0.8.0",)
    return "any", ("a plain Hugging Face model directory",)


_MARKS = (
    "fsdp_config.json",
    "lora_train_meta.json",
    "lora_adapter",
    "config.json",
    "huggingface/config.json",
    "huggingface/adapter",
    "hf_config_and_tokenizer",
    "adapter_checkpoint",
    "ckpt_contents.json",
    "model/dist_ckpt",
)


def _fsdp_version(path: Path) -> str:
    described = read_object(path / "fsdp_config.json")
    return f", which says FSDP{described['FSDP_version']}" if "FSDP_version" in described else ""


def _mentions_loader(path: Path) -> bool:
    """Check if a small file's bytes name torch's DataLoader; looked at, never unpickled."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return b"torch.utils.data.dataloader" in file.read(1 << 20)


def check_readable(path: Path) -> None:
    """Reject an empty file, such as a broken link into the Hub's cache.

    A missing file passes.

    Raises:
        LayoutError: it is a broken link, a pipe or the like.
    """
    # A pipe would block the first read for ever, and a device may never end.
    if os.path.lexists(path) and not path.is_file() and not path.is_dir():
        raise LayoutError(f"{path} is a broken link or no regular file: copy the file itself.")


def check_own(path: Path, role: Role) -> None:
    """Reject a small file that is a link to a place outside of the checkpoint.

    Links of a hub's cache to its own blobs are accepted, and so are links in a folder that the user
    named apart from the checkpoint.

    Raises:
        LayoutError: it leads outside the checkpoint.
    """
    folders = [folder for folder in (role.path, role.step_directory) if folder is not None]
    if not any(path.absolute().is_relative_to(folder.absolute()) for folder in folders):
        return
    roots = [folder.resolve() for folder in folders]
    roots += [
        above.parent / "blobs"
        for root in roots
        for above in root.parents
        if above.name == "snapshots"
    ]
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in roots):
        raise LayoutError(
            f"{path} leads to {target}, outside the checkpoint: if that is what you want, put the "
            "file itself there."
        )


def read_object(path: Path) -> dict[str, object]:
    """Return a small JSON object of a checkpoint.

    Raises:
        LayoutError: it is not one.
    """
    try:
        # Configs and receipts are small. A limit keeps a wrong file out of the memory.
        if path.stat().st_size > 64 << 20:
            raise LayoutError(
                f"{path} is no JSON object of a checkpoint: it has {path.stat().st_size} bytes."
            )
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LayoutError(f"{path} can't be read as JSON ({error}): copy it again.") from error
    if not isinstance(content, dict):
        raise LayoutError(
            f"{path} should hold a JSON object, but holds a {type(content).__name__}: copy it "
            "again."
        )
    return content
