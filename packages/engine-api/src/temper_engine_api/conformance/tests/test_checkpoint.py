"""Laws: a resumed run is the same run, at any world size; what is damaged or was never committed is refused; a crash costs one save."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Progress,
    Update,
    collect_state,
    load_and_train,
    merge_update_metrics,
    rank_slice,
    read_progress,
    train,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.rank_pool import RankFailureError
from temper_engine_api.conformance.harness.tolerances import (
    LOSS,
    LOSS_TERM_SCALE,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import OTHER_SHAPES, QWEN2_GROUPED, TinyModel
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from temper_engine_api.layout import default_layout
from temper_engine_api.loss_scale import INITIAL
from temper_engine_api.specs import ScheduleSpec
from temper_engine_api.weights import TrainingState

COSINE = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)


@pytest.fixture
def setup(oracle: OracleCache) -> EngineSetup:
    """An engine that trains with a rate that changes at every step."""
    return oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=COSINE)


@pytest.fixture
def batches(oracle: OracleCache) -> list[SequenceBatch]:
    """Four mini-batches."""
    return [oracle.get_batch(seed=seed) for seed in range(4)]


def test_resume_is_bitwise(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches)
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=2)
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[2:], folder=tmp_path
    )
    for number in range(2):
        updates, wanted = (
            [of_rank[-2 + number] for of_rank in of_ranks] for of_ranks in (resumed, whole)
        )
        for update, want in zip(updates, wanted, strict=True):
            assert_same_state(update.state, want.state)
            assert (update.grad_norm, update.next_lr) == (want.grad_norm, want.next_lr)
        assert merge_update_metrics(updates)["loss"] == merge_update_metrics(wanted)["loss"]


def train_without_stop(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> list[Update]:
    """Without a stop."""
    return train(rank.temporary_engine(setup), batches)


def test_saving_changes_nothing(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:2])[0]
    saving = engine_under_test.run(
        train_save_train, setup=setup, batches=batches[:2], folder=tmp_path
    )[0]
    assert_same_state(saving.state, whole[1].state)


@pytest.mark.if_claimed(Capability.BACKGROUND_SAVE)
def test_background_save_captures_the_state_at_the_call(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches)[0]
    went_on = engine_under_test.run(
        train_while_saving, setup=setup, batches=batches, folder=tmp_path
    )[0]
    assert_same_state(went_on[-1].state, whole[-1].state)
    assert list_complete_steps(tmp_path) == [1, 2]
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[2:], folder=tmp_path
    )[0]
    for update, want in zip(resumed, whole[2:], strict=True):
        assert_same_state(update.state, want.state)


def train_while_saving(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> list[Update]:
    """The first two updates are saved while the next ones run."""
    engine = rank.temporary_engine(setup)
    updates = []
    for step, batch in enumerate(batches, start=1):
        updates += train(engine, [batch])
        if step <= 2:
            engine.save_checkpoint(str(folder), global_step=step, in_background=True)
    engine.finish_saving()
    return updates


@pytest.mark.if_claimed(Capability.BACKGROUND_SAVE)
def test_failed_background_save_raises_on_every_rank(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    (tmp_path / "step_00000001").mkdir()
    for sentence, num_updates in engine_under_test.run(
        train_until_refused, setup=setup, batches=batches, folder=tmp_path
    ):
        assert "step_00000001 already exists" in sentence
        assert num_updates == len(batches), "the update that raised was lost"


def train_until_refused(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> tuple[str, int]:
    """The sentence that an ``optimizer_step`` raises; it is called again and goes on."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    engine.save_checkpoint(str(folder), global_step=1, in_background=True)
    sentence = ""
    for batch in batches:
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_batch(
                rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
            )
        time.sleep(0.5)
        try:
            engine.optimizer_step()
        except CheckpointError as error:
            sentence = str(error)
            engine.optimizer_step()
    return sentence, engine.num_updates


@pytest.mark.if_not_claimed(Capability.BACKGROUND_SAVE)
def test_unclaimed_background_save_is_rejected(
    engine_under_test: EngineUnderTest, setup: EngineSetup, tmp_path: Path
) -> None:
    engine_under_test.run(save_in_background_refused, setup=setup, folder=tmp_path)


def save_in_background_refused(rank: Rank, *, setup: EngineSetup, folder: Path) -> None:
    """Of an engine that does not claim it."""
    engine = rank.temporary_engine(setup)
    with pytest.raises(CapabilityError, match="background_save"):
        engine.save_checkpoint(str(folder), global_step=1, in_background=True)


