"""Train language agents with reinforcement learning: what you build is what you train.

The names below load on first use, so that `import rllm` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.trainer.agent_trainer import AgentTrainer as AgentTrainer
    from rllm.types import Action as Action
    from rllm.types import Episode as Episode
    from rllm.types import Step as Step
    from rllm.types import Trajectory as Trajectory

__version__ = "0.1.0"
__all__ = ["Action", "AgentTrainer", "Episode", "Step", "Trajectory", "__version__"]

_HOMES = {
    "Action": "rllm.types",
    "AgentTrainer": "rllm.trainer.agent_trainer",
    "Episode": "rllm.types",
    "Step": "rllm.types",
    "Trajectory": "rllm.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
