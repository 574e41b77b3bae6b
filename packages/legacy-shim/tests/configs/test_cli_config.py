"""``temper-migrate config`` and ``explain``, as a user calls them."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from temper_legacy_shim.cli import app
from temper_legacy_shim.errors import DamagedFileError, OutputError, UsageError

OLD = """\
defaults:
  - ppo_trainer
  - _self_
data:
  train_files: /data/gsm8k/train.parquet
  train_batch_size: 256
actor_rollout_ref:
  model:
    path: /models/q
  actor:
    optim:
      lr: 3e-6
  rollout:
    name: vllm
    n: 4
algorithm:
  adv_estimator: grpo
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(OLD)
    return path


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    return done.exit_code, done.stdout


def test_a_file_and_overrides_become_one_file_with_the_origin_of_every_value(
    old: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new.yaml"
    code, _ = invoke(
        "config",
        old,
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "--from-version",
        "v0.4.0",
        "--out",
        out,
    )
    assert code == 10
    text = out.read_text()
    written = yaml.safe_load(text)
    assert written["batching"]["num_mini_batches"] == 4  # 256 prompts in mini-batches of 64
    assert written["actor"]["engine"]["optimizer"]["lr"] == 3e-6
    assert written["algorithm"]["policy_loss"]["dual_clip"] == 3.0
    assert "lr: 3.0e-06  # actor_rollout_ref.actor.optim.lr [lr]" in text
    assert (
        "dual_clip: 3.0  # default of v0.4.0: actor_rollout_ref.actor.clip_ratio_c [dual-clip]"
        in text
    )


def test_translating_twice_gives_the_same_bytes(old: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("a.yaml", "b.yaml"):
        invoke("config", old, "--out", tmp_path / name)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


def test_nothing_is_overwritten(old: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    out.write_text("mine")
    with pytest.raises(OutputError, match="nothing is overwritten"):
        invoke("config", old, "--out", out)
    assert out.read_text() == "mine"


def test_report_for_machines_has_one_row_for_each_value_of_the_file_and_each_token(
    old: Path,
) -> None:
    code, text = invoke("config", old, "+fork.key=1", "--json")
    (report,) = json.loads(text)
    assert code == report["exit_code"] == 10
    assert report["schema"] == "temper-migrate/config/1"
    rows = {token["key"]: (token["index"], token["disposition"]) for token in report["tokens"]}
    assert rows["data.train_files"] == (-1, "moved")
    assert rows["fork.key"] == (0, "unmapped")
    assert len(rows) == len(report["tokens"]) == 8
    assert report["unmapped"] == {"fork.key": 1}


def test_a_folder_is_translated_file_by_file_and_what_is_no_old_configuration_is_left(
    old: Path, tmp_path: Path
) -> None:
    (tmp_path / "compose.yaml").write_text("services: {web: {image: nginx}}\n")
    code, text = invoke("config", tmp_path, "--check")
    assert code == 10
    assert text.startswith(f"{old}: pinned")
    assert "compose.yaml" not in text


@pytest.mark.parametrize(("name", "code"), [("dapo_trainer", 10), ("prime_trainer", 20)])
def test_a_variants_own_file_is_that_variant(
    name: str, code: int, old: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text(
        OLD.replace(
            "  adv_estimator: grpo",
            "  adv_estimator: grpo\n  filter_groups: {enable: true, metric: acc}",
        )
    )
    matches, text = invoke("config", path, "--from-version", "v0.5.0", "--json")
    (report,) = json.loads(text)
    assert (matches, report["source"]["entry"]) == (
        code,
        {10: "recipe.dapo.main_dapo", 20: "recipe.prime.main_prime"}[code],
    )
    assert bool(report["settings"]) is (code == 10)


def test_hydras_list_of_overrides_is_read_and_what_is_no_configuration_is_left(
    old: Path, tmp_path: Path
) -> None:
    (tmp_path / "chart.yaml").write_text("name: {{ .Values.name }}\n")
    (tmp_path / "hosts.yaml").write_text("- one\n- two\n")
    listed = tmp_path / "overrides.yaml"
    listed.write_text(
        "- algorithm.adv_estimator=grpo\n- actor_rollout_ref.rollout.n=16\n- +trainer.mine=1\n"
    )
    code, text = invoke("config", tmp_path, "--check")
    assert (
        code,
        text.count("overrides.yaml"),
        text.count("chart.yaml"),
        text.count("hosts.yaml"),
    ) == (10, 1, 0, 0)
    _, report = invoke("config", listed, "--from-version", "v0.7.0", "--json")
    (matches,) = json.loads(report)
    assert [token["text"] for token in matches["tokens"]] == yaml.safe_load(listed.read_text())
    with pytest.raises(DamagedFileError):
        invoke("config", tmp_path / "hosts.yaml")


def test_a_table_in_a_pipe_has_every_token_full(old: Path) -> None:
    value = "/data/" + "very-long-folder-name/" * 20 + "train.parquet"
    done = CliRunner().invoke(
        app, ["config", str(old), f"data.val_files={value}", "--table"], catch_exceptions=False
    )
    assert f"data.val_files={value}" in done.stderr
    assert "\u2026" not in done.stderr  # rich's sign for what was cut


def test_explain_tells_the_life_of_a_key() -> None:
    _, text = invoke("explain", "actor_rollout_ref.actor.entropy_coeff")
    assert "default 0.001 from v0.2" in text
    assert "default 0 from v0.4.0" in text
    assert "algorithm.entropy_coef" in text
    assert "#1100" in text


def test_explain_names_what_is_near_an_unknown_key() -> None:
    with pytest.raises(UsageError, match=r"Near it are .*actor_rollout_ref\.actor\.grad_clip"):
        invoke("explain", "actor_rollout_ref.actor.gradclip")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("clip_ratio", r"Near it are actor_rollout_ref\.actor\.clip_ratio"),
        (
            "use_mbridge",
            (
                r"Near it are .*critic\.megatron\.use_mbridge, "
                r".*actor_rollout_ref\.actor\.megatron\.use_mbridge"
            ),
        ),
        ("clip_ratoi", r"Near it are actor_rollout_ref\.actor\.clip_ratio"),
    ],
)
def test_explain_names_the_full_keys_of_a_last_part(key: str, near: str) -> None:
    with pytest.raises(UsageError, match=near):
        invoke("explain", key)


@pytest.mark.parametrize("key", ["", " ", "+", "=3"])
def test_explain_of_nothing_is_one_sentence(key: str) -> None:
    with pytest.raises(UsageError, match="is no key: give one such as"):
        invoke("explain", key)


RUN = [
    "config",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=/models/q",
    "data.train_files=/data/train.parquet",
]


@pytest.mark.parametrize("entry", ["foo.bar", "verl.trainer.main_pp0s.x", "train.py"])
def test_an_entry_that_is_no_program_is_refused(entry: str) -> None:
    result = CliRunner().invoke(app, [*RUN, "--entry", entry])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith(f"--entry {entry} is no program of the old releases")


@pytest.mark.parametrize(
    "options",
    [
        ["--config-name", "my_own_grpo"],
        ["--config-name=my_own_grpo.yaml"],
        ["--", "--config-name=my_own_grpo"],
    ],
)
def test_the_name_of_a_file_of_ones_own_is_refused_without_the_file(options: list[str]) -> None:
    result = CliRunner().invoke(app, [*RUN, *options])
    assert isinstance(result.exception, UsageError)
    assert "temper-migrate config PATH/my_own_grpo.yaml KEY=VALUE..." in str(result.exception)


@pytest.mark.parametrize(
    "name",
    [
        "ppo_trainer",
        "ppo_megatron_trainer.yaml",
        "dapo_megatron_trainer",
        "fully_async_dapo_trainer",
    ],
)
def test_names_that_releases_have_need_no_file(name: str) -> None:
    assert CliRunner().invoke(app, [*RUN, "--config-name", name]).exit_code in (10, 20)


def test_next_to_a_file_its_name_says_what_it_is_called(old: Path) -> None:
    assert (
        CliRunner().invoke(app, ["config", str(old), "--config-name", "my_own_grpo"]).exit_code
        == 10
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--nodes", "0", "--gpus-per-node", "8"],
        ["--nodes", "-1", "--gpus-per-node", "8"],
        ["--nodes", "1", "--gpus-per-node", "0"],
    ],
)
def test_a_cluster_has_a_machine_and_a_gpu_at_least(options: list[str]) -> None:
    result = CliRunner().invoke(app, [*RUN, *options])
    assert result.exit_code == 2


def test_a_forks_own_module_is_taken_for_the_releases_and_it_is_reported() -> None:
    result = CliRunner().invoke(app, [*RUN, "--entry", "myfork.trainer.main_ppo"])
    assert result.exit_code == 10
    assert "myfork.trainer.main_ppo is no program of any release" in result.output
    for entry in (
        "verl.trainer.main_ppo",
        "/home/me/verl/verl/trainer/main_ppo.py",
        "recipe/dapo/main_dapo.py",
        "ppo",
    ):
        assert "is no program of" not in CliRunner().invoke(app, [*RUN, "--entry", entry]).output
