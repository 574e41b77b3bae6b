"""An output is whole or absent; what was finished is kept; a receipt holds."""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from old_files import write_fsdp
from safetensors.torch import load_file
from typer.testing import CliRunner

from temper_legacy_shim.checkpoints import (
    Options,
    Sources,
    check_files,
    check_receipt,
    convert,
    plan_jobs,
    read_receipt,
)
from temper_legacy_shim.checkpoints.huggingface.model_directory import read_safetensors
from temper_legacy_shim.checkpoints.receipt import NAME
from temper_legacy_shim.checkpoints.staging import check_space
from temper_legacy_shim.cli import app
from temper_legacy_shim.errors import (
    DamagedFileError,
    LayoutError,
    OutputError,
    ShimError,
    UsageError,
    VerificationError,
)

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": False,
}


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """Return a role of two ranks with twelve tensors."""
    folder = tmp_path / "global_step_3/actor"
    write_fsdp(folder, {f"model.w{i}": torch.full((6, 4), float(i)) for i in range(12)})
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text(json.dumps(CONFIG))
    return folder


Run = Callable[..., Path]


@pytest.fixture
def run(actor: Path, tmp_path: Path) -> Run:
    def _run(
        out: str = "out",
        *,
        sources: Sources | None = None,
        progress: object = None,
        **options: object,
    ) -> Path:
        (job,) = plan_jobs(actor, tmp_path / out)
        convert(
            job, Options(checks_names=False, **options), sources or Sources(), progress=progress
        )  # type: ignore[arg-type]
        return tmp_path / out

    return _run


def test_shards_have_the_size_requested_and_an_index(run: Run) -> None:
    out = run(max_shard_bytes=3 * 96)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)
    ]
    assert index["metadata"]["total_size"] == 12 * 96
    merged = {
        name: tensor
        for file in set(index["weight_map"].values())
        for name, tensor in load_file(out / file).items()
    }
    assert all(torch.equal(merged[f"model.w{i}"], torch.full((6, 4), float(i))) for i in range(12))


def test_a_dtype_is_cast_and_reported_in_the_config(run: Run) -> None:
    out = run(dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


class _StoppedError(Exception):
    pass


def stop_half_way(what: str, done: int, total: int) -> None:
    """Report progress as a run that is interrupted after half of its bytes."""
    if done > total / 2:
        raise _StoppedError


def test_a_stopped_run_leaves_no_output_and_the_next_one_keeps_what_was_finished(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(_StoppedError):
        run(progress=stop_half_way, max_shard_bytes=3 * 96)
    assert not (tmp_path / "out").exists()
    staged = tmp_path / ".out.temper-partial/model-00001-of-00004.safetensors"
    finished = staged.stat().st_mtime_ns
    out = run(max_shard_bytes=3 * 96)
    assert (out / staged.name).stat().st_mtime_ns == finished
    assert check_files(out, read_receipt(out).files) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "out"]


def test_work_under_other_options_begins_again(run: Run, tmp_path: Path) -> None:
    with pytest.raises(_StoppedError):
        run(progress=stop_half_way, max_shard_bytes=3 * 96)
    out = run(dtype="float16", max_shard_bytes=3 * 96)
    assert {
        tensor.dtype for tensor in load_file(out / "model-00001-of-00002.safetensors").values()
    } == {torch.float16}


def test_a_second_run_at_the_same_time_is_refused(run: Run) -> None:
    def begin_again(what: str, done: int, total: int) -> None:
        with pytest.raises(OutputError, match="another temper-migrate"):
            run()

    run(progress=begin_again)


def test_nan_is_reported_and_refused_when_strict(run: Run, actor: Path, tmp_path: Path) -> None:
    write_fsdp(
        actor,
        {
            "model.w": torch.tensor([[1.0, math.nan], [2.0, 3.0]]),
            "model.inf": torch.tensor([[math.inf, -math.inf]] * 2),
        },
    )
    assert any(
        "NaN or infinity in model.w and 1 more" in note for note in read_receipt(run()).notes
    )
    with pytest.raises(
        VerificationError, match=r"model\.w and 1 more tensors hold NaN or infinity"
    ):
        run("strict", is_strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "out"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_smaller_type_cannot_hold_is_reported(run: Run, actor: Path, dtype: str) -> None:
    write_fsdp(
        actor,
        {
            "model.large": torch.full((2, 2), torch.finfo(torch.float32).max),
            "model.w": torch.ones(2, 2),
        },
    )
    out = run(dtype=dtype)
    assert any(note == "NaN or infinity in model.large" for note in read_receipt(out).notes)
    assert bool(load_file(out / "model.safetensors")["model.large"].isinf().all())


@pytest.mark.parametrize("damage", ["altered", "short", "missing", "receipt"])
def test_what_changed_after_the_conversion_is_named(run: Run, damage: str) -> None:
    out = run()
    file = out / ("temper-receipt.json" if damage == "receipt" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "altered":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-5])
    with pytest.raises(
        VerificationError, match=NAME if damage == "receipt" else r"model\.safetensors"
    ):
        check_files(out, read_receipt(out).files)


def test_a_receipt_of_the_first_release_is_still_checked(run: Run) -> None:
    out = run()
    body = json.loads((out / NAME).read_text())
    for record in body["files"]:
        del record["checksum"]
        record["sha256"] = hashlib.sha256((out / record["path"]).read_bytes()).hexdigest()
    (out / NAME).write_text(json.dumps(body | {"schema_version": 1}))
    check_receipt(out, read_receipt(out))
    with open(out / "config.json", "r+b") as file:
        file.write(b" ")
    with pytest.raises(VerificationError, match=r"config\.json has another checksum"):
        check_receipt(out, read_receipt(out))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({"checksum": "crc:0"}, "another checksum"),
        ({"files": []}, "names no file"),
        ({"num_tensors": 13}, "12 tensors instead of 13"),
        ({"files": 5}, "was altered"),
        ({"files": [{"path": 5}]}, "was altered"),
        ({"path": 5}, "was altered"),
        ({"path": ["a"]}, "was altered"),
        ({"path": "x" * 5000}, "is missing"),
        ({"num_bytes": "many"}, "was altered"),
    ],
)
def test_a_receipt_that_does_not_state_what_was_written_is_refused(
    run: Run, change: dict[str, object], given: str
) -> None:
    out = run()
    body = json.loads((out / NAME).read_text())
    record = body["files"][0]
    altered = (
        {**body, **change}
        if change.keys() <= {"files", "num_tensors"}
        else {**body, "files": [{**record, **change}]}
    )
    (out / NAME).write_text(json.dumps(altered))
    with pytest.raises(VerificationError, match=given):
        check_receipt(out, read_receipt(out))


