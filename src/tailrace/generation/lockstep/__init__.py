"""One engine on several ranks in lockstep: every rank gets the same calls in the same order.

In: the calls of `Engine` on rank 0. Out: what rank 0's engine answers, once all ranks have done the same. It must never
let ranks go apart: one that fails, dies or samples other tokens ends all of them with `EngineFailed`.
"""
