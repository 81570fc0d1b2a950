"""Between processes: batches and events one way, model state dicts the other.

In: `PlannedBatch`, out: `Batch`; in and out: `Event`, named tensors and big arrays. Each store is one small protocol
with several implementations: batch queues (memory, shared memory, files, ZMQ, Redis), streams of samples for a trainer
that is not ours (memory, Redis), `PayloadStore` (memory, shared memory, folder), `ModelStateDictStore` (memory, shared
memory), `EventLog` (memory, file, a client of another process's log). References travel by ZMQ over ipc sockets as
msgpack; bytes lie in shared memory files. Nothing here pickles, polls, or knows models, scheduling or training.
"""
