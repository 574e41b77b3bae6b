"""Test that a change of any file of a step, or of its manifest, is noticed."""

import json
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from temper_engine_api.checkpoint import (
    FileRecord,
    list_package_versions,
    lock_for_reading,
    manifest,
    verify,
)
from temper_engine_api.checkpoint.manifest import (
    _installed,
    get_axis_sizes,
    hash_config,
    parse_manifest,
    partition_by_size,
    read_manifest,
)
from temper_engine_api.checkpoint.part_files import read_json, report_part, write_json
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_engine_api.specs import EngineConfig, ModelSpec, OptimizerSpec
from temper_engine_api.topology import Axis, Topology

SaveStep = Callable[..., Path]


def test_a_directory_without_a_manifest_was_never_committed(tmp_path: Path) -> None:
    with pytest.raises(
        IncompleteCheckpointError, match=r"has no manifest.json, so it was never committed"
    ):
        verify(tmp_path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 16 bytes instead of 17"),
        (flip, "has another checksum than when it was written"),
    ],
)
def test_damage_is_refused_naming_the_file(
    save_step: SaveStep, damage: Callable[[Path], object], fault: str
) -> None:
    step = save_step(1)
    damage(step / "engine" / "shards" / "0.bin")
    with pytest.raises(DamagedCheckpointError, match=f"shards/0.bin {fault}: load another step"):
        verify(step)


