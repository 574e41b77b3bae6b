"""Training continues where the old system stopped."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from portable_state import read_training_state
from safetensors.torch import load_file
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.specs import LoraSpec, ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_legacy_shim.checkpoints.conversion import convert
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.checkpoints.fsdp_moments import read_trained_leaves
from temper_legacy_shim.checkpoints.layouts import find_roles
from temper_legacy_shim.checkpoints.model import Sources, read_model
from temper_legacy_shim.checkpoints.plan import Options, plan_jobs
from temper_legacy_shim.checkpoints.rank_files import read_weights
from temper_legacy_shim.checkpoints.receipt import check_files
from temper_legacy_shim.checkpoints.temper import step_directory
from temper_legacy_shim.checkpoints.temper.training_state import (
    resumable,
    training_state,
)
from temper_legacy_shim.errors import LayoutError

WITH_MOMENTS = (
    "v0.2_fsdp1-actor-tied_ws1",
    "v0.2_fsdp1-actor-tied_ws2",
    "v0.3.0.post1_fsdp1-hsdp-actor-untied_ws4",
    "v0.4.1_fsdp1-actor-tied_ws4",
    "v0.4.1_fsdp1-critic_ws2",
    "v0.4.1_fsdp2-hsdp-actor-untied_ws4",
    "v0.5.0_fsdp2-critictrl_ws2",
    "v0.6.1_fsdp2-sft-untied_ws2",
    "v0.7.1_fsdp1-dsv3-buffer-bf16_ws2",
    "v0.7.1_fsdp2-actor-untied_ws1",
    "v0.8.0_fsdp2-critic_ws2",
)
RESUMED = (
    "v0.2_fsdp1-actor-tied_ws2",
    "v0.3.0.post1_fsdp1-hsdp-actor-untied_ws4",
    "v0.4.1_fsdp2-hsdp-actor-untied_ws4",
    "v0.6.1_fsdp2-sft-untied_ws2",
    "v0.7.1_fsdp2-actor-untied_ws2",
)
VALUE_MODELS = ("v0.4.1_fsdp1-critic_ws2", "v0.5.0_fsdp2-critictrl_ws2")
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def _base(samples: Path, name: str) -> Path:
    return samples / "_base" / json.loads((samples / name / "META.json").read_text())["base"]


def _sources(samples: Path, name: str) -> Sources:
    return Sources(hf_config=_base(samples, name) if name.startswith("v0.3.0") else None)


def _step(samples: Path, name: str, out: Path) -> Path:
    (job,) = plan_jobs(samples / name / "checkpoints", out)
    convert(job, Options(target="temper", checks_names=False), _sources(samples, name))
    return out


def _engine(
    samples: Path, name: str, *, model_type: str = "language_model", lora: LoraSpec | None = None
) -> FSDPEngine:
    config = FSDPConfig(
        model=ModelSpec(path=str(_base(samples, name)), model_type=model_type),  # type: ignore[arg-type]
        optimizer=OptimizerSpec(**ADAM, clip_grad_norm=None, decays_vectors=True),  # type: ignore[arg-type]
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
        lora=lora or LoraSpec(),
    )
    engine = FSDPEngine(config)
    engine.init_model()
    return engine


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_every_weight_moved_against_the_moment_that_is_carried_for_it(
    samples: Path, name: str
) -> None:
    # A moment that is laid next to the wrong weights agrees with their movement by chance, in half
    # of the elements.
    (role,) = find_roles(samples / name / "checkpoints")
    state = resumable(read_model(role, _sources(samples, name)))
    before = load_file(_base(samples, name) / "model.safetensors")
    agreeing = total = 0
    for weight, kept in state.moments.items():
        assert kept.update_count == 2
        assert (as_torch(kept.second) >= 0).all()
        if weight in before:
            moved = as_torch(state.model.weights[weight]).float() - before[weight].float()
            moment = as_torch(kept.first).float()
            assert moment.shape == moved.shape
            agreeing += int(((moved * moment)[moment != 0] < 0).sum())
            total += int((moment != 0).sum())
    assert total > 20_000
    assert agreeing / total > 0.999


@pytest.mark.bitwise
@pytest.mark.parametrize("name", RESUMED)
def test_an_engine_goes_on_as_the_old_optimizer_would_have(
    samples: Path, name: str, tmp_path: Path
) -> None:
    out = _step(samples, name, tmp_path / "out")
    engine = _engine(samples, name)
    try:
        engine.load_checkpoint(str(out))
        assert (engine.num_updates, engine.num_schedule_steps) == (2, 2)
        written = {state.name: state for state in read_training_state(out)}
        for state in engine.export_state():
            same = written[state.name]
            assert state.update_count == same.update_count == 2
            assert torch.equal(state.master, same.master)
            assert torch.equal(state.first_moment, same.first_moment)
            assert torch.equal(state.second_moment, same.second_moment)
        batch = _batch()
        engine.set_loss_fn(
            lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
        )
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
        engine.optimizer_step()
        with engine.export_weights() as stream:
            new_word = dict(stream)
    finally:
        engine.close()
    others = _one_more_update(samples, name, batch)
    for weight, tensor in others.items():
        # The step is lr * m / sqrt(v): where v is tiny a gradient's last digits show.
        torch.testing.assert_close(new_word[weight], tensor, atol=2e-5, rtol=1e-5)


def _batch() -> SequenceBatch:
    tokens = torch.randint(0, 259, (24,), generator=torch.Generator().manual_seed(5))
    return from_sequences([tokens], loss_masks=[torch.arange(24) >= 1])


def _one_more_update(samples: Path, name: str, batch: SequenceBatch) -> dict[str, Tensor]:
    """Update the golden weights with the old moments by torch's AdamW."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        _base(samples, name), dtype=torch.float32
    )
    model.load_state_dict(load_file(samples / name / "golden_full_state.safetensors"), strict=False)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), **ADAM)  # type: ignore[arg-type]
    (role,) = find_roles(samples / name / "checkpoints")
    for state in training_state(read_model(role, _sources(samples, name))):
        parameter = named[state.name]
        assert torch.equal(parameter.detach(), state.master)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.update_count)),
            "exp_avg": state.first_moment,
            "exp_avg_sq": state.second_moment,
        }
    logits = model(input_ids=batch.tokens[None]).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, batch.tokens[1:]).backward()
    optimizer.step()
    return {weight: parameter.detach() for weight, parameter in named.items()}


