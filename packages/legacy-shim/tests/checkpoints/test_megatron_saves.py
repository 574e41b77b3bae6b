"""Megatron's own saves on several ranks, read without Megatron.

Weights, masters, moments and counts are what each engine had.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import megatron_saves
from megatron_engines import check_states
from test_megatron import CONFIG
from test_megatron_genuine import MIXTURE

from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.layout import Layout
from temper_legacy_shim.checkpoints import open_checkpoint
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.checkpoints.temper.training_state import resumable, training_state

pytest.importorskip(
    "megatron.core",
    reason="needs megatron-core: an environment with temper-engine-megatron runs this",
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DENSE = {**CONFIG, "num_hidden_layers": 4}
EXPERTS = {**MIXTURE, "num_hidden_layers": 4}
TIED = DENSE | {
    "tie_word_embeddings": True,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
}


def layout(name: str, world_size: int, **fields: object) -> Layout:
    return Layout(
        name=name, world_size=world_size, fields={"distributed_optimizer": True, **fields}
    )


TP2_DP2 = layout("tp2-dp2", 4, tensor_parallel=2)
TP2_PP2 = layout("tp2-pp2", 4, tensor_parallel=2, pipeline_parallel=2)
PP2_VPP2 = layout("pp2-vpp2", 2, pipeline_parallel=2, virtual_pipeline=2)
PP2_VPP2_DP2 = layout("pp2-vpp2-dp2", 4, pipeline_parallel=2, virtual_pipeline=2)
EP2 = layout("ep2", 2, expert_parallel=2)
EP2_DP2 = layout("ep2-dp2", 4, expert_parallel=2)
EP2_PP2 = layout("ep2-pp2", 4, expert_parallel=2, pipeline_parallel=2)
TP2_EP2 = layout(
    "tp2-ep2",
    2,
    tensor_parallel=2,
    sequence_parallel=True,
    expert_parallel=2,
    expert_tensor_parallel=1,
)
TP2_DP2_EP2 = layout("tp2-dp2-ep2", 4, tensor_parallel=2, sequence_parallel=True, expert_parallel=2)
ONLY = layout("alone", 1)


@pytest.fixture(scope="module")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    """Yield the two rank processes, and four; none is started before it is asked for."""
    ranks = {
        size: RankPool(size, folder=tmp_path_factory.mktemp(f"ranks-{size}"), job_timeout_s=300)
        for size in (2, 4)
    }
    yield ranks
    for each in ranks.values():
        each.close()


def save(
    job: Any,
    rank_pools: Mapping[int, RankPool],
    folder: Path,
    architecture: Mapping[str, object],
    at: Layout,
    **arguments: object,
) -> Any:
    """Return a role directory, and what the optimizer held."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(**{"model_type": architecture["model_type"], **architecture})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    setup = EngineSetup(model_path=str(folder / "model"), optimizer=ADAMW, compute="bf16")
    folder = folder / "actor"
    rank_pool = rank_pools[max(at.world_size, 2)]
    expected = rank_pool.run(
        job, engine="megatron", layout=at, arguments={"setup": setup, "folder": folder, **arguments}
    )[0]
    described = folder / (
        "hf_config_and_tokenizer" if job is megatron_saves.save_ranks else "huggingface"
    )
    described.mkdir(parents=True, exist_ok=True)
    (described / "config.json").write_text(json.dumps(architecture))
    return expected


def check(folder: Path, expected: Mapping[str, Any], **given: Any) -> None:
    """Compare bit for bit."""
    model = open_checkpoint(folder / "actor", **given)
    assert model.weights.keys() == expected.keys()
    for name, tensor in model.weights.items():
        assert torch.equal(as_torch(tensor), expected[name].master.bfloat16()), name
    check_states(training_state(model), expected)


# Nightly: each case starts two or four ranks of Megatron. One with experts on two ranks runs every
# day.
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    "sharding", ["dp_reshardable", pytest.param("fully_reshardable", marks=nightly)]
)
@pytest.mark.parametrize(
    ("architecture", "at"),
    [
        pytest.param(DENSE, TP2_DP2, id="tp2-dp2", marks=nightly),
        pytest.param(DENSE, TP2_PP2, id="tp2-pp2", marks=nightly),
        pytest.param(DENSE, PP2_VPP2_DP2, id="pp2-vpp2-dp2", marks=nightly),
        pytest.param(EXPERTS, ONLY, id="experts-alone", marks=nightly),
        pytest.param(EXPERTS, EP2, id="experts-ep2"),
        pytest.param(EXPERTS, EP2_DP2, id="experts-ep2-dp2", marks=nightly),
        pytest.param(EXPERTS, EP2_PP2, id="experts-ep2-pp2", marks=nightly),
        pytest.param(EXPERTS, TP2_EP2, id="experts-tp2-ep2", marks=nightly),
        pytest.param(EXPERTS, TP2_DP2_EP2, id="experts-tp2-dp2-ep2", marks=nightly),
    ],
)
def test_a_distributed_save_is_read_as_its_engine_had_it(
    rank_pools: Mapping[int, RankPool],
    tmp_path: Path,
    architecture: dict[str, object],
    at: Layout,
    sharding: str,
) -> None:
    check(
        tmp_path,
        save(
            megatron_saves.save_distributed,
            rank_pools,
            tmp_path,
            architecture,
            at,
            sharding=sharding,
        ),
    )


