"""Megatron's layouts at sizes that no sample has.

Cut up here by the rules of tensor, pipeline, virtual-pipeline and expert ranks.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from temper_legacy_shim.checkpoints import open_checkpoint
from temper_legacy_shim.checkpoints.adapters import merged
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, as_torch
from temper_legacy_shim.checkpoints.layouts import find_roles
from temper_legacy_shim.checkpoints.model import Sources, read_model
from temper_legacy_shim.checkpoints.temper.training_state import resumable
from temper_legacy_shim.errors import DamagedFileError, LayoutError

LAYERS, HIDDEN, HEADS, GROUPS, DIM, FFN, VOCAB, EXPERTS = 8, 16, 4, 2, 6, 12, 37, 4
PADDED = 40
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def _model(*, experts: int = 0) -> dict[str, Tensor]:
    """Return the seeded weights under Hugging Face names."""
    g = torch.Generator().manual_seed(1)
    made = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        made |= {
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
        }
        made |= {
            p + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        }
        made |= {p + f"self_attn.{n}_proj.weight": (GROUPS * DIM, HIDDEN) for n in "kv"}
        prefixes = [f"{p}mlp.experts.{e}." for e in range(experts)] or [p + "mlp."]
        made |= {p + "mlp.gate.weight": (experts, HIDDEN)} if experts else {}
        for q in prefixes:
            made |= {
                q + "gate_proj.weight": (FFN, HIDDEN),
                q + "up_proj.weight": (FFN, HIDDEN),
                q + "down_proj.weight": (HIDDEN, FFN),
            }
    return {name: torch.randn(shape, generator=g) for name, shape in made.items()}


def _qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the per query group: its queries, its key, its value."""
    parts = []
    for group in range(GROUPS):
        heads = HEADS // GROUPS
        parts += [
            q[group * heads * DIM : (group + 1) * heads * DIM],
            k[group * DIM : (group + 1) * DIM],
            v[group * DIM : (group + 1) * DIM],
        ]
    return torch.cat(parts)


def _padded(table: Tensor) -> Tensor:
    return torch.cat([table, torch.zeros(PADDED - VOCAB, HIDDEN)])


def _layer(
    hf: Mapping[str, Tensor], i: int, *, tp: int, num_tp: int, experts: range, grouped: bool
) -> dict[str, Tensor]:
    p = f"model.layers.{i}."
    rows = lambda t: t.chunk(num_tp)[tp]  # noqa: E731
    columns = lambda t: t.chunk(num_tp, dim=1)[tp].contiguous()  # noqa: E731
    attention = _qkv(*(hf[f"{p}self_attn.{n}_proj.weight"] for n in "qkv"))
    made = {
        "self_attention.linear_qkv.layer_norm_weight": hf[p + "input_layernorm.weight"],
        "self_attention.linear_qkv.weight": rows(attention),
        "self_attention.linear_qkv._extra_state": torch.zeros(3, dtype=torch.uint8),
        "self_attention.linear_proj.weight": columns(hf[p + "self_attn.o_proj.weight"]),
    }
    gated = lambda q: torch.cat([rows(hf[q + "gate_proj.weight"]), rows(hf[q + "up_proj.weight"])])  # noqa: E731
    if p + "mlp.gate.weight" not in hf:
        made["mlp.linear_fc1.layer_norm_weight"] = hf[p + "post_attention_layernorm.weight"]
        return made | {
            "mlp.linear_fc1.weight": gated(p + "mlp."),
            "mlp.linear_fc2.weight": columns(hf[p + "mlp.down_proj.weight"]),
        }
    made |= {
        "pre_mlp_layernorm.weight": hf[p + "post_attention_layernorm.weight"],
        "mlp.router.weight": hf[p + "mlp.gate.weight"],
    }
    for local, expert in enumerate(experts):
        q = f"{p}mlp.experts.{expert}."
        names = [
            f"mlp.experts.linear_fc{n}.weight{local}"
            if grouped
            else f"mlp.experts.local_experts.{local}.linear_fc{n}.weight"
            for n in (1, 2)
        ]
        made |= {names[0]: gated(q), names[1]: columns(hf[q + "down_proj.weight"])}
    return made


