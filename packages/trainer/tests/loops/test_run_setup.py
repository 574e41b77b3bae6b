"""Models are fitted to the tokenizer, epochs become steps, schedules get the run's length."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from temper_engine_api.errors import ConfigError
from temper_engine_api.schedule import compute_learning_rate
from temper_engine_api.specs import ScheduleSpec
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading import load
from temper_trainer.data.rows import DataError
from temper_trainer.loops.run.run_setup import fit_models_to_tokenizer, with_run_length


def composed(*overrides: str) -> TrainerConfig:
    return load(["experiment=quickstart", "~run.total_steps", *overrides]).config


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))


def test_copies_of_the_actors_model_start_from_the_warm_starts_model() -> None:
    on_base = ("~actor.engine.model.architecture", "actor.engine.model.path=base")
    kl = ("ref=frozen", "algorithm.kl_loss_coef=0.1")
    for path in ((), on_base):
        config = composed("algorithm=ppo", *kl, *path)
        fitted = fit_models_to_tokenizer(config, tokenizer(), trained_model="trained")
        assert fitted.critic is not None
        assert fitted.ref is not None
        for role in (fitted.actor, fitted.critic, fitted.ref):
            assert role.engine.model.path == "trained"
            assert not role.engine.model.architecture


def test_models_of_another_path_are_kept_after_the_warm_start() -> None:
    config = composed(
        *("ref=frozen", "algorithm.kl_loss_coef=0.1"),
        *("ref.engine.model.architecture={}", "ref.engine.model.path=other"),
    )
    fitted = fit_models_to_tokenizer(config, tokenizer(), trained_model="trained")
    assert fitted.actor.engine.model.path == "trained"
    assert fitted.ref is not None
    assert fitted.ref.engine.model.path == "other"


@pytest.fixture
def on_saved_model(tmp_path: Path) -> TrainerConfig:
    """Return the configuration of a run on a saved model with two tokens."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 2}')
    return composed("~actor.engine.model.architecture", f"actor.engine.model.path={tmp_path}")


def test_tokenizer_with_more_tokens_than_the_models_embedding_is_refused(
    on_saved_model: TrainerConfig,
) -> None:
    words = {"a": 0, "b": 1, "c": 2}
    larger = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "a")))
    message = (
        r"actor\.engine\.model\.path: .* ids up to 2, but the model has vocab_size 2 in .*json"
    )
    with pytest.raises(ConfigError, match=message):
        fit_models_to_tokenizer(on_saved_model, larger)


@pytest.mark.parametrize("required", [{"eos_token": "<c>"}, {"pad_token": "<c>"}])
def test_end_and_padding_tokens_must_be_in_the_models_embedding(
    on_saved_model: TrainerConfig, required: dict[str, str]
) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    with pytest.raises(ConfigError, match="ids up to 2"):
        fit_models_to_tokenizer(
            on_saved_model, PreTrainedTokenizerFast(tokenizer_object=words, **required)
        )


def test_added_token_without_an_embedding_is_a_warning(
    on_saved_model: TrainerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer of Gemma 3 has a token for images that its text models do not know."""
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    )
    fit_models_to_tokenizer(on_saved_model, words)
    assert not caplog.text
    words.add_tokens("<image>")
    fit_models_to_tokenizer(on_saved_model, words)
    assert "the tokenizer's token '<image>' has id 2, but the model has vocab_size 2" in caplog.text


def test_epoch_has_as_many_steps_as_full_batches() -> None:
    config = with_run_length(
        composed("run.total_epochs=3", "batching.prompts_per_step=32"), num_problems=100
    )
    assert config.run.total_steps == 9  # 3 passes of 100 // 32 = 3 steps
    assert config.run.total_epochs is None


def test_epoch_without_a_full_batch_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"has 7 problems, less than a step of batching\.prompts_per_step = 32"
    ):
        with_run_length(
            composed("run.total_epochs=3", "batching.prompts_per_step=32"), num_problems=7
        )


def test_schedule_of_length_0_gets_the_length_of_the_run_in_its_unit() -> None:
    epochs = (
        "actor.engine.schedule.kind=cosine",
        "actor.engine.schedule.total_steps=0",
        "run.total_epochs=2",
    )
    two_updates = ("batching.prompts_per_step=10", "batching.num_mini_batches=2")
    by_update = with_run_length(composed(*epochs, *two_updates), num_problems=50)
    assert by_update.actor.engine.schedule.total_steps == 20  # 2 passes x 5 steps x 2 updates
    by_step = with_run_length(
        composed(*epochs, *two_updates, "actor.engine.schedule.advance=rl_step"), num_problems=50
    )
    assert by_step.actor.engine.schedule.total_steps == 10


def test_schedule_with_a_length_keeps_it() -> None:
    config = composed(
        "actor.engine.schedule.kind=cosine",
        "actor.engine.schedule.total_steps=7",
        "run.total_epochs=2",
    )
    assert with_run_length(config, num_problems=64).actor.engine.schedule.total_steps == 7


def test_schedule_of_length_0_cannot_be_used_for_training() -> None:
    spec = replace(ScheduleSpec(kind="linear", total_steps=0))
    with pytest.raises(ConfigError, match="filled in by a trainer"):
        compute_learning_rate(0, peak=1.0, spec=spec)


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.total_steps \(command line\) has no effect with run\.total_epochs"
    ):
        load(["experiment=quickstart", "run.total_steps=3", "run.total_epochs=2"])
