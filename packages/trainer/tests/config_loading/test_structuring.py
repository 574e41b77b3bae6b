import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

from .conftest import RL


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.seed=1.5", "run.seed is 1.5, but must be a whole number of at least 0."),
        ("run.seed=1e1", "run.seed is 10.0, but must be a whole number of at least 0: write 10."),
        ("run.seed=-1e1", "run.seed is -10.0, but must be a whole number of at least 0."),
        ("run.seed=true", "run.seed is true, but must be a whole number of at least 0."),
        ("run.seed='1'", "run.seed is '1', but must be a whole number of at least 0."),
        ("run.seed=null", "run.seed is null, but must be a whole number of at least 0."),
        ("run.save_model='true'", "run.save_model is 'true', but must be true or false."),
        ("run.save_model=1", "run.save_model is 1, but must be true or false."),
        ("run.dir=3", "run.dir is 3, but must be text."),
        ("reward.timeout_s=ten", "reward.timeout_s is 'ten', but must be a number above 0."),
        ("reward.timeout_s=true", "reward.timeout_s is true, but must be a number above 0."),
        (
            "run.trackers=jsonl",
            (
                "run.trackers is 'jsonl', but must be a list of values, each jsonl, tensorboard, "
                "wandb, mlflow or trackio. A list is written [jsonl]."
            ),
        ),
        (
            "run.trackers=[csv]",
            (
                "run.trackers is ['csv'], but must be a list of values, each jsonl, tensorboard, "
                "wandb, mlflow or trackio."
            ),
        ),
        (
            "task=dop",
            "task is 'dop', but must be rl, sft, distill, dpo, rm, eval or generate.",
        ),
        (
            "actor.engine.optimizer.betas=[0.9]",
            "actor.engine.optimizer.betas is [0.9], but must be a list of 2 values, each a number.",
        ),
        (
            "run.eval_answer_pattern=3",
            "run.eval_answer_pattern is 3, but must be text, or null.",
        ),
        ("actor=5", "actor is 5, but must be a block of keys."),
        (
            "run.num_threads=few",
            (
                "run.num_threads is 'few', but must be a whole number of at least 1 and at most "
                "1024, or null."
            ),
        ),
        (
            "reward.arguments.x=[1]",
            (
                "reward.arguments.x is [1], but must be text, a whole number, a number, true, "
                "false or null."
            ),
        ),
        (
            "reward.components.length=ten",
            "reward.components.length is 'ten', but must be a number.",
        ),
        (
            "reward.components=1",
            "reward.components is 1, but must be a mapping from names to values.",
        ),
        ("environments=[a]", "environments is a list, but must be a mapping of keys."),
        ("rollout.vllm=[a]", "rollout.vllm is a list, but must be a mapping of keys."),
        ("data.train=[a]", "data.train is a list, but must be a mapping of keys."),
        ("data={train: [a]}", "data.train is a list, but must be a mapping of keys."),
        (
            "teachers.math.engine.model.architecture.sizes=[[1]]",
            (
                "teachers.math.engine.model.architecture.sizes is [[1]], but must be text, "
                "a whole number, a number, true, false, null, a list of values, each text, "
                "a whole number, a number, true, false or null, or a mapping from names to values."
            ),
        ),
    ],
)
def test_value_of_the_wrong_type_is_named_with_what_is_expected(
    override: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*RL, override])
    assert str(caught.value) == sentence


def test_integer_is_accepted_as_a_number() -> None:
    value = load([*RL, "reward.timeout_s=3"]).config.reward.timeout_s
    assert (value, type(value)) == (3.0, float)


def test_lists_become_tuples_and_mappings_stay_mappings() -> None:
    config = load(
        [*RL, "sampling.stop=[END,'a, b']", "actor.engine.optimizer.betas=[0.5,0]"]
    ).config
    assert config.sampling.stop == ("END", "a, b")
    assert config.actor.engine.optimizer is not None
    assert config.actor.engine.optimizer.betas == (0.5, 0.0)


def test_free_mapping_keeps_the_type_of_each_value() -> None:
    arguments = load(
        [*RL, "reward.arguments={a: 1, b: 1.0, c: true, d: text, e: null}"]
    ).config.reward.arguments
    assert [type(value) for value in arguments.values()] == [int, float, bool, str, type(None)]


def test_key_is_added_to_the_message_of_a_dataclass() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^actor.engine.schedule: schedule.kind is linear, which needs schedule.total_steps",
    ):
        load([*RL, "actor.engine.schedule.kind=linear"])


def test_key_is_not_added_twice_to_a_message() -> None:
    with pytest.raises(ConfigError, match=r"^run.total_steps is 0, but must be at least 1.$"):
        load([*RL, "run.total_steps=0"])


def test_more_threads_than_a_process_can_start_are_refused() -> None:
    sentence = r"^run.num_threads is 100000, but must be at least 1 and at most 1024.$"
    with pytest.raises(ConfigError, match=sentence):
        load([*RL, "run.num_threads=100000"])


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*RL, "run.seed=x", "sampling.top_p=2.0", "batching.max_tokens=a"])
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == [
        "sampling.top_p",
        "batching.max_tokens",
        "run.seed",
    ]


def test_every_bad_value_of_a_mapping_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*RL, "reward.components={a: 1.0, b: two, c: null}", "run.seed=x"])
    assert set(str(caught.value).splitlines()) == {
        "reward.components.b is 'two', but must be a number.",
        "reward.components.c is null, but must be a number.",
        "run.seed is 'x', but must be a whole number of at least 0.",
    }


def test_missing_required_key_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load([])
    assert "data.train.paths is not set and has no default: set it." in str(caught.value)
    assert (
        "actor.engine.model: exactly one of model.path (now None) and model.architecture "
        "(now {}) must be set"
    ) in str(caught.value)
