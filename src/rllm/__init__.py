"""Train language agents with reinforcement learning: what you build is what you train.

The names below load on first use, so that `import rllm` costs next to nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rllm._runtime.lazy import lazy_names
from rllm.compat import import_hook

if TYPE_CHECKING:
    from rllm.agents.agent import BaseAgent as BaseAgent
    from rllm.trainer.agent_trainer import AgentTrainer as AgentTrainer
    from rllm.types import Action as Action
    from rllm.types import Episode as Episode
    from rllm.types import Step as Step
    from rllm.types import Trajectory as Trajectory

import_hook.install()

# By default torch's threads wait for each other in a busy loop, which made a step of a small model 20 times slower on a
# machine with other busy programs. The limit costs nothing on an idle machine. It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"
__all__ = ["Action", "AgentTrainer", "BaseAgent", "Episode", "Step", "Trajectory", "__version__"]

__getattr__, _names, _ = lazy_names(
    __name__,
    {
        "rllm.agents.agent": "BaseAgent",
        "rllm.trainer.agent_trainer": "AgentTrainer",
        "rllm.types": "Action Episode Step Trajectory",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
