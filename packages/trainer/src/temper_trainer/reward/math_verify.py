"""Equality of mathematics by the math-verify library, an extra."""

from temper_trainer.reward.gsm8k import reference_answer
from temper_trainer.types import Prompt


def math_verify(prompt: Prompt, completion_text: str) -> float:
    """1 where the completion's answer equals the reference, else 0; an answer that can't be read is a wrong one.

    The library's own time-outs are off: they use signal.alarm, which works in a main thread only, and elsewhere turn every answer
    into a wrong one. The scorer's time-out covers this call.

    Raises:
        ValueError: the reference can't be read as mathematics.
    """
    from math_verify import parse, verify

    reference = reference_answer(prompt)
    # A bare reference is not in the delimiters that the parser looks for LaTeX in.
    gold = parse(f"${reference}$", parsing_timeout=None) or parse(reference, parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"the reference answer of prompt {prompt.prompt_id} ({prompt.source}) is {reference!r}, which math-verify can't read."
        )
    answer = parse(completion_text, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