def _write_ranks(
    folder: Path,
    hf: Mapping[str, Tensor],
    *,
    tp: int,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    grouped: bool = False,
) -> None:
    per_chunk = LAYERS // (pp * vpp)
    num_experts = sum(
        1
        for name in hf
        if name.startswith("model.layers.0.mlp.experts.") and name.endswith("up_proj.weight")
    )
    for t in range(tp):
        for stage in range(pp):
            for e in range(ep):
                local_experts = range(e * num_experts // ep, (e + 1) * num_experts // ep)
                chunks = []
                for virtual in range(vpp):
                    first = (virtual * pp + stage) * per_chunk
                    chunk: dict[str, Tensor] = {}
                    if first == 0:
                        chunk["embedding.word_embeddings.weight"] = _padded(
                            hf["model.embed_tokens.weight"]
                        ).chunk(tp)[t]
                    for local in range(per_chunk):
                        layer = _layer(
                            hf,
                            first + local,
                            tp=t,
                            num_tp=tp,
                            experts=local_experts,
                            grouped=grouped,
                        )
                        chunk |= {
                            f"decoder.layers.{local}.{name}": tensor
                            for name, tensor in layer.items()
                        }
                    if first + per_chunk == LAYERS:
                        chunk["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
                        chunk["output_layer.weight"] = _padded(hf["lm_head.weight"]).chunk(tp)[t]
                    chunks.append({name: tensor.clone() for name, tensor in chunk.items()})
                name = (
                    f"mp_rank_{t:02d}"
                    + (f"_{stage:03d}" if pp > 1 else "")
                    + (f"_{e:03d}" if ep > 1 else "")
                )
                (folder / "model" / name).mkdir(parents=True)
                torch.save(chunks, folder / "model" / name / "model.pt")
    _write_config(folder / "hf_config_and_tokenizer")


def _write_config(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _assert_equal(have: Mapping[str, LazyTensor], want: Mapping[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    assert [
        name for name, tensor in want.items() if not torch.equal(as_torch(have[name]), tensor)
    ] == []


@pytest.mark.parametrize(
    ("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)]
)
def test_ranks_of_every_layout_make_the_full_model(
    tmp_path: Path, tp: int, pp: int, vpp: int
) -> None:
    hf = _model()
    _write_ranks(tmp_path / "actor", hf, tp=tp, pp=pp, vpp=vpp)
    _assert_equal(open_checkpoint(tmp_path / "actor").weights, hf)


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "grouped"),
    [(1, 1, 2, False), (2, 1, 2, True), (1, 2, 2, False), (1, 2, 4, True), (2, 1, 1, False)],
)
def test_expert_ranks_make_the_full_mixture(
    tmp_path: Path, tp: int, pp: int, ep: int, grouped: bool
) -> None:
    hf = _model(experts=EXPERTS)
    _write_ranks(tmp_path / "actor", hf, tp=tp, pp=pp, ep=ep, grouped=grouped)
    _assert_equal(open_checkpoint(tmp_path / "actor").weights, hf)


def test_a_mixtral_of_megatron_s_is_written_under_mixtral_s_own_names(tmp_path: Path) -> None:
    import transformers

    from temper_legacy_shim.checkpoints import Options, convert, plan_jobs

    hf = _model(experts=EXPERTS)
    _write_ranks(tmp_path / "actor", hf, tp=2, ep=2, grouped=True)
    mixtral = CONFIG | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
    }
    (tmp_path / "actor/hf_config_and_tokenizer/config.json").write_text(json.dumps(mixtral))
    convert(plan_jobs(tmp_path / "actor", tmp_path / "out")[0], Options(), Sources())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    result = dict(model.state_dict())
    for layer in range(LAYERS):
        p = f"model.layers.{layer}.mlp.experts."
        parts = [
            [hf[f"{p}{e}.{part}_proj.weight"] for e in range(EXPERTS)]
            for part in ("gate", "up", "down")
        ]
        assert torch.equal(
            result.pop(f"{p}gate_up_proj"),
            torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], dim=1),
        )
        assert torch.equal(result.pop(f"{p}down_proj"), torch.stack(parts[2]))
    assert result.keys() == {name for name in hf if ".experts." not in name}
    assert all(torch.equal(tensor, hf[name]) for name, tensor in result.items())


def test_experts_that_were_never_saved_are_missed(tmp_path: Path) -> None:
    # 0.4.0 with experts over data-parallel ranks: of every expert rank but the first there is no
    # file.
    _write_ranks(tmp_path / "actor", _model(experts=EXPERTS), tp=1, ep=2)
    shutil.rmtree(tmp_path / "actor/model/mp_rank_00_001")
    config = tmp_path / "actor/hf_config_and_tokenizer/config.json"
    config.write_text(json.dumps(CONFIG | {"num_experts": EXPERTS}))
    with pytest.raises(
        DamagedFileError,
        match=(
            rf"layer 0 has 2 experts \(up to number 1\), but the config has {EXPERTS}\. 0\.4\.0 "
            r"saved"
        ),
    ):
        open_checkpoint(tmp_path / "actor")


@pytest.mark.parametrize(("tp", "ep", "pp"), [(2, 2, 1), (4, 2, 1), (4, 2, 2)])
def test_experts_divided_over_tensor_ranks_make_the_full_mixture(
    tmp_path: Path, tp: int, ep: int, pp: int
) -> None:
    # Expert tensor parallelism below the rest's: tensor rank t is expert rank t // (tp / ep), with
    # 1 / (tp / ep) of its experts' rows.
    hf = _model(experts=EXPERTS)
    size = tp // ep
    _write_ranks(tmp_path / "dense", hf, tp=tp, pp=pp, ep=ep, grouped=True)
    _write_ranks(tmp_path / "experts", hf, tp=size, pp=pp, ep=ep, grouped=True)
    for rank in range(tp):
        for stage in range(pp):
            suffix = (f"_{stage:03d}" if pp > 1 else "") + f"_{rank // size:03d}"
            chunks = torch.load(tmp_path / f"dense/model/mp_rank_{rank:02d}{suffix}/model.pt")
            own = torch.load(tmp_path / f"experts/model/mp_rank_{rank % size:02d}{suffix}/model.pt")
            mixed = [
                chunk | {name: t for name, t in other.items() if ".experts." in name}
                for chunk, other in zip(chunks, own, strict=True)
            ]
            (tmp_path / f"actor/model/mp_rank_{rank:02d}{suffix}").mkdir(parents=True)
            torch.save(mixed, tmp_path / f"actor/model/mp_rank_{rank:02d}{suffix}/model.pt")
    _write_config(tmp_path / "actor/hf_config_and_tokenizer")
    _assert_equal(open_checkpoint(tmp_path / "actor").weights, hf)


def test_a_rank_that_was_not_copied_is_named(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=2, pp=2)
    (tmp_path / "actor/model/mp_rank_01_000/model.pt").unlink()
    with pytest.raises(LayoutError, match="tensor rank 1, stage 0"):
        open_checkpoint(tmp_path / "actor")


def test_a_last_stage_that_was_not_copied_is_noticed(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=2, pp=4)
    for rank in range(2):
        shutil.rmtree(tmp_path / f"actor/model/mp_rank_{rank:02d}_003")
    with pytest.raises(LayoutError, match="has 6 of 8 layers, none of number 6"):
        open_checkpoint(tmp_path / "actor")


def test_a_copy_of_another_rank_s_file_is_noticed(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=2, pp=2)
    model = tmp_path / "actor/model"
    (model / "mp_rank_01_001/model.pt").write_bytes(
        (model / "mp_rank_00_001/model.pt").read_bytes()
    )
    with pytest.raises(DamagedFileError, match="tensor ranks 0 and 1 of stage 1 hold the same"):
        open_checkpoint(tmp_path / "actor")


def test_another_model_s_config_is_refused(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=1)
    (tmp_path / "actor/hf_config_and_tokenizer/config.json").write_text(
        json.dumps({**CONFIG, "num_attention_heads": 8})
    )
    with pytest.raises(DamagedFileError, match="is this the model's config"):
        open_checkpoint(tmp_path / "actor")


def _stacked(hf: Mapping[str, Tensor], *, experts: int = 0) -> dict[str, Tensor]:
    """Stack tensors as Megatron's distributed format does.

    Full matrices, stacked layers and experts.
    """
    layers = [
        _layer(hf, i, tp=0, num_tp=1, experts=range(experts), grouped=False) for i in range(LAYERS)
    ]
    made = {
        f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers])
        for name in layers[0]
        if "experts" not in name
    }
    for n in (1, 2) if experts else ():
        of_layer = [
            torch.stack(
                [
                    layer[f"mlp.experts.local_experts.{e}.linear_fc{n}.weight"]
                    for e in range(experts)
                ]
            )
            for layer in layers
        ]
        made[f"decoder.layers.mlp.experts.experts.linear_fc{n}.weight"] = torch.stack(of_layer)
    made.pop("decoder.layers.self_attention.linear_qkv._extra_state")
    made["embedding.word_embeddings.weight"] = _padded(hf["model.embed_tokens.weight"])
    made["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    return made | {"output_layer.weight": _padded(hf["lm_head.weight"])}


def _write_dist(folder: Path, tensors: Mapping[str, Tensor], common: object = None) -> None:
    save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)
    torch.save({} if common is None else common, folder / "common.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("experts", [0, EXPERTS])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_stacked_layers_and_experts_are_taken_apart(
    tmp_path: Path, experts: int, prefix: str
) -> None:
    hf = _model(experts=experts)
    _write_dist(
        tmp_path / "actor/dist_ckpt",
        {prefix + name: tensor for name, tensor in _stacked(hf, experts=experts).items()},
    )
    _write_config(tmp_path / "actor/huggingface")
    _assert_equal(open_checkpoint(tmp_path / "actor").weights, hf)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_split_layout_of_0_9_carries_its_moments(tmp_path: Path) -> None:
    hf = _model()
    folder = tmp_path / "global_step_7/actor"
    _write_dist(folder / "model/dist_ckpt", _stacked(hf))
    first, second = (
        {name: tensor * f for name, tensor in _stacked(hf).items()} for f in (0.5, 2.0)
    )
    state = {f"optimizer.state.exp_avg.{name}": tensor for name, tensor in first.items()}
    state |= {f"optimizer.state.exp_avg_sq.{name}": tensor for name, tensor in second.items()}
    _write_dist(
        folder / "optimizer/dist_ckpt",
        state,
        {"optimizer": {"optimizer": {"param_groups": [{"step": 7, "lr": 1e-5}]}}},
    )
    _write_config(folder / "model/huggingface")
    (folder / "ckpt_contents.json").write_text('{"schema_version": 2}')
    (role,) = find_roles(tmp_path)
    assert role.version == "0.9.0 or newer"
    kept = resumable(read_model(role, Sources()))
    _assert_equal(
        {name: moments.first for name, moments in kept.moments.items()},
        {name: 0.5 * tensor for name, tensor in hf.items()},
    )
    _assert_equal(
        {name: moments.second for name, moments in kept.moments.items()},
        {name: 2.0 * tensor for name, tensor in hf.items()},
    )
    assert kept.num_updates == 7


