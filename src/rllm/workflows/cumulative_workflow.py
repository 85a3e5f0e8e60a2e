"""`CumulativeWorkflow`: many turns in one growing conversation, under one budget of tokens."""

from __future__ import annotations

from typing import Any

from rllm.workflows.multi_turn_workflow import MultiTurnWorkflow


class CumulativeWorkflow(MultiTurnWorkflow):
    """A `MultiTurnWorkflow` whose turns together may have `max_response_length` tokens, beside the limit of `max_steps` turns."""

    def __init__(self, *args: Any, max_response_length: int = 8192, **kwargs: Any) -> None:
        super().__init__(*args, max_response_length=max_response_length, **kwargs)
