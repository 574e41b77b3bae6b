"""A script that leads to an old trainer is never "clean", however the trainer is started."""

import time
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome
from temper_legacy_shim.scripts import unfollowed
from temper_legacy_shim.scripts.makefiles import read_makefile
from temper_legacy_shim.scripts.migrate import Migration, migrate_script
from temper_legacy_shim.scripts.script_reading import ScriptReading, read_script
from temper_legacy_shim.scripts.script_report import headline, persons, remarks

RUN = (
    "data.train_files=/data/train.parquet actor_rollout_ref.model.path=/models/q "
    "algorithm.adv_estimator=grpo "
    "data.train_batch_size=64 trainer.n_gpus_per_node=8"
)
TUNING = "data.train_files=/data/train.parquet model.partial_pretrain=/models/q optim.lr=1e-5"


def entries(migration: Migration) -> list[str]:
    return [each.launch.entry for each in migration.launches]


@pytest.mark.parametrize(
    "options",
    ["--nproc_per_node=8", "--nnodes=1 --nproc_per_node 8", "--standalone --nproc-per-node=2"],
)
@pytest.mark.parametrize("launcher", ["torchrun", "python3 -m torch.distributed.run"])
def test_options_between_m_and_the_module_are_the_launchers(launcher: str, options: str) -> None:
    migration = migrate_script(f"{launcher} -m {options} verl.trainer.fsdp_sft_trainer {TUNING}\n")
    assert entries(migration) == ["verl.trainer.fsdp_sft_trainer"]
    assert migration.launches[0].translation.source.program == "sft"
    assert not any(
        setting.key.startswith("critic") for setting in migration.launches[0].translation.settings
    )


GUARDS = (
    'MODEL=${MODEL:-}\nif [[ -z "$MODEL" ]]; then echo "no model" >&2; exit 1; fi\n',
    (
        'usage() { echo "usage: $0 -m MODEL"; exit 1; }\nfor v in MODEL DATA; do [[ -z "${!v:-}" '
        "]] "
        '&& { echo "$v"; usage; }; done\n'
    ),
    'n=0\n[ "$n" -lt 1 ] && exit 2\n',
    ': "${MODEL:=}"\nMODEL=${MODEL:?give a model}\n',
)


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_the_defaults_do_not_pass_does_not_hide_the_launch(guard: str) -> None:
    migration = migrate_script(f"{guard}python3 -m own.train {RUN} data.max_prompt_length=512\n")
    assert entries(migration) == ["own.train"]
    assert migration.script is not None
    assert migration.script.text.startswith(guard)
    assert "batching.prompts_per_step=64" in migration.script.text


def test_exit_without_an_error_still_ends_the_script() -> None:
    migration = migrate_script(f'if [ -z "" ]; then exit 0; fi\npython3 -m own.train {RUN}\n')
    assert migration.launches == ()
    assert migration.outcome is Outcome.PERSON
    assert "line 2: settings of verl (" in persons(migration)[0]


def test_a_program_in_a_variable_that_runs_a_module_of_verl_is_python() -> None:
    assert entries(migrate_script(f'"$MY_ENV" -m verl.trainer.main_ppo {RUN}\n')) == [
        "verl.trainer.main_ppo"
    ]


SUBMITTED = (
    "JOB=$(sbatch --parsable -p gpu -w node1 --gres=gpu:1 --mem=80G job.sbatch)",
    "setsid nohup bash job.sbatch &",
)


@pytest.mark.parametrize("command", SUBMITTED)
def test_a_script_that_a_scheduler_gets_after_many_options_is_looked_at(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "job.sbatch").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PERSON
    assert "job.sbatch starts verl.trainer.main_ppo" in persons(migration)[0]


def test_a_script_behind_a_substitution_is_looked_for_by_its_name(tmp_path: Path) -> None:
    text = 'RUNNER=$(cd "$(dirname "$0")/../other" && pwd)/run_it.sh\nbash "$RUNNER"\n'
    assert migrate_script(text, folder=tmp_path).outcome is not Outcome.CLEAN
    (tmp_path / "run_it.sh").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    assert migrate_script(text, folder=tmp_path).outcome is Outcome.PERSON


HEREDOCS = (
    (
        f"cat > job.slurm <<'EOF'\n#SBATCH -N 1\npython3 -m verl.trainer.main_ppo {RUN}\nEOF\n"
        "sbatch "
        "job.slurm\n"
    ),
    f"sbatch <<EOF\n#!/bin/bash\nsrun python3 -m verl_tool.trainer.main_ppo {RUN}\nEOF\n",
    f"tee run.sh <<'EOF' >/dev/null\npython3 -m wrapped.trainer.main_ppo {RUN}\nEOF\n",
    f"echo 'python3 -m verl.trainer.main_ppo {RUN}' > run.sh\nbash run.sh\n",
)


@pytest.mark.parametrize("text", HEREDOCS)
def test_launch_in_a_text_that_is_run_later_is_translated_and_left_to_the_user(text: str) -> None:
    migration = migrate_script(text)
    assert migration.outcome is Outcome.PERSON
    assert entries(migration)[0].endswith("trainer.main_ppo")
    assert migration.script is not None
    assert "#     batching.prompts_per_step=64" in migration.script.text


def test_text_without_a_launch_is_not_read_as_one() -> None:
    migration = migrate_script(
        "cat > notes.txt <<'EOF'\nverl is installed; run python setup.py (later)\nEOF\n"
    )
    assert (migration.outcome, migration.launches) == (Outcome.CLEAN, ())


WRAPPED = (
    f"srun --nodes=1 python3 -m verl.trainer.main_ppo {RUN}\n",
    f"ray job submit --working-dir . -- python3 -m verl.trainer.main_ppo {RUN}\n",
    f"sbatch --wrap='python3 -m verl.trainer.main_ppo {RUN}'\n",
    f"CMD='python3 -m verl.trainer.main_ppo {RUN}'\n$CMD\n",
    f"CMD='python3 -m verl.trainer.main_ppo {RUN}'\nbash -c \"$CMD\"\n",
    f"python3 -m verl_mlite.launch verl.trainer.main_ppo {RUN}\n",
    f"python3 -m myfork.train {RUN}\n",
)


