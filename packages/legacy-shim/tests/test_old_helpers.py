"""Helpers that scripts for data and evaluation import from verl.

The script runs with changed imports, with the old results.
"""

from pathlib import Path
from typing import Any

import pytest

from temper_legacy_shim.imports.codemod import change_imports

torch = pytest.importorskip(
    "torch", reason="needs torch: an environment with temper-engine-fsdp runs this"
)


def run_changed(code: str, **names: Any) -> dict[str, Any]:
    """Run a script after its imports were changed; nothing may be left to do by hand."""
    changed = change_imports(code.encode(), keeps_legacy=False)
    assert [remark for remark in changed.remarks if remark.what_to_do] == []
    assert b"verl" not in changed.content
    exec(compile(changed.content, "script.py", "exec"), names)
    return names


@pytest.mark.parametrize("module", ["hdfs_io", "fs"])
def test_preprocessing_that_copies_its_files_to_a_folder(tmp_path: Path, module: str) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "train.parquet").write_bytes(b"rows")
    code = (
        f"import argparse, os\nfrom verl.utils.{module} import copy, exists, makedirs\n\n"
        "if hdfs_dir is not None and not exists(hdfs_dir):\n    "
        "makedirs(os.path.dirname(hdfs_dir))\n"
        "    copy(src=local_dir, dst=hdfs_dir)\n"
    )
    run_changed(code, local_dir=str(local), hdfs_dir=str(tmp_path / "far/away"))
    assert (tmp_path / "far/away/train.parquet").read_bytes() == b"rows"


def test_remote_folders_go_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec, which torch installs")
    from fsspec.implementations.memory import MemoryFileSystem

    fsspec.register_implementation("hdfs", MemoryFileSystem, clobber=True)
    try:
        (tmp_path / "data").mkdir()
        (tmp_path / "data/test.parquet").write_bytes(b"rows")
        code = (
            "from verl.utils.hdfs_io import copy, makedirs\nfrom verl.utils.fs import "
            "copy_to_local\n"
            "makedirs(hdfs_dir)\ncopy(src=local_dir, dst=hdfs_dir)\nback = copy_to_local(hdfs_dir "
            "+ '/data', cache_dir=cache)\n"
        )
        names = run_changed(
            code,
            local_dir=str(tmp_path / "data"),
            hdfs_dir="hdfs://cluster/sets",
            cache=str(tmp_path / "cache"),
        )
        assert (Path(names["back"]) / "test.parquet").read_bytes() == b"rows"
    finally:
        from fsspec.registry import _registry

        _registry.pop("hdfs", None)
        MemoryFileSystem.store.clear()


def test_local_paths_and_names_of_a_hub_are_returned_as_they_are() -> None:
    code = (
        "from verl.utils.fs import copy_local_path_from_hdfs, copy_to_local\na = "
        "copy_to_local(src='/m', verbose=True)\n"
    )
    names = run_changed(
        code + "b = copy_local_path_from_hdfs('Qwen/Qwen2.5-0.5B', use_shm=False)\n"
    )
    assert (names["a"], names["b"]) == ("/m", "Qwen/Qwen2.5-0.5B")


def tokenizer_folder(folder: Path) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.filterwarnings("ignore:the tokenizer has no padding token")
def test_agent_that_tokenizes_pads_and_numbers_a_prompt(tmp_path: Path) -> None:
    code = (
        "import verl.utils.torch_functional as verl_F\nfrom verl.utils import hf_tokenizer\n"
        "from verl.utils.model import compute_position_id_with_mask\n\ntokenizer = "
        "hf_tokenizer(local_path, trust_remote_code=False)\n"
        "ids, mask = verl_F.tokenize_and_postprocess_data(\n    prompt='a b a', "
        "tokenizer=tokenizer, max_length=5,\n"
        "    pad_token_id=tokenizer.pad_token_id, left_pad=True, truncation='error')\npositions = "
        "compute_position_id_with_mask(mask)\n"
        "longer = verl_F.pad_sequence_to_length(ids, 7, 0, left_pad=False)\n"
    )
    names = run_changed(code, local_path=tokenizer_folder(tmp_path))
    assert names["ids"].tolist() == [[1, 1, 2, 3, 2]]
    assert names["mask"].tolist() == [[0, 0, 1, 1, 1]]
    assert names["positions"].tolist() == [[0, 0, 0, 1, 2]]
    assert names["longer"].tolist() == [[1, 1, 2, 3, 2, 0, 0]]


@pytest.mark.parametrize(
    ("truncation", "expected"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])]
)
def test_texts_that_are_too_long_are_cut_where_the_old_function_cut(
    truncation: str, expected: list[int]
) -> None:
    code = (
        "from verl.utils.torch_functional import postprocess_data\nout, mask = "
        "postprocess_data(ids, ids, 3, 0, truncation=truncation)\n"
    )
    names = run_changed(code, ids=torch.tensor([[1, 2, 3, 4, 5]]), truncation=truncation)
    assert names["out"].tolist() == [expected]


def test_text_that_is_too_long_is_an_error_by_default() -> None:
    code = (
        "from verl.utils.torch_functional import postprocess_data\npostprocess_data(ids, ids, 3, "
        "0)\n"
    )
    with pytest.raises(NotImplementedError, match="5 tokens, but max_length is 3"):
        run_changed(code, ids=torch.tensor([[1, 2, 3, 4, 5]]))


def test_rows_of_an_environment_are_collated() -> None:
    code = "from verl.utils.dataset.rl_dataset import collate_fn\nbatch = collate_fn(rows)\n"
    rows = [
        {"ids": torch.tensor([number]), "prompt": [{"role": "user"}], "source": "x"}
        for number in range(2)
    ]
    batch = run_changed(code, rows=rows)["batch"]
    assert batch["ids"].tolist() == [[0], [1]]
    assert batch["prompt"].tolist() == [[{"role": "user"}]] * 2
    assert batch["source"].shape == (2,)
