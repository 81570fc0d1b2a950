"""What a user sets of training: the trainer, its loss, masks and components, LoRA. Plain models, without torch."""
