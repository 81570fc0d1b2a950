"""Where the samples of a batch come from: what its figures are told by, and what joins a token to its rollout."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.records.ids import RolloutId


class SampleOrigins(msgspec.Struct, frozen=True, array_like=True):
    """Of the samples of a batch, in their order; nothing of any where nobody knows."""

    rollout_ids: tuple[RolloutId, ...] = ()
    branches: tuple[int, ...] = ()
    """Which of its rollout's branches each sample is."""
    environments: tuple[str, ...] = ()
    """Names, each once."""
    environment_ids: tuple[int, ...] = ()
    """[num_samples]: into `environments`."""

    @classmethod
    def of(cls, samples: Sequence[tuple[RolloutId, int, str]], environments: Sequence[str] = ()) -> SampleOrigins:
        """Of samples' rollout, branch and environment. Those of `environments` come first. O(samples).

        >>> SampleOrigins.of([("a#0", 0, "names"), ("b#0", 1, "sums"), ("a#1", 0, "names")]).environment_ids
        (0, 1, 0)
        """
        if not samples:
            return cls(environments=tuple(environments))
        rollout_ids, branches, names = zip(*samples, strict=True)
        places = {name: place for place, name in enumerate(dict.fromkeys([*environments, *names]))}
        return cls(rollout_ids, branches, tuple(places), tuple(places[name] for name in names))

    def between(self, first: int, last: int) -> SampleOrigins:
        """Those of samples `first` to `last`."""
        return SampleOrigins(
            self.rollout_ids[first:last], self.branches[first:last], self.environments, self.environment_ids[first:last]
        )

    def is_sound(self, num_samples: int) -> bool:
        """Whether it tells of so many samples, or of none."""
        lengths = {len(self.rollout_ids), len(self.branches), len(self.environment_ids)}
        known = range(len(self.environments))
        return lengths in ({num_samples}, {0}) and all(place in known for place in self.environment_ids)
