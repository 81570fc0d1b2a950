"""What runs now, and what is trained on next.

In: tasks from the task stream, and the trainer's events. Out: batches; or samples one at a time, to a trainer that is
not ours (`feed`). The scheduler keeps the engines full: it admits groups while the staleness budget and the engines
have room, scores each group as soon as it is complete, and forms a batch once one is full. It never polls, never drops
a rollout without a reason in the ledger, and never decides when training is over: the trainer does.
"""

from tailrace.scheduling.admission import Verdict
from tailrace.scheduling.base import Scheduler, SchedulerSetup
from tailrace.scheduling.evaluation import Evaluation, EvaluationResult, Evaluator, evaluate
from tailrace.scheduling.feed import FeedFigures, FeedScheduler
from tailrace.scheduling.groups import UNSCORED
from tailrace.scheduling.ledger import Ledger
from tailrace.scheduling.mix import EnvironmentFigures, EnvironmentMix
from tailrace.scheduling.observer import SchedulerObserver, SchedulerStatistics
from tailrace.scheduling.settings import EvaluationSettings, SchedulingSettings
from tailrace.scheduling.stream import StreamScheduler
from tailrace.scheduling.tasks import TaskSource, TaskStream

__all__ = [
    "UNSCORED",
    "EnvironmentFigures",
    "EnvironmentMix",
    "Evaluation",
    "EvaluationResult",
    "EvaluationSettings",
    "Evaluator",
    "FeedFigures",
    "FeedScheduler",
    "Ledger",
    "Scheduler",
    "SchedulerObserver",
    "SchedulerSetup",
    "SchedulerStatistics",
    "SchedulingSettings",
    "StreamScheduler",
    "TaskSource",
    "TaskStream",
    "Verdict",
    "evaluate",
]
