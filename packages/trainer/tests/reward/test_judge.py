"""Scores of a judge behind a real HTTP server: requests, retries, failures, cache, secrets."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from packages.trainer.tests.reward.judge_server_for_tests import KEY, JudgeServer, serve_judge
from temper_engine_api.errors import ConfigError
from temper_trainer.config.judge import JudgeConfig
from temper_trainer.config.reward import RewardConfig
from temper_trainer.redaction import redact_secrets
from temper_trainer.reward.judge_answers import JudgeAnswerError, build_messages, parse_score
from temper_trainer.reward.judge_endpoint import warn_if_unreachable
from temper_trainer.reward.reward_calls import Item
from temper_trainer.reward.scoring import Scorer
from temper_trainer.reward.scoring_round import RewardFailureError
from temper_trainer.types import Prompt

pytest.importorskip("openai", reason="needs the extra temper-trainer[judge]")

CONFIG = JudgeConfig(
    base_url="http://127.0.0.1:9/v1",
    model="judge",
    prompt="Q: {question} R: {reference} Answer: {completion}",
    score_pattern=r"Score: (\S+)",
    max_retries=2,
    request_timeout_s=2.0,
    timeout_s=20.0,
)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """A running endpoint."""
    with serve_judge() as running:
        yield running


def open_scorer(
    server: JudgeServer, *, max_failure_fraction: float = 1.0, **changes: object
) -> Scorer:
    judge = replace(CONFIG, base_url=server.base_url, **changes)  # type: ignore[arg-type]
    return Scorer(
        RewardConfig(
            function="style", judges={"style": judge}, max_failure_fraction=max_failure_fraction
        )
    )


def items(*texts: str) -> list[Item]:
    return [
        (
            Prompt(
                prompt_id=i,
                text="<user>?",
                question="?",
                tokens=(1,),
                answer="2",
                location=f"f:{i}",
            ),
            text,
        )
        for i, text in enumerate(texts)
    ]


def test_request_has_the_filled_template_and_the_settings(server: JudgeServer) -> None:
    changes = {"system_prompt": "Be strict.", "request_arguments": {"seed": 3}}
    with open_scorer(server, **changes) as scorer:
        assert [score.reward for score in scorer.score(items("{reference}"))] == [0.5]
    assert server.bodies == [
        {
            "model": "judge",
            "messages": [
                {"role": "system", "content": "Be strict."},
                # A field in a completion is text.
                {"role": "user", "content": "Q: ? R: 2 Answer: {reference}"},
            ],
            "max_completion_tokens": 1024,
            "temperature": 0.0,
            "seed": 3,
        }
    ]


@pytest.mark.parametrize("text", ["busy", "flaky", "cut"])
def test_request_is_repeated_after_a_temporary_failure(server: JudgeServer, text: str) -> None:
    with open_scorer(server) as scorer:
        assert [score.reward for score in scorer.score(items(text))] == [0.5]
        metrics = scorer.metrics()
    assert server.attempts[text] == 2
    assert (metrics["judge/style/requests"], metrics["judge/style/retries"]) == (2.0, 1.0)
    if text == "busy":  # Retry-After: 0.3
        assert server.times[1] - server.times[0] >= 0.3


def test_failures_are_counted_by_kind_and_other_scores_are_kept(server: JudgeServer) -> None:
    texts = (
        *("fine", "refuse", "page", "malformed", "shapeless", "empty", "say nothing"),
        *("say Score: 7", "say Score: nan", "cut always", "broken"),
    )
    with open_scorer(server, max_retries=1) as scorer:
        scores = scorer.score(items(*texts))
        metrics = scorer.metrics()
    assert [score.reward for score in scores] == [0.5, *[None] * 10]
    failures = {text: score.failure or "" for text, score in zip(texts, scores, strict=True)}
    assert re.match("exception: AuthenticationError: .*<hidden>|.*wrong key", failures["refuse"])
    assert failures["page"].startswith("not_finite: the endpoint sent '<html>")
    assert failures["malformed"].startswith("exception: ")
    assert failures["shapeless"].startswith("not_finite: the endpoint sent ChatCompletion(")
    assert "raise reward.judges.style.max_tokens (prompt 5, f:5)" in failures["empty"]
    assert failures["say nothing"] == (
        "not_finite: the judge answered 'nothing', which is not a match of score_pattern "
        "'Score: (\\\\S+)' (prompt 6, f:6)"
    )
    assert "gave the score 7, but min_score is 0 and max_score is 1" in failures["say Score: 7"]
    assert failures["say Score: nan"].startswith("not_finite: ")
    assert failures["cut always"].startswith("exception: APIConnectionError")
    assert failures["broken"].startswith("exception: InternalServerError")
    assert metrics["reward/exception"] == 4.0
    assert metrics["reward/not_finite"] == 6.0
    # Retried once each: the two last ones.
    assert metrics["judge/style/retries"] == 2.0


def test_slow_answer_times_out_after_its_retries(server: JudgeServer) -> None:
    with open_scorer(server, request_timeout_s=0.2, max_retries=1) as scorer:
        (score,) = scorer.score(items("hang 2"))
    assert score.failure == (
        "timeout: took longer than reward.judges.style.request_timeout_s = 0.2 (prompt 0, f:0)"
    )
    assert server.attempts["hang 2"] == 2


def test_answer_that_arrives_byte_by_byte_times_out(server: JudgeServer) -> None:
    begin = time.monotonic()
    with open_scorer(server, timeout_s=0.5) as scorer:
        (score,) = scorer.score(items("drip"))
    assert score.failure == (
        "timeout: took longer than reward.judges.style.timeout_s = 0.5 (prompt 0, f:0)"
    )
    assert time.monotonic() - begin < 5


def test_requests_are_simultaneous_up_to_the_limit(server: JudgeServer) -> None:
    with open_scorer(server, max_concurrency=3) as scorer:
        scores = scorer.score(
            items(*(f"hang 0.1 {i}".replace(" 0.1 ", f" 0.1{i}") for i in range(9)))
        )
        metrics = scorer.metrics()
    assert [score.reward for score in scores] == [0.5] * 9
    assert server.max_active == 3
    assert metrics["judge/style/latency_max_s"] >= metrics["judge/style/latency_mean_s"] > 0.09


def test_equal_completions_are_judged_once_in_a_run(server: JudgeServer) -> None:
    with open_scorer(server, usd_per_million_prompt_tokens=2.0) as scorer:
        assert len(scorer.score(items("a", "a", "b"))) == 3
        assert scorer.metrics()["judge/style/cached"] == 1.0
        assert scorer.metrics()["judge/style/prompt_tokens"] == 200.0
        scorer.score(items("a", "c", "refuse"))
        metrics = scorer.metrics()
        scorer.score(items("refuse"))
    assert server.attempts == {"a": 1, "b": 1, "c": 1, "refuse": 2}  # failures are not remembered
    assert metrics["judge/style/cached"] == 1.0
    assert metrics["judge/style/completion_tokens"] == 10.0
    # 100 tokens of c at $2 per million, after 200 of a and b.
    assert metrics["judge/style/cost_usd"] == pytest.approx(2e-4)
    assert metrics["judge/style/total_cost_usd"] == pytest.approx(6e-4)


def test_too_many_failures_stop_the_run_without_the_remaining_requests(server: JudgeServer) -> None:
    texts = [f"refuse {i}" for i in range(50)]
    with (
        open_scorer(server, max_failure_fraction=0.1, max_concurrency=2) as scorer,
        pytest.raises(RewardFailureError, match=r"reward\.function style .*were not made"),
    ):
        scorer.score(items(*texts))
    assert sum(server.attempts.values()) < 15


def test_key_comes_from_the_variable_and_is_hidden(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-someone-else")
    with open_scorer(server, api_key_variable="JUDGE") as scorer:
        (score,) = scorer.score(items("refuse"))
    assert server.keys == {f"Bearer {KEY}"}
    assert "wrong key <hidden>" in (score.failure or "")
    assert redact_secrets(f"the key {KEY}") == "the key <hidden>"
    with open_scorer(server) as scorer:
        scorer.score(items("x"))
    assert "Bearer key-for-someone-else" not in server.keys


def test_missing_key_is_a_configuration_error(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE", raising=False)
    with pytest.raises(ConfigError, match="JUDGE, but this environment variable is not set"):
        open_scorer(server, api_key_variable="JUDGE")


def test_missing_library_is_a_configuration_error(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the openai library: run pip install"):
        open_scorer(server)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"model": "other"}, "reward.judges.style.model is other, but .* lists only judge"),
        (
            {"base_url": "http://127.0.0.1:9/v1"},
            "reward.judges.style.base_url http://127.0.0.1:9/v1 does not answer",
        ),
    ],
)
def test_check_warns_about_an_endpoint_that_cannot_be_used(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, changes: dict[str, str], message: str
) -> None:
    config = replace(CONFIG, **({"base_url": server.base_url} | changes))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="temper_trainer"):
        warn_if_unreachable(config, name="style")
    assert len(caplog.messages) == bool(message)
    assert re.match(message, "".join(caplog.messages))


@pytest.mark.parametrize(
    ("field", "answer", "score"),
    [
        ("score", '{"score": 0.25}', 0.25),
        ("score", 'Reasons {a}. ```json\n{"score": "1"}\n```', 1.0),
        ("score", '{"score": 0.1} or rather {"score": 0.9}', 0.9),
        ("rating.overall", '{"rating": {"overall": 1, "style": 0}}', 1.0),
        ("score", '{"score": true}', None),
        ("score", '{"score": null}', None),
        ("score", '{"score": 0.5', None),
        ("score", '{"score": 1e999}', None),
        ("score", "[" * 100_000 + '{"score": 0.5}', 0.5),
        ("score", '{"a":' * 100_000, None),
    ],
)
def test_score_is_the_field_of_the_last_object(
    field: str, answer: str, score: float | None
) -> None:
    config = replace(CONFIG, score_pattern=None, score_field=field)
    if score is not None:
        assert parse_score(answer, config=config) == score
        return
    with pytest.raises(JudgeAnswerError, match="not a JSON object with a number in score_field"):
        parse_score(answer, config=config)


def test_last_match_of_the_pattern_is_the_score() -> None:
    assert parse_score("Score: 1 ... Score: 0.5", config=CONFIG) == 0.5
    assert parse_score("8 of 10", config=replace(CONFIG, score_pattern=r"\d+", max_score=10)) == 10


def test_template_reads_fields_of_the_row() -> None:
    prompt = Prompt(prompt_id=0, text="", tokens=(1,), answer="", extra={"rubric": ["a", "b"]})
    config = replace(CONFIG, prompt='{extra.rubric} {completion} e.g. {"score": 1}')
    assert build_messages(config, prompt, "x") == [
        {"role": "user", "content": '["a", "b"] x e.g. {"score": 1}'}
    ]
    with Scorer(
        RewardConfig(function="j", judges={"j": config}, max_failure_fraction=1.0)
    ) as scorer:
        (score,) = scorer.score(items("x"))
    assert score.failure == (
        "exception: the prompt has no field 'rubric' in extra, which the template needs (prompt 0, "
        "f:0)"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "{question}"}, "must contain {completion}"),
        ({"prompt": "{completion} {refrence}"}, "Did you mean 'reference'?"),
        ({"prompt": "{completion} {extra}"}, "contains {extra}, which is not a field"),
        ({"score_field": "score"}, "exactly one of them must be set"),
        ({"score_pattern": None}, "exactly one of them must be set"),
        ({"score_pattern": "(a"}, "not a regular expression"),
        ({"min_score": 1.0}, "the first must be smaller"),
        ({"base_url": "localhost:8000"}, "must start with http"),
        ({"api_key_variable": "sk-12345"}, "not the name of an environment variable"),
        ({"max_concurrency": 0}, "max_concurrency of JudgeConfig is 0"),
    ],
)
def test_wrong_setting_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert "sk-12345" not in str(caught.value)
