"""The codemod: what it changes, what it leaves, what it reports.

And its table against the classes that it names.
"""

import ast
import importlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from temper_legacy_shim.cli import app
from temper_legacy_shim.imports import successors
from temper_legacy_shim.imports.codemod import NotPythonError, change_imports
from temper_legacy_shim.imports.successors import rows

TEMPER_NAMES = "from temper_trainer.runtime.worker_group import TrainingWorker\n"


def _change(text: str, *, keeps_legacy: bool = False) -> str:
    return change_imports(text.encode(), keeps_legacy=keeps_legacy).content.decode()


def test_an_imported_class_and_its_uses_get_the_new_name() -> None:
    text = (
        "from verl.workers.fsdp_workers import ActorRolloutRefWorker\n\nworker = "
        "ActorRolloutRefWorker(config)  # mine\n"
    )
    assert _change(text) == TEMPER_NAMES + "\nworker = TrainingWorker(config)  # mine\n"


def test_keep_legacy_takes_the_deprecated_class_and_leaves_its_uses() -> None:
    text = (
        "from verl.workers.fsdp_workers import ActorRolloutRefWorker\n"
        "ActorRolloutRefWorker(config)\n"
    )
    expected = (
        "from temper_legacy_shim.workers.fsdp_workers import ActorRolloutRefWorker\n"
        "ActorRolloutRefWorker(config)\n"
    )
    assert _change(text, keeps_legacy=True) == expected
    assert all(
        not remark.what_to_do for remark in change_imports(text.encode(), keeps_legacy=True).remarks
    )


def test_an_alias_stays_and_so_do_its_uses() -> None:
    text = "from verl import DataProto as Batch\nBatch.concat([])\n"
    assert (
        _change(text)
        == "from temper_engine_api.batch import PackedBatch as Batch\nBatch.concat([])\n"
    )


def test_names_without_a_successor_stay_and_are_reported_with_their_line() -> None:
    text = (
        "import os\nfrom verl.protocol import (\n    DataProto,  # data\n    DataProtoFuture,\n)\n"
    )
    changed = change_imports(text.encode(), keeps_legacy=False)
    tree = ast.parse(changed.content)
    assert [node.module for node in tree.body if isinstance(node, ast.ImportFrom)] == [
        "verl.protocol",
        "temper_engine_api.batch",
    ]
    (left,) = [remark for remark in changed.remarks if not remark.new]
    assert (left.line, left.old) == (2, "verl.protocol.DataProtoFuture")


def test_a_module_imported_full_is_replaced_with_what_was_used_of_it() -> None:
    text = (
        "import verl.workers.fsdp_workers as fw\nimport os, sys\n\n\ndef f():\n    return "
        "fw.CriticWorker(fw)\n"
    )
    changed = change_imports(text.encode(), keeps_legacy=True)
    assert b"CriticWorker(fw)" in changed.content
    plain = "import verl.workers.fsdp_workers\n\nx = verl.workers.fsdp_workers.CriticWorker(1)\n"
    assert _change(plain, keeps_legacy=True) == (
        "from temper_legacy_shim.workers.fsdp_workers import CriticWorker\n\nx = CriticWorker(1)\n"
    )


def test_a_module_imported_from_its_package_goes_by_what_was_used_of_it() -> None:
    text = (
        "from verl.trainer.ppo import core_algos\n\nx = core_algos.kl_penalty(a, b)\ny = "
        "core_algos.my_own(a)\n"
    )
    changed = change_imports(text.encode(), keeps_legacy=False)
    assert changed.content.decode() == (
        "from verl.trainer.ppo import core_algos\nfrom temper_trainer.algorithms.kl import "
        "estimate_kl\n\n"
        "x = estimate_kl(a, b)\ny = core_algos.my_own(a)\n"
    )
    assert [(remark.line, remark.old) for remark in changed.remarks] == [
        (1, "verl.trainer.ppo.core_algos.my_own"),
        (3, "verl.trainer.ppo.core_algos.kl_penalty"),
    ]


def test_a_local_name_of_the_same_spelling_is_not_touched() -> None:
    text = (
        "from verl.workers.fsdp_workers import ActorRolloutRefWorker\n\n\ndef "
        "f(ActorRolloutRefWorker):\n    return ActorRolloutRefWorker\n"
    )
    assert _change(text).endswith(
        "def f(ActorRolloutRefWorker):\n    return ActorRolloutRefWorker\n"
    )


