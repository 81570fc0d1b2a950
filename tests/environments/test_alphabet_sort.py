import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.environments.alphabet_sort import (
    NAMES,
    AlphabetSort,
    ConversationSizes,
    alphabet_sort,
    alphabet_sort_tasks,
    expected_lines,
    is_combination_held_out,
    turn_reward,
)
from tailrace.environments.protocol import EnvironmentSpec, Observation
from tailrace.errors import SettingsError
from tailrace.records import Message, Task, TaskId

MODEL_FOLDER = Path(__file__).parents[2] / "src" / "tailrace" / "recipes" / "models" / "quickstart"
TURNS = [["Max", "Ada"], ["Leo"], ["Zoe", "Eva"]]
ROW = {"turns": TURNS, "expected": [expected_lines(TURNS, turn) for turn in range(3)]}


def play(spec: EnvironmentSpec, task: Task, answers: list[str]) -> tuple[float, Observation]:
    """The rollout's reward and the last observation when the policy gives these answers."""
    assert spec.environment is not None
    environment = spec.environment()
    observation = environment.reset(task)
    total = 0.0
    for answer in answers:
        assert isinstance(observation, Observation)
        assert not observation.done
        assert observation.messages[-1]["role"] == "user"
        observation = environment.step(Message(role="assistant", content=answer))
        assert isinstance(observation, Observation)
        total += observation.reward or 0.0
    assert isinstance(observation, Observation)
    return total, observation


def combination(row: object) -> frozenset[str]:
    assert isinstance(row, dict)
    return frozenset(itertools.chain.from_iterable(row["turns"]))


def test_expected_lists_merge_sort_and_mark_only_the_latest_names() -> None:
    assert ROW["expected"] == [
        ["Ada", "Max"],
        ["Ada", "Leo (new)", "Max"],
        ["Ada", "Eva (new)", "Leo", "Max", "Zoe (new)"],
    ]


@pytest.mark.parametrize("index", range(20))
def test_perfect_answers_earn_a_reward_of_one(index: int) -> None:
    spec = alphabet_sort()
    task = spec.train_task(index)
    reward, last = play(spec, task, ["\n".join(lines) for lines in task["expected"]])
    assert reward == pytest.approx(1.0)
    assert last.done
    assert last.metrics["right_turns"] == 1.0


@pytest.mark.parametrize(
    ("answer", "ratio"),
    [
        ("Ada\nLeo (new)\nMax", 1.0),
        ("\n  Ada \n\nLeo (new)\nMax\n", 1.0),
        ("Ada\nLeo\nMax", 2 / 3),  # the mark is missing
        ("Ada\nMax\nLeo (new)", 2 / 3),  # not merged
        ("Ada\nLeo (new)", 4 / 5),  # one is left out
        ("Ada\nAda\nLeo (new)\nMax", 6 / 7),  # one is said twice
        ("Max (new)\nLeo\nAda (new)", 0.0),
        ("", 0.0),
    ],
)
def test_a_turn_earns_its_difflib_ratio_to_the_power(answer: str, ratio: float) -> None:
    assert turn_reward(answer, ROW["expected"][1], 4.0) == pytest.approx(ratio**4)
    assert turn_reward(answer, ROW["expected"][1], 1.0) == pytest.approx(ratio)


def test_a_rollout_earns_the_mean_over_its_turns_and_saves_each() -> None:
    spec = alphabet_sort()
    task = Task(task_id=TaskId("alphabet-sort/train/0"), environment="alphabet-sort", index=0, row=ROW)
    answers = ["Max\nAda", "Ada\nLeo (new)\nMax", "Ada\nEva\nLeo\nMax\nZoe"]
    reward, last = play(spec, task, answers)
    assert reward == pytest.approx((0.5**4 + 1.0 + 0.6**4) / 3)
    assert last.metrics["right_turns"] == pytest.approx(1 / 3)
    environment = AlphabetSort()
    environment.reset(task)
    environment.step(Message(role="assistant", content=answers[0]))
    assert environment.turn_rewards == [pytest.approx(0.5**4)]
    assert "turn_rewards" in spec.columns


