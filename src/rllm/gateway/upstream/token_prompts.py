"""Prompts as token ids for a server that renders messages itself, such as vLLM, and its answers as chat answers.

The first turn of a conversation is an ordinary chat request, which the server renders. Later turns go to its
`/completions`: the prompt is built here, from the known tokens and the text that the model's template prints after
them, and its answer, a text completion, is read as a chat answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rllm.capture import PriorAnswer
from rllm.capture.tokens import check_aligned
from rllm.errors import ConfigError, needed
from rllm.parser.answer import AnswerReader, VisibleText
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.continuation import Continuation
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import (
    DEFAULT_FORMAT,
    log_unread_calls,
    parser_of_answer,
    tool_format_of_template,
    tool_parser,
)
from rllm.types import JSONMapping, JSONObject, Message

logger = logging.getLogger(__name__)

_RENDERED_OTHERWISE = ("chat_template", "documents", "continue_final_message")
"""Fields that make a server render messages differently from the model's template here."""


class TokenPrompts:
    """Conversion between messages and tokens, with the tokenizer and the template of a served model."""

    def __init__(self, tokenizer: Any, tool_format: str | None = None) -> None:
        """`tool_format` names the server's parser of tool calls; by default the template shows it."""
        self._template = ChatTemplate(tokenizer)
        _ = self._template.shape  # raises for a template that does not print users' messages
        self._continuation = Continuation(tokenizer, self._template)
        name = tool_format or tool_format_of_template(self._template.text)
        chosen = tool_parser(name or DEFAULT_FORMAT)
        is_unread = log_unread_calls(self._template, chosen, "turns with tools are rendered again by the server")
        self._tool_parser = chosen if tool_format or (name and not is_unread) else None
        self._has_warned, self._has_noted = is_unread, False
        self._decoder = TextDecoder(tokenizer, markup=self._tool_parser.markup if self._tool_parser else ())

    @classmethod
    def load(cls, path: str, chat_template: Path | None = None) -> TokenPrompts:
        """Load the tokenizer of a model folder or hub id; `chat_template` is the server's, if it is not the model's.

        Raises:
            ConfigError: if the tokenizer or its chat template is missing, or the named template cannot be used.
            MissingDependencyError: without transformers.
        """
        with needed("transformers", "train", "a tokenizer for exact turns"):
            from transformers import AutoTokenizer

            from rllm.inference.model_folder import from_pretrained
            from rllm.parser.tool_prompt import TemplateChoice
        folder = Path(path).expanduser()
        if not folder.exists() and path.count("/") != 1:
            raise ConfigError(f"tokenizer={path!r}: no such folder; check the path, or use a hub id (owner/name)")
        source = str(folder) if folder.exists() else path
        tokenizer = from_pretrained(AutoTokenizer.from_pretrained, source, "tokenizer", setting="tokenizer")
        TemplateChoice(chat_template=chat_template, setting="--chat-template").apply(tokenizer)
        return cls(tokenizer)

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        """See `ChatTemplate.lost`."""
        return self._template.lost(messages, tools)

    def continued(self, request: JSONMapping, prior: PriorAnswer) -> Sequence[int] | None:
        """See `Upstream.continued_prompt`. Requests beyond a text completion are left to the server's own rendering."""
        if request.get("tool_choice") not in (None, "auto", "none") or request.get("response_format"):
            return None
        if request.get("top_logprobs") or request.get("add_generation_prompt") is False:
            return None
        if any(request.get(name) for name in _RENDERED_OTHERWISE):
            return None
        if request.get("tools") and request.get("tool_choice") != "none" and self._tool_parser is None:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the chat template prints no tool calls in a known format: turns with tools are left to the "
                    "server, which renders them again instead of continuing the sampled tokens"
                )
            return None
        messages = for_template(request["messages"])
        num_known = len(for_template(request["messages"][: prior.num_messages]))
        kwargs = request.get("chat_template_kwargs")
        try:
            return self._continuation.prompt_ids(
                prior.token_ids, messages, num_known, request.get("tools"), kwargs, appended_text=prior.appended_text
            )
        except ConfigError:  # then the server reports errors of the messages, if any
            return None

    def note_quoted(self, messages: Sequence[Message]) -> None:
        """Log once if a prompt that the server renders itself quotes control tokens."""
        quoted = () if self._has_noted else self._template.control_tokens.quoted_in(messages)
        if quoted:
            self._has_noted = True
            logger.warning(
                "messages quote control tokens of the model (%s): the server, which renders the first turn of a "
                "conversation, reads them as such, so their text can begin and end turns; later turns are sent as "
                "tokens, with the quoted ones as text",
                ", ".join(quoted),
            )

    def chunks(self, request: JSONMapping, prompt_ids: Sequence[int]) -> CompletionChunks:
        """Return a converter of a text completion, which reads its reasoning, text and tool calls from its ids."""
        stop = request.get("stop") or ()
        new_reader = partial(
            AnswerReader,
            prompt_ids=prompt_ids,
            decoder=self._decoder,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            tool_parser=parser_of_answer(self._tool_parser, request.get("tools"), request.get("tool_choice")),
        )
        return CompletionChunks(prompt_ids, new_reader)


