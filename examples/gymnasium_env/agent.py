"""A Blackjack player: it sees its hand and the dealer's card, and answers hit or stick."""

from __future__ import annotations

from typing import Any

from rllm.agents.chat_agent import ChatAgent

SYSTEM = "Play Blackjack. Say hit or stick."


class CardPlayer(ChatAgent):
    """Player whose answers are the names of actions; `ChatAgent` keeps the conversation and the trajectory."""

    def __init__(self) -> None:
        super().__init__(system_prompt=SYSTEM)

    def response_to_action(self, response: str) -> str:
        return response


def describe(observation: tuple[int, int, int]) -> str:
    """Return Gymnasium's numbers in words: the player's sum, the dealer's card, and whether an ace counts as 11."""
    total, dealer, usable_ace = observation
    return f"{'soft ' if usable_ace else ''}{total} against {dealer}"


GAME: dict[str, Any] = {"env": "Blackjack-v1", "action_labels": ["stick", "hit"], "observation_to_text": describe}
"""Arguments of `GymnasiumEnv`; the task adds the seed."""
