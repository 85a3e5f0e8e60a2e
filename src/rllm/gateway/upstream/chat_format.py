"""Formats of chat servers: messages as templates take them, log-probabilities, and text completions as chat answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rllm.errors import TokenMismatchError
from rllm.types import JSONMapping, JSONObject, Message


def for_template(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with every `developer` renamed to `system`, and the leading system messages merged.

    Templates know `system` only; some raise at a second one, and some ignore it silently.
    """
    before = None
    for message in messages:
        role = message["role"]
        if role == "developer" or role == before == "system":
            break
        before = role
    else:
        return messages
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    num_leading = next((k for k, message in enumerate(renamed) if message["role"] != "system"), len(renamed))
    if num_leading < 2:
        return renamed
    content = _joined([message.get("content") for message in renamed[:num_leading]])
    return [{**renamed[0], "content": content}, *renamed[num_leading:]]


def _joined(contents: Sequence[Any]) -> str | list[JSONObject]:
    """Join texts as paragraphs of one text; where there are parts, all as parts."""
    if all(content is None or isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if content)
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content or [])
    ]


def logprobs_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    texts: Sequence[str] = (),
    *,
    bytes_of: Callable[[int], bytes] | None = None,
    alternatives: Sequence[Sequence[tuple[int, float]]] = (),
) -> JSONObject:
    """Return log-probabilities in OpenAI's shape; a token without a text is named by its id, as vLLM does on request.

    Args:
        token_ids: sampled ids.
        logprobs: one of each id.
        texts: of the tokens, as far as a server gives them.
        bytes_of: the bytes of a token, where they are known and wanted.
        alternatives: of each token, ids and log-probabilities for `top_logprobs`.

    Raises:
        TokenMismatchError: if there are not as many as ids.
    """
    if len(token_ids) != len(logprobs):
        raise TokenMismatchError(
            f"{len(token_ids)} sampled ids but {len(logprobs)} log-probabilities: every id needs one"
        )
    if bytes_of is None:
        names = texts if len(texts) == len(token_ids) else [f"token_id:{token_id}" for token_id in token_ids]
        named = [{"token": name, "bytes": None} for name in names]
    else:
        named = [_named(bytes_of(token_id)) for token_id in token_ids]
    entries: list[JSONObject] = [
        {**name, "logprob": logprob, "top_logprobs": []} for name, logprob in zip(named, logprobs, strict=True)
    ]
    if bytes_of is not None:
        for entry, others in zip(entries, alternatives, strict=False):
            entry["top_logprobs"] = [{**_named(bytes_of(token_id)), "logprob": value} for token_id, value in others]
    return {"content": entries}


def _named(spelled: bytes) -> JSONObject:
    """Return a token's text, in which bytes that are only a part of a character are escaped, and its bytes."""
    return {"token": spelled.decode(errors="backslashreplace"), "bytes": [*spelled]}


_OF_CHAT = frozenset(
    """messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs chat_template_kwargs
    add_generation_prompt continue_final_message response_format echo""".split()
)
"""Fields that a text completion does not take, or takes otherwise."""


def completion_request(request: JSONMapping, prompt_ids: Sequence[int]) -> JSONObject:
    """Return the chat request as one for a text completion of these tokens."""
    sent = {name: value for name, value in request.items() if name not in _OF_CHAT}
    # Without a limit a chat answer is as long as there is room for, and a completion has sixteen tokens.
    sent["max_tokens"] = request.get("max_completion_tokens", request.get("max_tokens"))
    return {**sent, "prompt": list(prompt_ids), "logprobs": request.get("top_logprobs") or 0}


def chat_answer(completion: JSONMapping, prompt_ids: Sequence[int]) -> JSONObject:
    """Return a whole text completion as a chat completion; all of its text is the content."""
    choices = [
        {**_choice(choice), "message": {"role": "assistant", "content": choice.get("text") or ""}}
        for choice in completion.get("choices") or ()
    ]
    return {**completion, "object": "chat.completion", "choices": choices, "prompt_token_ids": list(prompt_ids)}


class TextChunks:
    """Converter of the chunks of one streamed text completion to those of a chat completion."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = list(prompt_ids)
        self._begun: set[int] = set()

    def feed(self, chunk: JSONMapping) -> JSONObject:
        """Return one chunk as a chat chunk; the first of a choice has the prompt's ids."""
        choices = [
            {**_choice(choice), "delta": {"content": choice.get("text") or ""}} for choice in chunk.get("choices") or ()
        ]
        begin = {choice["index"] for choice in choices} - self._begun
        self._begun |= begin
        prompt = {"prompt_token_ids": self._prompt_ids} if begin else {}
        return {**chunk, **prompt, "object": "chat.completion.chunk", "choices": choices}


def _choice(choice: JSONMapping) -> JSONObject:
    """Return the fields of a choice beside its text."""
    return {
        "index": choice.get("index", 0),
        "logprobs": _logprobs(choice.get("logprobs") or {}),
        "finish_reason": choice.get("finish_reason"),
        "token_ids": choice.get("token_ids"),
        **stop_reason_of(choice),
    }


def stop_reason_of(choice: JSONMapping) -> JSONObject:
    """Return the stop string, or the stop token's id, that ended the answer, if any."""
    return {} if choice.get("stop_reason") is None else {"stop_reason": choice["stop_reason"]}


def _logprobs(given: JSONMapping) -> JSONObject | None:
    numbers = given.get("token_logprobs")
    if numbers is None:
        return None
    rows = zip_longest(numbers, given.get("tokens") or (), given.get("top_logprobs") or ())
    return {"content": [_entry(token, number, others) for number, token, others in rows]}


def _entry(token: str | None, number: float | None, others: Mapping[str, float] | None) -> JSONObject:
    alternatives = [{"token": name, "logprob": value, "bytes": None} for name, value in (others or {}).items()]
    return {"token": token or "", "logprob": number, "bytes": None, "top_logprobs": alternatives}
