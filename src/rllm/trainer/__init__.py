"""The training loop, from a configuration to a trained policy. Read `loop.py` first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllm.lazy import lazy_names

if TYPE_CHECKING:
    from rllm.trainer.agent_sft_trainer import AgentSFTTrainer as AgentSFTTrainer
    from rllm.trainer.agent_trainer import AgentTrainer as AgentTrainer

__all__ = ["AgentSFTTrainer", "AgentTrainer"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AgentSFTTrainer": "rllm.trainer.agent_sft_trainer",
        "AgentTrainer": "rllm.trainer.agent_trainer",
    },
)
