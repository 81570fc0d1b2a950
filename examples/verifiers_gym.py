"""An environment of verifiers, as it is: reasoning-gym's sums of two numbers of one digit, scored by its rubric.

    pip install "tailrace[verifiers,reasoning-gym]"
    tailrace train smollm2-arithmetic --environment.name examples.verifiers_gym:chain_sums --rollouts.temperature 0.7

Run it from the folder above this one. What a package offers by its id needs no such file: it is the environment
`verifiers` with that id for `args.id`.
"""

from functools import partial

import verifiers as vf

from tailrace.environments import verifiers_environment

chain_sums = verifiers_environment(
    partial(
        vf.ReasoningGymEnv,
        # Sums of its default length, in its XML form, are beyond a model this small: no reply ever earns anything.
        gym=[{"name": "chain_sum", "weight": 1.0, "config": {"max_terms": 2, "max_digits": 1}}],
        system_prompt="You are a calculator. You print one number and nothing else.",
        parser=vf.Parser(),
        num_train_examples=2_000,
        num_eval_examples=200,
    ),
    name="chain-sums",
)
