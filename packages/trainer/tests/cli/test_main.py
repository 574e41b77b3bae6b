"""Tests of the `temper` command: arguments in, text and an exit code out."""

import itertools
import logging
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.distributed.process_group import choose_device
from temper_engine_api.errors import ConfigError, TemperError
from temper_engine_api.registry import load_engine_class
from temper_trainer.__main__ import main
from temper_trainer.config_loading import load
from temper_trainer.redaction import RedactingFormatter, print_redacted_traceback
from temper_trainer.run_lock import LOCK_FILE, RunLock

FIRST_LINE = f"temper-train {version('temper-trainer')}: checking\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output, and errors without the first line, which has its own test."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.removeprefix(FIRST_LINE)


def test_check_prints_ok_and_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "experiment=quickstart", "--check")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "OK"
    assert "  a step: 32 prompts x 8 = 256 completions, 1 update" in out.splitlines()
    placement = out.splitlines().index("  placement:")
    assert out.splitlines()[placement + 1] == "    this process: actor, rollout"


@pytest.mark.parametrize("options", [["--check"], []])
def test_first_line_appears_before_a_module_of_the_user_is_imported(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    name = f"slow_rewards_{len(options)}"  # a module is imported only once
    Path(f"{name}.py").write_text('import sys\nprint("imported", file=sys.stderr)\n')
    assert main(["experiment=quickstart", f"reward.function={name}:gone", *options]) == 2
    assert capsys.readouterr().err.startswith(f"{FIRST_LINE}imported\n")


def test_check_does_not_create_the_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, "experiment=quickstart", f"run.dir={tmp_path}/run", "--check")
    assert list(tmp_path.iterdir()) == []


def test_options_can_be_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--check", "experiment=quickstart", "--config-name", "temper", "run.total_steps=3"
    )
    assert code == 0
    assert "  a run: 3 steps = 768 completions, 3 updates" in out.splitlines()  # 3 * 32 * 8


def test_print_shows_the_configuration_with_origins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "experiment=quickstart", "run.seed=4", "--print")
    assert code == 0
    assert "  seed: 4  # command line\n" in out
    assert yaml.safe_load(out)["actor"]["engine"]["optimizer"]["betas"] == [0.9, 0.99]


def test_wrong_configuration_prints_one_message_and_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "experiment=quickstart", "run.sed=1", "--check")
    assert (code, out) == (2, "")
    assert err == (
        "configuration error:\nthere is no key run.sed: did you mean run.seed? (set by: "
        "command line)\n"
    )


@pytest.mark.parametrize(
    "argument",
    ["headers={Authorization: 'Bearer ${oc.env:HEADER}'}", "api_key=[1,'${oc.env:HEADER}']"],
)
def test_refused_argument_with_a_secret_is_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setenv("HEADER", "sentinel")  # a name that says of no secret
    code, out, err = run(capsys, "experiment=quickstart", f"+reward.arguments.{argument}")
    assert (code, out) == (2, "")
    assert "<hidden>" in err
    assert "sentinel" not in err


ARCHITECTURE = "actor.engine.model.architecture"
OPTIMIZER = "actor.engine.optimizer"
ADAPTER = ("actor.engine.lora.rank=4", "actor.engine.lora.alpha=8")


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [f"{ARCHITECTURE}.hidden_size=abc"],
            "model.architecture is not valid for model type qwen2: ",
        ),
        (
            [f"{ARCHITECTURE}.num_attention_heads=3"],
            "model.architecture.num_attention_heads is 3, but must divide hidden_size 128: ",
        ),
        (
            [f"{ARCHITECTURE}.num_key_value_heads=3"],
            "model.architecture.num_attention_heads is 4, but must be a multiple of num_key_value",
        ),
        (
            [*ADAPTER, "actor.engine.lora.target_modules=[nope]"],
            "lora.target_modules names nope, but no layer of this model has that name: ",
        ),
        (
            [*ADAPTER, "actor.engine.lora.modules_to_save=[nope]"],
            "lora.modules_to_save names nope, but no layer of this model has that name: ",
        ),
        (
            [f"{ARCHITECTURE}.num_hidden_layers=0"],
            "model.architecture: num_hidden_layers is 0, but must be at least 1.",
        ),
        (
            [f"{ARCHITECTURE}.hidden_size=0"],
            "model.architecture.hidden_size is 0, but must be at least 1.",
        ),
        (
            [f"+{ARCHITECTURE}.rope_theta=0"],
            "model.architecture: rope_theta is 0, but must be above 0.",
        ),
        (
            [f"+{ARCHITECTURE}.attention_dropout=2.0"],
            "model.architecture: attention_dropout is 2.0, but must be between 0 and 1.",
        ),
    ],
)
def test_check_refuses_a_model_that_cannot_be_built_in_the_words_of_the_engine(
    capsys: pytest.CaptureFixture[str], engine: str, overrides: list[str], sentence: str
) -> None:
    changed = ["experiment=quickstart", f"model_engine={engine}", *overrides]
    code, out, err = run(capsys, *changed, "--check")
    assert (code, out) == (2, "")
    assert err.startswith(f"configuration error:\nactor.engine: {sentence}")
    settings = load(changed).config.actor.engine
    with pytest.raises(ConfigError) as of_the_run:
        load_engine_class(engine)(settings).init_model()
    assert str(of_the_run.value) in err


