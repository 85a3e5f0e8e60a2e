"""`FrozenLakeAgent`: the grid world agent with the parameters of the rLLM framework."""

from __future__ import annotations

from rllm.agents.grid_world_agent import GridWorldAgent
from rllm.errors import ConfigError

__all__ = ["FrozenLakeAgent"]


class FrozenLakeAgent(GridWorldAgent):
    """See `GridWorldAgent`.

    Args:
        max_steps: has no effect: the environment counts the steps.
        use_accumulate_thinking: False leaves earlier turns' thoughts out of prompts.
        use_multistep_prompt: has no effect: there is one prompt.
        use_accumulate_history: must be true: every prompt has all turns.

    Raises:
        ConfigError: if `use_accumulate_history` is false.
    """

    def __init__(
        self,
        max_steps: int | None = None,
        use_accumulate_thinking: bool = True,
        use_multistep_prompt: bool = False,
        use_accumulate_history: bool = True,
    ) -> None:
        if not use_accumulate_history:
            raise ConfigError("use_accumulate_history=False: every prompt has all turns; leave the setting out")
        super().__init__(accumulate_thinking=use_accumulate_thinking)
