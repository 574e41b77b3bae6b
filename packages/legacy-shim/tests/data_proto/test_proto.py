import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from temper_engine_api.errors import BatchError
from temper_legacy_shim.data_proto import (
    DataProto,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)


def batch(num_rows: int = 4, **meta: object) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "ids": torch.arange(2 * num_rows).reshape(num_rows, 2),
            "score": torch.arange(num_rows) / 2,
        },
        non_tensors={"uid": [f"u{i}" for i in range(num_rows)]},
        meta_info=dict(meta),
    )


def uids(data: DataProto) -> list[object]:
    return data.non_tensor_batch["uid"].tolist()


def test_old_code_reads_columns_sizes_and_rows() -> None:
    data = batch()
    assert len(data) == 4
    assert data.batch is not None
    assert data.batch.batch_size == (4,)
    assert data.batch["ids"].tolist()[1] == [2, 3]
    assert data.batch[1:3]["ids"].tolist() == [[2, 3], [4, 5]]


def test_an_integer_gives_one_row_and_everything_else_a_batch() -> None:
    row = batch()[2]
    assert isinstance(row, DataProtoItem)
    assert row.batch is not None
    assert row.batch["ids"].tolist() == [4, 5]
    assert row.non_tensor_batch["uid"] == "u2"
    assert uids(batch()[::2]) == ["u0", "u2"]
    assert uids(batch()[[3, 0]]) == ["u3", "u0"]
    assert uids(batch()[np.array([1, 1])]) == ["u1", "u1"]
    assert uids(batch()[torch.tensor([True, False, False, True])]) == ["u0", "u3"]
    assert len(batch()[[]]) == 0


def test_columns_of_another_length_are_refused_by_name() -> None:
    with pytest.raises(BatchError, match="column 'short' has 3 rows, but the batch has 4"):
        DataProto.from_dict(tensors={"ids": torch.zeros(4, 2), "short": torch.zeros(3)})
    with pytest.raises(BatchError, match="'uid' has 1 rows, but the batch has 4"):
        DataProto.from_dict(tensors={"ids": torch.zeros(4, 2)}, non_tensors={"uid": ["a"]})


def test_union_adds_columns_and_keeps_what_both_agree_on() -> None:
    other = DataProto.from_dict(
        tensors={"score": torch.arange(4) / 2, "new": torch.full((4,), torch.nan)},
        meta_info={"b": 2},
    )
    united = batch(a=1).union(other).union(other)
    assert united.batch is not None
    assert set(united.batch.keys()) == {"ids", "score", "new"}
    assert united.meta_info == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (DataProto.from_dict(tensors={"score": torch.zeros(4)}), "tensor entry 'score' is in both"),
        (DataProto.from_dict(tensors={"ids": torch.zeros(4, 2)}), "tensor entry 'ids' is in both"),
        (
            DataProto.from_dict(non_tensors={"uid": ["a", "b", "c", "d"]}),
            "non-tensor entry 'uid' is in both",
        ),
        (DataProto(meta_info={"a": 2}), "meta_info entry 'a' is in both"),
        (DataProto.from_dict(tensors={"new": torch.zeros(3)}), "batches of 4 and 3 rows"),
    ],
)
def test_union_refuses_a_conflict_and_changes_nothing(other: DataProto, sentence: str) -> None:
    data = batch(a=1)
    with pytest.raises(BatchError, match=sentence):
        data.union(other)
    assert data.batch is not None
    assert set(data.batch.keys()) == {"ids", "score"}


