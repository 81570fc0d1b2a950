"""An environment of verifiers, as it is: reasoning-gym's chain sums, scored by its rubric.

    pip install "tailrace[verifiers,reasoning-gym]"
    tailrace train smollm2-arithmetic --environment.name examples.verifiers_gym:chain_sums

Run it from the folder above this one. What a package offers by its id needs no such file: it is the environment
`verifiers` with that id for `args.id`.
"""

from functools import partial

import verifiers as vf

from tailrace.environments import verifiers_environment

chain_sums = verifiers_environment(
    partial(vf.ReasoningGymEnv, gym="chain_sum", num_train_examples=2_000, num_eval_examples=200), name="chain-sums"
)
