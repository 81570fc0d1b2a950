"""Your own rows and your own reward: a JSONL file and a function.

    tailrace train quickstart --environment.name examples.own_dataset:rest --environment.data examples/names.jsonl \\
        --environment.eval_tasks 20

Run it from the folder above this one. A CSV or Parquet file, a folder of Hugging Face `datasets` or a data set of its
hub (`hub:OWNER/NAME`) goes in the same place.
"""

from difflib import SequenceMatcher

from tailrace.environments import EnvironmentSpec, Message, Task, single_turn_agent


def reward(task: Task, messages: list[Message]) -> float:
    """How much of the expected answer the last reply is, line by line."""
    reply, answer = messages[-1]["content"].strip(), task["answer"]
    return SequenceMatcher(None, reply.split("\n"), answer.split("\n")).ratio()


rest = EnvironmentSpec(
    name="rest",
    agent=single_turn_agent(prompt="prompt"),
    reward=reward,
    required_columns=("prompt", "answer"),
    trusted=True,
)
