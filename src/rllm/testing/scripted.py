"""An inference engine that follows a script, with exact tokens and log-probabilities, and without a model.

    engine = ScriptedEngine(["I will add.", "The answer is 42."])
    engine = ScriptedEngine(lambda messages: messages[-1]["content"].upper())
    engine = ScriptedEngine([{"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]}, "It is 3."])

Test an agent with it in milliseconds, in process or behind a gateway. Its "tokenizer" is the bytes of the text plus two
markers, so ids can be read back with `decode`, and the prompt of a continued conversation extends the tokens of the
turn before exactly, as a good chat template does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from rllm.errors import ConfigError, InferenceError, PromptTooLongError
from rllm.inference.engine import ModelOutput, OutputDelta, SamplingParams
from rllm.types import JSONMapping, JSONObject, Message, text_of

__all__ = ["TURN_END", "TURN_START", "Answer", "Script", "ScriptedEngine", "decode", "encode", "encode_prompt"]

Answer: TypeAlias = str | JSONMapping | Exception
"""Answer of the engine: a text; a mapping with any of `content`, `reasoning` and `tool_calls` (each in the OpenAI
format or as `{"name", "arguments"}`); or an error to raise."""

Script: TypeAlias = Sequence[Answer] | Callable[[list[Message]], Answer]
"""Answers in the order of the calls, starting over after the last; or a function of the messages."""

TURN_START, TURN_END = 256, 257
"""The two ids that are not bytes: beginning and end of a message."""

_PIECE = 4  # Characters in one streamed delta.


class ScriptedEngine:
    """Engine that answers from a script. `outputs` has the exact output of every call, in the order of the answers."""

    def __init__(
        self,
        script: Script,
        *,
        latency_s: float | Callable[[list[Message]], float] = 0.0,
        context_length: int = 1_000_000,
        weight_version: int = 0,
    ) -> None:
        """Take a script; `latency_s` is the duration of a whole answer: a number, or a function of the messages.

        Raises:
            ConfigError: if the script is empty, or is a single text.
        """
        if isinstance(script, str) or (not callable(script) and not script):
            raise ConfigError(f"script={script!r}: use a list of at least one answer, or a function of the messages")
        self.weight_version = weight_version
        self.outputs: list[ModelOutput] = []
        self.num_calls = 0
        self._script = script
        self._latency_s = latency_s
        self._context_length = context_length
        self._num_tool_calls = 0

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: object
    ) -> ModelOutput:
        """Return the script's next answer, with its tokens."""
        output = self._answer(list(messages), tools, SamplingParams.from_request(params))
        await asyncio.sleep(self._latency_of(messages))
        self.outputs.append(output)
        return output

    async def stream_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: object
    ) -> AsyncIterator[OutputDelta | ModelOutput]:
        """Yield the same answer in pieces of a few characters; tokens outside of the content come with the last one."""
        output = self._answer(list(messages), tools, SamplingParams.from_request(params))
        deltas = list(_deltas(output))
        for number, delta in enumerate(deltas):
            await asyncio.sleep(self._latency_of(messages) / len(deltas))
            yield delta if number else replace(delta, prompt_ids=output.prompt_ids)
        self.outputs.append(output)
        yield output

    def _latency_of(self, messages: Sequence[Message]) -> float:
        return self._latency_s(list(messages)) if callable(self._latency_s) else self._latency_s

    def _answer(
        self, messages: list[Message], tools: Sequence[JSONMapping] | None, sampling: SamplingParams
    ) -> ModelOutput:
        prompt_ids = encode_prompt(messages, tools)
        room = self._context_length - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens and the context length is {self._context_length}: "
                "shorten the conversation",
                num_tokens=len(prompt_ids),
            )
        answer = self._script(messages) if callable(self._script) else self._script[self.num_calls % len(self._script)]
        self.num_calls += 1
        if isinstance(answer, InferenceError):
            raise answer
        if isinstance(answer, Exception):
            raise InferenceError(f"the script raised {type(answer).__name__}: {answer}", status_code=500) from answer
        message = self._message(answer)
        ids, finish_reason, stop_string = _finish(message, min(sampling.max_tokens or room, room), sampling.stop)
        return ModelOutput(
            text=decode(ids),
            content=message["content"],
            reasoning=message["reasoning"],
            tool_calls=message["tool_calls"],
            prompt_ids=prompt_ids,
            completion_ids=ids,
            # Multiples of 1/128 that differ between neighbours and are exact on every machine.
            logprobs=[-(1 + (31 * token_id + 17 * position) % 255) / 128 for position, token_id in enumerate(ids)],
            logprobs_kind="processed",
            finish_reason=finish_reason,
            stop_string=stop_string,
            weight_version=self.weight_version,
            template_hash="scripted",
            sampling=sampling.to_dict(),
        )

    def _message(self, answer: Answer) -> JSONObject:
        """Return an answer with `content`, `reasoning` and OpenAI `tool_calls`."""
        given: JSONMapping = {"content": answer} if isinstance(answer, str) else {}
        if isinstance(answer, Mapping):
            given = answer
        if not given or not given.keys() <= {"content", "reasoning", "tool_calls", "role"}:
            raise ConfigError(
                f"script answer {answer!r}: use a text, a mapping with content or tool_calls, or an error"
            )
        calls = []
        for call in given.get("tool_calls") or []:
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            self._num_tool_calls += 1
            calls.append(
                {
                    "id": call.get("id") or f"call_{self._num_tool_calls}",
                    "type": "function",
                    "function": {
                        "name": function["name"],
                        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                    },
                }
            )
        return {
            "content": given.get("content") or "",
            "reasoning": given.get("reasoning") or "",
            "tool_calls": calls,
        }