@pytest.mark.parametrize("text", WRAPPED)
def test_launch_behind_a_wrapper_is_seen(text: str) -> None:
    assert entries(migrate_script(text)) in (["verl.trainer.main_ppo"], ["myfork.train"])


UNKNOWN = (
    f"$COMMAND {RUN}\n",
    f"./launch {RUN}\n",
    f"bash launch_{{1}}.sh {RUN}\n",
    f"my_launcher --flag {RUN}\n",
)


@pytest.mark.parametrize("text", UNKNOWN)
def test_command_with_known_keys_that_cannot_be_followed_is_a_question(text: str) -> None:
    migration = migrate_script(text)
    assert migration.outcome is Outcome.PERSON
    assert "could not be followed" in persons(migration)[0]
    assert headline(migration) == ", no launch of an old trainer was seen"


def test_sibling_script_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f'python3 -m verl.trainer.main_ppo {RUN} "$@"\n')
    for command in (
        "bash train.sh",
        "bash $HERE/train.sh data.seed=1 data.shuffle=False",
        "./train.sh",
        "sbatch train.sh",
    ):
        migration = migrate_script(f"{command}\n", folder=tmp_path)
        assert migration.outcome is Outcome.PERSON
        assert "starts verl.trainer.main_ppo: translate that script" in persons(migration)[
            0
        ].replace(", and gets settings of verl from here (data.seed, data.shuffle)", "")


def test_sibling_of_a_sibling_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    (tmp_path / "outer.sh").write_text("bash inner.sh\n")
    assert migrate_script("bash outer.sh\n", folder=tmp_path).outcome is Outcome.PERSON
    (tmp_path / "inner.sh").write_text("bash outer.sh\n")  # a circle ends
    assert migrate_script("bash outer.sh\n", folder=tmp_path).outcome is Outcome.CLEAN


def test_script_that_is_not_there_is_reported(tmp_path: Path) -> None:
    migration = migrate_script("bash elsewhere/train.sh\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert remarks(migration) == [
        (
            "line 1: elsewhere/train.sh was not found next to this script, so what it starts is "
            "not "
            "known"
        )
    ]


@pytest.mark.parametrize(
    "text",
    [
        "pip install verl\n",
        "ray start --head\n",
        "python merge.py --local_dir x\n",
        "echo data.seed=1 data.shuffle=1\n",
        "python3 - \"$REPORT\" <<'EOF'\nprint(1)\nEOF\n",
        "python3 <<EOF\nprint('$HOME')\nEOF\n",
    ],
)
def test_script_that_starts_no_trainer_is_clean(text: str, tmp_path: Path) -> None:
    (tmp_path / "merge.py").write_text("from verl.trainer.ppo.core_algos import kl_penalty\n")
    assert migrate_script(text, folder=tmp_path).outcome is Outcome.CLEAN


@pytest.mark.parametrize(
    "path",
    [
        "$HOME/models/Qwen3-VL-8B-Instruct",
        "${MODEL_PATH:-$HOME/Qwen2.5-VL-7B}",
        "${ROOT}/Qwen3-VL-2B",
    ],
)
def test_model_of_images_in_a_variable_is_a_question(path: str) -> None:
    migration = migrate_script(
        f"MODEL_PATH={path}\npython3 -m verl.trainer.main_ppo {RUN} "
        "actor_rollout_ref.model.path=$MODEL_PATH\n"
    )
    assert "images" in {finding.rule for finding in migration.launches[0].persons}


def test_default_path_below_home_is_written_as_hydra_reads_it() -> None:
    run = RUN.replace(
        "actor_rollout_ref.model.path=/models/q", "actor_rollout_ref.model.path=~/models/q"
    )
    migration = migrate_script(f"python3 -m verl.trainer.main_ppo {run}\n")
    assert migration.script is not None
    assert "=~" not in migration.script.text
    (setting,) = (
        item
        for item in migration.launches[0].translation.settings
        if item.key == "actor.engine.model.path"
    )
    assert setting.value == "${oc.env:HOME}/models/q"


def test_launch_in_a_written_text_next_to_another_one_is_a_question() -> None:
    text = (
        f"cat > eval.sh <<'EOF'\npython3 -m verl.trainer.main_ppo {RUN}\nEOF\npython3 -m "
        f"verl.trainer.main_ppo {RUN}\n"
    )
    migration = migrate_script(text)
    assert len(migration.launches) == 1
    assert (
        "line 1: a text that is written there starts verl.trainer.main_ppo: translate the file "
        "that it becomes." in persons(migration)
    )


@pytest.mark.parametrize(
    "command",
    ["python3 -m $MODULE", "python3 $(cat program.txt)", "torchrun --nproc_per_node=8 -m $MODULE"],
)
def test_unknown_program_with_one_setting_of_verl_is_a_question(command: str) -> None:
    migration = migrate_script(f"MODULE=$(cat m.txt)\n{command} data.train_batch_size=64\n")
    assert migration.launches == ()
    assert migration.outcome is Outcome.PERSON
    assert "data.train_batch_size" in " ".join(migration.unfollowed)


def test_arguments_that_xargs_adds_are_a_question() -> None:
    text = "cat settings.txt | xargs python3 -m verl.trainer.main_ppo algorithm.gamma=1.0\n"
    migration = migrate_script(text)
    assert entries(migration) == ["verl.trainer.main_ppo"]
    assert migration.outcome is Outcome.PERSON
    assert "xargs" in " ".join(migration.unfollowed)