RANK = 4
SHAPES = {  # (rows of B, columns of A) of each adapted matrix
    "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * DIM, HIDDEN),
    "self_attention.linear_proj": (HIDDEN, HEADS * DIM),
    "mlp.linear_fc1": (2 * FFN, HIDDEN),
    "mlp.linear_fc2": (HIDDEN, FFN),
}


def _adapter() -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return (A, B) of Megatron's matrices by layer and module."""
    g = torch.Generator().manual_seed(2)
    return {
        (i, module): (torch.randn(RANK, columns, generator=g), torch.randn(rows, RANK, generator=g))
        for i in range(LAYERS)
        for module, (rows, columns) in SHAPES.items()
    }


def _write_adapters(folder: Path, *, tp: int, pp: int, layers: int = LAYERS) -> None:
    """Write the private files of 0.7: names local to the stage.

    Columns and rows cut as the base is.
    """
    folder.mkdir(parents=True)
    for t in range(tp):
        for stage in range(pp):
            state = {}
            for (layer, module), (down, up) in _adapter().items():
                if layer // (layers // pp) != stage or layer >= layers:
                    continue
                name = f"decoder.layers.{layer % (layers // pp)}.{module}.adapter."
                is_row = module in ("self_attention.linear_proj", "mlp.linear_fc2")
                state[f"{name}linear_in.weight"] = down.chunk(tp, dim=1 if is_row else 0)[t].clone()
                halves = up.chunk(2) if module == "mlp.linear_fc1" else (up,)
                state[f"{name}linear_out.weight"] = torch.cat(
                    [half.chunk(tp)[t] for half in halves]
                )
            suffix = f"_{stage:03d}" if pp > 1 else ""
            torch.save(
                {"adapter_state_dict": state}, folder / f"mp_rank_{t:02d}{suffix}_adapter.pt"
            )


