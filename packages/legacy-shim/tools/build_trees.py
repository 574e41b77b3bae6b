"""Record the default configurations of one verl release in ``configs/data/trees.json``.

    python packages/legacy-shim/tools/build_trees.py v0.9.1 $(python -c 'import verl;
    print(*verl.__path__)') python packages/legacy-shim/tools/build_trees.py v0.7.0 CHECKOUT python
    packages/legacy-shim/tools/build_trees.py main CHECKOUT --commit 1dda039b --date 2026-08-22
    python packages/legacy-shim/tools/build_trees.py v0.8.0 CHECKOUT --recipes VERL_RECIPE_CHECKOUT

The source is an installed ``verl`` package or a checkout. Hydra composes each entry's own YAML
files; verl's code is neither imported nor run. Only facts are kept: key, default, entry and
release. A release that the file has already is replaced, so the command can be repeated.
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

DATA = Path(__file__).parent.parent / "src/temper_legacy_shim/configs/data/trees.json"
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo_fsdp": ("ppo_trainer", ()),
    "ppo_megatron": ("ppo_megatron_trainer", ()),
    "sft_columns": ("sft_trainer", ()),
    "sft_fsdp": ("sft_trainer_engine", ()),
    "sft_megatron": ("sft_trainer_engine", ("engine=megatron", "optim=megatron")),
    "generation": ("generation", ()),
    "evaluation": ("evaluation", ()),
}
"""Trees of the core package: the file that each is composed from, and the groups chosen in it."""
BASES = {"ppo_trainer": "ppo_fsdp", "ppo_megatron_trainer": "ppo_megatron"}
OWN_FOLDERS = ("recipe", "verl/experimental", "examples")
"""Where a release keeps configurations of further entries."""
WHOLE_TREES = ("prime_trainer", "spin_trainer", "sppo_trainer", "ppo_trainer_split")
"""Configurations that include no other file."""
GONE = {"$gone": True}
BASE = {"$base": True}
"""The default of the tree that the configuration is composed on."""

Tree = dict[str, Any]


def main() -> None:
    """Compose every tree of a release, and put them into the packed file."""
    arguments = _arguments()
    root = _root(arguments.source)
    families = {
        name: tree
        for name, (config, groups) in FAMILIES.items()
        if (tree := _core(root, config, groups))
    }
    if "ppo_fsdp" not in families:
        sys.exit(
            f"{root} has no verl/trainer/config/ppo_trainer.yaml: give an installed verl package "
            "or a checkout."
        )
    configs = dict(_own_trees(root, arguments.recipes, families))
    packed = Packed.read(DATA)
    packed.put(arguments.release, families, configs, programs=_programs(root))
    if arguments.commit:
        packed.commits[arguments.release] = {"commit": arguments.commit, "date": arguments.date}
    packed.write(DATA)
    print(
        f"{arguments.release}: "
        f"{', '.join(f'{name} {len(tree)}' for name, tree in families.items())}; {len(configs)} "
        "further configurations"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", help="v0.9.1, or main for a commit without a release")
    parser.add_argument(
        "source", type=Path, help="folder of the installed package verl, or a checkout"
    )
    parser.add_argument(
        "--recipes",
        type=Path,
        help="checkout of verl-recipe, where the release has it as a submodule",
    )
    parser.add_argument("--commit", help="of main")
    parser.add_argument("--date", help="of that commit, YYYY-MM-DD")
    arguments = parser.parse_args()
    if not re.fullmatch(r"v\d+\.\d+(\.\d+)?(\.(post|rc)\d+)?|main", arguments.release):
        parser.error(f"{arguments.release} is no release: write it as v0.9.1, or main.")
    if (arguments.release == "main") != bool(arguments.commit and arguments.date):
        parser.error(
            "main needs --commit and --date, which say what was read; a release needs neither."
        )
    return arguments


def _root(source: Path) -> Path:
    """Return the folder that contains the package ``verl``."""
    source = source.resolve()
    return source.parent if (source / "trainer/config").is_dir() else source


def _core(root: Path, config: str, groups: tuple[str, ...]) -> Tree:
    folder = root / "verl/trainer/config"
    if not (folder / f"{config}.yaml").is_file() or any(
        not (folder / f"{group.replace('=', '/')}.yaml").is_file() for group in groups
    ):
        return {}
    return _composed(root, folder, config, groups)


def _own_trees(
    root: Path, recipes: Path | None, families: dict[str, Tree]
) -> Iterator[tuple[str, tuple[str, Tree]]]:
    """Yield each further configuration: its name, the family that it is composed on, its tree."""
    folders = [root / name for name in OWN_FOLDERS if (root / name).is_dir()] + (
        [recipes] if recipes else []
    )
    for path in sorted(
        path for folder in folders for path in folder.rglob("*.yaml") if path.stem not in BASES
    ):
        family = _family(path)
        has_copy = (path.parent / "ppo_trainer.yaml").is_file()  # a fork of the release's own files
        if (
            family is None
            or family not in families
            or path.stem.startswith("_generated")
            or has_copy
        ):
            continue
        try:
            tree = _composed(root, path.parent, path.stem, ())
        except HydraException as error:
            print(
                f"left out: {path.relative_to(root) if path.is_relative_to(root) else path}: "
                f"{str(error).splitlines()[0]}"
            )
            continue
        yield path.stem, (family, tree)


def _programs(root: Path) -> Iterator[str]:
    """Yield the modules of the package that Hydra starts, such as ``verl.trainer.main_ppo``."""
    for path in (root / "verl").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "@hydra.main" in text and re.search(r"^if __name__ ==", text, re.MULTILINE):
            yield ".".join(path.relative_to(root).with_suffix("").parts)


def _family(path: Path) -> str | None:
    """Return the core tree below a configuration; None for YAML of another kind."""
    if path.stem in WHOLE_TREES:
        return "ppo_fsdp"
    values = yaml.safe_load(path.read_text())
    defaults = values.get("defaults") if isinstance(values, dict) else None
    names = [str(name) for name in defaults or [] if isinstance(name, str)]
    families = [BASES[name] for name in names if name in BASES]
    if families:
        return families[0]
    beside = [
        path.parent / f"{name}.yaml"
        for name in names
        if name != path.stem and (path.parent / f"{name}.yaml").is_file()
    ]
    return next((family for other in beside if (family := _family(other))), None)


def _composed(root: Path, folder: Path, config: str, groups: tuple[str, ...]) -> Tree:
    """Return leaves by dotted key, interpolations as they are written."""
    search = (
        []
        if folder == root / "verl/trainer/config"
        else [f"hydra.searchpath=[file://{root / 'verl/trainer/config'}]"]
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(initialize_config_dir(config_dir=str(folder), version_base=None))
        container = OmegaConf.to_container(
            compose(config_name=config, overrides=[*search, *groups])
        )
    assert isinstance(container, dict)
    return _flat({str(key): value for key, value in container.items()})


def _flat(values: Tree, prefix: str = "") -> Tree:
    leaves: Tree = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            leaves |= _flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _order(
    release: str, commits: dict[str, dict[str, str]], dates: dict[str, str]
) -> tuple[object, ...]:
    """Sort releases by number.

    Main stands before the first release that is younger than its commit.
    """
    if release in commits:
        younger = [_number(name) for name, date in dates.items() if date > commits[release]["date"]]
        return (*(min(younger) if younger else (99,)), -1)
    return (*_number(release), 0)


def _number(release: str) -> tuple[int, ...]:
    match = re.fullmatch(r"v(\d+)\.(\d+)(?:\.(\d+))?(?:\.(post|rc)(\d+))?", release)
    assert match is not None, release
    post = {None: 0, "post": 1 + int(match[5] or 0), "rc": 0}[match[4]]
    return int(match[1]), int(match[2]), int(match[3] or 0), post


RELEASED = {"v0.9.0": "2026-08-14", "v0.9.1": "2026-09-20"}
"""Days of releases around a recorded commit of main."""


class Packed:
    """The trees of all releases, and their compact form.

    Each key once, with the releases that changed its default.
    """

    def __init__(self) -> None:
        self.families: dict[str, dict[str, Tree]] = {}
        self.configs: dict[str, dict[str, tuple[str, Tree]]] = {}
        self.programs: dict[str, set[str]] = {}
        self.commits: dict[str, dict[str, str]] = {}

    @classmethod
    def read(cls, path: Path) -> "Packed":
        """Read the compact form."""
        packed_trees = cls()
        if not path.exists():
            return packed_trees
        packed = json.loads(path.read_text())
        versions = packed["versions"]
        packed_trees.commits = packed.get("commits", {})
        for family, block in packed["families"].items():
            packed_trees.families[family] = {
                versions[number]: _unpacked(block["keys"], number, absent=GONE)
                for number in block["present"]
            }
        for config, block in packed.get("configs", {}).items():
            keys, family = block["keys"], block["family"]
            packed_trees.configs[config] = {
                versions[number]: (family, _unpacked(keys, number, absent=BASE))
                for number in block["present"]
            }
        for program, present in packed.get("programs", {}).items():
            packed_trees.programs[program] = {versions[number] for number in present}
        return packed_trees

    def put(
        self,
        release: str,
        families: dict[str, Tree],
        configs: dict[str, tuple[str, Tree]],
        *,
        programs: Iterable[str],
    ) -> None:
        """Replace everything of one release.

        Of a configuration only what differs from its family is kept.
        """
        for trees in self.families.values():
            trees.pop(release, None)
        for configs_of_releases in self.configs.values():
            configs_of_releases.pop(release, None)
        for releases in self.programs.values():
            releases.discard(release)
        for program in programs:
            self.programs.setdefault(program, set()).add(release)
        for family, tree in families.items():
            self.families.setdefault(family, {})[release] = tree
        for config, (family, tree) in configs.items():
            base = families[family]
            own = {
                key: value
                for key, value in tree.items()
                if key not in base or not _is_same(base[key], value)
            }
            own |= {key: GONE for key in base if key not in tree}
            self.configs.setdefault(config, {})[release] = (family, own)

    def write(self, path: Path) -> None:
        """Write the compact form; the same trees give the same bytes."""
        releases = {release for trees in self.families.values() for release in trees}
        versions = sorted(releases, key=lambda release: _order(release, self.commits, RELEASED))
        lines = [
            (
                f'{{"versions": {json.dumps(versions)}, "commits": {json.dumps(self.commits)}, '
                f'"programs": {json.dumps(self._numbered_programs(versions))}, "families": {{'
            )
        ]
        blocks = [
            _block(family, versions, trees, head="", absent=GONE)
            for family, trees in self.families.items()
            if trees
        ]
        lines += [",\n".join(blocks), '}, "configs": {']
        blocks = []
        for config, releases_of_config in sorted(self.configs.items()):
            if not releases_of_config:
                continue
            (family, *others) = {family for family, _ in releases_of_config.values()}
            assert not others, f"{config} changed its family"
            trees = {release: tree for release, (_, tree) in releases_of_config.items()}
            blocks.append(
                _block(
                    config, versions, trees, head=f'"family": {json.dumps(family)}, ', absent=BASE
                )
            )
        path.write_text("\n".join([*lines, ",\n".join(blocks), "}}"]) + "\n")

    def _numbered_programs(self, versions: list[str]) -> dict[str, list[int]]:
        return {
            program: [number for number, version in enumerate(versions) if version in releases]
            for program, releases in sorted(self.programs.items())
            if releases
        }


def _unpacked(keys: dict[str, list[list[Any]]], number: int, *, absent: Tree) -> Tree:
    histories = {
        key: [value for since, value in history if since <= number] for key, history in keys.items()
    }
    return {key: values[-1] for key, values in histories.items() if values and values[-1] != absent}


def _block(
    name: str, versions: list[str], trees: dict[str, Tree], *, head: str, absent: Tree
) -> str:
    """Return one tree over all releases.

    Pairs of the release's number and the default from there on.
    """
    present = [number for number, version in enumerate(versions) if version in trees]
    lines = []
    for key in sorted({key for tree in trees.values() for key in tree}):
        history: list[list[Any]] = []
        for number, version in enumerate(versions):
            value = trees.get(version, {}).get(key, absent)
            if not history and value == absent:
                continue
            if not history or not _is_same(history[-1][1], value):
                history.append([number, value])
        lines.append(f"{json.dumps(key)}:{json.dumps(history, separators=(',', ':'))}")
    keys = ",\n".join(lines)
    return f'{json.dumps(name)}: {{{head}"present": {json.dumps(present)}, "keys": {{\n{keys}\n}}}}'


def _is_same(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)


if __name__ == "__main__":
    main()
