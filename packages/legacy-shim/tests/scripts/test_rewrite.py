"""The new script: what it launches, what it keeps, what it refuses to write."""

import shutil
import subprocess
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome
from temper_legacy_shim.scripts.launch_translation import Options
from temper_legacy_shim.scripts.migrate import migrate_script
from temper_legacy_shim.scripts.script_reading import read_script
from temper_legacy_shim.scripts.script_report import persons, remarks

GRPO = """\
#!/usr/bin/env bash
# My run.
set -x
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B}
lr=1e-6   # tuned

DATA=(
    # where the data lie
    data.train_files=$HOME/train.parquet
    data.val_files=$HOME/test.parquet  # held out
    data.train_batch_size=$((8 * 8))
    data.max_prompt_length=512
    data.max_response_length=1024
)
mkdir -p logs
PYTHONUNBUFFERED=1 nohup python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path=$MODEL_PATH \\
    actor_rollout_ref.actor.optim.lr=$lr \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.experiment_name=run_$(date +%s) \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.total_epochs=2 "$@" 2>&1 | tee logs/run.log
echo finished
"""


def _launched(text: str) -> list[str]:
    """Return the arguments of temper-train in the new script as the reader sees them."""
    events = [
        event
        for event in read_script(text).events
        if any(field.text.known == "temper-train" for field in event.fields)
    ]
    (event,) = events
    return [field.text.shown() for field in event.fields]


def test_the_new_script_launches_the_translated_overrides() -> None:
    migration = migrate_script(GRPO)
    assert migration.script is not None
    launched = _launched(migration.script.text)
    assert launched[:2] == ["nohup", "temper-train"]
    assert launched[-1] == "$@"
    assert "actor.engine.optimizer.lr=1e-6" in launched
    assert "batching.prompts_per_step=64" in launched
    assert "batching.num_mini_batches=2" in launched  # 64 prompts in mini-batches of 32
    assert set(migration.launches[0].translation.overrides) >= {
        item for item in launched if item.startswith("batching.")
    }


def test_tokens_of_the_script_survive_where_the_value_stays_as_it_is() -> None:
    migration = migrate_script(GRPO)
    assert migration.script is not None
    assert "actor.engine.model.path=$MODEL_PATH" in migration.script.text
    assert "batching.prompts_per_step=$((8 * 8))" in migration.script.text
    assert "actor.engine.optimizer.lr=$lr" in migration.script.text


@pytest.mark.parametrize("written", ["$DIR/train.parquet", '"${DIR}/train.parquet"'])
def test_a_path_that_becomes_a_list_of_one_keeps_its_variable(written: str) -> None:
    text = GRPO.replace("set -x", "DIR=/data").replace("$HOME/train.parquet", written)
    migration = migrate_script(text)
    assert migration.script is not None
    assert f'"data.train.paths=[\\"{written.strip(chr(34))}\\"]"' in migration.script.text
    assert 'data.train.paths=["/data/train.parquet"]' in _launched(migration.script.text)


def test_a_path_without_variables_is_written_plainly() -> None:
    migration = migrate_script(GRPO.replace("$HOME/train.parquet", "'/data/train.parquet'"))
    assert migration.script is not None
    assert '"data.train.paths=[/data/train.parquet]"' in migration.script.text


def test_what_a_person_must_decide_and_what_differs_stands_at_the_command() -> None:
    text = GRPO.replace(
        "trainer.nnodes=1",
        "trainer.nnodes=$SLURM_NNODES my.magic=$lr actor_rollout_ref.actor.clip_ratio=0.3",
    )
    migration = migrate_script(text)
    assert migration.outcome is Outcome.PERSON
    assert migration.script is not None
    lines = migration.script.text.splitlines()
    decide = next(
        number
        for number, line in enumerate(lines)
        if line.startswith("# DECIDE: trainer.nnodes is '$SLURM_NNODES'")
    )
    assert any(line.startswith("# differs: actor_rollout_ref.actor.clip_ratio") for line in lines)
    assert decide < lines.index("temper_overrides=(")
    assert (
        "    # my.magic=$lr: unmapped. a key of no release: a fork's own, or a slip. Nothing was "
        "guessed." in lines
    )


