"""Short runs of each model family of the conformance kit, with the transformers sampler."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_trainer.loops import RunResult

LINEAR_ATTENTION = "linear_num_value_heads"
TEXT_MODELS = [
    name for name, model in FAMILIES.items() if "vision_config" not in model.architecture
]


def format_value(value: object) -> str:
    """Return a value as an override spells it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {format_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


# Nightly: trains each family. The kit compares their log-probs with transformers every day.
@pytest.mark.nightly
@pytest.mark.parametrize("family", TEXT_MODELS)
def test_logprobs_of_sampler_and_engine_agree_while_a_family_trains(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    tmp_path: Path,
    family: str,
) -> None:
    model = FAMILIES[family]
    # Large enough weights that the next token is neither certain nor uniform.
    fields = {**model.settings, **model.architecture, "initializer_range": 0.2}
    # The tokenizer decides.
    del fields["vocab_size"]
    run(
        tmp_path,
        f"actor.engine.model.architecture={format_value(fields)}",
        "warm_start=null",
        "data.eval=null",
        "run.save_model=false",
        "run.total_steps=3",
    )
    # Linear attention divides its outputs by their norm, which enlarges the rounding of small ones.
    limit = 1e-4 if LINEAR_ATTENTION in model.architecture else 2e-5
    differences = [row["mismatch/abs_max"] for row in rows(tmp_path)]
    assert max(differences) < limit, differences
