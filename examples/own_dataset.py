"""Your own rows and your own reward: a JSONL file and a function.

    tailrace train quickstart --environment.name examples.own_dataset:shout --environment.data examples/words.jsonl \\
        --environment.eval_tasks 4

Run it from the folder above this one. A CSV or Parquet file, a folder of Hugging Face `datasets` or a data set of its
hub (`hub:OWNER/NAME`) goes in the same place.
"""

from difflib import SequenceMatcher

from tailrace.environments import EnvironmentSpec, Message, Task, single_turn_agent


def reward(task: Task, messages: list[Message]) -> float:
    """How much of the expected answer the last reply is: half of it for the letters, half for their case."""
    reply, answer = messages[-1]["content"].strip(), task["answer"]
    return (likeness(reply.upper(), answer) + likeness(reply, answer)) / 2


def likeness(reply: str, answer: str) -> float:
    """From 0 to 1, by `difflib`."""
    return SequenceMatcher(None, reply, answer).ratio()


shout = EnvironmentSpec(
    name="shout",
    agent=single_turn_agent(prompt="prompt"),
    reward=reward,
    required_columns=("prompt", "answer"),
    trusted=True,
)
