"""Compare a tiny model with transformers, in a process that `huggingface.model_comparison` starts.

Reads fields.json in a folder, and writes result.json there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import READ_GRADIENTS
from temper_engine_api.conformance.harness.tolerances import SMALL_TENSOR_FRACTION
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.conformance.inputs.tiny_models import TinyModel, write_model
from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine
from temper_engine_api.conformance.oracle.oracle_routers import OracleConfig
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import CapabilityError, WeightError
from temper_engine_api.specs import ModelSpec, PrecisionSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.huggingface.model_comparison import (
    ComparisonResult,
    accept_untested_models,
)

_LENGTHS = (9, 5, 14, 7)
"""Odd lengths in one pack, some longer than the window of the tiny model."""


def compare(fields: Mapping[str, object], *, folder: Path) -> ComparisonResult:
    """Return the largest relative difference in the gradients of one update."""
    path = write_model(TinyModel(name="tiny", architecture=fields, settings={}), folder=folder)
    expected = _measure_gradients(OracleEngine, OracleConfig, path=path, fields=fields)
    actual = _measure_gradients(MegatronEngine, MegatronConfig, path=path, fields=fields)
    return compare_tensors(actual, expected)


def compare_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> ComparisonResult:
    """Return the largest difference, relative to the largest expected entry of a tensor."""
    if actual.keys() != expected.keys():
        names = sorted(actual.keys() ^ expected.keys())
        return _describe_failure(f"only one of them has {names[0]}")
    # First, because comparisons with NaN are False: `max` would pass over it.
    for owner, tensors in (("transformers", expected), ("the engine", actual)):
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                return _describe_failure(f"{name} is not finite in {owner}")
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    differences = {
        name: float((actual[name] - tensor).abs().max())
        / max(float(tensor.abs().max()), SMALL_TENSOR_FRACTION * largest)
        for name, tensor in expected.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return ComparisonResult(difference=differences[worst], quantity=worst, is_final=True)


def _describe_failure(description: str) -> ComparisonResult:
    return ComparisonResult(difference=None, quantity=description, is_final=True)


def _measure_gradients(
    engine_class: type[BaseEngine],
    config_class: type[MegatronConfig] | type[OracleConfig],
    *,
    path: Path,
    fields: Mapping[str, object],
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    vocab_size = int(str(fields["vocab_size"]))
    batch = from_sequences(
        [torch.randint(0, vocab_size, (length,), generator=generator) for length in _LENGTHS],
        loss_masks=[torch.arange(length) >= 2 for length in _LENGTHS],
    )
    config = config_class(
        model=ModelSpec(path=str(path)),
        optimizer=READ_GRADIENTS,
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
    )
    engine = engine_class(config)
    with accept_untested_models():
        engine.init_model()
    engine.set_loss_fn(SftProbe())
    update = run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
    gradients = {f"the gradient of {name}": tensor for name, tensor in update.gradients.items()}
    engine.close()
    return gradients


def main(folder: Path) -> None:
    """Compare the model of a folder."""
    fields = json.loads((folder / "fields.json").read_text())
    try:
        _write(compare(fields, folder=folder), folder=folder)
    except Exception as error:
        # For the message of the parent: the last line of stderr may be about something else. If
        # the engine refuses the model or the names of its weights, it would do so again.
        failure = ComparisonResult(
            difference=None,
            quantity=f"{type(error).__name__}: {error}",
            is_final=isinstance(error, CapabilityError | WeightError),
        )
        _write(failure, folder=folder)
        raise


def _write(result: ComparisonResult, *, folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps(asdict(result)))