@pytest.mark.parametrize("name", VALUE_MODELS)
def test_a_critic_is_resumed_as_a_value_model(samples: Path, name: str, tmp_path: Path) -> None:
    out = _step(samples, name, tmp_path / "out")
    engine = _engine(samples, name, model_type="value_model")
    try:
        engine.load_checkpoint(str(out))
        assert {state.name: state.update_count for state in engine.export_state()}[
            "score.weight"
        ] == 2
    finally:
        engine.close()


@pytest.mark.parametrize(
    "name", ["v0.7.1_fsdp2-actor-tied-modelonly_ws2", "v0.7.1_megatron-distckpt-tp2"]
)
def test_engine_continues_without_old_moments_with_fresh_ones(
    samples: Path, name: str, tmp_path: Path
) -> None:
    out = _step(samples, name, tmp_path / "out")
    receipt = json.loads((out / "temper-receipt.json").read_text())
    assert any(sentence.startswith("optimizer moments: ") for sentence in receipt["not_carried"])
    engine = _engine(samples, name)
    try:
        engine.load_checkpoint(str(out))
        assert engine.num_updates == 0
        assert not any(bool(state.second_moment.any()) for state in engine.export_state())
        with engine.export_weights() as stream:
            weights = dict(stream)
    finally:
        engine.close()
    golden = load_file(samples / name / "golden_full_state.safetensors")
    assert all(torch.equal(tensor, golden[key].float()) for key, tensor in weights.items())


WITH_ADAPTERS = ("v0.4.1_fsdp1-lora_ws2", "v0.5.0_fsdp2-lora_ws2", "v0.9.1_fsdp2-loraonly_ws2")


@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_an_engine_with_an_adapter_goes_on_from_an_old_one(
    samples: Path, name: str, tmp_path: Path
) -> None:
    out = _step(samples, name, tmp_path / "out")
    written = {state.name: state for state in read_training_state(out)}
    assert len(written) == 2 * 7 * 2  # two layers of seven modules, A and B each
    assert all(
        state.update_count == 2 and state.second_moment.abs().max() > 0
        for state in written.values()
    )
    engine = _engine(samples, name, lora=LoraSpec(rank=4, alpha=16.0))
    try:
        engine.load_checkpoint(str(out))
        assert (engine.num_updates, engine.num_schedule_steps) == (2, 2)
        kept = {state.name: state for state in engine.export_state()}
        _, tensors = engine.export_adapter()
    finally:
        engine.close()
    assert kept.keys() == tensors.keys() == written.keys()
    golden = load_file(samples / name / "golden_full_state.safetensors")
    for key, tensor in tensors.items():
        module, _, half = (
            key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        )
        (expected,) = (
            value
            for other, value in golden.items()
            if module in other and f".lora_{half}." in other
        )
        assert torch.equal(tensor, expected.float())
        assert torch.equal(kept[key].first_moment, written[key].first_moment)