def test_comments_and_unrelated_lines_stay() -> None:
    migration = migrate_script(GRPO)
    assert migration.script is not None
    lines = migration.script.text.splitlines()
    for line in (
        "# My run.",
        "set -x",
        "lr=1e-6   # tuned",
        "mkdir -p logs",
        "echo finished",
        "    # where the data lie",
    ):
        assert line in lines
    assert "held out" in migration.script.text
    assert (
        'PYTHONUNBUFFERED=1 nohup temper-train "${temper_overrides[@]}" "$@" 2>&1 | tee '
        "logs/run.log" in lines
    )
    assert not any(line.startswith("DATA=(") for line in lines)


def test_translating_twice_gives_the_same_bytes() -> None:
    first, second = migrate_script(GRPO), migrate_script(GRPO)
    assert first.script is not None
    assert second.script is not None
    assert first.script.text == second.script.text
    assert migrate_script(first.script.text).launches == ()


@pytest.mark.skipif(
    shutil.which("bash") is None, reason="needs bash, which every machine with a shell script has"
)
def test_the_new_script_is_bash() -> None:
    migration = migrate_script(GRPO)
    assert migration.script is not None
    assert (
        subprocess.run(
            ["bash", "-n"], input=migration.script.text, text=True, check=False
        ).returncode
        == 0
    )


def test_a_variable_given_from_outside_decides_the_branch() -> None:
    text = GRPO.replace(
        "mkdir -p logs", 'if [ "$MODE" = big ]; then DATA+=(data.max_response_length=4096); fi'
    )
    usual, big = migrate_script(text), migrate_script(text, settings={"MODE": "big"})
    assert usual.script is not None
    assert big.script is not None
    assert "not taken" in usual.script.notes[0]
    assert "then { echo 'temper-migrate: this branch was not translated" in usual.script.text
    assert "sampling.max_tokens=4096" in big.script.text
    assert big.script.persons == []


@pytest.mark.parametrize(
    "extra",
    [
        "EXTRA=()|EXTRA+=(actor_rollout_ref.rollout.n=8)",
        'EXTRA=|EXTRA="actor_rollout_ref.rollout.n=8"',
    ],
)
def test_overrides_of_a_branch_that_was_not_taken_stop_the_new_script_there(extra: str) -> None:
    first, _, second = extra.partition("|")
    text = GRPO.replace(
        "mkdir -p logs", f'{first}\nif [ "${{DEBUG:-0}}" = 1 ]; then\n  {second}\nfi'
    ).replace('"$@"', "${EXTRA[@]}")
    migration = migrate_script(text)
    assert migration.script is not None
    assert "  { echo 'temper-migrate: this branch was not translated" in migration.script.text
    assert any("stand in a branch that was not taken" in note for note in migration.script.notes)
    taken = migrate_script(text, settings={"DEBUG": "1"})
    assert taken.script is not None
    assert "algorithm.group_size=8" in taken.script.text
    assert "this branch was not translated" not in taken.script.text


def test_a_launch_that_only_another_branch_reaches_needs_a_person() -> None:
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size="
    migration = migrate_script(f"{command}8\nif probe; then\n  exit\nfi\n{command}16\n")
    assert migration.outcome is Outcome.PERSON
    assert migration.script is not None
    (person,) = migration.script.persons
    assert person.startswith(
        "line 5: verl.trainer.main_ppo is started there where a condition turns out otherwise, and "
        "still stands as it was"
    )
    assert f"{command}16" in migration.script.text


def test_a_launch_that_no_reading_came_by_needs_a_person() -> None:
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size="
    for text in (
        f"if {command}8; then\n  {command}4\nelse\n  {command}2\nfi\n",
        f"again() {{\n  {command}4\n}}\n{command}8\n",
    ):
        migration = migrate_script(text)
        assert migration.script is not None
        assert any("and still stands as it was" in person for person in migration.script.persons), (
            text
        )


@pytest.mark.parametrize(
    "outside", ["A=$({})", 'A="$({})"', "for x in $({}); do :; done", "echo ${{A:-$({})}}"]
)
def test_an_old_launch_in_a_branch_of_a_substitution_is_reported(outside: str) -> None:
    command = "python3 -m verl.trainer.main_ppo"
    migration = migrate_script(
        outside.format(f"if {command}; then\n{command}\nelse\n{command}\nfi")
    )
    assert migration.script is not None
    assert any("and still stands as it was" in person for person in migration.script.persons)