def test_select_and_pop_take_columns() -> None:
    data = batch(a=1, b=2)
    chosen = data.select(batch_keys=["ids"], non_tensor_batch_keys=[], meta_info_keys=["b"])
    assert chosen.batch is not None
    assert (list(chosen.batch), chosen.non_tensor_batch, chosen.meta_info) == (
        ["ids"],
        {},
        {"b": 2},
    )
    popped = data.pop(batch_keys=["score"], meta_info_keys=["a"])
    assert popped.batch is not None
    assert popped.batch["score"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert data.batch is not None
    assert (list(data.batch), data.meta_info) == (["ids"], {"b": 2})


def test_split_leaves_a_shorter_last_piece_and_chunk_does_not() -> None:
    assert [len(part) for part in batch(5).split(2)] == [2, 2, 1]
    assert [uids(part) for part in batch(4).chunk(2)] == [["u0", "u1"], ["u2", "u3"]]
    with pytest.raises(BatchError, match="5 rows do not divide into 2 equal chunks"):
        batch(5).chunk(2)


def test_concat_undoes_chunk_and_collects_metrics_by_rank() -> None:
    parts = batch(4).chunk(2)
    for rank, part in enumerate(parts):
        part.meta_info = {"t": 0.7, "metrics": {"loss": [rank, rank], "lr": 0.1}}
    complete = DataProto.concat(parts)
    assert complete.batch is not None
    assert batch().batch is not None
    assert torch.equal(complete.batch.column("ids"), batch().batch["ids"])  # type: ignore[index]
    assert uids(complete) == ["u0", "u1", "u2", "u3"]
    assert complete.meta_info == {"t": 0.7, "metrics": {"loss": [[0, 0], [1, 1]], "lr": [0.1, 0.1]}}


def test_concat_refuses_settings_that_differ_and_metrics_that_only_a_later_rank_has() -> None:
    with pytest.raises(BatchError, match="'t' is in both"):
        DataProto.concat([batch(t=1), batch(t=2)])
    with pytest.raises(BatchError, match="metric 'b' is reported by a later batch"):
        DataProto.concat([batch(metrics={"a": 1}), batch(metrics={"a": 1, "b": 2})])


def test_repeat_and_reorder() -> None:
    assert uids(batch(2).repeat(2)) == ["u0", "u0", "u1", "u1"]
    assert uids(batch(2).repeat(2, interleave=False)) == ["u0", "u1", "u0", "u1"]
    data = batch(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert uids(data) == ["u2", "u0", "u1"]


@pytest.mark.parametrize(("rows", "divisor", "added"), [(4, 4, 0), (5, 4, 3), (2, 7, 5)])
def test_padding_to_a_divisor_repeats_rows_from_the_front_and_comes_off_again(
    rows: int, divisor: int, added: int
) -> None:
    padded, count = pad_dataproto_to_divisor(batch(rows), divisor)
    assert (count, len(padded)) == (added, rows + added)
    assert uids(padded) == [f"u{i % rows}" for i in range(rows + added)]
    assert uids(unpad_dataproto(padded, count)) == uids(batch(rows))


def test_padding_in_position_repeats_an_edge_row() -> None:
    data = batch(2)
    data.padding(2, "first")
    assert uids(data) == ["u0", "u1", "u0", "u0"]


def test_columns_change_names_at_once_and_none_is_lost() -> None:
    data = DataProto.from_dict({"a": torch.arange(2), "b": torch.ones(2)})
    data.rename(["a", "b"], ["b", "a"])
    assert data.batch is not None
    assert {name: column.tolist() for name, column in data.batch.items()} == {
        "b": [0, 1],
        "a": [1, 1],
    }
    with pytest.raises(BatchError, match="renamed 'b'"):
        data.rename("a", "b")
    with pytest.raises(BatchError, match="renamed 'c'"):
        data.rename(["a", "b"], ["c", "c"])
    assert sorted(data.batch) == ["a", "b"]


@pytest.mark.parametrize("value", ["abc", 5, {"x": 1}], ids=["text", "number", "mapping"])
def test_a_column_of_what_is_no_sequence_of_rows_is_refused(value: object) -> None:
    with pytest.raises(BatchError, match=type(value).__name__):
        DataProto.from_single_dict({"a": torch.arange(3), "x": value})


def test_mini_batches_of_a_seed_are_those_of_torch_s_loader() -> None:
    data = DataProto.from_dict({"a": torch.arange(8)})
    parts = data.make_iterator(4, 2, seed=1, dataloader_kwargs={"shuffle": True})
    loader = DataLoader(
        range(8), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    )  # type: ignore[arg-type]
    expected = [rows.tolist() for _ in range(2) for rows in loader]
    assert [part.batch["a"].tolist() for part in parts if part.batch is not None] == expected  # type: ignore[union-attr]


def test_mini_batches_of_every_epoch_hold_every_row() -> None:
    parts = list(batch(4, t=1).make_iterator(2, 2, seed=3, dataloader_kwargs={"shuffle": True}))
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert sorted(uid for part in parts[:2] for uid in uids(part)) == ["u0", "u1", "u2", "u3"]
    assert parts[0].meta_info == {"t": 1}
    with pytest.raises(BatchError, match="divides 4 rows"):
        next(batch(4).make_iterator(3, 1))
    with pytest.raises(BatchError, match="divides 4 rows"):
        next(batch(4).make_iterator(0, 1))


def test_pickling_keeps_dtypes_values_and_settings() -> None:
    data = batch(3, metrics={"loss": [1.0]})
    assert data.batch is not None
    data.batch["half"] = torch.tensor([[1.5], [2.5], [-0.25]], dtype=torch.bfloat16)
    data.batch["flag"] = torch.tensor([True, False, True])
    again = pickle.loads(pickle.dumps(data))
    assert again.batch.keys() == data.batch.keys()
    for name, column in data.batch.items():
        assert again.batch[name].dtype == column.dtype
        assert torch.equal(again.batch[name], column)
    assert uids(again) == uids(data)
    assert again.meta_info == data.meta_info
    again.batch["half"].add_(1)


def test_a_pickled_state_of_the_older_class_is_refused_unread() -> None:
    with pytest.raises(BatchError, match="written by the older generation"):
        DataProto().__setstate__((b"bytes of torch.save", {}, {}))


def test_a_file_brings_the_batch_back_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    batch(2, steps=[1, 2], name="x").save_to_disk(str(path))
    again = DataProto.load_from_disk(str(path))
    assert again.batch is not None
    assert again.batch["ids"].tolist() == [[0, 1], [2, 3]]
    assert (uids(again), again.meta_info) == (["u0", "u1"], {"steps": [1, 2], "name": "x"})
    with pytest.raises(FileExistsError):
        batch().save_to_disk(str(path))
    with pytest.raises(BatchError, match=r"meta_info.fn is a function"):
        batch(fn=lambda: None).save_to_disk(str(tmp_path / "other.pt"))


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (Path("exploded"),))


def test_a_foreign_pickle_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pt", "plain.pkl"):
        with pytest.raises(BatchError, match="not executed"):
            DataProto.load_from_disk(str(tmp_path / name))
    assert not (tmp_path / "exploded").exists()
