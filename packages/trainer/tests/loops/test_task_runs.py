"""Run tasks other than RL: preferences, reward models, conversations, streams, evaluation."""

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForTokenClassification

from temper_engine_api.errors import ConfigError
from temper_trainer.data.rows import DataError
from temper_trainer.loops import RunResult
from temper_trainer.loops.run.interrupts import RunInterrupted

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
MODEL = (
    "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: "
    "2, num_attention_heads: 4, num_key_value_heads: 2, "
    "max_position_embeddings: 128}"
)
TINY = (
    "data.tokenizer.kind=word_level",
    f"actor.engine.model.architecture={MODEL}",
    "actor.engine.precision.compute=fp32",
    "actor.engine.device=cpu",
    "actor.engine.optimizer.lr=1e-2",
    "batching.prompts_per_step=8",
    "run.num_threads=1",
    "data.max_prompt_tokens=32",
    "run.report=false",
)
CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% if m.role == 'assistant' "
    "%}<eos>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"data.train.paths=[{path}]"


def sums(tmp_path: Path) -> str:
    """Write sums with their results."""
    return write(
        tmp_path / "sums.jsonl",
        [{"question": f"{a} + 1", "answer": f"= {a + 1}"} for a in range(8)],
    )


def pairs(tmp_path: Path) -> str:
    """Write pairs that prefer a good answer to a bad one of the same sum."""
    sums = [(a, b) for a in range(1, 5) for b in range(1, 5)]
    return write(
        tmp_path / "pairs.jsonl",
        [
            {"question": f"{a} + {b}", "chosen": f"{a + b} good", "rejected": f"{a + b} bad"}
            for a, b in sums
        ],
    )


@pytest.mark.parametrize(
    "preference",
    [
        ("ref=frozen", "preference.sft_coef=0.1"),
        ("preference={name: ipo, reference: none}",),
        ("preference=simpo",),
        ("preference=orpo",),
    ],
)
def test_dpo_learns_which_completion_is_preferred(
    run: Run, rows: Rows, tmp_path: Path, preference: tuple[str, ...]
) -> None:
    run(
        tmp_path / "run",
        "task=dpo",
        pairs(tmp_path),
        *preference,
        "run.total_steps=12",
        "run.save_model=false",
        base=TINY,
    )
    step_rows = rows(tmp_path / "run", phase="dpo")
    assert step_rows[-1]["preference/margin"] > step_rows[0]["preference/margin"]
    if "ref=frozen" in preference:
        assert step_rows[0]["preference/margin"] == pytest.approx(0.0, abs=1e-6), (
            "the reference is the policy before its first update"
        )


def labeled(tmp_path: Path, *, labels: tuple[object, ...] = (True, False)) -> str:
    """Write good and bad answers of the same sums with their labels."""
    answers = [
        (f"{a} + {b}", f"{a + b} {'good' if label else 'bad'}", label)
        for a in range(1, 5)
        for b in range(1, 5)
        for label in labels
    ]
    return write(
        tmp_path / "labeled.jsonl",
        [{"question": q, "answer": answer, "label": label} for q, answer, label in answers],
    )


