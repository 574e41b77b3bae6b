"""Recognition of runs, steps and roles next to other folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from old_files import write_fsdp
from typer.testing import CliRunner

from temper_legacy_shim.checkpoints import find_roles, open_checkpoint, rank_files
from temper_legacy_shim.checkpoints.fsdp_moments import _group_by_layer
from temper_legacy_shim.checkpoints.staging import Staging
from temper_legacy_shim.cli import app
from temper_legacy_shim.errors import DamagedFileError, LayoutError, OutputError, UsageError

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": False,
}


def _role(folder: Path, **tensors: torch.Tensor) -> Path:
    write_fsdp(folder, tensors or {"model.norm.weight": torch.ones(4)})
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text(json.dumps(CONFIG))
    return folder


def _converted(folder: Path, *, receipt: bool = False) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({"model.norm.weight": torch.zeros(4)}, folder / "model.safetensors")
    if receipt:
        (folder / "temper-receipt.json").write_text("{}")


@pytest.mark.parametrize("name", ["out", "huggingface"])
def test_a_model_next_to_the_steps_of_a_run_is_not_taken_for_them(
    tmp_path: Path, name: str
) -> None:
    actor = _role(tmp_path / "run/global_step_2/actor")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("2")
    _converted(tmp_path / "run" / name)
    assert [role.path for role in find_roles(tmp_path / "run")] == [actor]


def test_what_was_converted_next_to_a_role_is_none(tmp_path: Path) -> None:
    actor = _role(tmp_path / "global_step_2/actor")
    _converted(tmp_path / "global_step_2/converted", receipt=True)
    assert [role.path for role in find_roles(tmp_path / "global_step_2")] == [actor]
    _converted(tmp_path / "alone/converted", receipt=True)
    assert len(find_roles(tmp_path / "alone")) == 1


def test_a_step_of_what_is_no_run_is_refused(tmp_path: Path) -> None:
    actor = _role(tmp_path / "global_step_2/actor")
    assert find_roles(actor, step=2)[0].step == 2
    with pytest.raises(LayoutError, match="step 7 can't be chosen"):
        find_roles(actor, step=7)


def test_a_run_of_the_first_version_has_steps_below_its_roles(tmp_path: Path) -> None:
    for name, steps in {"actor": (10, 20, 30), "critic": (10, 20)}.items():
        for step in steps:
            _converted(tmp_path / name / f"global_step_{step}")
    assert [(role.name, role.step) for role in find_roles(tmp_path)] == [
        ("actor", 20),
        ("critic", 20),
    ]
    assert [(role.name, role.step) for role in find_roles(tmp_path, step=10, role="critic")] == [
        ("critic", 10)
    ]
    assert find_roles(tmp_path / "actor")[0].step == 30
    with pytest.raises(
        LayoutError,
        match=(
            r"no step 30 of all its roles: actor has 10, 20, 30; critic has 10, 20\. Give the "
            r"folder of one"
        ),
    ):
        find_roles(tmp_path, step=30)


def test_folder_above_a_run_names_the_one_with_its_steps(tmp_path: Path) -> None:
    _role(tmp_path / "run/checkpoints/global_step_7/actor")
    with pytest.raises(LayoutError, match=r"run/checkpoints has steps: give that directory"):
        find_roles(tmp_path / "run")


def test_the_current_folder_is_known_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _role(tmp_path / "run/global_step_7")
    monkeypatch.chdir(step)
    (role,) = find_roles(".")
    assert (role.name, role.step, role.step_directory) == ("model", 7, Path())


def test_an_alpha_next_to_the_roles_is_found_from_within_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = {
        f"base_model.model.a.lora_{side}.default.weight": torch.ones(shape)
        for side, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    _role(tmp_path / "global_step_7/actor", **half)
    (tmp_path / "global_step_7/lora_train_meta.json").write_text(
        json.dumps({"r": 2, "lora_alpha": 16})
    )
    monkeypatch.chdir(tmp_path / "global_step_7")
    adapter = open_checkpoint("actor").adapter
    assert adapter is not None
    assert (adapter.alpha, adapter.alpha_from) == (16.0, "lora_train_meta.json")


@pytest.mark.parametrize(
    "given", [{"lora_alpha": float("inf")}, {"lora_alpha": 4, "alpha_pattern": {"a": "much"}}]
)
def test_an_alpha_that_is_no_number_is_none(tmp_path: Path, given: dict[str, object]) -> None:
    half = {
        f"base_model.model.a.lora_{side}.default.weight": torch.ones(shape)
        for side, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    actor = _role(tmp_path / "actor", **half)
    (actor / "lora_adapter").mkdir()
    (actor / "lora_adapter/adapter_config.json").write_text(json.dumps({"r": 2, **given}))
    adapter = open_checkpoint(actor).adapter
    assert adapter is not None
    with pytest.raises(
        (UsageError, DamagedFileError),
        match=r"no file of this checkpoint says the adapter's alpha|'much', which is no alpha",
    ):
        adapter.scale("a")


def test_a_buffer_that_differs_between_ranks_is_of_another_save(tmp_path: Path) -> None:
    write_fsdp(tmp_path / "a", {"w": torch.ones(4, 2), "bias": torch.ones(3)}, plain=["bias"])
    write_fsdp(tmp_path / "b", {"w": torch.ones(4, 2), "bias": torch.zeros(3)}, plain=["bias"])
    name = "model_world_size_2_rank_1.pt"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    (role,) = find_roles(tmp_path / "a")
    with pytest.raises(DamagedFileError, match="bias differs between ranks 0 and 1"):
        rank_files.read_weights(role.fsdp_files["model"], where=role.path)


def test_layers_of_two_towers_are_units_of_their_own() -> None:
    names = [
        "visual.blocks.0.a",
        "visual.blocks.1.a",
        "model.embed",
        "model.layers.0.a",
        "model.layers.0.b",
        "model.layers.1.a",
    ]
    expected = [
        ["model.embed"],
        ["visual.blocks.0.a"],
        ["visual.blocks.1.a"],
        ["model.layers.0.a", "model.layers.0.b"],
    ]
    assert _group_by_layer(names) == [*expected, ["model.layers.1.a"]]


def test_of_two_roles_none_is_written_where_one_lacks_something(tmp_path: Path) -> None:
    _role(tmp_path / "global_step_2/actor")
    critic = _role(tmp_path / "global_step_2/critic")
    (critic / "huggingface/config.json").unlink()
    with pytest.raises(
        UsageError, match=r"critic: .*--hf-config.* --role converts one of actor, critic alone"
    ):
        CliRunner().invoke(
            app,
            ["checkpoint", str(tmp_path / "global_step_2"), "--out", str(tmp_path / "out")],
            catch_exceptions=False,
        )
    assert not (tmp_path / "out").exists()


def test_of_two_roles_a_second_run_writes_what_the_first_one_did_not(tmp_path: Path) -> None:
    for name in ("actor", "critic"):
        _role(tmp_path / "global_step_2" / name)
    command = [
        "checkpoint",
        str(tmp_path / "global_step_2"),
        "--out",
        str(tmp_path / "out"),
        "--no-verify-names",
    ]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    shutil.rmtree(tmp_path / "out/critic")  # as if it had been stopped before the second
    first = (tmp_path / "out/actor/model.safetensors").stat().st_mtime_ns
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert [made["source"]["role"] for made in json.loads(done.stdout)] == ["actor", "critic"]
    assert (tmp_path / "out/actor/model.safetensors").stat().st_mtime_ns == first
    with pytest.raises(OutputError, match="out/actor exists already"):
        CliRunner().invoke(app, [*command, "--dtype", "bfloat16"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--max-shard-size", "inf"], "--max-shard-size is inf"),
        (["--max-shard-size", "nan"], "--max-shard-size is nan"),
        (["--lora-alpha", "0"], r"--lora-alpha is 0\.0, but must be a number above 0"),
        (["--lora-alpha", "nan"], "--lora-alpha is nan"),
        (["--lora-alpha", "-1"], "--lora-alpha is -1"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, options: list[str], given: str) -> None:
    with pytest.raises(UsageError, match=given):
        CliRunner().invoke(
            app,
            ["checkpoint", str(tmp_path), "--out", str(tmp_path / "out"), *options],
            catch_exceptions=False,
        )


def test_a_position_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"/dev/null/out can't be written \(Not a directory\)"):
        Staging(Path("/dev/null/out"), fingerprint="").__enter__()


def test_a_long_path_is_printed_full(tmp_path: Path) -> None:
    folder = _role(tmp_path / ("long" * 20) / "actor")
    given = (
        CliRunner()
        .invoke(
            app,
            ["checkpoint", str(folder), "--check"],
            catch_exceptions=False,
            env={"COLUMNS": "80"},
        )
        .stdout
    )
    assert str(folder) in "".join(
        line.removeprefix("checkpoint").strip() for line in given.splitlines()
    )
