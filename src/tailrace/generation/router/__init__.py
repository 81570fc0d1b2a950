"""Many generators as one: which replica takes a request, and what happens when one dies with requests on it.

In: calls of `generate`, replicas that join and leave, references of model state dicts. Out: completions, as if one
generator never failed; which version serves; metrics per replica. It must never lose a token that was streamed back,
and never send a request to a replica that is starved of weights. `run` starts the processes and connects clients.
"""