@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_a_command_without_settings_names_one_that_runs(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *flags)
    assert (code, out) == (2, "")
    assert "start with temper-train experiment=quickstart, or see temper-train --help." in err


@pytest.mark.parametrize(
    ("flag", "hint"),
    [("--chekc", "did you mean --check?"), ("--gpus=8", "see temper-train --help")],
)
def test_an_unknown_flag_gives_a_hint(
    capsys: pytest.CaptureFixture[str], flag: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["experiment=quickstart", flag])
    assert caught.value.code == 2
    assert f"unrecognized arguments: {flag}: {hint}" in capsys.readouterr().err


def test_check_compares_the_headers_of_saved_weights_with_their_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    architecture = load(["experiment=quickstart"]).config.actor.engine.model.architecture
    fields = {**architecture, "vocab_size": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.save_pretrained(tmp_path)
    settings = ["experiment=quickstart", "warm_start=null", "~actor.engine.model.architecture"]
    settings += [f"actor.engine.model.path={tmp_path}", "--check"]
    assert run(capsys, *settings)[0] == 0
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size": 600'))
    code, out, err = run(capsys, *settings)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"configuration error:\nactor.engine: the weights in {tmp_path} do not match their "
        "config.json: 1 of another shape, such as model.embed_tokens.weight ([512, 128] instead of "
        "[600, 128]). Use the config.json"
    )
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 0'))
    assert (
        f"actor.engine: {config}: rope_theta is 0, but must be above 0."
        in run(capsys, *settings)[2]
    )


@pytest.mark.parametrize(
    ("model_type", "overrides", "sentence"),
    [
        ("qwen3", [], "is sampler, but qwen3 has no routers of experts: set it to none."),
        ("qwen3_moe", ["actor.engine.compile_layers=true"], "because compile_layers leaves the"),
        ("qwen3_moe", [], None),
        ("qwen3_next", [], None),
    ],
)
def test_check_refuses_routing_replay_of_choices_that_nothing_records(
    capsys: pytest.CaptureFixture[str], model_type: str, overrides: list[str], sentence: str | None
) -> None:
    settings = ["experiment=quickstart", "warm_start=null", "rollout.routing_replay=sampler"]
    code, _, err = run(
        capsys, *settings, f"{ARCHITECTURE}.model_type={model_type}", *overrides, "--check"
    )
    assert code == (0 if sentence is None else 2)
    assert (sentence or "") in err


@pytest.mark.parametrize("owner", ["actor.engine", "critic.engine", "warm_start"])
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["name=torch.optim.Nope"], "optimizer.name is torch.optim.Nope, but torch.optim has no"),
        (
            ["name=torch.optim.SGD", "arguments.momentumm=1"],
            "optimizer.arguments.momentumm is not an argument of torch.optim.SGD: use momentum",
        ),
        (["name=torch.optim.SGD", "arguments.momentum=-1"], "Invalid momentum value: -1"),
    ],
)
def test_check_refuses_an_optimizer_that_cannot_be_built(
    capsys: pytest.CaptureFixture[str], owner: str, overrides: list[str], sentence: str
) -> None:
    changes = [f"++{owner}.optimizer.{override}" for override in overrides]
    settings = ["experiment=quickstart", "algorithm=ppo", f"++{owner}.optimizer.betas=[0.9,0.999]"]
    code, out, err = run(capsys, *settings, *changes, "--check")
    assert (code, out) == (2, "")
    assert f"\n{owner}: optimizer." in err
    assert sentence in err


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [
                "++{engine}.optimizer.name=torch.optim.SGD",
                "++{engine}.optimizer.betas=[0.9,0.999]",
            ],
            "MegatronEngine does not offer 'any_optimizer'; it offers ",
        ),
        (
            ["++{engine}.offload.optimizer_on_cpu=true"],
            "the Megatron engine does not support offload.optimizer_on_cpu: ",
        ),
        (
            ["++{engine}.precision.parameters=bf16"],
            "MegatronEngine does not offer 'other_dtypes'; it offers ",
        ),
        (
            ["++{engine}.override_optimizer_config.sgd_momentum=0.9"],
            "override_optimizer_config names 'sgd_momentum', which this engine never reads",
        ),
        (
            ["++{engine}.override_optimizer_config.decoupled_weight_decay=no"],
            "override_optimizer_config sets decoupled_weight_decay to 'no', but it must be true",
        ),
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_check_refuses_what_megatron_refuses_at_the_start(
    capsys: pytest.CaptureFixture[str], role: str, overrides: list[str], sentence: str
) -> None:
    engine = f"{role}.engine"
    changes = [override.format(engine=engine) for override in overrides]
    settings = ["experiment=quickstart", "model_engine=megatron", "algorithm=ppo", *changes]
    code, out, err = run(capsys, *settings, "--check")
    assert (code, out) == (2, "")
    assert f"\n{engine}: {sentence}" in err
    config = load(settings).config
    role_config = config.actor if role == "actor" else config.critic
    assert role_config is not None
    with pytest.raises(TemperError) as of_the_run:
        load_engine_class("megatron")(role_config.engine).init_model()
    assert str(of_the_run.value) in err