def test_each_rank_reads_its_shard_and_checks_all_sizes(save_step: SaveStep) -> None:
    step = save_step(1)
    flip(step / "engine" / "shards" / "0.bin")  # the first of two files
    verify(step, shard=(1, 2))
    with pytest.raises(DamagedCheckpointError, match=r"0\.bin has another checksum"):
        verify(step, shard=(0, 2))
    (step / "trainer" / "state.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"state.json is missing"):
        verify(step, shard=(2, 3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_any_altered_byte_of_a_manifest_is_noticed(
    save_step: SaveStep, tmp_path: Path, data: st.DataObject
) -> None:
    step = tmp_path / "step_00000001"
    content = (step if step.exists() else save_step(1)).joinpath("manifest.json").read_bytes()
    index = data.draw(st.integers(0, len(content) - 1))
    altered = content[:index] + bytes([data.draw(st.integers(33, 126))]) + content[index + 1 :]
    if json_of(altered) == json.loads(content):
        return
    with pytest.raises(DamagedCheckpointError, match=r"the manifest"):
        parse_manifest(altered, source="the manifest")


def json_of(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("cut", [0, 1, 40, -2])
def test_a_torn_manifest_is_damaged(save_step: SaveStep, cut: int) -> None:
    path = save_step(1) / "manifest.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is damaged"):
        read_manifest(path.parent)


def test_a_newer_schema_is_refused(save_step: SaveStep, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(manifest, "SCHEMA_VERSION", 4)
        step = save_step(1)
    with pytest.raises(
        CheckpointError,
        match=r"schema version 4, but this temper-engine-api reads up to 3: install a newer one",
    ):
        read_manifest(step)


def test_flipped_bit_in_the_schema_version_is_damage(
    save_step: SaveStep,
) -> None:
    path = save_step(1) / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 3', '"schema_version": 9'))
    with pytest.raises(DamagedCheckpointError, match=r"does not match its own checksum"):
        read_manifest(path.parent)


@pytest.mark.parametrize(("schema_version", "run_id"), [(1, None), (2, "c0ffee")])
def test_manifest_with_sha256_of_an_earlier_schema_is_verified(
    save_step: SaveStep, downgrade: Callable[..., None], schema_version: int, run_id: str | None
) -> None:
    step = save_step(1, run_id=run_id)
    downgrade(step, schema_version)
    files = verify(step).files
    assert [record.checksum[:7] for record in files] == ["sha256:", "sha256:"]
    assert read_manifest(step).info.run_id == run_id
    flip(step / "engine" / "shards" / "0.bin")
    with pytest.raises(DamagedCheckpointError, match=r"0\.bin has another checksum"):
        verify(step)


def test_checksum_of_an_unknown_algorithm_never_matches(save_step: SaveStep) -> None:
    step = save_step(1)
    content = read_manifest(step)
    records = tuple(replace(record, checksum="crc32:352441c2") for record in content.files)
    (step / "manifest.json").write_text(replace(content, files=records).to_json())
    with pytest.raises(DamagedCheckpointError, match=r"0\.bin has another checksum"):
        verify(step)


def test_checksum_that_is_not_text_is_damage(save_step: SaveStep) -> None:
    content = read_manifest(save_step(1))
    record = replace(content.files[0], checksum=7)  # type: ignore[arg-type]
    text = replace(content, files=(record,)).to_json()
    with pytest.raises(DamagedCheckpointError, match=r"the checksum 7 is not text"):
        parse_manifest(text.encode(), source="manifest.json")


def test_files_are_partitioned_over_ranks_by_size() -> None:
    files = [FileRecord(path=f"{size}", num_bytes=size, checksum="") for size in (7, 5, 4, 3, 1)]
    shards = partition_by_size(files, num_shards=2)
    assert [[record.num_bytes for record in shard] for shard in shards] == [[7, 3], [5, 4, 1]]


def test_altered_file_is_noticed_by_the_rank_that_reads_it(save_step: SaveStep) -> None:
    step = save_step(1)
    flip(step / "trainer/state.json")  # the smaller one of two files: rank 1 reads it
    verify(step, shard=(0, 2))
    with pytest.raises(DamagedCheckpointError, match=r"state\.json has another checksum"):
        verify(step, shard=(1, 2))
    verify(step, with_content=False)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def fail_to_read(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # a file whose first byte gives EIO, without any mock


@pytest.mark.parametrize("name", ["manifest.json", "engine/shards/0.bin"])
def test_a_symlink_loop_is_damage(save_step: SaveStep, name: str) -> None:
    step = save_step(1)
    loop(step / name)
    with pytest.raises(
        DamagedCheckpointError, match=r"cannot be read \(.*\): load another step"
    ) as caught:
        verify(step)
    assert "not damaged" not in str(caught.value)


def test_a_manifest_that_its_disk_cannot_read_is_damaged(save_step: SaveStep) -> None:
    step = save_step(1)
    fail_to_read(step / "manifest.json")
    with pytest.raises(DamagedCheckpointError, match=r"cannot be read \(Input/output error\)"):
        read_manifest(step)


def test_a_manifest_replaced_by_a_fifo_is_damaged_and_does_not_block(save_step: SaveStep) -> None:
    step = save_step(1)
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is not a file"):
        read_manifest(step)
    with (
        pytest.raises(DamagedCheckpointError, match=r"manifest.json is not a file"),
        lock_for_reading(step),
    ):
        pass


def test_too_many_open_files_are_no_damage(save_step: SaveStep) -> None:
    step = save_step(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"Too many open files\)\. The checkpoint is not damaged"
        ) as caught:
            verify(step)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert type(caught.value) is CheckpointError


def test_a_deeply_nested_manifest_is_damaged() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"the manifest is damaged"):
        parse_manifest(b"[" * 100_000, source="the manifest")


@pytest.mark.parametrize("name", ["nu\0ll", "\ud800", "x" * 5000, "d/" * 2500])
def test_an_impossible_path_in_an_intact_manifest_is_damage(save_step: SaveStep, name: str) -> None:
    step = save_step(1)
    content = read_manifest(step)
    records = (replace(content.files[0], path=name), *content.files[1:])
    (step / "manifest.json").write_text(replace(content, files=records).to_json())
    with pytest.raises(DamagedCheckpointError, match=r"has an impossible name|cannot be read"):
        verify(step)


@pytest.mark.parametrize("outside", ["../up", "/etc/up"])
def test_a_manifest_that_names_files_outside_is_refused(save_step: SaveStep, outside: str) -> None:
    content = (save_step(1) / "manifest.json").read_text().replace("trainer/state.json", outside)
    with pytest.raises(DamagedCheckpointError, match=r"names a file outside its directory"):
        parse_manifest(content.encode(), source="it")


def test_the_hash_of_a_configuration_depends_on_values_only() -> None:
    one = EngineConfig(model=ModelSpec(architecture={"model_type": "qwen2", "hidden_size": 8}))
    same = EngineConfig(
        model=ModelSpec(architecture=MappingProxyType({"hidden_size": 8, "model_type": "qwen2"}))
    )
    other = EngineConfig(model=one.model, optimizer=OptimizerSpec(lr=2e-6))
    assert hash_config(one) == hash_config(same)
    assert hash_config(one) != hash_config(other)


def test_configuration_with_an_arbitrary_object_has_no_hash() -> None:
    @dataclass(frozen=True)
    class Odd:
        thing: Mapping[str, object]

    with pytest.raises(TypeError, match=r"but contains a object"):
        hash_config(Odd(thing={"a": object()}))


def test_versions_include_engine_api_and_torch() -> None:
    versions = list_package_versions()
    assert {"temper-engine-api", "torch"} <= versions.keys()
    assert versions == {name: version(name) for name in versions}


def test_versions_include_a_distribution_whose_egg_info_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "Metadata-Version: 1.0\nName: temper-old\nVersion: 1.2\n\nVersion: of the text\n"
    (tmp_path / "temper_old-1.2.egg-info").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    _installed.cache_clear()
    versions = list_package_versions()
    monkeypatch.undo()
    _installed.cache_clear()
    assert versions["temper-old"] == "1.2"


def test_topology_sizes_name_every_axis() -> None:
    sizes = get_axis_sizes(Topology(world_size=4, dp=Axis(size=2), tp=Axis(size=2)))
    assert sizes == {"world_size": 4, "dp": 2, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "sp": 1}


def test_a_report_holds_size_and_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    (record,) = report_part(tmp_path, ["a", "a"]).files
    assert (record.path, record.num_bytes) == ("a", 3)
    # `b3sum` prints this for a file with "abc".
    expected = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert record.checksum == f"blake3:{expected}"


def test_json_is_read_back_and_other_content_is_damage(tmp_path: Path) -> None:
    assert read_json(tmp_path, write_json(tmp_path, "a.json", {"b": 1, "c": [2.5, None]})) == {
        "b": 1,
        "c": [2.5, None],
    }
    with pytest.raises(DamagedCheckpointError, match=r"b.json is missing"):
        read_json(tmp_path, "b.json")
    for content, sentence in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must contain a JSON object"),
    ):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(DamagedCheckpointError, match=f"c.json {sentence}"):
            read_json(tmp_path, "c.json")
