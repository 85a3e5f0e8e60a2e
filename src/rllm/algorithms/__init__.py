"""Algorithms: rewards to advantages, and advantages to a loss; arithmetic only.

Read `batch` (what is trained), `base` (the interface) and `grpo` first. Around them:

* `reinforce`: other baselines (RLOO, ReMax, OPO, ...). `otb`, `rae`: baselines of each token, and of each role.
* `gdpo`, `gigpo`, `maxrl`: other credit for groups: by part of the reward, by state, by success rate.
* `dppo`, `m2po`, `sapo`: other bounds of the ratio. `ppo`: a critic.
* `distill`, `sdft`, `sft`, `echo`: targets from a teacher, from the policy itself, from demonstrations, and from what
  environments answer.
* `losses`, `tree`: the surrogate losses, and prefixes that sequences share. `from_config`: a name and its settings.
"""

ALGORITHMS = {
    "cispo": "rllm.algorithms.grpo:CISPO",
    "dapo": "rllm.algorithms.grpo:DAPO",
    "distill": "rllm.algorithms.distill:Distill",
    "dppo": "rllm.algorithms.dppo:DPPO",
    "dr_grpo": "rllm.algorithms.grpo:DrGRPO",
    "gdpo": "rllm.algorithms.gdpo:GDPO",
    "gigpo": "rllm.algorithms.gigpo:GiGPO",
    "grpo": "rllm.algorithms.grpo:GRPO",
    "gspo": "rllm.algorithms.grpo:GSPO",
    "m2po": "rllm.algorithms.m2po:M2PO",
    "maxrl": "rllm.algorithms.maxrl:MaxRL",
    "online": "rllm.algorithms.reinforce:Online",
    "opo": "rllm.algorithms.reinforce:OPO",
    "otb": "rllm.algorithms.otb:OTB",
    "ppo": "rllm.algorithms.ppo:PPO",
    "rae": "rllm.algorithms.rae:RAE",
    "reinforce": "rllm.algorithms.reinforce:Reinforce",
    "reinforce_plus_plus": "rllm.algorithms.reinforce:ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "rllm.algorithms.reinforce:ReinforcePlusPlusBaseline",
    "remax": "rllm.algorithms.reinforce:ReMax",
    "rloo": "rllm.algorithms.reinforce:RLOO",
    "sapo": "rllm.algorithms.sapo:SAPO",
    "sdft": "rllm.algorithms.sdft:SDFT",
    "sft": "rllm.algorithms.sft:SFT",
}
"""Short names for `algorithm.name`; any `package.module:Class` does as well."""