def test_a_command_substitution_before_the_command_stays_full() -> None:
    text = GRPO.replace(
        "PYTHONUNBUFFERED=1", 'GPUS=(0 1)\nCUDA_VISIBLE_DEVICES=$(IFS=,; echo "${GPUS[*]}")'
    )
    migration = migrate_script(text)
    assert migration.script is not None
    assert (
        'CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${GPUS[*]}") nohup temper-train '
        '"${temper_overrides[@]}"' in migration.script.text
    )
    assert migrate_script(migration.script.text).launches == ()


def test_arrays_of_a_wrapper_stay() -> None:
    text = GRPO.replace("mkdir -p logs", "HOW=(--nodes=1)").replace(
        "nohup python3", 'srun "${HOW[@]}" python3'
    )
    migration = migrate_script(text)
    assert migration.script is not None
    assert "HOW=(--nodes=1)" in migration.script.text.splitlines()
    assert 'srun "${HOW[@]}" temper-train' in migration.script.text


def test_both_branches_of_an_undecided_condition_are_reported() -> None:
    text = GRPO.replace("lr=1e-6", "if [ -d /fast ]; then lr=2e-6; else lr=1e-6; fi")
    (alternative,) = migrate_script(text).reading.alternatives
    assert alternative.decision.what == "[ -d /fast ]"
    assert alternative.taken == 1
    assert any(
        override.text.known == "actor_rollout_ref.actor.optim.lr=2e-6"
        for override in alternative.launches[0].overrides
    )


def test_a_token_that_means_something_else_where_the_command_stands_is_written_out() -> None:
    text = (
        GRPO.replace("mkdir -p logs", "DATA+=(actor_rollout_ref.rollout.temperature=$t)")
        .replace("set -x", "t=0.7")
        .replace("PYTHONUNBUFFERED", "t=0.9\nPYTHONUNBUFFERED")
    )
    migration = migrate_script(text)
    assert migration.script is not None
    assert "sampling.temperature=0.7" in migration.script.text
    assert migration.script.persons == []


def test_loop_that_waits_for_a_command_is_read_for_one_round() -> None:
    waiting = "PORT=$(netstat -ntlp | grep ray)\n"
    body = "\n".join(["sleep 1"] * 20)
    loop = f'{waiting}while [ -n "$PORT" ]; do\n{body}\n{waiting}done\n'
    (launch,) = read_script(loop + "python3 -m verl.trainer.main_ppo trainer.nnodes=2\n").launches
    assert [each.text.shown() for each in launch.overrides] == ["trainer.nnodes=2"]


def test_one_command_in_a_loop_keeps_what_varies_as_a_variable() -> None:
    text = GRPO.replace("PYTHONUNBUFFERED", "for lr in 1e-6 2e-6; do\nPYTHONUNBUFFERED").replace(
        "echo finished", "done"
    )
    migration = migrate_script(text)
    assert len(migration.launches) == 2
    assert migration.script is not None
    assert migration.script.persons == []
    assert migration.script.text.count("actor.engine.optimizer.lr=$lr") == 1


def test_computed_values_that_differ_between_rounds_need_a_person() -> None:
    text = GRPO.replace("PYTHONUNBUFFERED", "for size in 16 32; do\nPYTHONUNBUFFERED").replace(
        "echo finished", "done"
    )
    migration = migrate_script(text.replace("ppo_mini_batch_size=32", "ppo_mini_batch_size=$size"))
    assert migration.outcome is Outcome.PERSON
    assert migration.script is not None
    assert "batching.num_mini_batches" in migration.script.persons[0]
    assert "python3 -m verl.trainer.main_ppo" in migration.script.text


def test_a_launch_inside_bash_c_is_left_with_the_new_command_next_to_it() -> None:
    command = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=8 "
        "trainer.nnodes=1"
    )
    migration = migrate_script(f"srun bash -c '{command}'\n")
    assert migration.outcome is Outcome.PERSON
    assert migration.script is not None
    assert "#     batching.prompts_per_step=8" in migration.script.text
    assert migration.script.text.endswith(f"srun bash -c '{command}'\n")


