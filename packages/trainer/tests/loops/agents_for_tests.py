"""Agents that only know an OpenAI client, as functions and as a program."""

import json
import os
import sys
from typing import TYPE_CHECKING

from openai import AsyncOpenAI, OpenAI

if TYPE_CHECKING:
    # Imports torch, which a program would wait for.
    from temper_trainer.environment.agent_environment import AgentTask


async def ask_twice(task: "AgentTask") -> float:
    """Ask, and ask again for the same conversation; return a reward for digits."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages = [{"role": "user", "content": task.question}]
        for _ in range(2):
            response = await client.chat.completions.create(model="gpt-x", messages=messages)  # type: ignore[arg-type]
            message = response.choices[0].message
            messages += [
                {"role": "assistant", "content": message.content or ""},
                {"role": "user", "content": "?"},
            ]
    text = "".join(each["content"] for each in messages[1:])
    return sum(character.isdigit() for character in text) / len(text)


def main() -> None:
    """Ask once, as a program whose variables name the endpoint."""
    task = json.loads(sys.stdin.readline())
    if "SECRET_OF_THE_RUN" in os.environ:
        sys.exit("the agent has a variable that it was not given")
    with OpenAI() as client:
        response = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"],
            messages=[{"role": "user", "content": task["prompt"]}],
            max_tokens=8,
        )
    num_tokens = response.usage.completion_tokens if response.usage else 0
    sys.stdout.write(f"{num_tokens} tokens\n{json.dumps({'reward': 0.25})}\n")
    if sys.argv[1:] == ["fail"]:
        sys.exit("the agent has failed")


if __name__ == "__main__":
    main()
