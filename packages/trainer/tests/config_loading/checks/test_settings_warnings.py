"""Settings with which a run learns nothing or little are warned about."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.external_checks import check_external_objects
from temper_trainer.config_loading.checks.settings_warnings import (
    warn_about_aggregation,
    warn_about_remote_files,
    warn_about_settings,
)
from temper_trainer.data.rows import DataError
from temper_trainer.loops.run.run_setup import with_run_length


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("experiment=quickstart", "warm_start=null", "~data.eval", "~data.train"),
        *("+data.train.name=jsonl", f"+data.train.paths=[{tmp_path}/rows.jsonl]"),
        "batching.prompts_per_step=16",
    ]


def test_learning_rate_of_zero_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_about_settings(load(settings).config)
    assert not caplog.messages
    warn_about_settings(load([*settings, "actor.engine.optimizer.lr=0"]).config)
    (message,) = caplog.messages
    assert message.startswith("actor.engine.optimizer.lr is 0, so its weights will not change")


def test_agent_with_advantages_per_token_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    agent = (
        "data.chat_template=x",
        "environment={name: agent, arguments: {command: a}, max_tokens: 99}",
    )
    warn_about_settings(load([*settings, *agent]).config)
    assert not caplog.messages
    per_token = [*settings, *agent, "algorithm=reinforce_plus_plus"]
    warn_about_settings(load([*per_token, "environment.max_turns=1"]).config)
    assert not caplog.messages
    warn_about_settings(load(per_token).config)
    (message,) = caplog.messages
    assert message.startswith("environment is agent, whose rollouts are several samples if")


@pytest.mark.parametrize(
    ("overrides", "is_warned"),
    [
        (["algorithm=gspo"], False),
        (["algorithm=gspo", "algorithm.aggregation=token_mean"], True),
        (["algorithm=grpo", "algorithm.policy_loss=sapo"], True),
        (["algorithm=grpo"], False),
    ],
)
def test_another_aggregation_than_the_papers_is_warned_about(
    settings: list[str], caplog: pytest.LogCaptureFixture, overrides: list[str], is_warned: bool
) -> None:
    warn_about_aggregation(load([*settings, *overrides]).config.algorithm)
    assert ("was published with algorithm.aggregation" in caplog.text) is is_warned


def list_warnings(caplog: pytest.LogCaptureFixture, overrides: list[str]) -> list[str]:
    caplog.clear()
    warn_about_settings(load(overrides).config)
    return caplog.messages


SGD = ("actor.engine.optimizer.name=torch.optim.SGD", "~actor.engine.optimizer.betas")


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["actor.engine.optimizer.lr=1000"], "actor.engine.optimizer.lr is 1000, with which the"),
        (["actor.engine.optimizer.lr=0.1"], "actor.engine.optimizer.lr is 0.1, with which the"),
        (["actor.engine.optimizer.lr=0.09"], None),
        ([*SGD, "actor.engine.optimizer.lr=1"], None),
        ([*SGD, "actor.engine.optimizer.lr=1000"], "actor.engine.optimizer.lr is 1000"),
        (
            ["actor.engine.optimizer.lr=0.01", "actor.engine.optimizer.weight_decay=100"],
            "actor.engine.optimizer: weight decay multiplies weights by 1 - lr * weight_decay",
        ),
        (["algorithm=ppo", "critic.engine.optimizer.lr=5"], "critic.engine.optimizer.lr is 5"),
    ],
)
def test_rate_that_destroys_the_model_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture, overrides: list[str], start: str | None
) -> None:
    messages = list_warnings(caplog, [*settings, *overrides])
    if start is None:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith(start)


def test_rates_of_a_warm_start_are_checked_too(caplog: pytest.LogCaptureFixture) -> None:
    quickstart = ["experiment=quickstart"]
    assert list_warnings(caplog, quickstart) == []
    high = list_warnings(caplog, [*quickstart, "warm_start.optimizer.lr=3"])
    assert high[0].startswith("warm_start.optimizer.lr is 3, with which the first updates of adamw")
    zero = list_warnings(caplog, [*quickstart, "warm_start.optimizer.lr=0"])
    assert zero[0].startswith("warm_start.optimizer.lr is 0, so its weights will not change")


def test_schedule_that_does_not_fit_the_run_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    # Ten steps of two updates.
    run = [*settings, "run.total_steps=10", "batching.num_mini_batches=2"]
    warmup = "actor.engine.schedule.warmup_steps"
    assert list_warnings(caplog, [*run, f"{warmup}=20"]) == []
    (message,) = list_warnings(caplog, [*run, f"{warmup}=21"])
    assert message.startswith("actor.engine.schedule has 21 warmup steps, but the run has 20 upda")
    cosine = [*run, "actor.engine.schedule.kind=cosine"]
    total = "actor.engine.schedule.total_steps"
    assert list_warnings(caplog, [*cosine, f"{total}=20"]) == []
    (message,) = list_warnings(caplog, [*cosine, f"{total}=19"])
    assert message.startswith("actor.engine.schedule.total_steps is 19, but the run has 20 updates")
    floor = "actor.engine.schedule.min_lr_ratio=0.1"
    assert list_warnings(caplog, [*cosine, f"{total}=19", floor]) == []
    ratio = "actor.engine.schedule.warmup_ratio=0.5"
    constant = [*run, "actor.engine.schedule.kind=constant", f"{warmup}=0", f"{total}=19", ratio]
    assert list_warnings(caplog, constant) == []


def test_step_of_more_prompts_than_rows_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    # There are 20 rows.
    assert list_warnings(caplog, [*settings, "batching.prompts_per_step=20"]) == []
    (message,) = list_warnings(caplog, [*settings, "batching.prompts_per_step=21"])
    assert message.startswith("batching.prompts_per_step is 21, but the training data has 20 rows")
    (message,) = list_warnings(caplog, [*settings, "data.train.max_rows=15"])
    assert message.startswith("batching.prompts_per_step is 16, but the training data has 15 rows")


def test_rows_of_all_sources_and_formats_are_counted(
    settings: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    columns = {"question": ["1 + 1?"] * 7, "answer": ["2"] * 7}
    parquet.write_table(pa.table(columns), tmp_path / "more.parquet")
    more = [
        "+data.train_sets.more.name=parquet",
        f"+data.train_sets.more.paths=[{tmp_path}/more.parquet]",
    ]
    assert list_warnings(caplog, [*settings, *more, "batching.prompts_per_step=27"]) == []
    (message,) = list_warnings(caplog, [*settings, *more, "batching.prompts_per_step=28"])
    assert "the training data has 27 rows" in message


def test_evaluation_on_training_data_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    held_out = ["+data.eval.name=jsonl", f"+data.eval.paths=[{tmp_path}/x/../rows.jsonl]"]
    (message,) = list_warnings(caplog, [*settings, *held_out])
    assert message.startswith(f"data.eval reads {tmp_path}/x/../rows.jsonl, which data.train train")


def test_data_whose_answers_are_all_empty_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def write(answers: list[str]) -> None:
        rows = [{"question": "1 + 1?", "answer": answer} for answer in answers]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    held_out = ["+data.eval.name=jsonl", f"+data.eval.paths=[{tmp_path}/rows.jsonl]"]
    evaluation = ["experiment=quickstart", "warm_start=null", "~data.train", "~data.eval"]
    runs = {
        "data.train: field 'answer' is empty in all of the first 20 rows, so rewards": settings,
        "data.train: field 'answer' is empty in all of the first 20 rows, so the model learns": [
            *settings,
            "task=sft",
        ],
        "data.eval: field 'answer' is empty in all": [*evaluation, *held_out, "task=eval"],
    }
    for start, overrides in runs.items():
        write(["", " \n"] * 10)
        (message,) = list_warnings(caplog, overrides)
        assert message.startswith(start)
        write([""] * 19 + ["2"])
        assert list_warnings(caplog, overrides) == []


def test_answers_that_no_one_reads_may_be_empty(
    settings: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    row = {"question": "1 + 1?", "answer": "", "messages": messages}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 20)
    conversations = [*settings, "task=sft", "+data.train.messages_key=messages"]
    assert list_warnings(caplog, conversations) == []
    assert list_warnings(caplog, [*settings, "task=generate"]) == []


def test_epoch_of_less_than_a_step_is_refused_in_the_words_of_the_run(settings: list[str]) -> None:
    config = load([*settings, "run.total_epochs=3", "batching.prompts_per_step=32"]).config
    with pytest.raises(ConfigError) as of_check:
        check_external_objects(config)
    with pytest.raises(DataError) as of_run:
        with_run_length(config, num_problems=20)
    assert str(of_check.value) == str(of_run.value)
    assert "run.total_epochs is 3, but the data has 20 problems" in str(of_run.value)


def test_check_says_that_it_does_not_read_a_remote_file(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_about_remote_files(load(settings).config)
    assert not caplog.messages
    remote = "data.train.paths=['s3://bucket/rows.jsonl']"
    warn_about_remote_files(load([*settings[:-2], f"+{remote}"]).config)
    (message,) = caplog.messages
    assert message.startswith("data.train.paths names s3://bucket/rows.jsonl, which --check does")