def test_check_warns_about_an_architecture_key_that_the_config_class_lacks(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"+{ARCHITECTURE}.nosuchkey=5", f"+{ARCHITECTURE}.rope_theta=5e5"]
    assert run(capsys, "experiment=quickstart", *keys, "--check")[0] == 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("model.architecture.nosuchkey is not a field of Qwen2Config")


def test_check_accepts_a_changed_model_and_an_adapter_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fitting = [f"{ARCHITECTURE}.num_hidden_layers=1", *ADAPTER]
    code, out, err = run(capsys, "experiment=quickstart", *fitting, "--check")
    assert (code, err) == (0, "")
    assert out.startswith("OK\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_check_refuses_cuda_on_a_machine_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    on_cuda = ["experiment=quickstart", "actor.engine.device=cuda"]
    code, _, err = run(capsys, *on_cuda, "--check")
    assert code == 2
    with pytest.raises(ConfigError) as of_the_run:
        choose_device("cuda")
    assert err == f"configuration error:\nactor.engine: {of_the_run.value}\n"
    on_ray = [*on_cuda, "runtime.kind=ray", "runtime.gpus_per_worker=1"]
    assert run(capsys, *on_ray, "--check")[0] == 0, "another host of the cluster may have a GPU"


def test_missing_file_is_found_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "data.train.paths=[gone.jsonl]", "experiment=gsm8k_sft")
    assert code == 2
    assert "data.train.paths names gone.jsonl, which is not a file" in err


def test_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--multirun"])
    assert caught.value.code == 2
    assert "usage: temper-train [OVERRIDE ...]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--wandb-api-key=opensesame"], "--wandb-api-key=<hidden>"),
        (["run.seed=1", "--config=opensesame"], "--config=<hidden>"),
        (["--check=opensesame"], "ignored explicit argument '<hidden>'"),
        (["--url=https://me:opensesame@host"], "--url=<hidden>"),
        (["-hopensesame"], "ignored explicit argument '<hidden>'"),
        (["-p", "--token="], "-p --token=<hidden>"),
        (["--chek"], "--chek"),
    ],
)
def test_usage_error_hides_what_may_be_a_secret(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    shown: str,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "opensesame")
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert shown in error
    assert "sesame" not in error


def test_help_explains_groups_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "      quickstart: GRPO on generated arithmetic word problems" in out
    meaning = "Number of RL steps, or of updates in tasks sft, dpo and rm."
    assert f"  run.total_steps=100   [whole number of at least 1]\n      {meaning}\n" in out
    assert "  actor.engine.activation_checkpointing=false   [true | false]" in out
    assert "  critic.*   [off until set]" in out


def test_help_of_every_field_has_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    lines = out[out.index("keys (key=default):") :].splitlines()[2:]
    for line, below in itertools.pairwise(lines):
        if line.startswith("  ") and not line.startswith("   "):
            assert below.startswith("      "), line


def test_help_lists_the_users_own_choices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("run: {seed: 1}\n")
    assert (
        "      mine: (in your --config-dir)"
        in run(capsys, "--help", "--config-dir", str(tmp_path))[1]
    )


