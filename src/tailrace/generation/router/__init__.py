"""Many generators as one: which replica takes a request, and what happens when one dies with requests on it.

In: calls of `generate`, replicas that join and leave, references of published model state dicts. Out: completions, as
if there were one generator that never fails; which version of the weights serves; figures per replica. It must never
lose a token that was streamed back, never send a request to a replica that is starved of weights, and never let a call
wait for something that nobody owns. It knows no process: whoever starts them (`run`) hands over clients and hears when
one is of no use any more.
"""