PYTHON = (
    "from verl.trainer.main_ppo import main\n\nmain()\n",
    "import subprocess\n\nsubprocess.run(['python3', '-m', 'verl.trainer.main_ppo'])\n",
)


@pytest.mark.parametrize("content", PYTHON)
@pytest.mark.parametrize(
    "command",
    ["python3 train.py", "torchrun --nproc_per_node=8 ./train.py --lr 1", "srun python -m train"],
)
def test_sibling_python_file_is_looked_into(tmp_path: Path, content: str, command: str) -> None:
    (tmp_path / "train.py").write_text(content)
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PERSON
    assert "line 1: train.py uses verl.trainer.main_ppo" in persons(migration)[0].replace("./", "")


def test_python_file_that_prepares_data_is_no_trainer(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "# for verl.trainer.main_ppo\nfrom verl.utils.hdfs_io import copy\n"
    )
    assert migrate_script("python3 data.py\n", folder=tmp_path).outcome is Outcome.CLEAN


@pytest.mark.parametrize(
    "command", ["base64 -d job.txt | bash", "ssh node < commands.txt bash -s", "wandb agent me/p/x"]
)
def test_commands_that_only_a_run_knows_are_reported(tmp_path: Path, command: str) -> None:
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert "line 1: " in remarks(migration)[0]
    assert remarks(migration)[0].endswith("commands that are not in this script")


@pytest.mark.parametrize("before", ["mapfile -t EXTRA < args.txt", "read -ra EXTRA < args.txt"])
def test_array_that_only_a_run_knows_is_passed_on_with_all_elements(before: str) -> None:
    migration = migrate_script(f'{before}\npython3 -m own.train {RUN} "${{EXTRA[@]}}"\n')
    assert migration.script is not None
    assert 'temper-train "${temper_overrides[@]}" "${EXTRA[@]}"' in migration.script.text
    assert migration.outcome is Outcome.PERSON
    assert '"${EXTRA[@]}" gives own.train arguments that only a run knows' in " ".join(
        persons(migration)
    )


def test_script_of_another_shell_is_a_question() -> None:
    migration = migrate_script(
        f"#!/usr/bin/env zsh\nargs=({RUN})\npython3 -m verl.trainer.main_ppo $args\n"
    )
    assert migration.outcome is Outcome.PERSON
    assert "the script is for zsh, but was read as bash" in " ".join(persons(migration))


@pytest.mark.parametrize("shell", ["bash", "ssh node bash -s", "ssh node"])
def test_launch_that_is_piped_into_a_shell_is_translated_and_left_to_the_user(shell: str) -> None:
    migration = migrate_script(f"echo 'python3 -m verl.trainer.main_ppo {RUN}' | {shell}\n")
    assert entries(migration) == ["verl.trainer.main_ppo"]
    assert migration.outcome is Outcome.PERSON


MAKEFILE = f"""\
MODEL ?= /models/q
RUN = python3 -m verl.trainer.main_ppo # the old trainer
.PHONY: all train

all: data train
data:
\tpython3 prepare.py

train: data ; @echo start
\t-@cd work && $(RUN) {RUN} \\
\t    actor_rollout_ref.model.path=$(MODEL) trainer.experiment_name=$$USER
lint:
\truff check .
"""


@pytest.mark.parametrize(
    "command",
    [
        "make train MODEL=/models/r",
        "make -j 4 -C . train",
        "exec make",  # all, the first rule
        "make lint train",
        "gmake -f Makefile train",
    ],
)
def test_rule_of_a_makefile_is_looked_into(tmp_path: Path, command: str) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PERSON
    assert "of Makefile (line " in persons(migration)[0]
    assert "which starts verl.trainer.main_ppo: save the commands" in persons(migration)[0]


TRAINER = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    "variables",
    [
        f"CMD = {TRAINER}\nCMD += {RUN}",
        f"CMD := {TRAINER}\nCMD := $(CMD) {RUN}",
        f"CMD := {TRAINER}\nOTHER := $(CMD) {RUN}\nCMD = echo\nCMD = $(OTHER)",
        f"CMD := echo $$USER;\nCMD += $(MODULE)\nMODULE = {TRAINER}",
        f"CMD ?= {TRAINER}\nCMD ?= echo",
        f"train: CMD = {TRAINER}",
        f"ifeq ($(MODE),rl)\nCMD = {TRAINER}\nelse\nCMD = echo\nendif",
        f"define CMD\n@cd work && {TRAINER} {RUN}\necho done\nendef",
    ],
)
def test_variable_of_a_makefile_is_built_up_as_make_does(tmp_path: Path, variables: str) -> None:
    (tmp_path / "Makefile").write_text(f"{variables}\ntrain:\n\t$(CMD)\n")
    migration = migrate_script("make train\n", folder=tmp_path)
    assert "which starts verl.trainer.main_ppo" in persons(migration)[0]


def test_included_makefile_is_read(tmp_path: Path) -> None:
    (tmp_path / "common.mk").write_text(f"CMD = {TRAINER} {RUN}\ninclude Makefile\n")
    (tmp_path / "Makefile").write_text("-include absent.mk common.mk\ntrain:\n\t$(CMD)\n")
    migration = migrate_script("make train\n", folder=tmp_path)
    assert "which starts verl.trainer.main_ppo" in persons(migration)[0]


@pytest.mark.parametrize(
    ("top", "include"),
    [
        ("D = mk", "include $(D)/a.mk"),
        ("", "include mk/*.mk"),
        ("PARTS := mk/a.mk", "-include $(PARTS)"),
    ],
)
def test_names_of_included_makefiles_are_evaluated(tmp_path: Path, top: str, include: str) -> None:
    (tmp_path / "mk").mkdir()
    (tmp_path / "mk/a.mk").write_text("include mk/b.mk\n")  # make looks in its own folder
    (tmp_path / "mk/b.mk").write_text(f"CMD = {TRAINER}\n")
    (tmp_path / "Makefile").write_text(f"{top}\n{include}\ntrain:\n\t$(CMD)\n")
    assert persons(migrate_script("make train\n", folder=tmp_path))