def test_a_new_name_that_is_taken_is_imported_under_the_old_one() -> None:
    text = (
        "from verl.workers.fsdp_workers import ActorRolloutRefWorker\n\n\nclass "
        "TrainingWorker(ActorRolloutRefWorker):\n    pass\n"
    )
    changed = _change(text)
    assert changed.startswith(
        "from temper_trainer.runtime.worker_group import TrainingWorker as ActorRolloutRefWorker\n"
    )
    assert "class TrainingWorker(ActorRolloutRefWorker):" in changed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            """from verl.utils.reward_score import gsm8k, math
def compute_score(*text): return gsm8k.compute_score(*text) or math.compute_score(*text)
""",
            """from temper_legacy_shim.old_scores import gsm8k_score, math_score
def compute_score(*text): return gsm8k_score(*text) or math_score(*text)
""",
        ),
        (
            "import copy\nfrom verl.utils import hdfs_io\nhdfs_io.copy(copy.copy('a'), 'b')\n",
            """import copy
from temper_legacy_shim.old_helpers import copy as hdfs_io_copy
hdfs_io_copy(copy.copy('a'), 'b')
""",
        ),
        (
            "from verl.utils import hdfs_io\ncopy = hdfs_io_copy = hdfs_io.copy\n",
            """from temper_legacy_shim.old_helpers import copy as hdfs_io_copy_
copy = hdfs_io_copy = hdfs_io_copy_
""",
        ),
    ],
    ids=["own function of that name", "module of that name", "both names taken"],
)
def test_function_of_a_module_gets_a_name_that_the_file_does_not_use(
    text: str, expected: str
) -> None:
    assert _change(text) == expected


@pytest.mark.parametrize(
    ("before", "middle", "after"),
    [
        ("if text:\n    ", "else:\n    ", "verl.utils.reward_score.gsm8k"),
        ("try:\n    ", "except ImportError:\n    ", "mine"),
    ],
    ids=["two old modules", "an old module and another one"],
)
def test_name_that_two_imports_bind_stays(before: str, middle: str, after: str) -> None:
    def script(first: str, second: str) -> str:
        return f"{before}{first}\n{middle}{second}\nprint(compute_score)\n"

    old = "from {} import compute_score"
    new = "from temper_legacy_shim.old_scores import {}_score as compute_score"
    assert _change(script(old.format("verl.utils.reward_score.math"), old.format(after))) == script(
        new.format("math"), (old if after == "mine" else new).format(after.rpartition(".")[2])
    )


def test_module_that_two_imports_bind_is_left_to_a_person() -> None:
    text = (
        "try:\n    from verl.utils.reward_score import math\n"
        "except ImportError:\n    from verl.utils.reward_score import math_reward as math\n"
        "math.compute_score('a', 'b')\n"
    )
    changed = change_imports(text.encode(), keeps_legacy=False)
    assert changed.content.decode() == text
    assert [(remark.line, bool(remark.what_to_do)) for remark in changed.remarks] == [
        (2, True),
        (4, True),
    ]


def test_imports_inside_blocks_and_on_shared_lines_keep_their_position() -> None:
    text = (
        "try:\n    import os; from verl import DataProto  # late\nexcept ImportError:\n    "
        "DataProto = None\n"
    )
    changed = _change(text, keeps_legacy=True)
    assert ast.parse(changed)
    assert (
        "    import os\n    from temper_legacy_shim.data_proto import DataProto  # late\n"
        in changed
    )


def test_an_import_on_the_line_of_its_if_is_changed_with_its_uses() -> None:
    text = "import typing\nif typing.TYPE_CHECKING: from verl import DataProto\nx: DataProto\n"
    expected = (
        "import typing\nif typing.TYPE_CHECKING: from temper_engine_api.batch import PackedBatch\n"
        "x: PackedBatch\n"
    )
    assert _change(text) == expected


def test_uses_on_the_line_of_the_import_are_changed_too() -> None:
    text = "from verl import DataProto; x = DataProto()\n"
    assert _change(text) == "from temper_engine_api.batch import PackedBatch\nx = PackedBatch()\n"


def test_a_name_that_a_quoted_annotation_or_all_mentions_stays() -> None:
    quoted = 'from verl import DataProto\n\n\ndef f(x: "list[DataProto]") -> DataProto: ...\n'
    assert _change(quoted) == quoted.replace(
        "from verl import DataProto", "from temper_engine_api.batch import PackedBatch as DataProto"
    )
    listed = 'from verl import DataProto\n\n__all__ = ["DataProto"]\n'
    assert _change(listed) == listed.replace(
        "from verl import DataProto", "from temper_engine_api.batch import PackedBatch as DataProto"
    )


def test_a_package_keeps_the_names_that_other_files_import_from_it() -> None:
    changed = change_imports(b"from verl import DataProto\n", keeps_legacy=False, is_package=True)
    assert changed.content == b"from temper_engine_api.batch import PackedBatch as DataProto\n"