def test_a_wrong_turn_does_not_change_what_the_next_one_asks() -> None:
    task = Task(task_id=TaskId("alphabet-sort/train/0"), environment="alphabet-sort", index=0, row=ROW)
    right, wrong = AlphabetSort(), AlphabetSort()
    assert right.reset(task) == wrong.reset(task)
    after_right = right.step(Message(role="assistant", content="Ada\nMax"))
    after_wrong = wrong.step(Message(role="assistant", content="no idea"))
    assert after_right.messages == after_wrong.messages


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)),
    turns=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    names=st.tuples(st.integers(1, 3), st.integers(0, 2)),
)
def test_no_combination_of_names_is_both_trained_on_and_held_out(
    seeds: tuple[int, int], turns: tuple[int, int], names: tuple[int, int]
) -> None:
    seed, eval_seed = seeds
    sizes = ConversationSizes(turns[0], sum(turns), names[0], sum(names))
    train = {combination(row) for row in alphabet_sort_tasks(sizes, held_out=False, seed=seed, length=30)}
    held_out = {combination(row) for row in alphabet_sort_tasks(sizes, held_out=True, seed=eval_seed, length=30)}
    assert train.isdisjoint(held_out)


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=12, unique=True), st.randoms(use_true_random=False))
def test_the_split_ignores_the_order_of_names(names: list[str], rng: random.Random) -> None:
    shuffled = list(names)
    rng.shuffle(shuffled)
    assert is_combination_held_out(names) == is_combination_held_out(shuffled)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 99), st.booleans())
def test_rows_keep_within_their_sizes_and_name_nobody_twice(seed: int, index: int, held_out: bool) -> None:
    row = alphabet_sort_tasks(ConversationSizes(2, 4, 1, 5), held_out=held_out, seed=seed, length=100)[index]
    assert 2 <= len(row["turns"]) <= 4
    assert all(1 <= len(names) <= 5 for names in row["turns"])
    assert len(combination(row)) == sum(map(len, row["turns"]))


def test_tasks_depend_on_the_seed_alone_not_on_how_many_there_are() -> None:
    few, many = alphabet_sort(num_train_tasks=5, seed=3), alphabet_sort(num_train_tasks=50, seed=3)
    assert list(few.train_tasks) == list(many.train_tasks)[:5]
    assert list(alphabet_sort(seed=4, num_train_tasks=5).train_tasks) != list(few.train_tasks)
    assert list(few.eval_tasks) == list(alphabet_sort(seed=4).eval_tasks)
    assert len(few.eval_tasks) == 200
    assert few.train_tasks[-1] == few.train_tasks[4]
    with pytest.raises(IndexError):
        few.train_tasks[5]


def test_impossible_sizes_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="min_turns = 4"):
        alphabet_sort(min_turns=4, max_turns=3)
    with pytest.raises(SettingsError, match="max_turns × max_names is 60"):
        alphabet_sort(max_turns=6, max_names=10)
    with pytest.raises(SettingsError, match="power"):
        alphabet_sort(power=0.0)


def test_names_are_in_alphabetical_order_as_strings() -> None:
    assert sorted(NAMES) == sorted(NAMES, key=str.lower)
    assert len(set(NAMES)) == len(NAMES)
    assert all(name.isascii() and name.isalpha() for name in NAMES)


def test_the_bundled_model_loads_and_its_tokenizer_gives_every_name_one_token() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_FOLDER)
    assert model.num_parameters() < 3_000_000
    assert model.config.vocab_size >= len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for name in NAMES:
        assert len(tokenizer.encode(name, add_special_tokens=False)) == 1
    for text in ["\n".join(NAMES), "Ada (new)\nMax", "Größe, 東京 and 3 + 4 = 7!", " \t\n\n"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_bundled_chat_template_only_appends() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_FOLDER)
    messages = [{"role": "user", "content": "Sort"}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nSort<|im_end|>\n<|im_start|>assistant\n"
    messages += [{"role": "assistant", "content": "Ada"}, {"role": "tool", "content": "12"}]
    longer = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert longer == f"{asked}Ada<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
