"""Training, from a configuration to a trained policy.

Read first: `loop` (the steps of a run), then `credit` (episodes to credited sequences to a batch), `rollout_sources`
(where episodes come from) and `agent_trainer` (how all parts are put together). Around them:

* `rollouts`, `selection`, `sequences`: requests of rollouts, filters and replay, token sequences.
* `teacher`, `text_teacher`: distillation, also by the policy itself and across tokenizers.
* `online`, `opponents`: sessions of users, earlier policies in self-play.
* `async_loop`: rollouts ahead of updates, over the same types.
* `checkpoint`, `resume`: exact resume.
* `metrics`, `run_health`, `batch_log`, `episode_records`: what a run records.
* `export`, `rescore`: reading a run afterwards.
* `settings`, `preflight`, `checkup`: checks before work starts.
* `agent_sft_trainer`, `demonstrations`, `sampled_rows`: supervised fine-tuning through the same loop.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if sys.platform == "win32":
    raise ImportError("rllm does not train on Windows: use it in WSL2")

if TYPE_CHECKING:
    from rllm.trainer.agent_sft_trainer import AgentSFTTrainer as AgentSFTTrainer
    from rllm.trainer.agent_trainer import AgentTrainer as AgentTrainer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "rllm.trainer.agent_sft_trainer": "AgentSFTTrainer",
        "rllm.trainer.agent_trainer": "AgentTrainer",
    },
)
