"""Batches from the orchestrator to the trainer: queue, layout, stores, channels between processes."""
