"""What a run tells people: metrics, event-loop lag, phase times, rollout files, the live view, summary and report.

In flow finished rollouts, batch summaries, counters and snapshots; out flow `metrics.jsonl`, `rollouts/*.jsonl`,
`summary.json`, `report.html`, `reward.png` and a terminal that is a pleasure to watch. Observing never decides
anything, never stalls the event loop, never queues without bound, and never ends a run: a full disk costs records,
and they are counted.
"""
