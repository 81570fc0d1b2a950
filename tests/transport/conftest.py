from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.transport.channels import create_socket_folder


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a path short enough for sockets; nothing but sockets may be left in it."""
    folder = create_socket_folder()
    yield folder
    shutil.rmtree(folder)
