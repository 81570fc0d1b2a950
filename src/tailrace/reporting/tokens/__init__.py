"""Rollouts token by token, on disk: what the generator knows of each token, and beside it what the trainer made of it.

    rollouts that ended ─► writer ─► tokens/step_000012.parquet          one row a branch
    trainer's export ──────────────► tokens/step_000012_rank_0.parquet   one row a trained token
    both ─► reader ─► `BranchTokens`: columns of one branch, joined by rollout, branch and position

Parquet is the extra `parquet`: pyarrow is imported when a file is written or read, not before. Nothing imports torch.
"""

from tailrace.reporting.tokens.files import TokenFile, exported_steps, token_files
from tailrace.reporting.tokens.reader import (
    Alternatives,
    BranchKey,
    BranchTokens,
    list_branches,
    read_rollout,
)
from tailrace.reporting.tokens.trained import TrainerTokens
from tailrace.reporting.tokens.writer import TokenOrigin, TokenWriter, require_parquet

__all__ = [
    "Alternatives",
    "BranchKey",
    "BranchTokens",
    "TokenFile",
    "TokenOrigin",
    "TokenWriter",
    "TrainerTokens",
    "exported_steps",
    "list_branches",
    "read_rollout",
    "require_parquet",
    "token_files",
]
