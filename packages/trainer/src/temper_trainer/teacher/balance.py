"""Which replica of a teacher answers which question: the longest first, each to the replica with the fewest tokens so far."""

from collections.abc import Sequence

from temper_trainer.teacher.teacher_protocol import TeacherRequest


def assign_to_replicas(
    questions: Sequence[TeacherRequest], *, num_replicas: int
) -> list[list[int]]:
    """Places in ``questions`` for each replica; a pure function, so that a repeated step asks the same replica the same."""
    loads = [0] * num_replicas
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    for place in sorted(range(len(questions)), key=lambda i: (-len(questions[i].tokens), i)):
        replica = loads.index(min(loads))
        shares[replica].append(place)
        loads[replica] += len(questions[place].tokens)
    return shares
