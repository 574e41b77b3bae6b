"""Conformance tests of a model's settings: each takes effect, or the engine rejects the model."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    collect_weights,
    measure_outputs,
    measure_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    assert_all_close,
    assert_all_equal,
    assert_close,
)
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.conformance.inputs.tiny_models import (
    BUFFERS,
    DROPOUT,
    NORM_EPSILON,
    QWEN2_GROUPED,
    ROPE_SCALING,
    ROPE_THETA,
    UNDECLARED_FIELDS,
    WINDOW,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.weights import NamedWeight

LENGTHS = (47, 40, 64, 90)
"""Longer than the window of 8 tokens, so that it reaches back through all layers."""


def read_rejection(rank: Rank, *, setup: EngineSetup) -> str:
    """Return the message with which the engine rejects the model; empty if it builds it."""
    try:
        rank.cached_engine(setup)
    except (CapabilityError, ConfigError) as error:
        return str(error)
    return ""


def is_rejected(
    engine_under_test: EngineUnderTest, setup: EngineSetup, *, names: tuple[str, ...]
) -> bool:
    """Return whether all ranks reject the model; the message must contain a name.

    Upper and lower case are the same, because some engines name the model's class.
    """
    messages = set(engine_under_test.run(read_rejection, setup=setup))
    assert len(messages) == 1, f"ranks raise different errors: {messages}"
    message = messages.pop()
    assert not message or any(name in message.lower() for name in names), (
        f"the model is rejected for another reason than {' or '.join(names)}: {message}"
    )
    return bool(message)


def check_setting(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    model: TinyModel,
    *,
    names: tuple[str, ...],
) -> None:
    """Compare log-probs and gradient with the oracle's, unless the engine rejects the model."""
    setup = oracle.make_setup(model)
    if is_rejected(engine_under_test, setup, names=names):
        return
    batch = oracle.get_batch_of(LENGTHS, prompt_length=2)
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    # Both models have the same weights, so the difference comes from the setting.
    default = oracle.get_outputs(oracle.make_setup(QWEN2_GROUPED), batch, HeadOutput.LOGPROB)
    assert float((expected - default).abs().max()) > 0.1
    check_numbers(engine_under_test, oracle, setup, batch=batch, expected=expected)


def check_numbers(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    setup: EngineSetup,
    *,
    batch: SequenceBatch,
    expected: Tensor,
) -> None:
    """Compare log-probs with the expected ones, and the gradient with the oracle's."""
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        expected,
        LOGPROB,
        quantity="log-probs",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )
    update = engine_under_test.run(measure_update, setup=setup, objective=SftProbe(), batch=batch)[
        0
    ]
    assert_all_close(
        update.gradients,
        oracle.get_update(setup, SftProbe(), batch).gradients,
        GRADIENT,
        quantity="gradient",
    )


def test_sliding_window_limits_attention(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare a model with a window of 8 tokens with the oracle, unless it is rejected."""
    check_setting(engine_under_test, oracle, WINDOW, names=("window",))


def test_rope_theta_of_the_model_is_used(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare a model with rope_theta 1e6 with the oracle, unless it is rejected."""
    check_setting(engine_under_test, oracle, ROPE_THETA, names=("rope",))


def test_rope_scaling_of_the_model_is_used(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare a model whose positions are divided by 4 with the oracle, unless it is rejected."""
    check_setting(engine_under_test, oracle, ROPE_SCALING, names=("rope",))


def test_norm_epsilon_of_the_model_is_used(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare a model with rms_norm_eps 0.1 with the oracle, unless it is rejected."""
    check_setting(engine_under_test, oracle, NORM_EPSILON, names=("eps",))


def test_fields_that_the_config_class_does_not_declare_have_no_effect(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare a model whose config has fields of other models with the oracle.

    transformers ignores such fields. The engine may reject the model instead.
    """
    setup = oracle.make_setup(UNDECLARED_FIELDS)
    fields = UNDECLARED_FIELDS.architecture.keys() - QWEN2_GROUPED.architecture.keys()
    if is_rejected(engine_under_test, setup, names=tuple(fields)):
        return
    batch = oracle.get_batch_of(LENGTHS, prompt_length=2)
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    check_numbers(engine_under_test, oracle, setup, batch=batch, expected=expected)


def test_dropout_of_the_model_is_on_in_training_only(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that dropout changes the gradient, but no log-prob after that update.

    The engine may reject the model instead. The optimizer's learning rate is 0.
    """
    batch = oracle.get_batch()
    setup, without = oracle.make_setup(DROPOUT), oracle.make_setup(QWEN2_GROUPED)
    if is_rejected(engine_under_test, setup, names=("dropout",)):
        return
    update = engine_under_test.run(measure_update, setup=setup, objective=SftProbe(), batch=batch)[
        0
    ]
    expected = oracle.get_update(without, SftProbe(), batch)
    distance = math.sqrt(
        sum(
            float((update.gradients[name] - gradient).double().square().sum())
            for name, gradient in expected.gradients.items()
        )
    )
    # Half of the attention weights are dropped, and the others are doubled. Without dropout, the
    # distance is at most 4 % in bf16.
    assert distance > 0.2 * expected.grad_norm, f"the gradient moved by {distance} only"
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        oracle.get_outputs(without, batch, HeadOutput.LOGPROB),
        LOGPROB,
        quantity="log-probs after an update",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )


def test_persistent_buffers_are_exported_loaded_and_resumed(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Compare exported tensors with the model's file, which contains buffers.

    Then load other weights and compare again, and once more after a save and a resume in a new
    engine. The engine may reject the model instead. The kit's MoE model files contain no buffers,
    so layouts with experts export parameters.
    """
    setup = oracle.make_setup(BUFFERS)
    family = str(BUFFERS.architecture["model_type"]).partition("_")[0]
    if is_rejected(engine_under_test, setup, names=(family, "buffer")):
        return
    own, other = (
        load_file(oracle.write_model(BUFFERS, seed=seed) / "model.safetensors") for seed in range(2)
    )
    for initial, loaded, resumed in engine_under_test.run(
        load_and_resume, setup=setup, weights=other, folder=tmp_path
    ):
        for exported, expected, origin in (
            (initial, own, ""),
            (loaded, other, " after a load"),
            (resumed, other, " after a resume"),
        ):
            assert_exported(exported, expected, quantity=f"weights and buffers{origin}")


def assert_exported(
    exported: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, quantity: str
) -> None:
    """Compare tensors bit for bit; bf16 ones with the expected tensors in bf16."""
    rounded = {
        name: tensor.bfloat16()
        if name in exported and exported[name].dtype == torch.bfloat16
        else tensor
        for name, tensor in expected.items()
    }
    assert_all_equal(exported, rounded, quantity=quantity)


def load_and_resume(
    rank: Rank, *, setup: EngineSetup, weights: Mapping[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the exported weights at first, after a load, and after a resume in a new engine."""
    engine = rank.temporary_engine(setup)
    initial = collect_weights(engine)
    engine.load_weights(NamedWeight(*each) for each in weights.items())
    loaded = collect_weights(engine)
    engine.save_checkpoint(str(folder), global_step=1)
    resumed = rank.temporary_engine(setup)
    resumed.load_checkpoint(str(folder))
    return initial, loaded, collect_weights(resumed)