def _folded(hf: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Return the base with every product added where Megatron would add it, in Megatron's rows."""
    made = dict(hf)
    for (i, module), (down, up) in _adapter().items():
        delta, p = scale * (up @ down), f"model.layers.{i}."
        if module == "self_attention.linear_qkv":
            index = torch.arange(delta.shape[0])
            rows = _qkv_rows(index)
            for n in "qkv":
                made[f"{p}self_attn.{n}_proj.weight"] = (
                    made[f"{p}self_attn.{n}_proj.weight"] + delta[rows[n]]
                )
        elif module == "mlp.linear_fc1":
            for name, half in zip(("gate", "up"), delta.chunk(2)):
                made[f"{p}mlp.{name}_proj.weight"] = made[f"{p}mlp.{name}_proj.weight"] + half
        else:
            name = "self_attn.o_proj" if "proj" in module else "mlp.down_proj"
            made[f"{p}{name}.weight"] = made[f"{p}{name}.weight"] + delta
    return made


def _qkv_rows(index: Tensor) -> dict[str, Tensor]:
    per_group = index.reshape(GROUPS, -1)
    heads = HEADS // GROUPS
    q, k, v = (
        per_group[:, : heads * DIM],
        per_group[:, heads * DIM : (heads + 1) * DIM],
        per_group[:, (heads + 1) * DIM :],
    )
    return {"q": q.reshape(-1), "k": k.reshape(-1), "v": v.reshape(-1)}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_private_adapters_fold_into_the_base_as_megatron_adds_them(
    tmp_path: Path, tp: int, pp: int
) -> None:
    hf = _model()
    _write_ranks(tmp_path / "actor", hf, tp=1)
    _write_adapters(tmp_path / "actor/adapter_checkpoint", tp=tp, pp=pp)
    model = open_checkpoint(tmp_path / "actor", lora_alpha=8.0)
    assert model.adapter is not None
    assert model.adapter.rank == RANK
    folded = merged(model.weights, model.adapter)
    for name, tensor in _folded(hf, scale=2.0).items():
        torch.testing.assert_close(as_torch(folded[name]), tensor, atol=1e-5, rtol=1e-5)


def test_adapters_that_virtual_pipelining_lost_are_not_passed_over(tmp_path: Path) -> None:
    _write_ranks(tmp_path / "actor", _model(), tp=1)
    _write_adapters(tmp_path / "actor/adapter_checkpoint", tp=1, pp=2, layers=LAYERS // 2)
    with pytest.raises(DamagedFileError, match="--partial-adapter"):
        open_checkpoint(tmp_path / "actor", lora_alpha=8.0)
    (role,) = find_roles(tmp_path / "actor")
    partial = read_model(role, Sources(lora_alpha=8.0, accepts_partial_adapter=True))
    assert partial.adapter is not None
    assert len(partial.adapter.pairs) == LAYERS // 2 * 7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_adapters_inside_the_distributed_checkpoint_are_found(tmp_path: Path) -> None:
    hf, adapter = _model(), _adapter()
    stacked = {}
    for module in SHAPES:
        for side, half in (("in", 0), ("out", 1)):
            stacked[f"decoder.layers.{module}.adapter.linear_{side}.weight"] = torch.stack(
                [adapter[i, module][half] for i in range(LAYERS)]
            )
    _write_dist(tmp_path / "actor/dist_ckpt", _stacked(hf) | stacked)
    _write_config(tmp_path / "actor/huggingface")
    model = open_checkpoint(tmp_path / "actor", lora_alpha=8.0)
    assert model.adapter is not None
    folded = merged(model.weights, model.adapter)
    name = "model.layers.3.self_attn.k_proj.weight"
    torch.testing.assert_close(
        as_torch(folded[name]), _folded(hf, scale=2.0)[name], atol=1e-5, rtol=1e-5
    )
