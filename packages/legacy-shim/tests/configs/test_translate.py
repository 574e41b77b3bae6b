"""The translation as its callers see it."""

import subprocess
import sys

import pytest

from temper_legacy_shim.configs import Cluster, Outcome, translate

from .conftest import rules_found, translated

GRPO = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=/data/gsm8k/train.parquet",
    "data.val_files=/data/gsm8k/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "actor_rollout_ref.model.path=${MODEL_PATH}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.n=5",
    "trainer.n_gpus_per_node=8",
]


def test_a_translation_needs_no_torch_and_imports_fast() -> None:
    program = (
        "import sys, time; start = time.perf_counter(); from temper_legacy_shim.configs import "
        "translate; "
        "translate(['algorithm.adv_estimator=grpo']); seconds = time.perf_counter() - start; "
        "print([name for name in ('torch', 'numpy', 'hydra', 'omegaconf', 'transformers') if name "
        "in sys.modules], seconds)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[] ")


def test_every_token_has_a_report_and_known_ones_their_new_keys() -> None:
    translation = translate(GRPO, entry="verl.trainer.main_ppo", version="v0.7.0")
    assert [report.text for report in translation.tokens] == GRPO
    new = {report.key: report.new_keys for report in translation.tokens}
    assert new["data.train_batch_size"] == (
        "batching.prompts_per_step",
        "batching.num_mini_batches",
    )
    settings = {setting.key: setting.value for setting in translation.settings}
    assert settings["batching.num_mini_batches"] == 4  # 1024 prompts in mini-batches of 256
    assert settings["actor.num_workers"] == 8
    assert settings["ref"] == "frozen"


def test_what_only_the_shell_knows_stays_as_it_is() -> None:
    translation = translate(GRPO, version="v0.7.0")
    path = next(
        setting for setting in translation.settings if setting.key == "actor.engine.model.path"
    )
    assert path.is_verbatim
    assert path.sources == (6,)
    assert path.value == "${MODEL_PATH}"


def test_the_launchers_numbers_win_over_the_configurations() -> None:
    translation = translate(GRPO, version="v0.7.0", cluster=Cluster(nodes=2, gpus_per_node=4))
    assert {setting.key: setting.value for setting in translation.settings}[
        "actor.num_workers"
    ] == 8


def test_a_key_of_no_release_is_listed_and_never_guessed() -> None:
    translation = translate([*GRPO, "+my_fork.magic=3"], version="v0.7.0")
    assert translation.unmapped == {"my_fork.magic": 3}
    assert translation.tokens[-1].disposition == "unmapped"
    assert translation.outcome is Outcome.PINNED
    assert "its configuration has no such key" in next(
        finding.message for finding in translation.findings if finding.rule == "unmapped"
    )


def test_a_key_of_no_release_is_one_finding_with_or_without_a_plus() -> None:
    translation = translate([*GRPO, "my_fork.magic=3", "trainer.use_v1=False"], version="v0.7.0")
    (only,) = (finding for finding in translation.findings if "my_fork.magic" in finding.old_keys)
    assert (
        only.message
        == "my_fork.magic=3 is a key of no release: v0.7.0 would not have started with it."
    )
    refused = [finding.old_keys for finding in translation.findings if finding.level == "refused"]
    assert ("trainer.use_v1",) in refused  # a key of another release is refused by this one


def test_a_release_that_lacked_the_program_is_left_for_the_nearest_that_had_it() -> None:
    translation = translate(
        ["model.partial_pretrain=/models/q"],
        entry="verl.trainer.fsdp_sft_trainer",
        version="v0.9.0",
    )
    assert translation.source.version == "v0.7.0"


@pytest.mark.parametrize("switch", ["--multirun", "-m", "hydra.mode=MULTIRUN"])
def test_sweep_is_a_question_and_not_called_refused(switch: str) -> None:
    result = translated("v0.7.0", switch, "actor_rollout_ref.actor.optim.lr=1e-6,2e-6")
    (finding,) = [item for item in result.findings if item.rule == "multirun"]
    assert finding.level == "person"
    assert "actor_rollout_ref.actor.optim.lr" in finding.message
    assert "refused" not in rules_found(result, "refused")


def test_sweep_without_several_values_is_one_run() -> None:
    result = translated("v0.7.0", "--multirun")
    assert not [item for item in result.findings if item.rule == "multirun"]
