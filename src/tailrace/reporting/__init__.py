"""What a run tells people: metrics, records of rollouts, live view, summary, report, charts."""