def test_comments_between_the_parentheses_of_an_import_stay() -> None:
    text = "from verl import (  # all of it\n    # the batch\n    DataProto,  # data\n)\n"
    assert (
        _change(text)
        == "# all of it\n# the batch\n# data\nfrom temper_engine_api.batch import PackedBatch\n"
    )


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ("DataProto, DataProtoFuture", "DataProtoFuture"),
        ("DataProtoFuture, DataProto", "DataProtoFuture"),
        ("DataProtoFuture, DataProto, DataProtoItem", "DataProtoFuture, DataProtoItem"),
        ("(DataProtoFuture, DataProto,)", "(DataProtoFuture,)"),
        ("DataProtoFuture, \\\n    DataProto", "DataProtoFuture"),
    ],
)
def test_names_without_a_successor_stay_as_they_are_written(names: str, left: str) -> None:
    expected = (
        f"from verl.protocol import {left}\nfrom temper_engine_api.batch import PackedBatch\n"
    )
    assert _change(f"from verl.protocol import {names}\n") == expected


def test_names_with_lines_and_comments_of_their_own_stay_on_them() -> None:
    text = (
        "from verl.protocol import (\n    DataProto,  # batch\n    DataProtoFuture,  # later\n)\n"
    )
    expected = (
        "# batch\nfrom verl.protocol import (\n    DataProtoFuture,  # later\n)\nfrom "
        "temper_engine_api.batch import PackedBatch\n"
    )
    assert _change(text) == expected


def test_a_name_inside_an_f_string_stays_and_is_bound_to_the_new_class() -> None:
    text = 'from verl import DataProto\n\nprint(f"{DataProto.__name__:>9} of {DataProto()!r}")\n'
    assert _change(text) == text.replace(
        "from verl import DataProto", "from temper_engine_api.batch import PackedBatch as DataProto"
    )


def test_a_name_behind_a_letter_of_several_bytes_is_found() -> None:
    text = "from verl import DataProto\n\nx = 'é', DataProto  # ü\n"
    assert _change(text).endswith("\nx = 'é', PackedBatch  # ü\n")


def test_scopes_of_classes_comprehensions_and_globals_are_those_of_python() -> None:
    text = (
        "from verl import DataProto\n\n\nclass A:\n    DataProto = 1\n    x = DataProto\n\n    def "
        "f(self):\n        return DataProto\n\n\n"
        "y = [DataProto for DataProto in ()]\nz = [DataProto for _ in DataProto.items]\n"
    )
    expected = (
        "from temper_engine_api.batch import PackedBatch\n\n\nclass A:\n    DataProto = 1\n    x = "
        "DataProto\n\n    def f(self):\n"
        "        return PackedBatch\n\n\ny = [DataProto for DataProto in ()]\nz = [PackedBatch for "
        "_ in PackedBatch.items]\n"
    )
    assert _change(text) == expected


# Nightly: measures processor time, which other programs on the host lengthen.
@pytest.mark.nightly
def test_a_long_file_takes_less_than_a_fifth_of_a_second() -> None:
    line = "    out = [each.batch['x'].sum(-1) for each in data if each is not None]\n"
    body = "def f{0}(self, data):\n" + line + "    return DataProto(out, {0})\n\n"
    functions = "".join(body.format(number) for number in range(500))
    content = f"from verl import DataProto\n\n{functions}".encode()
    assert len(content) > 50_000
    seconds = []
    for _ in range(3):
        start = time.process_time()
        change_imports(content, keeps_legacy=False)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


@pytest.mark.parametrize(
    ("old", "advice"),
    [
        ("verl.trainer.ppo.core_algos.register_adv_est", "algorithm.advantage"),
        ("verl.utils.torch_functional.get_cosine_schedule_with_warmup", "transformers has"),
        ("verl.utils.torch_functional.masked_mean", "an engine computes"),
        ("verl.protocol.unpad_dataproto", "--keep-legacy takes it from temper_legacy_shim.data"),
        ("verl.utils.fsdp_utils.offload_fsdp_optimizer", "docs/engines/fsdp.md"),
        ("verl.utils.hdfs_io", "no use was found"),
        ("verl.workers.agent.mine", "keep a copy of the function"),
    ],
)
def test_name_without_a_successor_comes_with_advice(old: str, advice: str) -> None:
    module, _, name = old.rpartition(".")
    changed = change_imports(f"from {module} import {name}\n".encode(), keeps_legacy=False)
    (remark,) = changed.remarks
    assert not remark.new
    assert advice in remark.what_to_do


def test_pages_that_advice_names_exist() -> None:
    table = Path(successors.__file__).parent / "data/successors.tsv"
    root = Path(__file__).parents[4]
    for page, anchor in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", table.read_text()):
        text = (root / page).read_text().lower()
        assert not anchor or f"## {anchor.replace('-', ' ')}\n" in text


