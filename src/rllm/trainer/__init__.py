"""The training loop, from a configuration to a trained policy. Read `loop.py` first."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names

if sys.platform == "win32":
    raise ImportError("rllm does not train on Windows itself: install it in WSL2, where it runs as on Linux")

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