@pytest.mark.parametrize(
    "rule",
    [
        "launch = $(1) $(2) x\ntrain:\n\t$(call launch,python3 -m,verl.trainer.main_ppo)",
        "M = verl.trainer.main_ppo\nlaunch = python3 -m $1\ntrain:\n\t${call launch, $(M)}",
        f"define launch\ncd $(1)\n{TRAINER} $(2)\nendef\ntrain:\n\t$(call launch,.,$(basename x))",
        "train:\n\t$(MAKE) -C sub train",
        "train:\n\tcd sub && ${MAKE} train",
    ],
)
def test_calls_in_rules_of_a_makefile_are_followed(tmp_path: Path, rule: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/Makefile").write_text(f"train:\n\t{TRAINER}\n")
    (tmp_path / "Makefile").write_text(f"{rule}\n")
    assert persons(migrate_script("make train\n", folder=tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("include absent.mk\ntrain:\n\techo", "Makefile includes absent.mk, which was not found"),
        ("train: a.bin out/%\n\techo", "needs a.bin out/%, for which no rule or file was found"),
        (
            "train:\n\t$(foreach x,a b,bash $(x);) $(shell nproc)",
            "the rule train of Makefile uses functions of make (foreach, shell), which were not",
        ),
        ("$(eval $(call rule,x))\ntrain:\n\techo", "makes rules with a function ($(eval $(call"),
    ],
)
def test_parts_of_a_makefile_that_were_not_read_are_reported(
    tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "Makefile").write_text(f"{text}\n")
    migration = migrate_script("make train\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert any(expected in each for each in remarks(migration))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TRAIN = $(shell cat cmd)\nall:\n\t$(TRAIN) a=b", "functions of make (shell)"),
        ("TRAIN := $(shell cat cmd)\nall:\n\t$(TRAIN) a=b", "functions of make (shell)"),
        ("r = $(shell cat $(1))\nall:\n\t$(call r,cmd)", "functions of make (shell)"),
        ("all:\n\tbash $(S:.x=.sh)", "functions of make ($(S:.x=.sh))"),
        ("all:\n\tbash $(*:.x=.sh)", "functions of make ($(*:.x=.sh))"),
        ("all:\n\tbash ${*F:.x=.sh}", "functions of make (${*F:.x=.sh})"),
    ],
)
def test_functions_in_expanded_commands_of_a_makefile_are_reported(
    tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "run.sh").write_text(f"{TRAINER} {RUN}\n")
    (tmp_path / "Makefile").write_text(f"{text}\n")
    migration = migrate_script("make all\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert any(expected in each for each in remarks(migration))


def test_command_substitution_of_bash_in_a_makefile_is_no_function(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("D := $$(basename x)\nall:\n\techo $(D) $$(date +%s)\n")
    assert migrate_script("make all\n", folder=tmp_path).outcome is Outcome.CLEAN


@pytest.mark.parametrize("command", ["make all", "make a.out"])
def test_pattern_rule_of_a_makefile_is_followed(tmp_path: Path, command: str) -> None:
    (tmp_path / "a.out").touch()
    (tmp_path / "a.in").touch()
    (tmp_path / "Makefile").write_text(f"all: a.out\n%.out: %.in\n\t{TRAINER} {RUN}\n")
    assert "which starts verl" in persons(migrate_script(f"{command}\n", folder=tmp_path))[0]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("run-7b run-14b: run-%: %.sh\n\tbash $<", "make run-7b"),
        ("run-7b: run-%: ; bash $*.sh", "make run-7b"),
        ("all: run-7b\nrun-7b run-14b : run-% :\n\tbash $(*).sh", "make"),
        ("run-%:\n\tbash $*.sh", "make run-7b"),
        ("out/%.log: %.sh\n\tbash $(<F)", "make out/7b.log"),
        ("S = 7b 14b\n$(S:%=run-%): run-%: %.sh\n\tbash $<", "make run-7b"),
        ("R = run-7b\nall: ${R:run-%=%}\n7b: ; bash $@.sh", "make"),
        ("S = 7b.x\nall:\n\tbash $(S:.x=.sh)", "make"),
        ("7b.sh:\n\tbash $(@F)\nall: 7b.sh\n\tbash ./$^", "make all"),
        ("7b: C = 7b.sh\n14b: C = other.sh\n7b 14b: ; bash $(C)", "make 7b"),
        ("7b: C = 7b.sh\n14b: C = other.sh\n7b 14b: %: ; bash $(C)", "make 7b"),
        ("all: C = 7b.sh\n14b: C = other.sh\nall: run\nrun: ; bash $(C)", "make"),
        ("C = other.sh\n%b: C = $@.sh\n7b:\n\tbash $(C)", "make 7b"),
        ("C = other.sh\nS = 7b\n7b: export C := $(S).sh\n7b:\n\tbash $(C)", "make 7b"),
        ("C = bash\n7b:C += 7b.sh\n7b: ; $(C)\n14b: ; $(C)", "make 14b 7b"),
    ],
)
def test_rules_with_a_stem_run_the_script_of_their_target(
    tmp_path: Path, text: str, command: str
) -> None:
    (tmp_path / "7b.sh").write_text(f"{TRAINER} {RUN}\n")
    (tmp_path / "Makefile").write_text(f"{text}\n")
    (message,) = persons(migrate_script(f"{command}\n", folder=tmp_path))
    assert "which starts another script with an old trainer" in message


def test_chain_of_rules_with_variables_of_their_own_is_read_at_once(tmp_path: Path) -> None:
    chain = "".join(f"t{n}: t{n + 1}\nt{n}: V{n} = x\nt{n}: ; echo\n" for n in range(3_000))
    (tmp_path / "Makefile").write_text(f"{chain}t3000: ; {TRAINER}\n")
    start = time.monotonic()
    assert persons(migrate_script("make t0\n", folder=tmp_path))
    assert time.monotonic() - start < 30