def test_the_users_own_configuration_is_found_around_the_script(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\nactor_rollout_ref:\n  rollout:\n    n: 16\n"
    )
    options = (
        '--config-path="$P/conf" --config-name=mine algorithm.adv_estimator=grpo trainer.nnodes=1'
    )
    text = f"P=$(pwd)\npython3 -m verl.trainer.main_ppo {options}\n"
    result, missing = migrate_script(text, folder=tmp_path), migrate_script(text)
    assert result.script is not None
    assert "algorithm.group_size=16" in result.script.text
    assert missing.script is not None
    assert "of your own" in missing.script.persons[0]


def test_a_folder_that_the_default_made_of_the_experiments_name_is_full() -> None:
    run = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=1 "
        "trainer.experiment_name=run_$SEED"
    )
    for text in (f"{run}\n", f"for SEED in 1 2; do\n  {run}\ndone\n"):
        script = migrate_script(text).script
        assert script is not None
        assert "run.dir=checkpoints/verl_examples/run_$SEED " in script.text.replace('"', "")
        assert script.persons == []


@pytest.mark.parametrize(
    ("head", "name", "keys"),
    [
        (
            "NNODES=${SLURM_NNODES:-2}; ADV=grpo",
            "SLURM_NNODES",
            "actor.num_workers, rollout.num_replicas",
        ),
        ("NNODES=${1:-2}; ADV=grpo", "argument 1", "actor.num_workers"),
        (
            "NNODES=2; K=${K:-group}; case $K in\n  group) ADV=grpo ;;\n  value) ADV=gae ;;\nesac",
            "K",
            "algorithm.advantage.name",
        ),
        (
            'NNODES=2; ADV=grpo; if [ "${CRITIC:-no}" = yes ]; then ADV=gae; fi',
            "CRITIC",
            "algorithm.advantage.name",
        ),
    ],
)
def test_what_an_environment_variable_would_change_and_the_new_script_holds_fixed_is_reported(
    head: str, name: str, keys: str
) -> None:
    run = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ADV trainer.nnodes=$NNODES "
        "data.train_batch_size=64"
    )
    migration = migrate_script(f"{head}\n{run} actor_rollout_ref.model.path=${{MODEL:-m}}\n")
    (sentence,) = [
        remark for remark in remarks(migration) if "has a default in the script" in remark
    ]
    assert sentence.startswith(
        f"{name} has a default in the script, from which {keys}"
    )  # and nothing of MODEL, which the new script reads as the old one did
    assert "translate again with --set" in sentence


def test_a_branch_that_only_chooses_between_texts_of_overrides_stops_where_it_was_not_taken() -> (
    None
):
    head = (
        'A="trainer.total_epochs=1"\nB="trainer.total_epochs=2"\nif [ "${K:-a}" = a ]; then\n  '
        'X="$A"\nelse\n  X=$B\nfi\n'
    )
    script = migrate_script(f"{head}python3 -m verl.trainer.main_ppo $X {' '.join(REST)}\n").script
    assert script is not None
    lines = script.text.splitlines()
    assert [
        line[:2] for line in lines if "trainer.total_epochs=" in line and "run." not in line
    ] == ["# ", "# "]
    assert "choose it with --set" in lines[lines.index("else") + 1]


def test_configuration_of_a_known_program_is_not_looked_for(tmp_path: Path) -> None:
    script = migrate_script(
        "python3 -m recipe.dapo.main_dapo --config-name=dapo_megatron_trainer "
        "algorithm.adv_estimator=grpo trainer.nnodes=1\n",
        folder=tmp_path,
    ).script
    assert script is not None
    assert "of your own" not in " ".join(script.persons)


def test_a_users_own_file_of_an_old_name_is_read_and_the_packages_own_is_not_looked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/ppo_trainer.yaml").write_text("actor_rollout_ref: {rollout: {n: 16}}\n")
    for path, num_completions in (
        ("$PWD/conf", 16),
        ("config", 1),
        ("$HOME/verl/trainer/config", 1),
    ):
        options = (
            f"--config-path={path} --config-name=ppo_trainer algorithm.adv_estimator=grpo "
            "trainer.nnodes=1"
        )
        script = migrate_script(
            f"python3 -m verl.trainer.main_ppo {options}\n", folder=tmp_path
        ).script
        assert script is not None
        assert f"algorithm.group_size={num_completions}" in script.text, path
        assert "of your own" not in " ".join(script.persons)


