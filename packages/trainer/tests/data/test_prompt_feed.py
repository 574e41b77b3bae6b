"""Prompts that were trained before others are skipped by a resumed run, and no other ones."""

from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.data.streams import InMemoryStream, PromptFeed
from temper_trainer.types import Prompt

PROMPTS = [Prompt(prompt_id=i, text="", tokens=(i,), answer="") for i in range(7)]


def test_positions_continue_over_epochs_and_skip_trained_prompts() -> None:
    stream = InMemoryStream(PROMPTS, seed=0, shuffle=False)
    stream.take(5)
    feed = PromptFeed(stream, num_trained=7, trained_ahead=(1, 3))
    taken = [(position, prompt.prompt_id) for position, prompt in feed.take(4)]
    # Prompts 5 to 6 and 0 to 3 of the next epoch, without the second and the fourth.
    assert taken == [(5, 5), (7, 0), (9, 2), (10, 3)]


@given(first=st.sets(st.integers(0, 11)), second=st.sets(st.integers(0, 11)))
def test_resumed_feeds_deliver_every_prompt_once(first: set[int], second: set[int]) -> None:
    """Train some of 12 prompts, resume, train others, resume again, and take the rest."""
    trained: set[int] = set()
    cursor, ahead, num_trained = None, (), 0
    for chosen in (first, second):
        feed = PromptFeed(
            InMemoryStream(PROMPTS, seed=3, shuffle=True, cursor=cursor),
            num_trained=num_trained,
            trained_ahead=ahead,
        )
        marks = []
        taken = []
        while len(taken) + num_trained < 12:
            marks.append(feed.mark)
            taken += feed.take(1)
        now = {position for position, _ in taken} & chosen
        assert not now & trained
        trained |= now
        oldest = next(
            (
                mark
                for mark, (position, _) in zip(marks, taken, strict=True)
                if position not in trained
            ),
            feed.mark,
        )
        cursor, ahead = oldest.cursor, feed.list_trained_ahead(oldest, trained=now)
        num_trained = len(trained)
    feed = PromptFeed(
        InMemoryStream(PROMPTS, seed=3, shuffle=True, cursor=cursor),
        num_trained=num_trained,
        trained_ahead=ahead,
    )
    rest = [position for position, _ in feed.take(12 - num_trained)]
    assert sorted([*trained, *rest]) == list(range(12))