# --- chat messages and log-probabilities ------------------------------------------------------------------------------


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
    """Join texts as paragraphs of one text; if any content has parts, return all as parts."""
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
    *,
    bytes_of: Callable[[int], bytes] | None = None,
    alternatives: Sequence[Sequence[tuple[int, float]]] = (),
) -> JSONObject:
    """Return log-probabilities in OpenAI's shape; a token without a text is named by its id, as vLLM does on request.

    Args:
        token_ids: sampled ids.
        logprobs: one for each id.
        bytes_of: returns the bytes of a token, if they are known and wanted.
        alternatives: for each token, ids and log-probabilities for `top_logprobs`.

    Raises:
        TokenMismatchError: if the numbers of ids and of log-probabilities differ.
    """
    check_aligned(token_ids, logprobs)
    if bytes_of is None:
        named: list[JSONObject] = [{"token": f"token_id:{token_id}", "bytes": None} for token_id in token_ids]
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


# --- text completions as chat answers ---------------------------------------------------------------------------------


_OF_CHAT = frozenset(
    """messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs chat_template_kwargs
    add_generation_prompt continue_final_message response_format echo""".split()
)
"""Fields that a text completion does not take, or takes with another meaning."""


def completion_request(request: JSONMapping, prompt_ids: Sequence[int]) -> JSONObject:
    """Return the chat request as one for a text completion of these tokens."""
    sent = {name: value for name, value in request.items() if name not in _OF_CHAT}
    # Without a limit a chat answer may fill the context, but a completion has sixteen tokens unless this is null.
    sent["max_tokens"] = request.get("max_completion_tokens", request.get("max_tokens"))
    return {**sent, "prompt": list(prompt_ids), "logprobs": request.get("top_logprobs") or 0}


def chat_answer(completion: JSONObject, chunks: CompletionChunks) -> JSONObject:
    """Return a whole text completion as a chat completion."""
    converted = chunks.feed(completion)
    for choice in converted["choices"]:
        delta = choice.pop("delta")
        calls = [{name: call[name] for name in call.keys() - {"index"}} for call in delta.pop("tool_calls", ())]
        content = delta.get("content") or (None if calls else "")
        message = {"role": "assistant", **delta, "content": content}
        choice["message"] = {**message, "tool_calls": calls} if calls else message
    return {**converted, "object": "chat.completion"}


class CompletionChunks:
    """Converter of the chunks of one text completion to chunks of a chat completion."""

    def __init__(self, prompt_ids: Sequence[int], new_reader: Callable[[], AnswerReader] | None) -> None:
        """Without a reader, all of the text is the content."""
        self._prompt_ids = prompt_ids
        self._new_reader = new_reader
        self._readers: dict[int, AnswerReader | None] = {}
        self._ids: dict[int, list[int]] = {}

    def feed(self, chunk: JSONMapping) -> JSONObject:
        """Return one chunk as a chat chunk; the first of a choice has the prompt's ids."""
        num_begun = len(self._ids)
        choices = [self._choice(choice) for choice in chunk.get("choices") or ()]
        prompt = {"prompt_token_ids": self._prompt_ids} if len(self._ids) > num_begun else {}
        return {**chunk, **prompt, "object": "chat.completion.chunk", "choices": choices}

    def _choice(self, choice: JSONMapping) -> JSONObject:
        index, ids, reason = choice.get("index", 0), choice.get("token_ids"), choice.get("finish_reason")
        is_first = index not in self._ids
        if is_first:
            self._readers[index] = None if self._new_reader is None else self._new_reader()
        so_far = self._ids.setdefault(index, [])
        so_far += ids or ()
        delta: JSONObject = {"role": "assistant"} if is_first else {}
        if (reader := self._readers[index]) is None:
            delta["content"] = choice.get("text") or ""
        else:
            shown = reader.show(list(ids or ()))
            reasoning, content = shown.reasoning, shown.content
            if reason is not None:
                answer = reader.read(so_far)
                rest = reader.rest(VisibleText(answer.reasoning, answer.content))
                reasoning, content = reasoning + rest.reasoning, content + rest.content
                if answer.tool_calls:
                    delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(answer.tool_calls)]
                    reason = "tool_calls" if reason == "stop" else reason
            delta |= {"reasoning_content": reasoning} if reasoning else {}
            delta |= {"content": content} if content else {}
        stop = {} if choice.get("stop_reason") is None else {"stop_reason": choice["stop_reason"]}
        logprobs = _logprobs(choice)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids, **stop}


def _logprobs(choice: JSONMapping) -> JSONObject | None:
    """Return the log-probabilities of a text completion in the form of a chat completion."""
    given = choice.get("logprobs") or {}
    numbers = given.get("token_logprobs")
    if numbers is None:
        return None
    ids = choice.get("token_ids")
    if ids is not None:
        check_aligned(ids, numbers)
    names = given.get("tokens") or [f"token_id:{token_id}" for token_id in ids or ()]
    rows = zip_longest(numbers, names, given.get("top_logprobs") or ())
    return {
        "content": [
            {
                "token": name or "",
                "logprob": number,
                "bytes": None,
                "top_logprobs": [
                    {"token": other, "logprob": value, "bytes": None} for other, value in (others or {}).items()
                ],
            }
            for number, name, others in rows
        ]
    }
