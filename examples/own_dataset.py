"""Your own rows and your own reward: a JSONL file and a function.

    tailrace train quickstart --environment.name examples.own_dataset:shout --environment.data examples/words.jsonl \\
        --environment.eval_tasks 4

Run it from the folder above this one. A Parquet file or a folder of Hugging Face `datasets` goes in the same place.
"""

from difflib import SequenceMatcher

from tailrace.environments import EnvironmentSpec, Message, Task, single_turn_agent


def reward(task: Task, messages: list[Message]) -> float:
    """How much of the expected answer the last reply is."""
    return SequenceMatcher(None, messages[-1]["content"], task["answer"]).ratio()


shout = EnvironmentSpec(
    name="shout",
    agent=single_turn_agent(prompt="prompt"),
    reward=reward,
    required_columns=("prompt", "answer"),
    trusted=True,
)
