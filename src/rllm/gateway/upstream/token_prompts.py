"""Prompts as token ids for a server that renders messages itself, such as vLLM: later turns go to its `/completions`.

The first turn of a conversation is an ordinary chat request, which the server renders. A later prompt is built here,
from the known tokens and the text that the model's template prints after them, and its answer, a text completion, is
read as a chat answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm.capture import PriorAnswer
from rllm.errors import ConfigError, MissingDependencyError
from rllm.gateway.upstream.chat_format import for_template, logprobs_of, stop_reason_of
from rllm.parser.answer import AnswerReader, Shown
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.continuation import Continuation
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import parser_of_answer, tool_format_of_template, tool_parser
from rllm.types import JSONMapping, JSONObject, Message

logger = logging.getLogger(__name__)

_RENDERED_OTHERWISE = ("chat_template", "documents", "continue_final_message")
"""Fields by which a server prints messages otherwise than the model's template does here."""


class TokenPrompts:
    """Prompts and answers as tokens, of a served model's tokenizer."""

    def __init__(self, tokenizer: Any, tool_format: str | None = None) -> None:
        """`tool_format` names the server's parser of tool calls; by default the template shows it."""
        self._template = ChatTemplate(tokenizer)
        _ = self._template.shape  # refuses a template that prints nothing of users
        self._continuation = Continuation(tokenizer, self._template)
        name = tool_format or tool_format_of_template(self._template.text)
        self._tool_parser = tool_parser(name) if name else None
        self._warned: set[str] = set()
        self._decoder = TextDecoder(tokenizer, markup=self._tool_parser.markup if self._tool_parser else ())

    @classmethod
    def load(cls, path: str, chat_template: Path | None = None) -> TokenPrompts:
        """Load the tokenizer of a model folder or hub id; `chat_template` is the server's, if not the model's own.

        Raises:
            ConfigError: if there is none there, or it has no chat template, or the named one cannot be used.
            MissingDependencyError: without transformers.
        """
        try:
            from transformers import AutoTokenizer

            from rllm.inference.pretrained import from_pretrained
            from rllm.parser.tool_prompt import TemplateChoice
        except ImportError as error:
            raise MissingDependencyError.of("transformers", "train", "a tokenizer for exact turns") from error
        folder = Path(path).expanduser()
        if not folder.exists() and path.count("/") != 1:
            raise ConfigError(
                f"tokenizer={path!r}: there is no such folder; check the path, or use a hub id (owner/name)"
            )
        source = str(folder) if folder.exists() else path
        tokenizer = from_pretrained(AutoTokenizer.from_pretrained, source, "tokenizer", setting="tokenizer")
        TemplateChoice(chat_template=chat_template, setting="--chat-template").apply(tokenizer)
        return cls(tokenizer)

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        """See `ChatTemplate.lost`."""
        return self._template.lost(messages, tools)

    def continued(self, request: JSONMapping, prior: PriorAnswer) -> list[int] | None:
        """See `Upstream.continued_prompt`. What a text completion cannot do is left to the server's own rendering."""
        if request.get("tool_choice") not in (None, "auto", "none") or request.get("response_format"):
            return None
        if request.get("top_logprobs") or request.get("add_generation_prompt") is False:
            return None
        if any(request.get(name) for name in _RENDERED_OTHERWISE):
            return None
        if _may_call(request) and self._tool_parser is None:
            self._warn_once(
                "format",
                "the chat template prints no tool calls in a known format: turns with tools are left to the server, "
                "which renders them again instead of continuing the sampled tokens",
            )
            return None
        messages = for_template(request["messages"])
        num_known = len(for_template(request["messages"][: prior.num_messages]))
        kwargs = request.get("chat_template_kwargs")
        try:
            return self._continuation.prompt_ids(
                prior.token_ids, messages, num_known, request.get("tools"), kwargs, written_on=prior.appended_text
            )
        except ConfigError:  # then the server reports errors of the messages, if any
            return None

    def chat_answer(self, completion: JSONObject, request: JSONMapping, prompt_ids: Sequence[int]) -> JSONObject:
        """Return a whole text completion as a chat completion."""
        chunks = self.chat_chunks(request, prompt_ids)
        choices = []
        for choice in completion.get("choices") or ():
            (whole,) = chunks.feed({**completion, "choices": [choice]})["choices"]
            delta = whole.pop("delta")
            calls = [
                {name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())
            ]
            message = {**delta, "content": delta.get("content") or (None if calls else "")}
            choices.append({**whole, "message": {**message, "tool_calls": calls} if calls else message})
        shared = {name: value for name, value in completion.items() if name != "choices"}
        return {**shared, "object": "chat.completion", "choices": choices, "prompt_token_ids": list(prompt_ids)}

    def chat_chunks(self, request: JSONMapping, prompt_ids: Sequence[int]) -> ChatChunks:
        """Return a converter of a streamed text completion to chunks of a chat completion."""
        stop = request.get("stop") or ()
        return ChatChunks(
            prompt_ids,
            decoder=self._decoder,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            tool_parser=parser_of_answer(self._tool_parser, request.get("tools"), request.get("tool_choice")),
        )

    def note_quoted(self, messages: Sequence[Message]) -> None:
        """Log once that a prompt which the server renders itself quotes control tokens, if it does."""
        quoted = () if "quoted" in self._warned else self._template.control_tokens.quoted_in(messages)
        if quoted:
            self._warn_once(
                "quoted",
                f"messages quote control tokens of the model ({', '.join(quoted)}): the server, which renders the "
                "first turn of a conversation, reads them as such, so their text can begin and end turns; later "
                "turns are sent as tokens, with the quoted ones as text",
            )

    def _warn_once(self, kind: str, warning: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", warning)


def _may_call(request: JSONMapping) -> bool:
    """Return whether the answer may have tool calls."""
    return bool(request.get("tools")) and request.get("tool_choice") != "none"


class ChatChunks:
    """Converter of the chunks of one streamed call, choice by choice."""

    def __init__(self, prompt_ids: Sequence[int], **options: Any) -> None:
        self._prompt_ids = list(prompt_ids)
        self._options = options
        self._choices: dict[int, _Choice] = {}

    def feed(self, chunk: JSONMapping) -> JSONObject:
        """Return one chunk as a chat chunk; the first one has the prompt's ids."""
        prompt = {} if self._choices else {"prompt_token_ids": self._prompt_ids}
        choices = []
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            if index not in self._choices:
                self._choices[index] = _Choice(AnswerReader(prompt_ids=self._prompt_ids, **self._options))
            choices.append(self._choices[index].feed(choice))
        return {**chunk, **prompt, "object": "chat.completion.chunk", "choices": choices}


class _Choice:
    """Converter of one choice of a stream."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._ids: list[int] = []
        self._began = False

    def feed(self, choice: JSONMapping) -> JSONObject:
        ids = list(choice.get("token_ids") or ())
        self._ids += ids
        delta: JSONObject = {} if self._began else {"role": "assistant"}
        self._began = True
        reason = choice.get("finish_reason")
        shown = self._reader.show(ids)
        reasoning, content = shown.reasoning, shown.content
        if reason is not None:
            answer = self._reader.read(self._ids)
            rest = self._reader.rest(Shown(answer.reasoning, answer.content))
            reasoning, content = reasoning + rest.reasoning, content + rest.content
            if answer.tool_calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(answer.tool_calls)]
                reason = "tool_calls" if reason == "stop" else reason
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        given = choice.get("logprobs") or {}
        numbers = given.get("token_logprobs")
        return {
            "index": choice.get("index", 0),
            "delta": delta,
            "logprobs": None if numbers is None else logprobs_of(ids, numbers, given.get("tokens") or ()),
            "finish_reason": reason,
            "token_ids": ids,
            **stop_reason_of(choice),
        }