def test_moments_of_an_adapter_are_distinguished_by_their_shapes(samples: Path) -> None:
    # FSDP2 keeps shapes, which follow each other as the modules do; a shifted numbering would not
    # fit anywhere.
    (role,) = find_roles(samples / "v0.5.0_fsdp2-lora_ws2" / "checkpoints")
    raw = read_weights(role.fsdp_files["model"], where=role.path)
    leaves = [key for key in raw if ".lora_" in key]
    with pytest.raises(LayoutError, match="moment number"):
        read_trained_leaves(role, raw, leaves=[*leaves[1:], leaves[0]])
    with pytest.raises(LayoutError, match="keeps states of 28 parameters, but 27"):
        read_trained_leaves(role, raw, leaves=leaves[1:])


@pytest.mark.bitwise
@pytest.mark.filterwarnings("ignore::UserWarning:megatron.core")
@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize("name", ["v0.7.1_fsdp2-actor-untied_ws2", "v0.2_fsdp1-actor-tied_ws2"])
def test_the_portable_state_goes_through_a_megatron_engine_bit_for_bit(
    samples: Path, name: str
) -> None:
    pytest.importorskip(
        "megatron.core",
        reason="needs megatron-core: an environment with temper-engine-megatron runs this",
    )
    from temper_engine_megatron.config import MegatronConfig
    from temper_engine_megatron.engine import MegatronEngine

    config = MegatronConfig(
        model=ModelSpec(path=str(_base(samples, name))),
        optimizer=OptimizerSpec(**ADAM, decays_vectors=True),  # type: ignore[arg-type]
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
    )
    (role,) = find_roles(samples / name / "checkpoints")
    old = {state.name: state for state in training_state(read_model(role, Sources()))}
    engine = MegatronEngine(config)
    engine.init_model()
    try:
        engine.load_state(iter(old.values()))
        for state in engine.export_state():
            same = old.pop(state.name)
            assert state.update_count == same.update_count == 2
            for column in ("master", "first_moment", "second_moment"):
                assert torch.equal(getattr(state, column), getattr(same, column)), (
                    state.name,
                    column,
                )
        assert not old
    finally:
        engine.close()


class _StoppedError(Exception):
    pass


def test_a_stopped_run_leaves_no_step_and_the_next_one_keeps_what_was_finished(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_directory, "_GROUP_BYTES", 64 << 10)
    name = RESUMED[0]
    (job,) = plan_jobs(samples / name / "checkpoints", tmp_path / "out")
    options = Options(target="temper", checks_names=False)

    def stop(what: str, done: int, total: int) -> None:
        if done > total / 2:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        convert(job, options, _sources(samples, name), progress=stop)
    assert not (tmp_path / "out").exists()
    staged = sorted((tmp_path / ".out.temper-partial/groups").rglob("*.distcp"))
    assert len(staged) > 1
    kept = {path.stat().st_mtime_ns for path in staged}

    reported: list[tuple[int, int]] = []
    receipt = convert(
        job,
        options,
        _sources(samples, name),
        progress=lambda what, done, total: reported.append((done, total)),
    )

    assert reported[-1][0] == reported[-1][1]
    assert kept < {path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.distcp")}
    check_files(tmp_path / "out", receipt.files)
    full = _step(samples, name, tmp_path / "whole")
    for resumed, expected in zip(
        read_training_state(tmp_path / "out"), read_training_state(full), strict=True
    ):
        assert resumed.name == expected.name
        assert resumed.update_count == expected.update_count
        for field in ("master", "first_moment", "second_moment"):
            assert torch.equal(getattr(resumed, field), getattr(expected, field))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    engine = _engine(samples, name)
    engine.load_checkpoint(str(tmp_path / "out"))
    assert engine.num_updates == 2
    engine.close()