def test_kto_learns_which_completions_are_desirable_whatever_the_micro_batches(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    shared = (
        "task=dpo",
        "preference=kto",
        "ref=frozen",
        labeled(tmp_path),
        "run.total_steps=12",
        "run.save_model=false",
    )
    run(tmp_path / "large", *shared, base=TINY)
    run(tmp_path / "small", *shared, "batching.max_tokens=40", base=TINY)
    large, small = (rows(tmp_path / name, phase="dpo") for name in ("large", "small"))
    # The reference is the policy before its first update, so both log-ratio and baseline are 0.
    assert large[0]["preference/margin"] == pytest.approx(0.0, abs=1e-6)
    assert large[-1]["preference/chosen_reward"] > large[-1]["preference/rejected_reward"]
    assert max(row["preference/kl_baseline"] for row in large) > 0
    for one, other in zip(large[:4], small[:4], strict=True):
        names = [name for name in one if name.startswith("preference/") or name == "actor/loss"]
        assert {name: one[name] for name in names} == pytest.approx(
            {name: other[name] for name in names}, rel=1e-3, abs=1e-5
        )


def test_kto_without_both_labels_is_refused(run: Run, tmp_path: Path) -> None:
    data = labeled(tmp_path, labels=(True,))
    with pytest.raises(ValueError, match=r"all 16 rows of .* have the label True in field 'label'"):
        run(tmp_path / "run", "task=dpo", "preference=kto", "ref=frozen", data, base=TINY)


def test_label_that_is_no_truth_value_is_refused(run: Run, tmp_path: Path) -> None:
    data = labeled(tmp_path, labels=("good",))
    with pytest.raises(ValueError, match=r"must be true .* or false .*, but is 'good'"):
        run(tmp_path / "run", "task=dpo", "preference=kto", "ref=frozen", data, base=TINY)


def test_reward_model_scores_preferred_completions_higher_and_loads_in_transformers(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    result = run(
        tmp_path / "run",
        "task=rm",
        pairs(tmp_path),
        "actor.engine.model.model_type=reward_model",
        "rm.center_coef=0.01",
        "run.total_steps=12",
        base=TINY,
    )
    step_rows = rows(tmp_path / "run", phase="rm")
    assert step_rows[-1]["preference/margin"] > step_rows[0]["preference/margin"]
    assert (
        AutoModelForTokenClassification.from_pretrained(result.directory / "huggingface").num_labels
        == 1
    )


def test_reward_model_learns_to_keep_the_margins_of_pairs(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    for margin in (0.0, 4.0):
        pairs(tmp_path)
        lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        data = write(tmp_path / f"{margin}.jsonl", [row | {"margin": margin} for row in records])
        run(
            tmp_path / str(margin),
            "task=rm",
            data,
            "data.train.margin_key=margin",
            "actor.engine.model.model_type=reward_model",
            "run.total_steps=12",
            "run.save_model=false",
            base=TINY,
        )
    none, some = (rows(tmp_path / name, phase="rm") for name in ("0.0", "4.0"))
    assert some[0]["preference/margin"] == pytest.approx(none[0]["preference/margin"])
    # ln(1 + e^(4 - d)) is about 4 - d, and ln(1 + e^-d) about ln 2 for a difference d near 0.
    assert some[0]["actor/loss"] > none[0]["actor/loss"] + 3.0
    assert some[-1]["preference/margin"] > 4.0, "the scores differ by more than the margin"


@pytest.mark.parametrize("margin", ["large", True, None, [1.0]])
def test_margin_that_is_no_number_is_refused_with_its_line(
    run: Run, tmp_path: Path, margin: object
) -> None:
    row = {"question": "q", "chosen": "a", "rejected": "b", "margin": margin}
    with pytest.raises(ValueError, match=r"margins.jsonl:1: field 'margin', .* finite number"):
        run(
            tmp_path / "run",
            "task=rm",
            write(tmp_path / "margins.jsonl", [row]),
            "data.train.margin_key=margin",
            "actor.engine.model.model_type=reward_model",
            base=TINY,
        )


def conversations(tmp_path: Path) -> str:
    turns = [
        [
            {"role": "user", "content": f"say {i}"},
            {"role": "assistant", "content": f"{i}"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"{i}"},
        ]
        for i in range(12)
    ]
    return write(tmp_path / "conversations.jsonl", [{"messages": messages} for messages in turns])


@pytest.mark.parametrize(
    ("task", "pairs_metric"),
    [
        (("task=dpo", "ref=frozen"), "chosen_reward"),
        (("task=rm", "actor.engine.model.model_type=reward_model"), "chosen_score"),
    ],
)
def test_held_out_pairs_are_evaluated_as_an_update_would_measure_them(
    run: Run, rows: Rows, tmp_path: Path, task: tuple[str, ...], pairs_metric: str
) -> None:
    data = pairs(tmp_path)
    shared = (*task, data, "batching.prompts_per_step=16", "run.save_model=false")
    held_out = f"data.eval.paths=[{tmp_path / 'pairs.jsonl'}]"
    options = ("batching.max_tokens=40", "run.eval_every=1", "run.total_steps=3")
    result = run(tmp_path / "evaluated", *shared, held_out, *options, base=TINY)
    run(tmp_path / "plain", *shared, "run.total_steps=3", base=TINY)
    phase = task[0].removeprefix("task=")
    evaluated, steps = (rows(tmp_path / "evaluated", phase=name) for name in ("eval", phase))
    # All pairs are held out and trained in every step, so each update first measures what the
    # evaluation before it has.
    for evaluation, step in zip(evaluated[:3], rows(tmp_path / "plain", phase=phase), strict=True):
        for name in ("accuracy", "margin", pairs_metric):
            assert evaluation[f"eval/preference/{name}"] == pytest.approx(
                step[f"preference/{name}"], rel=1e-4, abs=1e-5
            )
        assert evaluation["eval/preference/loss"] == pytest.approx(step["actor/loss"], rel=1e-4)
    assert [step["actor/loss"] for step in steps] == pytest.approx(
        [step["actor/loss"] for step in rows(tmp_path / "plain", phase=phase)], rel=1e-4
    ), "evaluations do not change training"
    assert len(evaluated) == 4, "before the first step, twice between steps, after the last"
    assert result.evaluation["eval/preference/accuracy"] > 0.9
    assert result.evaluation["eval/preference/accuracy_ci95"] < 0.2


def test_stop_before_a_held_out_evaluation_abandons_it_and_saves_the_step(
    run: Run, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Output(io.StringIO):
        def write(self, text: str) -> int:
            # The line of the step's metrics is printed before its evaluation.
            if text.startswith("dpo 2/4"):
                signal.raise_signal(signal.SIGTERM)
            return super().write(text)

    held_out = f"data.eval.paths=[{tmp_path / 'pairs.jsonl'}]"
    options = (held_out, "ref=frozen", "run.eval_every=2", "run.total_steps=4")
    shared = ("task=dpo", pairs(tmp_path), *options, "run.save_model=false")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Output())
        with pytest.raises(RunInterrupted) as caught:
            run(tmp_path / "run", *shared, base=TINY)
    assert caught.value.step == 2
    assert len(rows(tmp_path / "run", phase="eval")) == 1, "the one before the first step"
    run(tmp_path / "run", *shared, "run.resume=auto", base=TINY)
    assert len(rows(tmp_path / "run", phase="eval")) == 2, "and the one after the last"


def test_held_out_labels_have_an_accuracy(run: Run, rows: Rows, tmp_path: Path) -> None:
    data = labeled(tmp_path)
    named = f"data.eval_sets.more.paths=[{tmp_path / 'labeled.jsonl'}]"
    options = ("preference=kto", "ref=frozen", "run.total_steps=6", "run.save_model=false")
    run(tmp_path / "run", "task=dpo", data, named, *options, base=TINY)
    before, after = rows(tmp_path / "run", phase="eval")
    assert before["eval/more/preference/accuracy"] == 0.5
    assert after["eval/more/preference/accuracy"] > 0.5
    assert after["eval/more/preference/kl_baseline"] >= 0.0


def test_held_out_demonstrations_have_weighted_loss_and_likelihood(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    records: list[dict[str, object]] = [
        {"question": f"{a} + 1", "answer": f"= {a + 1}", "weight": [1, 1, 1, 3]} for a in range(8)
    ]
    data = write(tmp_path / "sums.jsonl", records)
    weighted = (data, "data.train.loss_weight_key=weight")
    held_out = tuple(each.replace("train", "eval") for each in weighted)
    shared = ("task=sft", "run.total_steps=1", "run.save_model=false", "batching.max_tokens=40")
    run(tmp_path / "run", *shared, *weighted, *held_out, base=TINY)
    before, after = rows(tmp_path / "run", phase="eval")
    (step,) = rows(tmp_path / "run", phase="sft")
    assert before["eval/sft/nll"] == pytest.approx(step["sft/nll"], rel=1e-4)
    assert before["eval/sft/loss"] == pytest.approx(step["actor/loss"], rel=1e-4)
    assert before["eval/sft/loss"] != pytest.approx(before["eval/sft/nll"], rel=1e-4)
    assert after["eval/sft/nll"] < before["eval/sft/nll"]
    # A new model is nearly uniform, so its entropy is about its expected negative log-likelihood.
    assert step["policy/entropy"] == pytest.approx(step["sft/nll"], rel=0.05)


def test_held_out_conversations_have_their_own_key(run: Run, rows: Rows, tmp_path: Path) -> None:
    data = conversations(tmp_path)
    chats = tmp_path / "conversations.jsonl"
    held_out = ("data.eval.name=jsonl", f"data.eval.paths=[{chats}]")
    options = (f'data.chat_template="{CHAT}"', "run.total_steps=1", "run.save_model=false")
    keys = ("data.train.messages_key=messages", "data.eval.messages_key=messages")
    run(tmp_path / "run", "task=sft", data, *held_out, *keys, *options, base=TINY)
    before, after = rows(tmp_path / "run", phase="eval")
    assert after["eval/sft/nll"] < before["eval/sft/nll"]


def test_every_assistant_turn_of_a_conversation_is_trained(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    shared = (
        "task=sft",
        conversations(tmp_path),
        "data.train.messages_key=messages",
        f'data.chat_template="{CHAT}"',
    )
    run(tmp_path / "all", *shared, "run.total_steps=1", "run.save_model=false", base=TINY)
    run(
        tmp_path / "last",
        *shared,
        "data.train_on=last",
        "run.total_steps=1",
        "run.save_model=false",
        base=TINY,
    )
    (everything,), (last,) = (rows(tmp_path / name, phase="sft") for name in ("all", "last"))
    assert everything["sft/nll"] != last["sft/nll"]


def test_dft_learns_from_demonstrations_and_starts_with_the_same_likelihood(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    data = write(
        tmp_path / "sums.jsonl",
        [{"question": f"{a} + 1", "answer": f"= {a + 1}"} for a in range(8)],
    )
    for name in ("dft", "cross_entropy"):
        overrides = ("task=sft", f"sft={name}", data, "run.total_steps=12", "run.save_model=false")
        run(tmp_path / name, *overrides, base=TINY)
    dft, usual = (rows(tmp_path / name, phase="sft") for name in ("dft", "cross_entropy"))
    assert dft[0]["sft/nll"] == pytest.approx(usual[0]["sft/nll"])
    assert dft[0]["actor/loss"] < usual[0]["actor/loss"]
    assert dft[-1]["sft/nll"] < dft[0]["sft/nll"]


def test_tokens_of_weight_zero_are_not_learned(run: Run, rows: Rows, tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"question": f"{a} + 1", "answer": f"= {a + 1}", "weight": [0, 0, 1, 2]} for a in range(8)
    ]
    data = write(tmp_path / "sums.jsonl", records)
    short = ("task=sft", data, "run.total_steps=1", "run.save_model=false")
    run(tmp_path / "weighted", *short, "data.train.loss_weight_key=weight", base=TINY)
    run(tmp_path / "plain", *short, base=TINY)
    (weighted,), (plain,) = (rows(tmp_path / name, phase="sft") for name in ("weighted", "plain"))
    assert weighted["data/tokens"] == plain["data/tokens"]
    assert weighted["sft/nll"] != plain["sft/nll"], "fewer tokens count"
    assert weighted["actor/loss"] != pytest.approx(weighted["sft/nll"]), "the mean is weighted"
    assert plain["actor/loss"] == pytest.approx(plain["sft/nll"])


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_weights_of_messages_are_required_somewhere_in_the_data(
    run: Run, tmp_path: Path, streaming: str
) -> None:
    tokenizer = (
        run(
            tmp_path / "first", "task=sft", "run.total_steps=1", sums(tmp_path), base=TINY
        ).directory
        / "tokenizer"
    )
    with pytest.raises(ValueError, match=r"no message of .* has the field 'wieght'"):
        run(
            tmp_path / "run",
            "task=sft",
            conversations(tmp_path),
            "data.train.messages_key=messages",
            "data.train.loss_weight_key=wieght",
            f'data.chat_template="{CHAT}"',
            f"data.streaming={streaming}",
            "data.tokenizer.kind=pretrained",
            f"data.tokenizer.path={tokenizer}",
            "run.total_steps=3",
            base=TINY,
        )


@pytest.mark.bitwise
def test_streamed_data_is_packed_by_tokens_and_resumes_where_it_stopped(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    records: list[dict[str, object]] = [
        {"question": f"{a} + {b}", "answer": f"= {a + b}"} for a in range(6) for b in range(6)
    ]
    data = write(tmp_path / "sums.jsonl", records)
    first = (
        run(tmp_path / "tokenizer", "task=sft", data, "run.total_steps=1", base=TINY).directory
        / "tokenizer"
    )
    streamed = (
        "task=sft",
        data,
        "data.streaming=true",
        "data.streaming_buffer=5",
        "data.tokenizer.kind=pretrained",
        f"data.tokenizer.path={first}",
        "batching.tokens_per_update=80",
        "run.save_model=false",
    )
    run(tmp_path / "whole", *streamed, "run.total_steps=6", base=TINY)
    run(tmp_path / "parts", *streamed, "run.total_steps=4", base=TINY)
    run(tmp_path / "parts", *streamed, "run.total_steps=6", "run.resume=auto", base=TINY)
    uninterrupted = rows(tmp_path / "whole", phase="sft")
    assert rows(tmp_path / "parts", phase="sft") == uninterrupted
    assert all(row["data/tokens"] <= 80 for row in uninterrupted)
    assert uninterrupted[-1]["data/epoch"] >= 1.0


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_overlong_demonstration_is_an_error_or_dropped_whether_rows_are_streamed_or_not(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    streaming: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records: list[dict[str, object]] = [
        {"question": f"{a} + 1", "answer": f"= {a + 1}"} for a in range(4)
    ]
    records.insert(1, {"question": "1 + 1", "answer": "= 2 " * 25})
    data = write(tmp_path / "sums.jsonl", records)
    first = run(tmp_path / "first", "task=sft", data, "run.total_steps=1", base=TINY)
    settings = (
        *("task=sft", data, f"data.streaming={streaming}", "data.tokenizer.kind=pretrained"),
        f"data.tokenizer.path={first.directory / 'tokenizer'}",
        *("batching.max_tokens=60", "data.max_prompt_tokens=30", "run.save_model=false"),
        *("batching.prompts_per_step=2", "run.total_steps=3"),
    )
    with pytest.raises(DataError, match=r"sums.jsonl:2: .* tokens, but batching.max_tokens is 60"):
        run(tmp_path / "error", *settings, base=TINY)
    run(tmp_path / "drop", *settings, "data.overlong_prompts=drop", base=TINY)
    # Streamed rows are counted after each epoch, here in the third step.
    assert [row["step"] for row in rows(tmp_path / "drop", phase="sft") if row["step"]] == [1, 2, 3]
    line = "dropped 1 of 5 streamed rows" if streaming == "true" else "{'data': 1}"
    assert line in capsys.readouterr().out


def write_sums(run: Run, folder: Path) -> tuple[str, ...]:
    """Write six problems, train a tokenizer on them, and return the settings that use both."""
    data = write(
        folder / "sums.jsonl",
        [{"question": f"{a} + 1", "answer": f"= {a + 1}"} for a in range(6)],
    )
    first = run(folder / "first", "task=sft", data, "run.total_steps=1", base=TINY)
    path = first.directory / "tokenizer"
    return (data, "data.tokenizer.kind=pretrained", f"data.tokenizer.path={path}")


@pytest.mark.bitwise
def test_streamed_rows_train_the_same_bits_as_rows_that_are_loaded_first(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    settings = (
        *write_sums(run, tmp_path),
        "run.save_model=false",
        "sampling.max_tokens=8",
        "algorithm.group_size=2",
        "reward.function=temper_trainer_test_rewards:share_of_digits",
    )
    run(tmp_path / "loaded", *settings, "run.total_steps=4", base=TINY)
    streamed = (*settings, "data.streaming=true")
    run(tmp_path / "streamed", *streamed, "run.total_steps=2", base=TINY)
    run(tmp_path / "streamed", *streamed, "run.total_steps=4", "run.resume=auto", base=TINY)
    assert rows(tmp_path / "streamed", phase="rl") == rows(tmp_path / "loaded", phase="rl")


def test_warm_start_on_streamed_rows_uses_their_buffer(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    result = run(
        tmp_path / "streamed",
        *write_sums(run, tmp_path),
        "data.streaming=true",
        "data.streaming_buffer=3",
        "warm_start.total_steps=2",
        "run.total_steps=1",
        "run.save_model=false",
        "sampling.max_tokens=8",
        "algorithm.group_size=2",
        "reward.function=temper_trainer_test_rewards:share_of_digits",
        base=TINY,
    )
    assert len(rows(result.directory, phase="warm_start")) == 2


def test_tasks_eval_and_generate_score_and_write_completions(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    data = write(
        tmp_path / "sums.jsonl",
        [{"question": f"{a} + 1", "answer": f"= {a + 1}"} for a in range(6)],
    )
    trained = (
        run(tmp_path / "sft", "task=sft", data, "run.total_steps=2", base=TINY).directory
        / "huggingface"
    )
    model = (
        f"actor.engine.model.path={trained}",
        "reward.function=exact_match",
        "run.num_threads=1",
    )
    short = "run.eval_sampling.max_tokens=8"
    result = run(tmp_path / "eval", "task=eval", *model, data, short, base=())
    assert 0.0 <= result.evaluation["eval/greedy/reward"] <= 1.0
    named = write(
        tmp_path / "named.jsonl",
        [{"question": f"{a} + 1", "answer": f"= {a + 1}", "level": a % 2} for a in range(4)],
    ).partition("=")[2]
    result = run(
        tmp_path / "named",
        "task=eval",
        *model,
        f"data.eval_sets.sums.paths={named}",
        "data.eval_sets.sums.category_key=level",
        "run.eval_sampling.temperature=0.5",
        short,
        "run.eval_num_completions=2",
        base=(),
    )
    # There is no data.train, which is evaluated only if nothing is held out.
    assert {name.rpartition("/")[0] for name in result.evaluation} == {
        "eval/sums/eval",
        "eval/sums/eval/0",
        "eval/sums/eval/1",
    }
    assert {"eval/sums/eval/pass_at_2", "eval/sums/eval/maj_at_2"} <= result.evaluation.keys()
    assert "sums" in (result.directory / "report.html").read_text()
    generate = (
        *("task=generate", *model, data, "generate.num_completions=2", "sampling.max_tokens=8"),
        "generate.file=texts/sums.jsonl",
    )
    run(tmp_path / "generate", *generate, base=())
    written = tmp_path / "generate" / "texts" / "sums.jsonl"
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert len(lines) == 12
    assert all(len(line["tokens"][0]) == len(line["logprobs"][0]) for line in lines)
    with pytest.raises(ConfigError, match=r"sums\.jsonl already exists and is never overwritten"):
        run(tmp_path / "generate", *generate, "run.resume=auto", base=())


def test_pair_of_equal_completions_is_refused(run: Run, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", [{"question": "q", "chosen": "a", "rejected": "a"}])
    with pytest.raises(ValueError, match="are equal, so there is no preference"):
        run(tmp_path / "run", "task=dpo", data, "ref=frozen", base=TINY)


def test_unused_reference_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preference is dpo with reference none, and ref is set"):
        run(
            tmp_path / "run",
            "task=dpo",
            pairs(tmp_path),
            "ref=frozen",
            "preference.reference=none",
            base=TINY,
        )