def test_torchruns_numbers_are_the_cluster() -> None:
    text = (
        "torchrun --nnodes=2 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer "
        "data.train_files=a model.partial_pretrain=b\n"
    )
    migration = migrate_script(text)
    assert migration.script is not None
    assert "actor.num_workers=8" in migration.script.text  # 2 nodes of 4
    assert "torchrun" not in migration.script.text


def test_a_script_that_launches_nothing_is_clean() -> None:
    migration = migrate_script("echo hello\n")
    assert migration.script is None
    assert migration.outcome is Outcome.CLEAN


def test_other_programs_with_hydras_overrides_are_left_unchanged() -> None:
    cifar = "python train.py task=cifar optimizer.lr=0.1 data.root=/d trainer.max_epochs=10\n"
    assert migrate_script(cifar).script is None
    forks = (
        "python src/train.py data.train_files=/d/a.parquet actor_rollout_ref.model.path=/m "
        "my.own=1 other.own=2\n"
    )
    assert len(migrate_script(forks).launches) == 1


def test_a_fork_with_a_configuration_of_another_kind_is_a_question() -> None:
    text = (
        "python3 -m verl.trainer.main config=c.yaml data.train_files=a worker.rollout.n=8 "
        "trainer.n_gpus_per_node=8\n"
    )
    migration = migrate_script(text)
    assert migration.outcome is Outcome.PERSON
    assert migration.script is not None
    assert "python3 -m verl.trainer.main config=c.yaml" in migration.script.text
    assert "EasyR1" in migration.launches[0].persons[0].message


def test_an_old_trainer_that_is_only_named_needs_a_person() -> None:
    inside = (
        "cat > run.sh <<'END'\n# python3 -m verl.trainer.main_ppo\npython3 -m "
        "verl.trainer.main_ppo trainer.nnodes=1\nEND\nbash run.sh\n"
    )
    assert (
        migrate_script(inside).outcome is Outcome.PERSON
    )  # its launch is translated, and left to the user
    named = migrate_script("ENTRY=verl.trainer.main_ppo\nmake train\n")
    assert (named.script, named.outcome) == (None, Outcome.PERSON)
    (sentence,) = persons(named)
    assert sentence.startswith(
        "line 1: verl.trainer.main_ppo is named there, but nothing in this script was seen to "
        "start it: translate"
    )
    assert migrate_script("echo use python3 -m verl.trainer.main_ppo\n").outcome is Outcome.CLEAN


@pytest.mark.parametrize("files", ["['$one', '$HOME/two.parquet']", "[$one,$HOME/two.parquet]"])
def test_a_variable_that_holds_a_list_stays_that_list(files: str) -> None:
    text = (
        f'one=$HOME/one.parquet\nfiles="{files}"\npython3 -m verl.trainer.main_ppo '
        f'data.train_files="$files" {" ".join(REST)}\n'
    )
    migration = migrate_script(text)
    assert migration.script is not None
    assert '    data.train.paths="$files"  #' in migration.script.text
    (launch,) = migration.launches
    values = {setting.key: setting.value for setting in launch.translation.settings}
    assert values["data.train.paths"] == ["${one}", "${HOME}/two.parquet"]
    assert values["data.train.name"] == "parquet"


REST = (
    "actor_rollout_ref.model.path=/m",
    "actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
)


@pytest.mark.parametrize(
    ("switch", "override", "says"),
    [
        (
            "LORA_RANK=${LORA_RANK:-0}",
            "actor_rollout_ref.model.lora_rank=$LORA_RANK",
            "LORA_RANK=37 would set actor.engine.lora.rank",
        ),
        (
            "USE_KL=${USE_KL:-False}",
            "actor_rollout_ref.actor.use_kl_loss=$USE_KL",
            "USE_KL=True would set ref, algorithm.kl_loss_coef",
        ),
        ("OFF=${OFF:-0}", "actor_rollout_ref.nccl_timeout=$OFF", ""),
    ],
)
def test_switch_of_the_environment_that_is_off_by_default_is_named(
    switch: str, override: str, says: str
) -> None:
    text = (
        f"{switch}\npython3 -m verl.trainer.main_ppo data.train_batch_size=64 "
        f"actor_rollout_ref.model.path=/m {override}\n"
    )
    migration = migrate_script(text, options=Options(version="v0.7.0"))
    result = [remark for remark in remarks(migration) if "switches nothing on" in remark]
    assert [says in remark for remark in result] == ([True] if says else [])


