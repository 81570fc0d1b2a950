"""Training: a batch in, a new policy version out.

Batches come from a `BatchReceiver`, already packed, with their loss denominator planned; each becomes one optimizer
step, whose weights go to the `ModelStateDictStore` and whose story goes to the `EventLog`. The trainer alone decides
when training is over. It never sees text, tasks or rewards, and never changes a batch.

`settings` → `losses`, `rows` → `model` → `step` → `trainer`, which `loop` runs and `leading` runs on several ranks.
"""