def train_save_train(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> Update:
    """One update, a save, another update."""
    engine = rank.temporary_engine(setup)
    train(engine, batches[:1])
    engine.save_checkpoint(str(folder), global_step=1)
    return train(engine, batches[1:])[0]


def test_counters_and_learning_rate_are_resumed(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    bad = batches[1].with_columns(
        {"advantages": torch.full_like(batches[1].columns["advantages"], torch.inf)}
    )
    for saved, loaded in engine_under_test.run(
        progress_around_a_save,
        setup=setup,
        batches=[batches[0], bad, batches[2]],
        folder=tmp_path,
    ):
        assert loaded == saved
        assert (saved.num_updates, saved.num_schedule_steps, saved.num_nonfinite_updates) == (
            2,
            2,
            1,
        )


@pytest.mark.if_claimed(Capability.FP16)
def test_fp16_loss_scale_is_halved_and_resumed(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, schedule=COSINE, compute="fp16")
    # Far beyond what fp16 holds once it is scaled: every rank sees it in the global norm.
    large = batches[1].with_columns({"advantages": batches[1].columns["advantages"] * 1e9})
    for saved, loaded in engine_under_test.run(
        progress_around_a_save,
        setup=setup,
        batches=[batches[0], large, batches[2]],
        folder=tmp_path,
    ):
        assert loaded == saved
        assert (saved.num_updates, saved.num_schedule_steps, saved.num_nonfinite_updates) == (
            2,
            2,
            1,
        )
        assert saved.loss_scale == INITIAL / 2


def progress_around_a_save(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path
) -> tuple[Progress, Progress]:
    """Before the save, and in a new engine after loading."""
    engine = rank.temporary_engine(setup)
    train(engine, batches)
    engine.save_checkpoint(str(folder), global_step=3)
    other = rank.temporary_engine(setup)
    other.load_checkpoint(str(folder))
    return read_progress(engine), read_progress(other)


def test_random_state_is_resumed(
    engine_under_test: EngineUnderTest, setup: EngineSetup, tmp_path: Path
) -> None:
    for after_save, after_load in engine_under_test.run(
        draws_around_a_save, setup=setup, folder=tmp_path
    ):
        assert torch.equal(after_save, after_load)


def draws_around_a_save(rank: Rank, *, setup: EngineSetup, folder: Path) -> tuple[Tensor, Tensor]:
    """What torch draws after a save, and after loading it."""
    engine = rank.temporary_engine(setup)
    torch.manual_seed(rank.index + 5)
    engine.save_checkpoint(str(folder), global_step=0)
    after_save = torch.rand(4)
    torch.rand(7)
    engine.load_checkpoint(str(folder))
    return after_save, torch.rand(4)


@pytest.mark.if_claimed(Capability.RESHARD_ON_LOAD)
def test_resume_in_another_layout_gives_the_same_loss(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:3])
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=2)
    # Here, in the run's first layout and in the one after this.
    layouts = engine_under_test.comparable_layouts
    for other in {
        layouts[0],
        engine_under_test.layout,
        layouts[(layouts.index(engine_under_test.layout) + 1) % len(layouts)],
    }:
        resumed = engine_under_test.run_in(
            other, load_and_train, setup=setup, batches=batches[2:3], folder=tmp_path
        )
        losses = [
            merge_update_metrics([of_rank[-1] for of_rank in of_ranks])["loss"]
            for of_ranks in (resumed, whole)
        ]
        assert_close(
            losses[0], losses[1], LOSS, what=f"next loss at {other.name}", min_scale=LOSS_TERM_SCALE
        )
        assert resumed[0][-1].next_lr == whole[0][-1].next_lr


@pytest.mark.parametrize("how", ["altered", "truncated", "removed"])
def test_damaged_checkpoint_is_rejected_naming_the_file(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
    how: str,
) -> None:
    step = Path(
        engine_under_test.run(
            train_and_save, setup=setup, batches=batches[:1], folder=tmp_path, step=1
        )[0]
    )
    victim = max(
        (path for path in (step / "engine").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damage(victim, how)
    for message, before, after in engine_under_test.run(
        refused_load, setup=setup, folder=step, kind="damaged"
    ):
        assert victim.name in message
        assert_same_state(after, before)


def damage(victim: Path, how: str) -> None:
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "removed":
        victim.unlink()
    else:
        victim.write_bytes(content if how == "altered" else content[:-1])


def refused_load(
    rank: Rank, *, setup: EngineSetup, folder: Path, kind: str
) -> tuple[str, dict[str, TrainingState], dict[str, TrainingState]]:
    """The refusal's sentence, and the state around it."""
    expected = {
        "damaged": DamagedCheckpointError,
        "incomplete": IncompleteCheckpointError,
        "foreign": CheckpointError,
    }[kind]
    engine = rank.temporary_engine(setup)
    before = collect_state(engine)
    with pytest.raises(expected) as caught:
        engine.load_checkpoint(str(folder))
    assert caught.type is expected
    return str(caught.value), before, collect_state(engine)


def test_step_without_manifest_is_rejected(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    step = Path(
        engine_under_test.run(
            train_and_save, setup=setup, batches=batches[:1], folder=tmp_path, step=1
        )[0]
    )
    (step / "manifest.json").unlink()
    for place in (step, tmp_path):
        for _, before, after in engine_under_test.run(
            refused_load, setup=setup, folder=place, kind="incomplete"
        ):
            assert_same_state(after, before)


@pytest.mark.parametrize("other", OTHER_SHAPES, ids=lambda model: model.name)
def test_checkpoint_of_another_model_is_rejected(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
    other: TinyModel,
) -> None:
    foreign = oracle.make_setup(other, optimizer=ADAMW, schedule=COSINE)
    if not all(
        engine_under_test.run(
            save_if_buildable, setup=foreign, batches=batches[:1], folder=tmp_path, step=1
        )
    ):
        # The layout fixes how many layers there are; another one makes the checkpoint that this one must refuse.
        engine_under_test.run_in(
            default_layout(1),
            train_and_save,
            setup=foreign,
            batches=batches[:1],
            folder=tmp_path,
            step=1,
        )
    for _, before, after in engine_under_test.run(
        refused_load, setup=setup, folder=tmp_path, kind="foreign"
    ):
        assert_same_state(after, before)


def save_if_buildable(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch], folder: Path, step: int
) -> bool:
    """Whether this layout can have such a model; its checkpoint is saved then."""
    try:
        train_and_save(rank, setup=setup, batches=batches, folder=folder, step=step)
    except ConfigError:
        return False
    return True


def test_failed_save_keeps_the_previous_step(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:1], folder=tmp_path, step=1)
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:2])[0]
    messages = engine_under_test.run(failing_save, setup=setup, folder=tmp_path, step=2)
    assert all("No space left" in message for message in messages)
    assert list_complete_steps(tmp_path) == [1]
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[1:2], folder=tmp_path
    )[0]
    assert_same_state(resumed[0].state, whole[1].state)


