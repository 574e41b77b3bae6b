"""Trees of releases and entries: how they are recorded, and which one a translation takes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from temper_legacy_shim.configs import translate
from temper_legacy_shim.configs.reading.trees import (
    Family,
    composed_tree,
    default_tree,
    described,
    own_configs,
    releases_of,
    versions,
)
from temper_legacy_shim.errors import UsageError

from .conftest import BASE, translated

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


CHECKOUT = {
    "verl/trainer/config/ppo_trainer.yaml": (
        "defaults: [actor/dp@actor, _self_]\ntrainer: {epochs: 3, name: '${actor.lr}'}\n"
    ),
    "verl/trainer/config/actor/dp.yaml": "lr: 1.0e-06\nclip: null\n",
    "verl/trainer/main_ppo.py": (
        "@hydra.main(config_path='config')\ndef main(): ...\n\n"
        "if __name__ == '__main__':\n    main()\n"
    ),
    "verl/trainer/main_ppo_v0.py": "class TaskRunner: ...\n",
    "recipe/dapo/config/dapo_trainer.yaml": (
        "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, "
        "_self_]\ntrainer: {epochs: 1}\nbuffer: 0\n"
    ),
}


def build(monkeypatch: pytest.MonkeyPatch, data: Path, *arguments: str) -> ModuleType:
    builder = tool("build_trees")
    monkeypatch.setattr(builder, "DATA", data)
    monkeypatch.setattr(sys, "argv", ["build_trees.py", *arguments])
    builder.main()
    return builder


def test_tree_of_a_checkout_holds_its_defaults_and_those_of_its_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, CHECKOUT)
    builder = build(monkeypatch, tmp_path / "trees.json", "v0.9.9", str(tmp_path))
    packed = builder.Packed.read(tmp_path / "trees.json")
    core = {
        "actor.lr": 1e-6,
        "actor.clip": None,
        "trainer.epochs": 3,
        "trainer.name": "${actor.lr}",
    }
    assert packed.families == {"ppo_fsdp": {"v0.9.9": core}}
    assert packed.configs == {
        "dapo_trainer": {"v0.9.9": ("ppo_fsdp", {"trainer.epochs": 1, "buffer": 0})}
    }
    assert packed.programs == {"verl.trainer.main_ppo": {"v0.9.9"}}


def test_installed_package_gives_the_tree_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, CHECKOUT)
    build(monkeypatch, tmp_path / "one.json", "v0.9.9", str(tmp_path))
    build(monkeypatch, tmp_path / "other.json", "v0.9.9", str(tmp_path / "verl"))
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_commit_stands_before_the_next_release_and_is_named_with_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, CHECKOUT)
    data = tmp_path / "trees.json"
    for release in ("v0.9.1", "v0.9.0"):
        build(monkeypatch, data, release, str(tmp_path))
    builder = build(
        monkeypatch, data, "main", str(tmp_path), "--commit", "1dda039b", "--date", "2026-08-22"
    )
    assert list(builder.json.loads(data.read_text())["versions"]) == ["v0.9.0", "main", "v0.9.1"]
    assert described("main") == "main (commit 1dda039b of 2026-08-22)"


def test_recorded_file_is_what_its_trees_give(tmp_path: Path) -> None:
    builder = tool("build_trees")
    builder.Packed.read(builder.DATA).write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == builder.DATA.read_bytes()


def test_release_without_a_tree_is_missing_and_a_release_without_support_is_not() -> None:
    checker = tool("check_releases")
    assert checker.find_missing(["0.9.1", "0.9.2", "0.2", "0.1"]) == ["0.9.2"]


@pytest.mark.parametrize("version", ["v0.9.2", "0.10", "v1.0"])
def test_newer_release_is_reported_and_not_treated_as_an_older_one(version: str) -> None:
    with pytest.raises(
        UsageError, match=r"newer than the newest release that is known here, v0\.9\.1"
    ):
        translate(BASE, entry="verl.trainer.main_ppo", version=version)


def test_commit_of_main_is_named_with_its_date() -> None:
    assert (
        translated("main").source.release == "main (commit 1dda039b of 2026-08-22) (given as main)"
    )


def test_keys_of_the_newest_release_are_known() -> None:
    interpreter = "ray_kwargs.ray_init.runtime_env.py_executable=python"
    assert not [
        each for each in translated("v0.9.1", interpreter).findings if each.level == "refused"
    ]
    callback = translated("v0.9.1", "trainer.checkpoint_callback_class=my.Callback")
    assert callback.unmapped == {}
    assert callback.tokens[-1].disposition == "needs a person"


@pytest.mark.parametrize("config", sorted(own_configs()))
def test_further_configuration_is_laid_over_the_tree_of_its_release(config: str) -> None:
    family: Family = "ppo_megatron" if "megatron" in config else "ppo_fsdp"
    for version in releases_of(config):
        assert len(composed_tree(version, family, (config,))) > 100


@pytest.mark.parametrize(
    ("entry", "version", "taken"),
    [
        ("recipe.one_step_off_policy.main_ppo", "v0.4.1", "v0.5.0"),
        ("recipe.dapo.main_dapo", "v0.3.0.post1", "v0.4.0"),
    ],
)
def test_entry_that_a_release_did_not_have_is_read_as_the_nearest_one(
    entry: str, version: str, taken: str
) -> None:
    source = translated(version, entry=entry).source
    assert source.version == taken
    assert "had no such program" in source.evidence[-1]


def test_asynchronous_entry_has_the_defaults_of_its_own_configuration() -> None:
    core = default_tree("v0.9.0", "ppo_fsdp")
    own = composed_tree("v0.9.0", "ppo_fsdp", ("fully_async_ppo_trainer",))
    assert (
        core["algorithm.rollout_correction.bypass_mode"],
        own["algorithm.rollout_correction.bypass_mode"],
    ) == (False, True)
    assert own["rollout.n"] == 4
    assert versions()[-1] == "v0.9.1"


@pytest.mark.parametrize(
    ("entry", "given", "taken"),
    [
        ("verl.trainer.main_ppo_sync", "v0.7.0", "v0.8.0"),
        ("verl.trainer.main_ppo_sync", "v0.9.1", "v0.8.0"),
        ("verl.trainer.fsdp_sft_trainer", "v0.9.0", "v0.7.0"),
        ("/old/verl/trainer/main_generation_server.py", "v0.5.0", "v0.6.0"),
    ],
)
def test_program_that_a_release_lacks_is_reported(entry: str, given: str, taken: str) -> None:
    result = translate([], entry=entry, version=given)
    assert result.source.version == taken
    (message,) = [each.message for each in result.findings if each.rule == "program-release"]
    assert message.startswith(f"{given} had no program {entry}: it was read as of {taken}")


def test_release_is_one_that_has_the_program() -> None:
    result = translate(BASE, entry="verl.trainer.main_ppo_sync")
    assert result.source.version == "v0.8.0"
    assert "program-release" not in [each.rule for each in result.findings]
