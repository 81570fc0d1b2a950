from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A run sets up the logging of its process; a test gives it back."""
    root, ours = logging.getLogger(), logging.getLogger("tailrace")
    handlers, level, our_level = list(root.handlers), root.level, ours.level
    yield
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    for handler in handlers:
        if handler not in root.handlers:
            root.addHandler(handler)
    root.setLevel(level)
    ours.setLevel(our_level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
