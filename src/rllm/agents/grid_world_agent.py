"""`GridWorldAgent`: walks a grid world, one move a turn."""

from __future__ import annotations

import re

from rllm.agents.chat_agent import ChatAgent

SYSTEM_PROMPT = """\
You walk on a frozen lake. Reach the goal G without stepping into a hole O. P is you, _ is ice.
Each turn, choose one of Up, Down, Left, Right. You may reason first; end with your move alone in a block:
```
Right
```"""

_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
_BLOCK = re.compile(r"```(.*?)```", re.DOTALL)


class GridWorldAgent(ChatAgent):
    """Moves in the last direction of the last ``` block, or else of the answer; the move may be empty."""

    def __init__(self, *, system_prompt: str = SYSTEM_PROMPT, accumulate_thinking: bool = True) -> None:
        super().__init__(system_prompt=system_prompt, accumulate_thinking=accumulate_thinking)

    def response_to_action(self, response: str) -> str:
        answer = self.split(response).answer
        blocks = _BLOCK.findall(answer)
        moves = _MOVE.findall(blocks[-1] if blocks else answer)
        return moves[-1].capitalize() if moves else ""