@nightly
def test_buckets_of_tied_embeddings_over_two_stages_are_distinguished(
    rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    check(
        tmp_path,
        save(
            megatron_saves.save_distributed,
            rank_pools,
            tmp_path,
            TIED,
            TP2_PP2,
            sharding="dp_reshardable",
        ),
    )


@nightly
def test_an_optimizer_that_megatron_itself_saved_shifted_is_not_believed(
    rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    save(
        megatron_saves.save_distributed,
        rank_pools,
        tmp_path,
        TIED,
        TP2_PP2,
        sharding="fully_reshardable",
    )
    kept = resumable(open_checkpoint(tmp_path / "actor"))
    assert not kept.moments
    assert any("does not round to the weight next to it" in reason for reason in kept.not_carried)


@pytest.mark.parametrize(
    ("architecture", "at", "is_of_0_4", "all_experts"),
    [
        pytest.param(DENSE, TP2_DP2, False, False, id="0.3-tp2-dp2", marks=nightly),
        pytest.param(DENSE, TP2_DP2, True, False, id="0.4.0-tp2-dp2", marks=nightly),
        pytest.param(TIED, TP2_PP2, True, False, id="tied-tp2-pp2", marks=nightly),
        pytest.param(DENSE, PP2_VPP2_DP2, True, False, id="pp2-vpp2-dp2", marks=nightly),
        pytest.param(EXPERTS, ONLY, False, False, id="experts-alone", marks=nightly),
        pytest.param(
            EXPERTS, TP2_EP2, False, False, id="0.3-experts-over-tensor-ranks", marks=nightly
        ),
        pytest.param(EXPERTS, TP2_EP2, True, False, id="0.4.0-experts-over-tensor-ranks"),
        pytest.param(EXPERTS, EP2_DP2, True, True, id="0.4.0-experts-ep2-dp2", marks=nightly),
        pytest.param(EXPERTS, EP2_PP2, True, True, id="0.4.0-experts-ep2-pp2", marks=nightly),
    ],
)
def test_per_rank_files_are_read_as_their_engine_had_them(
    rank_pools: Mapping[int, RankPool],
    tmp_path: Path,
    architecture: dict[str, object],
    at: Layout,
    is_of_0_4: bool,
    all_experts: bool,
) -> None:
    expected = save(
        megatron_saves.save_ranks,
        rank_pools,
        tmp_path,
        architecture,
        at,
        is_of_0_4=is_of_0_4,
        all_experts=all_experts,
    )
    check(tmp_path, expected, num_updates=2)


@nightly
def test_of_experts_whose_ranks_wrote_one_file_the_receipt_says_what_was_lost(
    rank_pools: Mapping[int, RankPool], tmp_path: Path
) -> None:
    save(
        megatron_saves.save_ranks,
        rank_pools,
        tmp_path,
        EXPERTS,
        EP2,
        is_of_0_4=False,
        all_experts=True,
    )
    kept = resumable(open_checkpoint(tmp_path / "actor", num_updates=2))
    assert not kept.moments
    assert any("several expert ranks wrote one file" in reason for reason in kept.not_carried)


@pytest.mark.bitwise
@nightly
@pytest.mark.parametrize(
    ("architecture", "at"),
    [pytest.param(EXPERTS, EP2, id="ep2"), pytest.param(DENSE, PP2_VPP2, id="pp2-vpp2")],
)
def test_a_run_goes_on_in_megatron_from_its_own_converted_save(
    rank_pools: Mapping[int, RankPool], tmp_path: Path, architecture: dict[str, object], at: Layout
) -> None:
    save(
        megatron_saves.save_distributed,
        rank_pools,
        tmp_path,
        architecture,
        at,
        sharding="dp_reshardable",
    )
    run_command(
        [
            "checkpoint",
            str(tmp_path / "actor"),
            "--to",
            "temper",
            "--out",
            str(tmp_path / "resumed"),
        ]
    )
    setup = EngineSetup(model_path=str(tmp_path / "model"), optimizer=ADAMW, compute="bf16")

    def update(folder: Path | None) -> Any:
        return rank_pools[2].run(
            megatron_saves.next_update,
            engine="megatron",
            layout=at,
            arguments={"setup": setup, "folder": folder},
        )[0]

    full, resumed = update(None), update(tmp_path / "resumed")
    assert resumed.grad_norm == full.grad_norm > 0
    for name, state in full.state.items():
        for column in ("master", "first_moment", "second_moment"):
            assert torch.equal(getattr(resumed.state[name], column), getattr(state, column)), (
                name,
                column,
            )
        assert resumed.state[name].update_count == 3


def run_command(arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from temper_legacy_shim.cli import app

    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, (ended.output, ended.exception)


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor, by torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def taken_apart(select_kind: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the stacked fused adapters under PEFT's names, by hand.

    Rows of B by query group, and gate above up.
    """
    result = {}
    heads, groups, dim = (
        DENSE["num_attention_heads"],
        DENSE["num_key_value_heads"],
        DENSE["head_dim"],
    )

    def half_of(layer: int, host: str, side: str) -> torch.Tensor:
        return select_kind[f"decoder.layers.{host}.adapter.linear_{side}.weight"][layer]

    for layer in range(DENSE["num_hidden_layers"]):
        half = partial(half_of, layer)
        grouped = half("self_attention.linear_qkv", "out").view(
            groups, heads // groups + 2, dim, -1
        )
        gate, up = half("mlp.linear_fc1", "out").chunk(2)
        parts = {
            "self_attn.q_proj": ("self_attention.linear_qkv", grouped[:, :-2].flatten(0, 2)),
            "self_attn.k_proj": ("self_attention.linear_qkv", grouped[:, -2].flatten(0, 1)),
            "self_attn.v_proj": ("self_attention.linear_qkv", grouped[:, -1].flatten(0, 1)),
            "self_attn.o_proj": (
                "self_attention.linear_proj",
                half("self_attention.linear_proj", "out"),
            ),
            "mlp.gate_proj": ("mlp.linear_fc1", gate),
            "mlp.up_proj": ("mlp.linear_fc1", up),
            "mlp.down_proj": ("mlp.linear_fc2", half("mlp.linear_fc2", "out")),
        }
        for module, (host, rows) in parts.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            result[f"{prefix}.lora_A.weight"], result[f"{prefix}.lora_B.weight"] = (
                half(host, "in"),
                rows,
            )
    return result


@pytest.mark.parametrize(
    "sharding", ["dp_reshardable", pytest.param("fully_reshardable", marks=nightly)]
)
@pytest.mark.parametrize(
    ("at", "is_private"),
    [
        pytest.param(ONLY, False, id="alone", marks=nightly),
        pytest.param(layout("tp2", 2, tensor_parallel=2), False, id="tp2"),
        pytest.param(TP2_PP2, False, id="tp2-pp2", marks=nightly),
        pytest.param(TP2_PP2, True, id="0.7-tp2-pp2", marks=nightly),
        pytest.param(PP2_VPP2_DP2, False, id="pp2-vpp2-dp2", marks=nightly),
    ],
)
def test_an_adapters_masters_and_moments_are_those_of_its_optimizer(
    rank_pools: Mapping[int, RankPool], tmp_path: Path, at: Layout, is_private: bool, sharding: str
) -> None:
    save(
        megatron_saves.save_adapter,
        rank_pools,
        tmp_path,
        DENSE,
        at,
        sharding=sharding,
        is_private=is_private,
    )
    raw = read_by_torch(tmp_path / "actor/again/dist_ckpt")
    of_adapters = {name: tensor for name, tensor in raw.items() if ".adapter." in name}

    def select_kind(kind: str) -> dict[str, torch.Tensor]:
        prefix = f"optimizer.state.{kind}."
        return taken_apart(
            {
                name.removeprefix(prefix): tensor
                for name, tensor in of_adapters.items()
                if name.startswith(prefix)
            }
        )

    kinds = {kind: select_kind(kind) for kind in ("param", "exp_avg", "exp_avg_sq")}
    folder = tmp_path / "actor/first"
    (tmp_path / "actor/huggingface").rename(folder / "huggingface")
    state = resumable(open_checkpoint(folder, lora_alpha=8))
    assert state.model.weights.keys() == kinds["param"].keys()
    for name in state.model.weights:
        assert torch.equal(as_torch(state.model.weights[name]), kinds["param"][name]), name
        assert torch.equal(as_torch(state.moments[name].first), kinds["exp_avg"][name]), name
        assert torch.equal(as_torch(state.moments[name].second), kinds["exp_avg_sq"][name]), name
    assert state.num_updates == 2
    assert kinds["exp_avg"][name].abs().sum() > 0
    assert any("shared one A" in note for note in state.model.notes)
