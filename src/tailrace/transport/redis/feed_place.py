"""Where the samples of a run are: what its folder tells a trainer outside."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tailrace.errors import DataError, SettingsError
from tailrace.guards import guarded, read_at_most

FEED_FILE = "feed.json"
"""Its name in the run's folder."""
_LOOK_S = 0.2


class FeedPlace(msgspec.Struct, frozen=True):
    """A run's own Redis, or one that it shares with others."""

    url: str
    run: str
    """The run's name."""
    prefix: str = "tailrace"
    """The run's `transport.redis.prefix`."""
    transfers: str = ""
    """The folder of sockets at which its generators ask for weights (`transport.weights = "nccl"`), on its host."""
    transfer_call_s: float = 30.0
    """How long one of them may take for a call of a transfer."""

    @classmethod
    def announcement_file(cls, folder: str | os.PathLike[str], patience_s: float) -> FeedPlace:
        """Wait for the run to tell. Raises `DataError` where its folder does not, or tells something else."""
        if "://" in str(folder):
            raise SettingsError("a run is joined by its folder, or by Feed(FeedPlace(URL, run=NAME))")
        path, deadline_s = Path(folder) / FEED_FILE, time.monotonic() + patience_s
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        with guarded(f"{path} does not tell how to reach the samples of a run", DataError):
            return msgspec.json.decode(read_at_most(path, 1 << 16), type=cls)
