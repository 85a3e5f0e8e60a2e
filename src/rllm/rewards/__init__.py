"""Rewards: functions of a task and an action that return a number, or `None` for unscored.

`reward_fn` has the ready-made functions and the protocol of your own; `scoring` calls any of them, validates the
result, and combines an agent and a reward. `math_reward`, `search_reward` (questions and multiple choice),
`countdown_reward`, `code_reward`, `function_call_reward` and `ifeval_reward` score one kind of task each.
`reward_types` has their input, output and settings, and finds answers in texts. `llm_judge` has judges that are
models, and `verdicts` parses and caches their answers. `equivalence_worker` compares mathematical answers in a process
that can be killed; `code_harness` judges programs in a sandbox, with `code_peer` between tests and solution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.rewards.code_reward import RewardCodeFn as RewardCodeFn
    from rllm.rewards.countdown_reward import countdown_reward_fn as countdown_reward_fn
    from rllm.rewards.function_call_reward import function_call_reward_fn as function_call_reward_fn
    from rllm.rewards.ifeval_reward import ifeval_reward_fn as ifeval_reward_fn
    from rllm.rewards.llm_judge import judge as judge
    from rllm.rewards.math_reward import RewardMathFn as RewardMathFn
    from rllm.rewards.reward_fn import RewardFunction as RewardFunction
    from rllm.rewards.reward_fn import as_reward_output as as_reward_output
    from rllm.rewards.reward_fn import code_reward_fn as code_reward_fn
    from rllm.rewards.reward_fn import f1_reward_fn as f1_reward_fn
    from rllm.rewards.reward_fn import math_reward_fn as math_reward_fn
    from rllm.rewards.reward_fn import multiple_choice_reward_fn as multiple_choice_reward_fn
    from rllm.rewards.reward_fn import search_reward_fn as search_reward_fn
    from rllm.rewards.reward_fn import zero_reward as zero_reward
    from rllm.rewards.reward_types import RewardConfig as RewardConfig
    from rllm.rewards.reward_types import RewardInput as RewardInput
    from rllm.rewards.reward_types import RewardOutput as RewardOutput
    from rllm.rewards.reward_types import RewardType as RewardType
    from rllm.rewards.scoring import group_reward as group_reward
    from rllm.rewards.search_reward import RewardSearchFn as RewardSearchFn

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.rewards.code_reward": "RewardCodeFn",
        "rllm.rewards.countdown_reward": "countdown_reward_fn",
        "rllm.rewards.function_call_reward": "function_call_reward_fn",
        "rllm.rewards.ifeval_reward": "ifeval_reward_fn",
        "rllm.rewards.llm_judge": "judge",
        "rllm.rewards.math_reward": "RewardMathFn",
        "rllm.rewards.reward_fn": (
            "RewardFunction as_reward_output code_reward_fn f1_reward_fn math_reward_fn multiple_choice_reward_fn "
            "search_reward_fn zero_reward"
        ),
        "rllm.rewards.reward_types": "RewardConfig RewardInput RewardOutput RewardType",
        "rllm.rewards.scoring": "group_reward",
        "rllm.rewards.search_reward": "RewardSearchFn",
    },
)