def test_texts_and_stars_are_left_to_a_person() -> None:
    text = 'from verl.protocol import *\nmock.patch("verl.workers.fsdp_workers.CriticWorker")\n'
    changed = change_imports(text.encode(), keeps_legacy=False)
    assert changed.content.decode() == text
    assert [remark.line for remark in changed.remarks] == [1, 2]


def test_changing_twice_changes_nothing_more() -> None:
    text = (
        "from verl.workers.fsdp_workers import ActorRolloutRefWorker, RewardModelWorker\n"
        "ActorRolloutRefWorker()\n"
    )
    once = _change(text)
    assert _change(once) == once


def test_what_is_no_python_is_our_own_error() -> None:
    with pytest.raises(NotPythonError):
        change_imports(b"from verl import (\n", keeps_legacy=False)


def test_every_target_of_the_table_exists() -> None:
    for old, successor, legacy in rows():
        for target in filter(None, (successor.target, legacy)):
            module, _, name = target.partition(":")
            if module.startswith("temper_engine_megatron") or "megatron" in module:
                pytest.importorskip(
                    "megatron.core",
                    reason=(
                        "needs megatron-core: an environment with temper-engine-megatron runs this"
                    ),
                )
            assert hasattr(importlib.import_module(module), name), old


def test_nothing_is_written_without_write_and_only_changed_files_with_it(tmp_path: Path) -> None:
    old, other = tmp_path / "a.py", tmp_path / "b.py"
    old.write_text("from verl import DataProto\n")
    other.write_text("import os\n")
    stamp = other.stat().st_mtime_ns
    done = CliRunner().invoke(
        app, ["imports", str(tmp_path), "--keep-legacy"], catch_exceptions=False
    )
    assert done.exit_code == 10
    assert "+from temper_legacy_shim.data_proto import DataProto" in done.stdout
    assert old.read_text() == "from verl import DataProto\n"
    written = CliRunner().invoke(
        app,
        ["imports", str(tmp_path), "--keep-legacy", "--write", "--json"],
        catch_exceptions=False,
    )
    assert json.loads(written.stdout)["files"][0]["is_changed"]
    assert old.read_text() == "from temper_legacy_shim.data_proto import DataProto\n"
    assert other.stat().st_mtime_ns == stamp
    assert (
        CliRunner().invoke(app, ["imports", str(tmp_path)], catch_exceptions=False).exit_code == 0
    )


ODD = {
    "plain.py": b"from verl import DataProto\nDataProto()\n",
    "no_end.py": b"import os\n\n\nx = 1\nfrom verl import DataProto\nDataProto()",
    "page.py": b"import os\n\x0c\n# one\n# two\n# three\n# four\nfrom verl import DataProto\n",
    "windows.py": b"import os\r\nfrom verl import DataProto\r\n",
    "with blank.py": b"from verl import DataProto\n",
    "latin.py": b"# -*- coding: latin-1 -*-\n# \xe9t\xe9\nfrom verl import DataProto\n",
}


@pytest.mark.skipif(
    shutil.which("patch") is None, reason="needs patch, which a machine with build tools has"
)
def test_the_diff_applies_to_odd_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in ODD.items():
        (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(app, ["imports", "."], catch_exceptions=False)
    subprocess.run(["patch", "--binary", "-p1", "-s"], input=done.stdout_bytes, check=True)
    for name, content in ODD.items():
        assert (tmp_path / name).read_bytes() == change_imports(
            content, keeps_legacy=False
        ).content, name
        assert b"PackedBatch" in (tmp_path / name).read_bytes()


def test_a_copy_of_the_old_package_is_named_and_left(tmp_path: Path) -> None:
    copy = tmp_path / "fork/verl"
    (copy / "trainer").mkdir(parents=True)
    (copy / "__init__.py").write_text("from .protocol import DataProto\n")
    (copy / "tools.py").write_text("from verl import DataProto\n")
    (tmp_path / "fork/mine.py").write_text("from verl.workers.fsdp_workers import CriticWorker\n")
    done = CliRunner().invoke(
        app, ["imports", str(tmp_path), "--keep-legacy", "--json"], catch_exceptions=False
    )
    report = json.loads(done.stdout)
    assert [Path(each["path"]).name for each in report["files"]] == ["mine.py"]
    assert report["copies"] == [str(copy)]
    assert done.exit_code == 20
    requested = CliRunner().invoke(
        app, ["imports", str(copy), "--keep-legacy", "--json"], catch_exceptions=False
    )
    assert [Path(each["path"]).name for each in json.loads(requested.stdout)["files"]] == [
        "tools.py"
    ]
