from temper_trainer.progress import advance_progress, list_active_tasks, track_progress


def names() -> list[tuple[str, int | None, int]]:
    return [(each.name, each.total, each.done) for each in list_active_tasks()]


def test_items_of_active_operations_are_counted() -> None:
    with track_progress("rollout"), track_progress("completions", total=3):
        advance_progress("completions", 2)
        advance_progress("rewards")  # none is open, as in a worker's process
        assert names() == [("rollout", None, 0), ("completions", 3, 2)]
    assert names() == []


def test_newest_operation_with_a_name_is_counted() -> None:
    with track_progress("rewards", total=4):
        with track_progress("rewards", total=2):
            advance_progress("rewards")
        advance_progress("rewards", 3)
        assert names() == [("rewards", 4, 3)]
