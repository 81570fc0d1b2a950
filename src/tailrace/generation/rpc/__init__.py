"""A generator in another process: its server, its client, their messages over ZeroMQ, the keys that protect them.

In: `GenerationRequest`s and references of model state dicts, by msgpack message. Out: chunks and completions, as the
generator made them, with errors of their own types; statistics, every so often. It must never copy fields of a request,
never unpickle, and never let a call outlive its peer: a socket's monitor reports a process that died.
"""