def encode(text: str) -> list[int]:
    """Return a text as ids, one for each byte of its UTF-8."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """Return the text of ids, without the markers."""
    return bytes(token_id for token_id in ids if token_id < TURN_START).decode(errors="replace")


def encode_prompt(messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> list[int]:
    """Return a conversation as ids, up to the beginning of the assistant's answer."""
    ids: list[int] = []
    if tools:
        ids += [TURN_START, *encode("tools\n" + json.dumps(list(tools))), TURN_END, *encode("\n")]
    for message in messages:
        ids += [TURN_START, *encode(f"{message['role']}\n"), *_encode_body(message), TURN_END, *encode("\n")]
    return [*ids, TURN_START, *encode("assistant\n")]


def _encode_body(message: JSONMapping) -> list[int]:
    """Return the ids of a message's content; for an answer exactly the sampled ones, however a client rewrote it."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    thought = f"<think>\n{reasoning}\n</think>\n" if reasoning else ""
    text = thought + text_of(message)
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = str(function.get("arguments") or "")
        with suppress(ValueError, RecursionError):  # A script may contain malformed answers.
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        text += f"\n<tool_call>\n{json.dumps(function.get('name'))} {arguments}\n</tool_call>"
    return encode(text)


def _finish(message: JSONObject, max_tokens: int, stop: Sequence[str]) -> tuple[list[int], str, str | None]:
    """Return ids, finish reason and stop string of an answer; cut the message at that or at the token limit."""
    ids = [*_encode_body(message), TURN_END]
    reason = "tool_calls" if message["tool_calls"] else "stop"
    ends = [(at, at + len(text)) for text in stop if (at := message["content"].find(text)) >= 0]
    found = None
    if ends:
        start, end = min(ends)
        found = message["content"][start:end]
        message["tool_calls"] = []
        ids = _encode_body({**message, "content": message["content"][:end]})
        message["content"], reason = message["content"][:start], "stop"
    if len(ids) > max_tokens:
        ids = ids[:max_tokens]
        message.update(content=decode(ids), reasoning="", tool_calls=[])
        reason, found = "length", None
    return ids, reason, found


def _deltas(output: ModelOutput) -> Iterator[OutputDelta]:
    """Yield pieces of the text with their tokens; markers and tool calls belong to the whole answer alone."""
    pieces = [output.content[start : start + _PIECE] for start in range(0, len(output.content), _PIECE)]
    taken = 0
    if output.reasoning:
        taken = len(encode(f"<think>\n{output.reasoning}\n</think>\n"))
        yield OutputDelta("", output.completion_ids[:taken], output.logprobs[:taken], output.reasoning)
    for piece in pieces:
        at = taken + len(encode(piece))
        yield OutputDelta(piece, output.completion_ids[taken:at], output.logprobs[taken:at])
        taken = at