@pytest.mark.parametrize(
    "loop",
    [
        'while [[ $# -gt 0 ]]; do\n  case "$1" in\n    --batch) B="$2"; shift 2 ;;\n  esac\ndone',
        'while [ -n "$1" ]; do\n  case "$1" in\n    --batch=*) B="${1#*=}"; shift ;;\n  esac\ndone',
        "while getopts b: opt; do\n  case $opt in\n    b) B=$OPTARG ;;\n  esac\ndone",
        'for arg in "$@"; do\n  case $arg in\n    --batch=*) B=${arg#*=} ;;\n  esac\ndone',
    ],
)
def test_option_of_the_script_whose_default_stays_fixed_is_named(loop: str) -> None:
    run = "python3 -m verl.trainer.main_ppo data.train_batch_size=$B trainer.total_epochs=$E"
    text = f"E=2\nB=512\n{loop}\n{run} actor_rollout_ref.model.path=/m\n"
    lines = remarks(migrate_script(text, options=Options(version="v0.7.0")))
    (sentence,) = [line for line in lines if "has a default in the script" in line]
    assert "B, which an option of the script changes, has a default" in sentence
    assert "from which batching.num_mini_batches came" in sentence
    assert "change its default in line 2, and translate again" in sentence


def test_variable_of_texts_that_follow_it_and_of_a_name_switches_nothing_on() -> None:
    # A name of the run is dropped, so that the translation with another value is compared.
    run = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 trainer.experiment_name=$M-$D"
    text = (
        f"M=${{M:-/m}}\nD=${{D:-/d.parquet}}\nF=${{F:-1}}\n{run} actor_rollout_ref.model.path=$M "
        "data.train_files=$D +my.key=$F trainer.default_local_dir=/c\n"
    )
    lines = remarks(migrate_script(text, options=Options(version="v0.7.0")))
    assert [line for line in lines if "switches nothing on" in line] == []


def test_switch_of_the_scripts_options_that_is_off_is_named() -> None:
    loop = 'while [ $# -gt 0 ]; do case "$1" in --kl) KL=True; shift ;; esac; done'
    run = (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=/m"
    )
    text = f"KL=False\n{loop}\n{run} actor_rollout_ref.actor.use_kl_loss=$KL\n"
    lines = remarks(migrate_script(text, options=Options(version="v0.7.0")))
    (sentence,) = [line for line in lines if "switches nothing on" in line]
    assert "KL=True would set ref, algorithm.kl_loss_coef" in sentence


@pytest.mark.parametrize(
    ("before", "override", "says"),
    [
        ("", "${DEBUG:+trainer.total_epochs=1}", "DEBUG=37 would set run.total_epochs"),
        ("", "${DEBUG:+my.key=1}", "DEBUG=37 would set my.key"),
        (
            (
                'R=4096\nif [ "${DYN:-1}" = 1 ]; then X="actor_rollout_ref.actor.use_dynamic_bsz='
                'True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((R*2))"; fi\n'
            ),
            "$X",
            "DYN has a default in the script, from which batching.max_tokens came",
        ),
    ],
)
def test_override_that_a_variable_of_the_environment_adds_or_removes_is_named(
    before: str, override: str, says: str
) -> None:
    run = f"python3 -m verl.trainer.main_ppo {' '.join(REST)} {override}"
    migration = migrate_script(f"{before}{run}\n", options=Options(version="v0.7.0"))
    assert any(says in remark for remark in remarks(migration))


@pytest.mark.parametrize("form", ["coproc T { %s; }", "coproc { %s; }", "coproc %s"])
def test_launch_in_a_coprocess_is_translated_there(form: str) -> None:
    run = f"python3 -m verl.trainer.main_ppo {' '.join(REST)}"
    migration = migrate_script(form % run + "\nwait\n")
    assert migration.script is not None
    assert "batching.prompts_per_step=8" in migration.script.text
    assert "main_ppo data" not in migration.script.text
    assert len(migration.launches) == 1