def test_files_that_the_receipt_does_not_know_are_named(run: Run) -> None:
    out = run()
    assert check_receipt(out, read_receipt(out)).surplus == ()
    (out / "more").mkdir()
    (out / "more/model.py").write_text("")
    result = check_receipt(out, read_receipt(out))
    assert (result.num_tensors, result.surplus) == (12, ("more/model.py",))
    given = CliRunner().invoke(app, ["verify", str(out), "--json"])
    assert given.exit_code == 0, given.output
    assert "more/model.py" in given.output


def test_a_source_that_is_cut_off_while_it_is_read_leaves_nothing(
    run: Run, actor: Path, tmp_path: Path
) -> None:
    path = actor / "model_world_size_2_rank_1.pt"
    write_fsdp(actor, {"model.w": torch.zeros(2000, 1000)})

    def cut(what: str, done: int, total: int) -> None:
        with open(path, "rb+") as file:
            file.truncate(100_000)

    with pytest.raises(DamagedFileError, match="truncated"):
        run(progress=cut)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_keeps_other_bytes_is_noticed_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(
        os,
        "write",
        lambda file, data: write(file, bytes(len(data)) if isinstance(data, memoryview) else data),
    )
    with pytest.raises(VerificationError, match="bytes from 0 on are others than were written"):
        run()
    assert not (tmp_path / "out").exists()


def test_an_output_inside_the_source_is_refused(actor: Path) -> None:
    (job,) = plan_jobs(actor, actor / "hf")
    with pytest.raises(OutputError, match="lie in one another"):
        convert(job, Options(), Sources())


def test_what_no_disk_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        OutputError,
        match=r"1,000,000,067 MB are needed \(67 of them to spare\), but [0-9,]+ MB are free at",
    ):
        check_space(tmp_path, 10**15)


@pytest.mark.parametrize(
    ("options", "sources", "named"),
    [
        ({"dtype": "int8"}, Sources(), "--dtype"),
        ({"keeps_adapter": True}, Sources(), "--adapter keep"),
        ({"target": "peft"}, Sources(), "--to peft"),
        ({}, Sources(lora_alpha=2.0), "--lora-alpha"),
        ({"max_shard_bytes": 0}, Sources(), "--max-shard-size"),
    ],
)
def test_an_option_without_effect_is_an_error(
    run: Run, options: dict[str, object], sources: Sources, named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named):
        run(sources=sources, **options)
    assert not (tmp_path / "out").exists()


