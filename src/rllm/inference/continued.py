"""Prompts of whichever engine can make them: continued from the tokens of an earlier answer, and what they lack."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError
from rllm.inference.engine import ContinuingEngine, InferenceEngine
from rllm.types import Message

logger = logging.getLogger(__name__)


def continued_prompt(
    engine: InferenceEngine,
    known_ids: Sequence[int],
    messages: Sequence[Message],
    num_known: int,
    request: Mapping[str, Any],
    *,
    written_on: str = "",
) -> list[int] | None:
    """See `ContinuingEngine`; `tools` and `chat_template_kwargs` are those of the request.

    `None` where the engine takes nothing but messages, or where its template cannot go on from there.
    """
    if not isinstance(engine, ContinuingEngine):
        return None
    try:
        return engine.continued_prompt(
            known_ids,
            messages,
            num_known,
            tools=request.get("tools"),
            template_kwargs=request.get("chat_template_kwargs"),
            written_on=written_on,
        )
    except ConfigError as error:
        logger.debug("a conversation of %d messages is rendered anew and not gone on from: %s", len(messages), error)
        return None


def lost_in_prompt(
    engine: object, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[str, ...]:
    """Return the kinds of content that the chat template of an engine or upstream leaves out of the prompt.

    Empty for one that renders nothing here: it has no method `lost`.
    """
    lost = getattr(engine, "lost", None)
    return tuple(lost(messages, tools)) if callable(lost) else ()
