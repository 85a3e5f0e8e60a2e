"""Prompts of token ids for a server's `/completions`, and its answers as the chat answers that the gateway speaks of inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

_OF_CHAT = frozenset(
    """messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs chat_template_kwargs
    add_generation_prompt continue_final_message response_format echo""".split()
)
"""Fields that a text completion does not take, or takes otherwise."""


def completion_request(request: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
    """The chat request as one for a text completion of these tokens."""
    sent = {name: value for name, value in request.items() if name not in _OF_CHAT}
    # Without a limit a chat answer is as long as there is room for, and a completion has sixteen tokens.
    sent["max_tokens"] = request.get("max_completion_tokens", request.get("max_tokens"))
    return {**sent, "prompt": list(prompt_ids), "logprobs": request.get("top_logprobs") or 0}


def chat_answer(completion: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
    """A whole text completion as a chat completion; its text is the content, whatever is in it."""
    choices = [
        {**_choice(choice), "message": {"role": "assistant", "content": choice.get("text") or ""}}
        for choice in completion.get("choices") or ()
    ]
    return {**completion, "object": "chat.completion", "choices": choices, "prompt_token_ids": list(prompt_ids)}


class TextChunks:
    """The chunks of one streamed text completion, as those of a chat completion."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = list(prompt_ids)
        self._begun: set[int] = set()

    def feed(self, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """One chunk as a chat chunk; that with which a choice begins has the prompt's ids."""
        choices = [
            {**_choice(choice), "delta": {"content": choice.get("text") or ""}} for choice in chunk.get("choices") or ()
        ]
        begin = {choice["index"] for choice in choices} - self._begun
        self._begun |= begin
        told = {"prompt_token_ids": self._prompt_ids} if begin else {}
        return {**chunk, **told, "object": "chat.completion.chunk", "choices": choices}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What a choice says beside its text."""
    return {
        "index": choice.get("index", 0),
        "logprobs": _logprobs(choice.get("logprobs") or {}),
        "finish_reason": choice.get("finish_reason"),
        "token_ids": choice.get("token_ids"),
        **stop_reason_of(choice),
    }


def stop_reason_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """By which stop string, or which stop token's id, the answer ended, if by one."""
    return {} if choice.get("stop_reason") is None else {"stop_reason": choice["stop_reason"]}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any] | None:
    numbers = given.get("token_logprobs")
    if numbers is None:
        return None
    rows = zip_longest(numbers, given.get("tokens") or (), given.get("top_logprobs") or ())
    return {"content": [_entry(token, number, others) for number, token, others in rows]}


def _entry(token: str | None, number: float | None, others: Mapping[str, float] | None) -> dict[str, Any]:
    alternatives = [{"token": name, "logprob": value, "bytes": None} for name, value in (others or {}).items()]
    return {"token": token or "", "logprob": number, "bytes": None, "top_logprobs": alternatives}
