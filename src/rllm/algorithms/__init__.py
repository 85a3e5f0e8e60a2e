"""Algorithms: rewards to advantages, and advantages to a loss; arithmetic only.

Read `batch.py` and `base.py`, then `grpo.py`. `reinforce.py` has the algorithms with other baselines.
"""

ALGORITHMS = {
    "cispo": "rllm.algorithms.grpo:CISPO",
    "dapo": "rllm.algorithms.grpo:DAPO",
    "distill": "rllm.algorithms.distill:Distill",
    "dr_grpo": "rllm.algorithms.grpo:DrGRPO",
    "grpo": "rllm.algorithms.grpo:GRPO",
    "gspo": "rllm.algorithms.grpo:GSPO",
    "opo": "rllm.algorithms.reinforce:OPO",
    "ppo": "rllm.algorithms.ppo:PPO",
    "reinforce": "rllm.algorithms.reinforce:Reinforce",
    "reinforce_plus_plus": "rllm.algorithms.reinforce:ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "rllm.algorithms.reinforce:ReinforcePlusPlusBaseline",
    "remax": "rllm.algorithms.reinforce:ReMax",
    "rloo": "rllm.algorithms.reinforce:RLOO",
    "sft": "rllm.algorithms.sft:SFT",
}
"""Short names for `algorithm.name`; any `package.module:Class` does as well."""