def failing_save(rank: Rank, *, setup: EngineSetup, folder: Path, step: int) -> str:
    """The disk of the last rank is full once everything is written."""
    engine = rank.temporary_engine(setup)
    write = engine._write_state

    def write_and_fail(directory: str) -> list[str]:
        files = write(directory)
        if rank.index == rank.world_size - 1:
            raise OSError(28, "No space left on device")
        return files

    engine._write_state = write_and_fail  # type: ignore[method-assign]  # a fault, not a stand-in
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(str(folder), global_step=step)
    return str(caught.value)


def test_killed_save_keeps_the_previous_step(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:1], folder=tmp_path, step=1)
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches[:2])[0]
    with pytest.raises(RankFailureError, match="died"):
        engine_under_test.run(killed_save, setup=setup, folder=tmp_path, step=2)
    assert list_complete_steps(tmp_path) == [1]
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[1:2], folder=tmp_path
    )[0]
    assert_same_state(resumed[0].state, whole[1].state)


def killed_save(rank: Rank, *, setup: EngineSetup, folder: Path, step: int) -> None:
    """The last rank is killed once its files are written."""
    engine = rank.temporary_engine(setup)
    write = engine._write_state

    def write_and_die(directory: str) -> list[str]:
        files = write(directory)
        if rank.index == rank.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return files

    engine._write_state = write_and_die  # type: ignore[method-assign]  # a fault, not a stand-in
    engine.save_checkpoint(str(folder), global_step=step)


def test_only_the_newest_steps_are_kept(
    engine_under_test: EngineUnderTest, setup: EngineSetup, tmp_path: Path
) -> None:
    engine_under_test.run(save_often, setup=setup, folder=tmp_path, num_saves=4, max_to_keep=2)
    assert list_complete_steps(tmp_path) == [3, 4]


def save_often(
    rank: Rank, *, setup: EngineSetup, folder: Path, num_saves: int, max_to_keep: int
) -> None:
    """Steps 1 to num_saves."""
    engine = rank.temporary_engine(setup)
    for step in range(1, num_saves + 1):
        engine.save_checkpoint(str(folder), global_step=step, max_ckpt_to_keep=max_to_keep)


def test_only_the_downloaded_copy_is_deleted(
    engine_under_test: EngineUnderTest,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    tmp_path: Path,
) -> None:
    local, remote, downloads = tmp_path / "local", tmp_path / "remote", tmp_path / "downloads"
    downloads.mkdir()
    (downloads / "mine.txt").write_text("the user's own")
    states = engine_under_test.run(
        save_and_load_remotely,
        setup=setup,
        batches=batches[:1],
        local=local,
        url=f"file://{remote}",
        downloads=downloads,
    )
    assert_same_state(states[0][1], states[0][0])
    assert [path.name for path in downloads.iterdir()] == ["mine.txt"]
    assert (list_complete_steps(local), list_complete_steps(remote)) == ([1], [1])


def save_and_load_remotely(
    rank: Rank,
    *,
    setup: EngineSetup,
    batches: list[SequenceBatch],
    local: Path,
    url: str,
    downloads: Path,
) -> tuple[dict[str, TrainingState], dict[str, TrainingState]]:
    """State when saved, and when loaded from the copy."""
    engine = rank.temporary_engine(setup)
    train(engine, batches)
    saved = collect_state(engine)
    engine.save_checkpoint(str(local), url, global_step=1)
    train(engine, batches)
    engine.load_checkpoint(str(downloads), url, del_local_after_load=True)
    return saved, collect_state(engine)
