"""What a bounded table keeps, against a plain list of what was used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.recent import RecentTable


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["put", "get", "forget"]), st.integers(0, 9))))
def test_the_last_used_are_there_and_no_more_than_twice_as_many(least: int, uses: list[tuple[str, int]]) -> None:
    table, used = RecentTable[int, int](least), list[int | None]()
    for number, (use, key) in enumerate(uses):
        if use == "put":
            table[key] = number
            used = [*(one for one in used if one != key), key]
        elif use == "forget":
            table.forget(key)
            used = [None if one == key else one for one in used]  # it had its place
        elif table.get(key) is not None:
            used = [*(one for one in used if one != key), key]
        assert all(one in table for one in used[-least:] if one is not None)
        assert sum(one in table for one in range(10)) <= 2 * least


def test_values_are_those_put_last_and_go_by_value_or_all_at_once() -> None:
    table = RecentTable[str, int](2)
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        table[key] = value
    assert (table.get("a"), table.get("b"), table.get("c")) == (3, 2, None)
    table.forget_all(where=lambda value: value == 3)
    assert (table.get("a"), table.get("b")) == (None, 2)
    table.clear()
    assert "b" not in table
