"""Model state dicts from the trainer to generators."""
