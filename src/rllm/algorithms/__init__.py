"""Algorithms: rewards to advantages, and advantages to a loss; arithmetic only, one small file each."""

ALGORITHMS = {
    "cispo": "rllm.algorithms.cispo:CISPO",
    "dapo": "rllm.algorithms.dapo:DAPO",
    "distill": "rllm.algorithms.distill:Distill",
    "dr_grpo": "rllm.algorithms.dr_grpo:DrGRPO",
    "grpo": "rllm.algorithms.grpo:GRPO",
    "gspo": "rllm.algorithms.gspo:GSPO",
    "opo": "rllm.algorithms.opo:OPO",
    "ppo": "rllm.algorithms.ppo:PPO",
    "reinforce": "rllm.algorithms.reinforce:Reinforce",
    "reinforce_plus_plus": "rllm.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "rllm.algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline",
    "remax": "rllm.algorithms.remax:ReMax",
    "rloo": "rllm.algorithms.rloo:RLOO",
    "sft": "rllm.algorithms.sft:SFT",
}
"""Short names for `algorithm.name`; any `package.module:Class` does as well."""
