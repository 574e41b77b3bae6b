"""Continue each kind of old run for one update, in an engine and in torch.

Torch's side reads weights from the golden files and moments from the old optimizer files with
``torch.load``: nothing of the shim.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from old_files import write_fsdp
from portable_state import read_training_state
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.specs import LoraSpec, ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_legacy_shim.checkpoints.conversion import convert
from temper_legacy_shim.checkpoints.model import Sources
from temper_legacy_shim.checkpoints.plan import Options, plan_jobs
from temper_legacy_shim.checkpoints.receipt import Receipt
from temper_legacy_shim.checkpoints.temper import dcp
from temper_legacy_shim.errors import DamagedFileError

pytestmark = pytest.mark.filterwarnings("ignore:.*weights_only")
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LORA = LoraSpec(rank=4, alpha=16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """A sample, and how torch continues with it."""

    name: str
    """Its folder."""
    is_critic: bool = False
    """Trained on values."""
    has_adapter: bool = False
    """Trained on an adapter alone."""


MIXTURE = Old(name="v0.7.1_fsdp1-dsv3-buffer-bf16_ws2")
# Nightly: a mixture, a critic, one of TRL's and an adapter run every day. The others take the same
# path with files of another release.
nightly = pytest.mark.nightly
narrow_values = pytest.mark.skipif(
    find_spec("temper_engine_fsdp.model") is None,
    reason="temper-engine-fsdp 0.1.0 needs values as wide as queries, which DeepSeek's are not",
)
KINDS = [
    pytest.param(MIXTURE, id="mixture-fsdp1", marks=narrow_values),
    pytest.param(Old(name="v0.4.1_fsdp1-actor-tied_ws2"), id="actor-fsdp1", marks=nightly),
    pytest.param(Old(name="v0.7.1_fsdp2-actor-untied_ws2"), id="actor-fsdp2", marks=nightly),
    pytest.param(Old(name="v0.6.1_fsdp2-sft-untied_ws2"), id="sft-fsdp2", marks=nightly),
    pytest.param(Old(name="v0.4.1_fsdp1-critic_ws2", is_critic=True), id="critic-fsdp1"),
    pytest.param(
        Old(name="v0.8.0_fsdp2-critic_ws2", is_critic=True), id="critic-fsdp2", marks=nightly
    ),
    pytest.param(Old(name="v0.5.0_fsdp2-critictrl_ws2", is_critic=True), id="critic-of-trl-fsdp2"),
    pytest.param(
        Old(name="v0.4.1_fsdp1-lora_ws2", has_adapter=True), id="adapter-fsdp1", marks=nightly
    ),
    pytest.param(Old(name="v0.5.0_fsdp2-lora_ws2", has_adapter=True), id="adapter-fsdp2"),
    pytest.param(
        Old(name="v0.9.1_fsdp2-loraonly_ws2", has_adapter=True),
        id="adapter-alone-fsdp2",
        marks=nightly,
    ),
]


@pytest.mark.parametrize("old", KINDS)
def test_an_engine_makes_the_updates_that_the_old_run_would_have_made(
    old: Old, samples: Path, tmp_path: Path
) -> None:
    check_next_updates(old, samples, tmp_path)


def test_a_mixture_that_was_kept_expert_by_expert_goes_on(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_CHUNK_BYTES", 1 << 12)  # one expert of a layer
    check_next_updates(write_mixture(samples, tmp_path / "old"), tmp_path / "old", tmp_path)


def test_of_a_mixture_an_engine_has_every_weight_and_moment_of_its_old_files(
    samples: Path, tmp_path: Path
) -> None:
    convert_step(MIXTURE, samples, tmp_path / "out")
    engine = _engine(MIXTURE, samples)
    try:
        engine.load_checkpoint(str(tmp_path / "out"))
        engine.save_checkpoint(str(tmp_path / "next"), global_step=2)
    finally:
        engine.close()
    golden, moments = _golden(MIXTURE, samples), _moments(MIXTURE, samples)
    for state in read_training_state(tmp_path / "next"):
        assert torch.equal(state.master, golden.pop(state.name))
        first, second = moments.pop(state.name)
        assert torch.equal(state.first_moment, first.float())
        assert torch.equal(state.second_moment, second.float())
        assert state.update_count == 2
    assert not moments
    assert list(golden) == ["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_an_expert_that_saw_fewer_updates_is_reported(samples: Path, tmp_path: Path) -> None:
    old = write_mixture(samples, tmp_path / "old", expert_updates=1)
    receipt = convert_step(old, tmp_path / "old", tmp_path / "out")
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert any(
        f"update counts of 3 experts' matrices, such as {name}" in sentence
        for sentence in receipt.not_carried
    )
    counts = {state.name: state.update_count for state in read_training_state(tmp_path / "out")}
    assert counts[name] == 2


def test_a_missing_expert_is_an_error_that_names_its_layer(samples: Path, tmp_path: Path) -> None:
    old = write_mixture(
        samples, tmp_path / "old", without=("model.layers.1.mlp.experts.2.up_proj.weight",)
    )
    with pytest.raises(
        DamagedFileError,
        match=r"layers\.1\.mlp\.experts\.gate_up_proj there are 7 matrices, but none of number 2",
    ):
        convert_step(old, tmp_path / "old", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def convert_step(old: Old, samples: Path, out: Path) -> Receipt:
    """Convert as ``--to temper`` does."""
    (job,) = plan_jobs(samples / old.name / "checkpoints", out)
    return convert(job, Options(target="temper", checks_names=False), Sources())


def check_next_updates(old: Old, samples: Path, folder: Path) -> None:
    """Compare two updates by an engine and by torch: losses, parameters and counts."""
    convert_step(old, samples, folder / "out")
    batch = _batch()
    engine = _engine(old, samples)
    try:
        engine.load_checkpoint(str(folder / "out"))
        assert (engine.num_updates, engine.num_schedule_steps) == (2, 2)
        losses = [_update(engine, batch, old), _update(engine, batch, old)]
        engine.save_checkpoint(str(folder / "next"), global_step=4)
    finally:
        engine.close()
    new_word = {state.name: state for state in read_training_state(folder / "next")}
    expected_losses, other = _two_more_updates(old, samples, batch)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[0] == pytest.approx(expected_losses[0], rel=1e-5)
    assert new_word.keys() == other.keys()
    for weight, tensor in other.items():
        assert new_word[weight].update_count == 4, weight
        # The step is lr * m / sqrt(v): where v is tiny a gradient's last digits show.
        torch.testing.assert_close(
            new_word[weight].master,
            tensor,
            atol=5e-5,
            rtol=1e-5,
            msg=lambda given, name=weight: f"{name}: {given}",
        )


def write_mixture(
    samples: Path, folder: Path, *, expert_updates: int = 2, without: Sequence[str] = ()
) -> Old:
    """Return a sample of DeepSeek-V3's kind of one rank, whose values are as wide as its queries.

    Args:
        samples: real ones.
        folder: of samples.
        expert_updates: that the first expert saw.
        without: weights that its model file lacks; it has no moments then.
    """
    torch.manual_seed(3)
    old = Old(name="mixture")
    config = transformers.AutoConfig.from_pretrained(_base(MIXTURE, samples))
    config.v_head_dim = config.qk_head_dim
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "_base/mixture")
    full = {
        part: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        for part, tensor in _parts(name, tensor)
    }
    role = folder / old.name / "checkpoints/global_step_2/actor"
    named = _named_as_before(model)
    buffers = [name for name in full if name not in dict(named)]
    sort_by_order = {name: full[name] for name in [*dict(named), *buffers] if name not in without}
    write_fsdp(role, sort_by_order, mesh_shape=(1,), plain=buffers)
    (role / "huggingface").mkdir()
    config.save_pretrained(role / "huggingface")
    state = {}
    for number, (name, shape) in enumerate(named):
        step = torch.tensor(float(expert_updates if ".experts.0." in name else 2))
        state[number] = {
            "step": step,
            "exp_avg": torch.randn(shape) * 1e-3,
            "exp_avg_sq": torch.rand(shape) * 1e-5 + 1e-6,
        }
    if not without:
        torch.save(
            {"state": state, "param_groups": [{"params": list(state), **ADAM}]},
            role / "optim_world_size_1_rank_0.pt",
        )
    save_file(full, folder / old.name / "golden_full_state.safetensors")
    meta = {
        "base": "mixture",
        "kind": "actor",
        "fsdp": 2,
        "world_size": 1,
        "role_dir": "checkpoints/global_step_2/actor",
    }
    (folder / old.name / "META.json").write_text(json.dumps(meta))
    return old


def _batch() -> SequenceBatch:
    tokens = torch.randint(0, 259, (24,), generator=torch.Generator().manual_seed(5))
    return from_sequences([tokens], loss_masks=[torch.arange(24) >= 1])


def _meta(old: Old, samples: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((samples / old.name / "META.json").read_text())
    return result


def _base(old: Old, samples: Path) -> Path:
    return samples / "_base" / _meta(old, samples)["base"]


def _golden(old: Old, samples: Path) -> dict[str, Tensor]:
    return {
        _bare(name): tensor.float()
        for name, tensor in load_file(samples / old.name / "golden_full_state.safetensors").items()
    }


def _engine(old: Old, samples: Path) -> FSDPEngine:
    config = FSDPConfig(
        model=ModelSpec(
            path=str(_base(old, samples)),
            model_type="value_model" if old.is_critic else "language_model",
        ),
        optimizer=OptimizerSpec(**ADAM, clip_grad_norm=None, decays_vectors=True),  # type: ignore[arg-type]
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
        lora=LORA if old.has_adapter else LoraSpec(),
    )
    engine = FSDPEngine(config)
    engine.init_model()
    return engine


def _update(engine: FSDPEngine, batch: SequenceBatch, old: Old) -> float:
    """Return the loss before it."""

    def loss_of(data: Any, predictions: Mapping[str, Tensor], ctx: Any) -> tuple[Tensor, Any]:
        if old.is_critic:
            return (predictions["value"][data.loss_mask] - 1.0).square().mean(), ctx
        return -predictions["logprob"][data.loss_mask].mean(), ctx

    engine.set_loss_fn(loss_of)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        _, loss, _ = engine.forward_backward_step(batch)
    engine.optimizer_step()
    assert loss is not None
    return loss.item()


def _two_more_updates(
    old: Old, samples: Path, batch: SequenceBatch
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses before each update, and the trained state by portable name."""
    golden = _golden(old, samples)
    model = _model(old, samples)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments = _moments(old, samples)
    optimizer = torch.optim.AdamW(trained.values(), **ADAM)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(_of(golden, name))
        for name, parameter in trained.items():
            first, second = ({of: kept[side] for of, kept in moments.items()} for side in (0, 1))
            optimizer.state[parameter] = {
                "step": torch.tensor(2.0),
                "exp_avg": _of(first, name).float(),
                "exp_avg_sq": _of(second, name).float(),
            }
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(input_ids=batch.tokens[None]).logits[0, :-1]
        loss = (
            (logits[:, 0] - 1.0).square().mean()
            if old.is_critic
            else nn.functional.cross_entropy(logits, batch.tokens[1:])
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {
        part: tensor
        for name, parameter in trained.items()
        for part, tensor in _parts(name, parameter.detach())
    }


def _model(old: Old, samples: Path) -> nn.Module:
    """Build a model with random numbers."""
    config = transformers.AutoConfig.from_pretrained(_base(old, samples))
    if old.is_critic:
        config.num_labels, config.classifier_dropout = 1, 0.0
        return transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if old.has_adapter:
        return peft.get_peft_model(
            model,
            peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    return model


_JOINED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_NUM_EXPERTS = 4


def _bare(name: str) -> str:
    """Return one name for what the old classes and today's call differently."""
    return (
        name.removeprefix("pretrained_model.")
        .replace("v_head.summary.", "score.")
        .replace(".default.", ".")
    )


def _of(by_name: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor of today's model: experts stacked, gate above up."""
    joined = _JOINED.fullmatch(name)
    if joined is None:
        is_tied = name.endswith("lm_head.weight") and _bare(name) not in by_name
        return by_name[_bare(name.replace("lm_head", "model.embed_tokens") if is_tied else name)]
    kinds = ("gate_proj", "up_proj") if joined[2] == "gate_up_proj" else ("down_proj",)
    return torch.stack(
        [
            torch.cat([by_name[f"{joined[1]}.{e}.{kind}.weight"] for kind in kinds])
            for e in range(_NUM_EXPERTS)
        ]
    )


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the reverse."""
    joined = _JOINED.fullmatch(name)
    if joined is None:
        yield _bare(name), tensor
        return
    for number, expert in enumerate(tensor):
        kinds = ("gate_proj", "up_proj") if joined[2] == "gate_up_proj" else ("down_proj",)
        yield from (
            (f"{joined[1]}.{number}.{kind}.weight", part)
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True)
        )


def _moments(old: Old, samples: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both moments by name, put together from every rank's file by hand."""
    meta = _meta(old, samples)
    role = samples / old.name / str(meta["role_dir"])
    world = int(meta["world_size"])
    files = [role / f"optim_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    states = [torch.load(file, weights_only=False, map_location="cpu")["state"] for file in files]
    assert all(float(state["step"]) == 2 for of_rank in states for state in of_rank.values())
    units = _units(old, samples, is_flat=meta["fsdp"] == 1)
    numbers = sorted(states[0])
    if old.has_adapter:  # frozen parameters are numbered too, and have no state
        units = dict(zip(numbers, units.values(), strict=True))
    result = {}
    for number in numbers:
        sides = []
        for side in ("exp_avg", "exp_avg_sq"):
            pieces = [of_rank[number][side] for of_rank in states]
            full = torch.cat([getattr(piece, "_local_tensor", piece) for piece in pieces]).flatten()
            sizes = [math.prod(shape) for _, shape in units[number]]
            assert 0 <= len(full) - sum(sizes) < world, "no more than padding is left over"
            sides.append(full[: sum(sizes)].split(sizes))
        for (name, shape), first, second in zip(units[number], *sides, strict=True):
            result[name] = (first.view(shape), second.view(shape))
    return result


def _units(old: Old, samples: Path, *, is_flat: bool) -> dict[int, list[tuple[str, torch.Size]]]:
    """Return the parameters that each number of the old optimizer stands for."""
    named = [
        entry
        for entry in _named_as_before(_model(old, samples))
        if not old.has_adapter or ".lora_" in entry[0]
    ]
    if "trl" in _meta(old, samples)["kind"]:
        vocabulary, hidden = dict(named)["model.embed_tokens.weight"]
        named.insert(-2, ("lm_head.weight", torch.Size((vocabulary, hidden))))
    if old.has_adapter or not is_flat:
        return {number: [entry] for number, entry in enumerate(named)}
    units: dict[str, list[tuple[str, torch.Size]]] = {"": []}
    for name, shape in named:
        layer = re.match(r"model\.layers\.\d+\.", name)
        units.setdefault(layer[0] if layer else "", []).append((name, shape))
    return dict(enumerate(units.values()))


def _named_as_before(model: nn.Module) -> list[tuple[str, torch.Size]]:
    """Return the names and shapes in the order of the old model's modules.

    An expert's three matrices one after the other.
    """
    result: list[tuple[str, torch.Size]] = []
    for name, parameter in model.named_parameters():
        if name.endswith(".experts.down_proj"):
            continue
        if not name.endswith(".experts.gate_up_proj"):
            result.append((_bare(name), parameter.shape))
            continue
        experts = name.removesuffix(".gate_up_proj")
        _, rows, columns = parameter.shape
        up, down = torch.Size((rows // 2, columns)), torch.Size((columns, rows // 2))
        for number in range(_NUM_EXPERTS):
            of = f"{experts}.{number}"
            result += [
                (f"{of}.gate_proj.weight", up),
                (f"{of}.up_proj.weight", up),
                (f"{of}.down_proj.weight", down),
            ]
    return result
