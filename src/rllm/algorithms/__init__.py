"""How rewards become advantages, and advantages a loss: arithmetic only, one small file an algorithm."""

ALGORITHMS = {
    "grpo": "rllm.algorithms.grpo:GRPO",
}
"""Short names for `algorithm.name`; any `package.module:Class` does as well."""