def test_target_outside_the_pattern_of_its_static_rule_is_reported(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("go:\n\techo\nall: run-%: %.sh\n\tbash $<\n")
    migration = migrate_script("make go\n", folder=tmp_path)
    assert "all does not match run-% in Makefile, so its rule was not read" in remarks(migration)[0]


def test_pattern_rule_that_matches_its_own_prerequisite_ends(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "Makefile").write_text("all: a\n%: %.in\n\techo\n")
    migrate_script("make all\n", folder=tmp_path)


def test_missing_file_of_an_indented_include_is_reported(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("ifdef X\n  include absent.mk\nendif\nall:\n\techo\n")
    migration = migrate_script("make all\n", folder=tmp_path)
    assert "includes absent.mk, which was not found" in remarks(migration)[0]


@pytest.mark.parametrize("name", ["/*/*.mk", "../*/*.mk"])
def test_include_pattern_of_other_folders_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "Makefile").write_text(f"-include {name}\nall:\n\techo\n")
    migration = migrate_script("make all\n", folder=tmp_path)
    assert f"includes {name}, which was not read" in remarks(migration)[0]


@pytest.mark.parametrize("name", ["a\0*.mk", "a\0/*.mk", "a\0.mk"])
def test_include_pattern_with_a_nul_matches_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "Makefile").write_text(f"-include {name}\nall:\n\techo\n")
    assert migrate_script("make all\n", folder=tmp_path).outcome is Outcome.CLEAN


def test_calls_of_a_makefile_that_are_nested_too_deeply_are_reported(tmp_path: Path) -> None:
    for depth in (10, 400):
        nested = "$(call f," * depth + TRAINER + ")" * depth
        (tmp_path / "Makefile").write_text(f"f = $(1)\nall:\n\t{nested}\n")
        migration = migrate_script("make all\n", folder=tmp_path)
        if depth == 10:
            assert "which starts verl" in persons(migration)[0]
        else:
            assert any("functions of make (nested-call)" in each for each in remarks(migration))