def test_an_index_that_leads_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "actor/huggingface"
    folder.mkdir(parents=True)
    (tmp_path / "secret.safetensors").write_bytes(b"x" * 100)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "../../secret.safetensors"}})
    )
    (job,) = plan_jobs(tmp_path / "actor", tmp_path / "out")
    with pytest.raises(ShimError, match="outside its folder"):
        convert(job, Options(), Sources())


def test_names_may_be_those_under_which_transformers_saves_a_model(tmp_path: Path) -> None:
    # Mixtral's layers have a block_sparse_moe in files and an mlp in memory, where its experts are
    # joined.
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    config = transformers.AutoConfig.for_model(
        "mixtral", num_local_experts=2, num_key_value_heads=1, **sizes
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    saved = load_file(tmp_path / "base/model.safetensors")
    write_fsdp(tmp_path / "actor", saved, mesh_shape=(1,))
    (tmp_path / "actor/huggingface").mkdir()
    shutil.copy(tmp_path / "base/config.json", tmp_path / "actor/huggingface")
    (job,) = plan_jobs(tmp_path / "actor", tmp_path / "out")
    receipt = convert(job, Options(), Sources())
    assert any(
        f"{len(saved)} names and shapes equal those of transformers" in sentence
        for sentence in receipt.verified
    )
    assert "model.layers.0.block_sparse_moe.experts.1.w3.weight" in load_file(
        tmp_path / "out/model.safetensors"
    )
    # transformers passes over experts of any other name, and initializes its own.
    others = {
        "block_sparse_moe.": "mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }
    renamed = {
        re.sub("|".join(map(re.escape, others)), lambda result: others[result[0]], name): t
        for name, t in saved.items()
    }
    write_fsdp(tmp_path / "actor", renamed, mesh_shape=(1,))
    with pytest.raises(VerificationError, match="gate_proj"):
        convert(plan_jobs(tmp_path / "actor", tmp_path / "other")[0], Options(), Sources())


# Nightly: both embeddings have other names than Llama's.
@pytest.mark.parametrize("model_type", [pytest.param("gpt2", marks=pytest.mark.nightly), "opt"])
def test_a_tied_head_is_written_once_whatever_the_embedding_is_called(
    tmp_path: Path, model_type: str
) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
        "max_position_embeddings": 16,
    }
    config = transformers.AutoConfig.for_model(
        model_type, word_embed_proj_dim=8, ffn_dim=12, **sizes
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    write_fsdp(
        tmp_path / "actor",
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
        mesh_shape=(2,),
    )
    config.save_pretrained(tmp_path / "actor/huggingface")
    (job,) = plan_jobs(tmp_path / "actor", tmp_path / "out")
    convert(job, Options(), Sources())
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    result = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(result[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    # Nightly: the names are left out in the same way in every dtype.
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float32, marks=pytest.mark.nightly),
        pytest.param(torch.float16, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_frequencies_that_the_config_gives_are_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    config = transformers.AutoConfig.for_model("llama", rope_theta=500_000.0, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    frequencies = (500_000.0 ** -(torch.arange(0, 16, 2) / 16)).to(dtype)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(2)}
    write_fsdp(tmp_path / "actor", weights | old, plain=list(old))
    config.save_pretrained(tmp_path / "actor/huggingface")
    receipt = convert(plan_jobs(tmp_path / "actor", tmp_path / "out")[0], Options(), Sources())
    assert load_file(tmp_path / "out/model.safetensors").keys() == weights.keys()
    assert any("2 tables of rotary frequencies" in note for note in receipt.notes)
    # Those of another base, or scaled, are no less than a weight.
    write_fsdp(
        tmp_path / "actor",
        weights | {name: tensor / 2 for name, tensor in old.items()},
        plain=list(old),
    )
    with pytest.raises(VerificationError, match=r"unexpected .*inv_freq"):
        convert(plan_jobs(tmp_path / "actor", tmp_path / "other")[0], Options(), Sources())


@pytest.mark.parametrize(
    ("model_type", "actor"),
    [
        # Nightly: what differs from gpt_neox is the class's name.
        pytest.param("gpt2", "GPT2LMHeadModel", marks=pytest.mark.nightly),
        ("gpt_neox", "GPTNeoXForCausalLM"),
    ],
)
def test_a_critic_whose_head_is_called_classifier_is_one(
    tmp_path: Path, model_type: str, actor: str
) -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    config = transformers.AutoConfig.for_model(
        model_type, num_labels=1, architectures=[actor], **sizes
    )
    model = transformers.AutoModelForTokenClassification.from_config(config)
    write_fsdp(
        tmp_path / "critic", {name: tensor.detach() for name, tensor in model.state_dict().items()}
    )
    config.save_pretrained(tmp_path / "critic/huggingface")
    receipt = convert(plan_jobs(tmp_path / "critic", tmp_path / "out")[0], Options(), Sources())
    assert receipt.head == "value_model"
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [
        type(model).__name__
    ]
    result = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "out"
    ).state_dict()
    assert all(torch.equal(result[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UsageError, match="called classifier"):
        convert(
            plan_jobs(tmp_path / "critic", tmp_path / "state")[0],
            Options(target="temper"),
            Sources(),
        )


def test_a_critic_whose_config_names_no_architecture_has_as_many_labels_as_its_head_has_rows(
    tmp_path: Path,
) -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    config = transformers.AutoConfig.for_model("llama", **sizes)
    model = transformers.AutoModelForTokenClassification.from_config(
        transformers.AutoConfig.for_model("llama", num_labels=1, **sizes)
    )
    write_fsdp(
        tmp_path / "critic",
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
        mesh_shape=(2,),
    )
    config.save_pretrained(tmp_path / "critic/huggingface")
    (job,) = plan_jobs(tmp_path / "critic", tmp_path / "out")
    convert(job, Options(), Sources())
    result = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "out"
    ).state_dict()
    assert all(torch.equal(result[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("target", ["exists", "nowhere"])
def test_output_that_is_a_link_is_written_where_it_leads(
    run: Run, tmp_path: Path, target: str
) -> None:
    (tmp_path / "disk/exists").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / target)
    run()
    assert (tmp_path / "disk" / target / NAME).is_file()
    assert (tmp_path / "out").is_symlink()
    assert not list(tmp_path.rglob(".*.temper-partial"))


def test_output_that_is_a_link_to_itself_is_refused_before_working(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "out")
    with pytest.raises(
        OutputError, match="out is a link that leads nowhere: give another --out, or remove it"
    ):
        run(progress=lambda *_: pytest.fail("something was written"))
    assert not list(tmp_path.rglob(".*.temper-partial"))


def _broken_link(path: Path) -> None:
    path.symlink_to("../../blobs/absent")


@pytest.mark.parametrize("make", [_broken_link, os.mkfifo])
def test_tokenizer_that_cannot_be_read_is_an_error(
    run: Run, actor: Path, make: Callable[[Path], None]
) -> None:
    make(actor / "huggingface/tokenizer.json")
    with pytest.raises(
        LayoutError,
        match=(
            r"huggingface/tokenizer.json is a broken link or no regular file: copy the file itself"
        ),
    ):
        run()


def test_config_that_is_a_broken_link_is_an_error(run: Run, actor: Path) -> None:
    path = actor / "huggingface/config.json"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(
        LayoutError,
        match=r"huggingface/config.json is a broken link or no regular file: copy the file itself",
    ):
        run()


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ({**CONFIG, "num_attention_heads": "four"}, "hf"),
        ({"tie_word_embeddings": False}, "temper"),
    ],
)
def test_names_that_could_not_be_compared_are_a_note(
    actor: Path, tmp_path: Path, config: dict[str, object], target: str
) -> None:
    (actor / "huggingface/config.json").write_text(json.dumps(config))
    (job,) = plan_jobs(actor, tmp_path / "out")
    receipt = convert(job, Options(target=target), Sources())  # type: ignore[arg-type]
    assert not any("not compared" in sentence for sentence in receipt.verified)
    (note,) = (each for each in receipt.notes if "not compared" in each)
    assert note.startswith("not verified: names were not compared with transformers' model")


def test_finished_file_that_was_damaged_after_a_stop_is_written_again(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(_StoppedError):
        run(progress=stop_half_way, max_shard_bytes=3 * 96)
    staged = tmp_path / ".out.temper-partial/model-00001-of-00004.safetensors"
    content = staged.read_bytes()
    staged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert (run(max_shard_bytes=3 * 96) / staged.name).read_bytes() == content


def test_overlapping_tensors_of_safetensors_are_refused(tmp_path: Path) -> None:
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [2], "data_offsets": offsets}
            for name, offsets in (("a", [0, 8]), ("b", [4, 12]))
        }
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(12))
    with pytest.raises(
        DamagedFileError, match=r"model.safetensors: b begins inside a: copy it again"
    ):
        read_safetensors(path)


def test_adapter_only_asks_for_all_that_it_needs_at_once(samples: Path, tmp_path: Path) -> None:
    (job,) = plan_jobs(samples / "v0.7.1_megatron-peft4063-tp1/checkpoints", tmp_path / "out")
    with pytest.raises(UsageError, match=r"give --base-model, .* and --lora-alpha, .*"):
        convert(job, Options(), Sources())
    with pytest.raises(UsageError, match=r"give --base-model, .* and --lora-alpha, .*"):
        convert(job, Options(), Sources(hf_config=samples / "_base/qwen2_tied"))
