"""What is under way: counted by those who work, shown by those who ask."""

from temper_trainer.progress import advance, open_parts, part


def names() -> list[tuple[str, int | None, int]]:
    return [(each.name, each.total, each.done) for each in open_parts()]


def test_parts_are_counted_while_they_are_open() -> None:
    with part("rollout"), part("completions", total=3):
        advance("completions", 2)
        advance("rewards")  # none is open, as in a worker's process
        assert names() == [("rollout", None, 0), ("completions", 3, 2)]
    assert names() == []


def test_the_newest_part_of_a_name_is_counted() -> None:
    with part("rewards", total=4):
        with part("rewards", total=2):
            advance("rewards")
        advance("rewards", 3)
        assert names() == [("rewards", 4, 3)]
