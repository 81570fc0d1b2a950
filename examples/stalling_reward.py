"""A reward that holds the event loop, planted: docs/performance.md finds it.

    tailrace train quickstart --environment.name examples.stalling_reward:copy_text --max_steps 8 --capture 4 \\
        --rollouts.max_tokens 48 --rollouts.agent_workers 0

Run it from the folder above this one; with agent_workers 0 the loop is the run's own. The reward compares a reply with
its reference letter by letter. That is quick for a sentence; one task in eight has a reference as long as a book's
chapter.
"""

from dataclasses import replace

from tailrace.environments import EnvironmentSpec, Message, Task, single_turn_agent

SENTENCE = "The mill race never stops."
CHAPTER = SENTENCE * 250


def similarity(text: str, reference: str) -> float:
    """1 for equal texts, 0 for texts that share nothing: edit distance over the longer one's length."""
    before = list(range(len(reference) + 1))
    for row, letter in enumerate(text, start=1):
        after = [row]
        for column, expected in enumerate(reference, start=1):
            after.append(min(before[column] + 1, after[-1] + 1, before[column - 1] + (letter != expected)))
        before = after
    return 1.0 - before[-1] / max(len(text), len(reference), 1)


def reward(task: Task, messages: list[Message]) -> float:
    """How much of the reference the reply repeats."""
    return similarity(str(messages[-1]["content"]), str(task["reference"]))


copy_text = EnvironmentSpec(
    name="copy-text",
    agent=single_turn_agent(),
    reward=reward,
    train_tasks=[
        {"prompt": f"Copy: {SENTENCE} ({number})", "reference": CHAPTER if number % 8 == 7 else SENTENCE}
        for number in range(64)
    ],
    held_out=8,
    trusted=True,  # "it returns at once": not for a chapter
)

mended = replace(copy_text, trusted=False)
"""The same in worker processes, where it holds nobody up."""