def test_arguments_of_a_call_in_a_makefile_are_expanded_once(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(
        "M = verl\nf = echo $(1)\nall:\n\t$(call f,$$(M) $$USER $(M))\n"
    )
    makefile = read_makefile(tmp_path / "Makefile")
    assert makefile.write_commands("all", variables={}) == "echo $(M) $USER verl\n"


def test_rules_that_call_make_are_looked_into_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [f"t{n}:\n" + f"\t$(MAKE) t{n + 1}\n" * 6 for n in range(3)]
    (tmp_path / "Makefile").write_text("\n".join([*rules, "t3:", "\techo"]))
    texts = []

    def count(text: str, **given: Path) -> ScriptReading:
        texts.append(text)
        return read_script(text, **given)

    monkeypatch.setattr(unfollowed, "read_script", count)
    assert remarks(migrate_script("make t0\n", folder=tmp_path))
    assert len(texts) == 3


def test_call_of_a_variable_that_calls_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(
        "f = $(call f,$(1)) $(call g,$(1)\ntrain:\n\techo $(call f,x)\n"
    )
    assert migrate_script("make train\n", folder=tmp_path).outcome is Outcome.CLEAN


def test_script_of_the_same_name_in_another_folder_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/run.sh").write_text(f"{TRAINER} {RUN}\n")
    (tmp_path / "run.sh").write_text("cd sub && bash run.sh\n")
    migration = migrate_script((tmp_path / "run.sh").read_text(), folder=tmp_path)
    assert "(temper-migrate script sub/run.sh)" in persons(migration)[0]


@pytest.mark.parametrize("command", ["train", "uv run --extra gpu train", "poetry run train x"])
def test_command_of_a_package_is_followed(tmp_path: Path, command: str) -> None:
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\ntrain = "package:main"\n')
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from verl.trainer import main_ppo\n")
    assert persons(migrate_script(f"{command}\n", folder=tmp_path))


def test_program_with_too_many_modules_is_reported(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(60)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "m38.py").write_text("from verl.trainer import main_ppo\n")
    (tmp_path / "few.py").write_text(f"import {', '.join(names[:39])}\n")
    (tmp_path / "many.py").write_text(f"import {', '.join(names[39:])}, {', '.join(names[:38])}\n")
    assert (
        "few.py uses verl.trainer" in persons(migrate_script("python few.py\n", folder=tmp_path))[0]
    )
    migration = migrate_script("python many.py\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert "many.py imports many modules of the project" in remarks(migration)[0]


def test_variables_of_a_makefile_that_refer_to_themselves_end(tmp_path: Path) -> None:
    doubled = "\n".join(f"V{n} = $(V{n + 1}) $(V{n + 1})" for n in range(40))
    (tmp_path / "Makefile").write_text(f"CMD = $(CMD) x\n{doubled}\ntrain:\n\t$(CMD) $(V0)\n")
    assert migrate_script("make train\n", folder=tmp_path).outcome is Outcome.CLEAN


def test_rule_of_a_makefile_without_a_trainer_is_clean(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    assert migrate_script("make lint\n", folder=tmp_path).outcome is Outcome.CLEAN


def test_rule_of_a_makefile_that_calls_a_script_is_followed(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    (tmp_path / "Makefile").write_text("train:\n\tbash train.sh\n\tmake train\n")
    migration = migrate_script("make train\n", folder=tmp_path)
    assert "another script with an old trainer (train)" in persons(migration)[0]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("make train", "line 1: make train: no makefile was found next to this script"),
        ("modal run jobs/train.py::main", "line 1: jobs/train.py was not found next to this"),
    ],
)
def test_launch_by_a_missing_file_is_reported(tmp_path: Path, command: str, expected: str) -> None:
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert remarks(migration)[0].startswith(expected)


def test_missing_rule_of_a_makefile_is_reported(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    migration = migrate_script("make evaluate\n", folder=tmp_path)
    assert remarks(migration) == [
        "line 1: Makefile has no rule evaluate, so what it starts is not known"
    ]


@pytest.mark.parametrize(
    "command",
    [
        "modal run train.py",
        "modal run --detach --env dev train.py::main --epochs 3",
        "python3 -m modal run -m train::main",
        "uv run modal deploy train.py",
    ],
)
def test_python_file_that_modal_runs_is_looked_into(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text(PYTHON[1])
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PERSON
    assert "line 1: train.py uses verl.trainer.main_ppo" in persons(migration)[0]


LAUNCH = f"python3 -m verl.trainer.main_ppo {RUN}\n"
IMPORT = "from verl.trainer.main_ppo import main\nmain()\n"


@pytest.mark.parametrize(
    ("command", "name", "content"),
    [
        ("./launch", "launch", LAUNCH),
        ("srun bash launch", "launch", LAUNCH),
        ("sbatch --nodes 2 train.job", "train.job", LAUNCH),
        ("qsub train.pbs", "train.pbs", LAUNCH),
        ("ray job submit -- ./launch", "launch", LAUNCH),
        ("bsub < train.lsf", "train.lsf", LAUNCH),
        ("bash -s -- 1 < train.in", "train.in", LAUNCH),
        ("cd sub && bash run.sh", "sub/run.sh", LAUNCH),
        ("pushd sub; python3 run.py", "sub/run.py", IMPORT),
        ("python3 < run.py", "run.py", IMPORT),
        ("python3 - < run.py", "run.py", IMPORT),
        ("python3 -m package", "package/__main__.py", IMPORT),
        ("uv run train", "package/train.py", IMPORT),
        ("pytest tests/test_train.py", "tests/test_train.py", IMPORT),
        ("echo 'from verl.trainer.main_ppo import main; main()' | python3", "a", ""),
        ("sky launch -y task.yaml", "task.yaml", f"run: |\n  {LAUNCH}"),
        ("kubectl apply -f job.yaml", "job.yaml", f"command: {LAUNCH}"),
    ],
)
def test_file_that_a_command_runs_is_looked_into(
    tmp_path: Path, command: str, name: str, content: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\ntrain = "package.train:main"\n')
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PERSON
    assert "main_ppo" in persons(migration)[0]


def test_modules_that_a_python_file_imports_are_looked_into(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/core.py").write_text(IMPORT)
    (tmp_path / "package/steps.py").write_text("from . import core\n")
    (tmp_path / "train.py").write_text("import os\nfrom package.steps import run\n")
    migration = migrate_script("python3 train.py\n", folder=tmp_path)
    assert "train.py uses verl.trainer.main_ppo" in persons(migration)[0]


@pytest.mark.parametrize(
    "command",
    [
        "just train",
        "docker compose up",
        "condor_submit train.sub",
        "dvc repro train",
        "find jobs -name '*.sh' -exec bash {} \\;",
        "parallel bash ::: jobs/*.sh",
        "cat list | xargs -I{} bash {}",
        "bash <(cat train.in)",
        "cat run.py | python3",
        "python3 $SCRIPT",
        "python3 -m $MODULE",
        "bash $SCRIPT",
        "./missing --flag",
        "python3 missing.py",
    ],
)
def test_command_that_runs_something_else_is_reported(tmp_path: Path, command: str) -> None:
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert remarks(migration)[0].startswith("line 1: ")


@pytest.mark.parametrize("command", ["source lib.sh\ntrain", ". ./lib.sh; train extra=1"])
def test_function_of_a_sourced_file_is_followed(tmp_path: Path, command: str) -> None:
    (tmp_path / "lib.sh").write_text(f'train() {{ {LAUNCH.strip()} "$@"; }}\nreturn 0\n')
    migration = migrate_script(f"{command}\n", folder=tmp_path)
    assert entries(migration) == ["verl.trainer.main_ppo"]
    assert migration.outcome is Outcome.PERSON


def test_variables_of_a_sourced_file_are_known(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text(f'TRAINER=verl.trainer.main_ppo\nexport ARGS="{RUN}"\n')
    migration = migrate_script("source env.sh\npython3 -m $TRAINER $ARGS\n", folder=tmp_path)
    assert entries(migration) == ["verl.trainer.main_ppo"]
    assert migration.script is not None
    assert "temper-train" in migration.script.text
    assert migration.script.text.startswith("source env.sh\n")


def test_function_that_eval_defines_is_not_taken_for_text_of_the_script() -> None:
    migration = migrate_script(f"eval 'train() {{ {LAUNCH.strip()}; }}'\ntrain\n")
    assert migration.outcome is Outcome.PERSON
    assert migration.script is not None
    assert migration.script.text.count("train()") == 1


@pytest.mark.parametrize(
    "command",
    [
        f"bash {'a' * 300}",
        f"source {'a' * 300}/env.sh",
        f"docker compose run trainer '{'x ' * 200}'",
        f"mlflow run . -P note={'x' * 300}",
    ],
)
def test_argument_that_no_file_can_have_as_its_name_is_no_file(
    tmp_path: Path, command: str
) -> None:
    assert migrate_script(f"{command}\n", folder=tmp_path).outcome is not Outcome.PERSON


@pytest.mark.parametrize("text", ["tool = 3\nproject = []\n", "[tool.poetry]\nscripts = 'x'\n"])
def test_odd_tables_of_a_pyproject_file_are_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert migrate_script("mytrain\n", folder=tmp_path).outcome is Outcome.CLEAN


CHAIN = "".join(f"t{n}: t{n + 1}\n" for n in range(3_000)) + f"t3000:\n\t{TRAINER}\n"
CYCLE = "include " + " ".join(f"m{n}.mk" for n in range(12)) + f"\nt0:\n\t{TRAINER}\n"


@pytest.mark.parametrize(
    "text",
    [
        CHAIN,
        CYCLE,
        "".join(f"A{n} = $(A{n + 1})$(A{n + 1})\n" for n in range(28))
        + f"t0:\n\t{TRAINER} $(A0)\n",
        "".join(f"A{n} = $(A{n + 1})\n" for n in range(3_000)) + f"t0:\n\t{TRAINER} $(A0)\n",
        f"x y:{' ' * 3_000}(=\nt0:\n\t{TRAINER}\n",
        f"include loop.mk\nt0:\n\t{TRAINER}\n",
    ],
    ids=["rules", "includes", "references", "variables", "blanks", "link"],
)
def test_makefile_that_repeats_itself_is_read_at_once(tmp_path: Path, text: str) -> None:
    for number in range(12):
        (tmp_path / f"m{number}.mk").write_text(CYCLE.splitlines()[0] + "\n")
    (tmp_path / "loop.mk").symlink_to("loop.mk")
    (tmp_path / "Makefile").write_text(text)
    migration = migrate_script("make t0\n", folder=tmp_path)
    assert "which starts verl.trainer.main_ppo" in persons(migration)[0]


@pytest.mark.parametrize("name", ["nextflow run x --input {}", "tox {}", "make -f {}", "bash {}"])
def test_large_data_that_a_command_gets_is_not_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / "train.parquet").open("wb") as file:
        file.write(LAUNCH.encode())
        file.truncate(2**33)
    migration = migrate_script(f"{name.format('train.parquet')}\n", folder=tmp_path)
    assert not persons(migration)


@pytest.mark.parametrize(
    "text",
    ["source lib.sh\n", "source other.sh\n", f"{'# padding of a long file' * 12_000}\n"],
    ids=["itself", "circle", "long"],
)
def test_sourced_file_that_cannot_be_read_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "lib.sh").write_text(f"A=1\n{text}")
    (tmp_path / "other.sh").write_text("source lib.sh\n")
    migration = migrate_script(f"source lib.sh\n{LAUNCH}", folder=tmp_path)
    assert entries(migration) == ["verl.trainer.main_ppo"]
    notes = migration.reading.notes
    assert [note for note in notes if "is sourced and was not read" in note]


def test_launch_in_a_sourced_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "lib.sh").write_text(LAUNCH)
    migration = migrate_script("source lib.sh\n", folder=tmp_path)
    assert "the launch is in lib.sh, which this script sources" in persons(migration)[0]


def test_sourced_file_of_a_folder_above_is_named(tmp_path: Path) -> None:
    (tmp_path / "scripts/grpo").mkdir(parents=True)
    (tmp_path / "env.sh").write_text("TRAINER=verl.trainer.main_ppo\n")
    script = f"source env.sh\npython3 -m $TRAINER {RUN}\n"
    migration = migrate_script(script, folder=tmp_path / "scripts/grpo")
    assert "env.sh was read from ../../env.sh" in migration.reading.notes


@pytest.mark.parametrize("border", [".git", "pyproject.toml"])
def test_files_above_the_project_are_not_looked_for(tmp_path: Path, border: str) -> None:
    (tmp_path / "project/scripts").mkdir(parents=True)
    (tmp_path / "project" / border).touch()
    (tmp_path / "env.sh").write_text("TRAINER=verl.trainer.main_ppo\n")
    migration = migrate_script("source env.sh\n", folder=tmp_path / "project/scripts")
    assert "env.sh is sourced and was not read: what it sets is not known here" in (
        migration.reading.notes
    )


def test_files_of_the_home_folder_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    (tmp_path / "run.sh").write_text(LAUNCH)
    assert not persons(migrate_script("bash run.sh\n", folder=tmp_path / "work"))


def test_script_of_the_folder_that_is_changed_to_comes_first(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/run.sh").write_text(LAUNCH)
    (tmp_path / "run.sh").write_text("cd sub && bash run.sh\n")
    migration = migrate_script("cd sub && bash run.sh\n", folder=tmp_path)
    assert "run.sh starts verl.trainer.main_ppo" in persons(migration)[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("if [ 1 ]; then\n", "called.sh could not be read as bash"),
        (f"{'# padding' * 300_000}\n", "called.sh is too long or not readable"),
        ("bash missing.sh\n", "called.sh: line 1: missing.sh was not found"),
        ("just train\n", "called.sh: line 1: just train runs commands"),
        ("bash a.sh\n", "called.sh: line 1: a.sh: line 1: b.sh: line 1: c.sh was not read"),
    ],
    ids=["syntax", "long", "missing", "runner", "chain"],
)
def test_called_script_that_cannot_be_examined_is_not_clean(
    tmp_path: Path, content: str, expected: str
) -> None:
    (tmp_path / "called.sh").write_text(content)
    for name, other in ("ab", "bc", "cd"):
        (tmp_path / f"{name}.sh").write_text(f"bash {other}.sh\n")
    migration = migrate_script("bash called.sh\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert remarks(migration)[0].startswith(f"line 1: {expected}")


def test_scripts_that_call_each_other_without_a_trainer_are_clean(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("bash b.sh\n")
    (tmp_path / "b.sh").write_text("bash a.sh\n")
    assert migrate_script("bash a.sh\n", folder=tmp_path).outcome is Outcome.CLEAN


@pytest.mark.parametrize(
    "command", ["sbatch -c 8 job", "bash job -c conf", "bash -e -o pipefail job -s"]
)
def test_options_after_the_file_or_of_a_scheduler_do_not_hide_it(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "job").write_text(LAUNCH)
    assert persons(migrate_script(f"{command}\n", folder=tmp_path))


@pytest.mark.parametrize("command", ["cd sub && make train", "make -C sub train"])
def test_makefile_of_the_folder_that_is_changed_to_comes_first(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/Makefile").write_text(f"train:\n\t{TRAINER}\n")
    (tmp_path / "GNUmakefile").write_text("train:\n\techo\n")
    assert persons(migrate_script(f"{command}\n", folder=tmp_path))


def test_makefile_next_to_the_script_comes_before_those_above(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/Makefile").write_text(f"train:\n\t{TRAINER}\n")
    (tmp_path / "GNUmakefile").write_text("train:\n\techo\n")
    assert persons(migrate_script("make train\n", folder=tmp_path / "sub"))


@pytest.mark.parametrize(
    "text",
    [
        "from package import (\n    core,\n)\n",
        "from verl.trainer.ppo import ray_trainer\n",
        "from recipe.dapo import main_dapo\n",
        "import package.sub\n",
        "PATTERN = '\\d'\nfrom verl.trainer.main_ppo import run_ppo\n",
    ],
)
def test_imports_of_any_form_are_followed(tmp_path: Path, text: str) -> None:
    (tmp_path / "package/sub").mkdir(parents=True)
    (tmp_path / "package/core.py").write_text(IMPORT)
    (tmp_path / "package/sub/__init__.py").write_text(IMPORT)
    (tmp_path / "train.py").write_text(text)
    migration = migrate_script("python3 train.py\n", folder=tmp_path)
    assert persons(migration)[0].startswith("line 1: train.py uses ")


NAMED = (
    "case $1 in grpo) bash train.sh;; *) echo no;; esac",
    "[ -f train.sh ] && bash train.sh",
    'if [ "$1" == go ]; then bash "$HERE"/train.sh; fi',
    'sbatch --gres=gpu:8 --wrap "bash train.sh"',
    'ssh node1 "cd /w && bash train.sh"',
    'tmux send-keys -t a "bash train.sh" C-m',
    "trap 'bash train.sh' EXIT",
    'su user -c "bash train.sh"',
    "ray exec c.yaml 'bash train.sh'",
    "ts bash train.sh",
    "chroot /x bash ${BASH_SOURCE%/*}/train.sh",
    "at now -f train.sh",
    'echo "bash train.sh" | batch',
    "torchrun --no-python bash train.sh",
    "python3 -c \"import subprocess as s; s.run(['bash','train.sh'])\"",
    "source <(cat train.sh)",
    'eval "$(cat train.sh)"',
    "go() { bash train.sh; }\nexport -f go\nbash -c go",
    "ts bash ${SCRIPT:-train.sh}",
    "ts bash train$SIZE.sh",
    "exit 0\nbash train.sh",
    'if [ "$1" = all ]; then for f in {eval,train}.sh; do bash $f; done; fi',
    'ssh node1 "bash t{rain,est}.sh"',
)


@pytest.mark.parametrize("text", NAMED)
def test_script_that_is_named_in_any_way_is_a_question(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.sh").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    migration = migrate_script(f"{text}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PERSON
    assert "train.sh" in persons(migration)[0]
    (tmp_path / "train.sh").write_text("python3 -V\n")
    assert not persons(migrate_script(f"{text}\n", folder=tmp_path))


def test_numbered_scripts_that_braces_name_are_questions(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"run{number}.sh").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    text = 'if [ "$1" = all ]; then sbatch --wrap "bash run{1..2}.sh"; fi\n'
    migration = migrate_script(text, folder=tmp_path)
    assert [line.partition(" is named")[0] for line in persons(migration)] == [
        "line 1: run1.sh",
        "line 1: run2.sh",
    ]
    assert migration.not_read == ()


UNKNOWN_CALLS = (
    "while read s; do bash $s; done < list.txt",
    "find . -name '*.sh' | while read f; do bash $f; done",
    'ts bash "$SCRIPT"',
    'ssh node1 "bash /w/train.sh"',
    'if [ "$A" = b ]; then srun bash $NAME.sh; fi',
)


@pytest.mark.parametrize("text", UNKNOWN_CALLS)
def test_call_of_an_unknown_script_in_a_loop_text_or_branch_is_reported(
    tmp_path: Path, text: str
) -> None:
    migration = migrate_script(f"{text}\n", folder=tmp_path)
    assert migration.outcome is Outcome.PINNED
    assert "what that starts is not known" in migration.not_read[0]


ONLY_TEXT = (
    "# bash train.sh",
    "python3 -V  # then bash train.sh",
    'echo "now run bash train.sh" >&2',
    "usage() { cat <<EOF\nusage: bash train.sh\nEOF\n}",
    ": ${MODEL:?see train.sh}",
    "cp run.sh logs/",
    "if [ -f a ]; then source /opt/conda/etc/profile.d/conda.sh; fi",
)


@pytest.mark.parametrize("text", ONLY_TEXT)
def test_script_that_is_only_mentioned_is_no_question(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.sh").write_text(f"python3 -m verl.trainer.main_ppo {RUN}\n")
    (tmp_path / "run.sh").write_text(f"{text}\n")
    assert migrate_script(f"{text}\n", folder=tmp_path).outcome is Outcome.CLEAN


def test_program_that_an_unknown_command_gets_is_a_question(tmp_path: Path) -> None:
    text = "from verl.trainer.main_ppo import main\n"
    (tmp_path / "train.py").write_text(f'{text}if __name__ == "__main__":\n    main()\n')
    (tmp_path / "library.py").write_text(text)
    for name, outcome in (("train", Outcome.PERSON), ("library", Outcome.CLEAN)):
        assert migrate_script(f"ts python {name}.py\n", folder=tmp_path).outcome is outcome


def test_scripts_that_name_each_other_are_read_once(tmp_path: Path) -> None:
    names = [f"s{number}.sh" for number in range(30)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\nts {' '.join(names)}\n")
    start = time.process_time()
    assert migrate_script(f"ts {' '.join(names)}\n", folder=tmp_path).outcome is Outcome.CLEAN
    assert time.process_time() - start < 5
