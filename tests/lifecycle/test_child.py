"""What the process of a role does where its parent is gone."""

from __future__ import annotations

import threading

import pytest

from tailrace.lifecycle import child


def test_a_role_whose_threads_both_remove_leftovers_ends_after_the_one_that_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the second, which finds the folder locked, ends the process in the middle of the first one's work."""
    began, may_end, ended = threading.Event(), threading.Event(), list[str]()

    def remove() -> None:
        began.set()
        may_end.wait(10)
        ended.append("removed")

    monkeypatch.setattr(child, "_PARENT", 0)
    monkeypatch.setattr("tailrace.transport.owned_folders.remove_leftovers", remove)
    first = threading.Thread(target=child._remove_leftovers)
    second = threading.Thread(target=child._remove_leftovers)
    first.start()
    began.wait(10)
    began.clear()
    second.start()
    assert not began.wait(0.1)
    may_end.set()
    first.join(10)
    second.join(10)
    assert ended == ["removed", "removed"]