def test_help_shows_the_keys_of_the_chosen_engine(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help", "model_engine=megatron")
    assert "actor.engine.device=auto" in out
    assert "activation_checkpointing" not in out


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("algorithm", ["      grpo: ", "  algorithm.group_size="], ["run.seed", "quickstart"]),
        ("experiment", ["      quickstart: "], ["algorithm.group_size"]),
        ("rollout", ["      vllm: ", "  rollout.canary_tolerance="], ["algorithm.group_size"]),
        ("critic.engine", ["  critic.engine.optimizer.lr="], ["actor.engine"]),
        ("run.total_steps", ["  run.total_steps=100", "Number of RL steps"], ["run.seed"]),
        ("teachers.NAME.engine", ["  teachers.NAME.engine.device="], ["actor.engine"]),
    ],
)
def test_help_of_a_group_shows_only_its_choices_and_keys(
    capsys: pytest.CaptureFixture[str], name: str, shown: list[str], hidden: list[str]
) -> None:
    code, out, _ = run(capsys, "--help", name)
    assert code == 0
    assert [text for text in shown if text not in out] == []
    assert [text for text in ["usage:", *hidden] if text in out] == []


def test_help_of_an_unknown_group_names_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "--help", "algoritm")
    assert code == 2
    assert "--help algoritm: there is no such group or key: did you mean algorithm?" in err


def test_version_names_the_installed_packages(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.splitlines()[0] == f"temper-train {version('temper-trainer')}"
    assert f"  torch {version('torch')}" in out.splitlines()


def test_run_folder_with_a_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    code, _, err = run(capsys, "experiment=quickstart", f"run.dir={tmp_path}")
    assert code == 2
    assert (
        "already contains a run: continue it with run.resume=auto, or choose another run.dir."
        in err
    )


def test_check_refuses_a_run_folder_that_another_process_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ("experiment=quickstart", f"run.dir={tmp_path}")
    with RunLock(tmp_path):
        before = (tmp_path / LOCK_FILE).read_bytes()
        code, _, err = run(capsys, *command, "--check")
        assert code == 2
        assert f"run.dir {tmp_path} is in use by process {os.getpid()} on host " in err
        assert run(capsys, *command) == (code, "", err), "the start refuses in the same words"
        assert (tmp_path / LOCK_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("num_good", "status", "sentence"),
    [
        (1, 2, "{file}:2: not a JSON object"),
        (200, 1, "DataError: {file}:201: not a JSON object"),
    ],
    ids=["found before the start", "found by the run"],
)
def test_malformed_data_is_reported_with_file_and_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    num_good: int,
    status: int,
    sentence: str,
) -> None:
    file = tmp_path / "train.jsonl"
    row = '{"question": "1+1?", "answer": "#### 2"}\n'
    file.write_text(row * num_good + '{"question": \n')
    data = f"data.train.paths=[{file}]"
    code, _, err = run(capsys, "experiment=gsm8k_sft", data, f"run.dir={tmp_path}/run")
    assert code == status
    assert sentence.format(file=file) in err


def test_interrupt_during_imports_does_not_advise_to_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted_reward.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["experiment=quickstart", "reward.function=interrupted_reward:f"]
    code, _, err = run(capsys, *arguments, f"run.dir={tmp_path}/run")
    assert code == 130
    assert err.startswith("interrupted before the run was started, start again with: temper-train")
    assert "run.resume=auto" not in err


def test_full_disk_names_the_last_saved_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full_disk_reward.py").write_text(
        "import errno\n"
        "class Full:\n"
        "    def __call__(self, prompt, completion): ...\n"
        "    @property\n"
        "    def __signature__(self):\n"
        "        error = OSError(errno.ENOSPC, 'No space left')\n"
        "        error.add_note('step 3 is saved in here')\n"
        "        raise error\n"
        "f = Full()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["experiment=quickstart", "reward.function=full_disk_reward:f"]
    code, _, err = run(capsys, *arguments, f"run.dir={tmp_path}/run")
    assert code == 1
    assert err.splitlines()[-1] == "step 3 is saved in here"


def test_control_characters_of_errors_and_log_messages_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "experiment=quickstart", "run.seed='\x1b[2J'", "--check")
    assert code == 2
    assert "\x1b" not in err
    assert r"\x1b[2J" in err
    record = logging.LogRecord(
        "x", logging.WARNING, "", 0, "tool said %r and %s", ("a", "\x1b"), None
    )
    assert RedactingFormatter("%(message)s").format(record) == r"tool said 'a' and \x1b"
    error = ValueError("\x1b[2J")
    print_redacted_traceback(ValueError, error, None)
    assert capsys.readouterr().err == "ValueError: \\x1b[2J\n"
