"""An inference engine of this process as upstream: its outputs in the shape of vLLM's chat completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from rllm.capture import SAMPLING_FIELDS, PriorAnswer
from rllm.errors import ConfigError, InferenceError
from rllm.gateway.upstream.base import FACTS_KEY, UpstreamCall
from rllm.gateway.upstream.token_prompts import for_template, logprobs_of
from rllm.inference.engine import (
    InferenceEngine,
    ModelOutput,
    OutputDelta,
    SamplingParams,
    continued_prompt,
    lost_in_prompt,
    offers,
)
from rllm.inference.parameters import field_of, log_ignored
from rllm.types import JSONMapping, JSONObject, Message


class EngineUpstream:
    """Answers with an `InferenceEngine`; `n` answers are `n` concurrent calls of it, each with a seed of its own."""

    def __init__(self, engine: InferenceEngine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self._detailed = engine if offers(engine, "check_request") else None

    def prepare(self, request: JSONMapping) -> JSONObject:
        if self._detailed is not None:
            self._detailed.check_request(request)
        ignored = self.ignored(request)
        log_ignored(ignored)  # fields that a session imposes; the client's are logged already
        left_out = {field_of(key) for key in ignored if "." not in key} - {"tools"}
        sampling = SamplingParams.from_request(request).to_dict()
        sent = {
            name: value
            for name, value in {**request, **_present(sampling)}.items()
            if value is not None and name not in left_out
        }
        sent.pop("max_completion_tokens", None)  # `max_tokens` has the same meaning.
        return {**sent, "model": self.model_name}

    def ignored(self, request: JSONMapping) -> Sequence[str]:
        return () if self._detailed is None else self._detailed.ignored(request)

    def continued_prompt(self, request: JSONMapping, prior: PriorAnswer) -> Sequence[int] | None:
        messages = for_template(request["messages"])
        num_known = len(for_template(request["messages"][: prior.num_messages]))
        return continued_prompt(
            self.engine, prior.token_ids, messages, num_known, request, appended_text=prior.appended_text
        )

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        return lost_in_prompt(self.engine, for_template(messages), tools)

    async def complete(self, call: UpstreamCall) -> JSONObject:
        self._check(call)
        outputs = await self._outputs(call)
        describe = self._describe(call)
        call.route.queue_s += _queued(outputs)
        choices = [
            {
                "index": index,
                "message": output.to_message(),
                "logprobs": describe(output.completion_ids, output.logprobs, alternatives=output.top_logprobs),
                "finish_reason": output.finish_reason,
                "token_ids": output.completion_ids,
                **({"stop_reason": output.stop_string} if output.stop_string else {}),
            }
            for index, output in enumerate(outputs)
        ]
        head = self._head(call.id, "chat.completion")
        prompt_ids = outputs[0].prompt_ids
        if not isinstance(prompt_ids, list):  # the array of a continued prompt, as the engine was given it
            prompt_ids = list(prompt_ids)
        ids = {"prompt_token_ids": prompt_ids}
        return {**head, "choices": choices, "usage": _usage(outputs), **ids, FACTS_KEY: _facts(outputs)}

    async def stream(self, call: UpstreamCall) -> AsyncGenerator[list[JSONObject], None]:
        self._check(call)
        head = self._head(call.id, "chat.completion.chunk")
        describe = self._describe(call)
        if _num_choices(call.request) == 1:
            chunks, pieces = _ChoiceChunks(0, describe), self._pieces(call)
            prompt_ids: Sequence[int] = ()
            async with aclosing(pieces):
                async for piece in pieces:
                    ids = {"prompt_token_ids": list(piece.prompt_ids)} if piece.prompt_ids and not prompt_ids else {}
                    prompt_ids = prompt_ids or piece.prompt_ids
                    yield [{**head, "choices": [chunks.feed(piece)], **ids}]
            outputs = [] if chunks.output is None else [chunks.output]
        else:  # Several answers come whole: hardly any client asks for a stream of them.
            outputs = await self._outputs(call)
            choices = [_ChoiceChunks(index, describe).feed(output) for index, output in enumerate(outputs)]
            yield [{**head, "choices": choices, "prompt_token_ids": list(outputs[0].prompt_ids)}]
        call.route.queue_s += _queued(outputs)
        yield [{**head, "choices": [], "usage": _usage(outputs), FACTS_KEY: _facts(outputs)}]

    async def models(self) -> list[JSONObject]:
        return [{"id": self.model_name, "object": "model", "created": 0, "owned_by": "rllm"}]

    async def check(self) -> None:
        """Do nothing: an engine in this process is always available."""

    async def close(self) -> None:
        """Do nothing: the engine is its caller's."""

    def _check(self, call: UpstreamCall) -> None:
        if not call.request["messages"] and not offers(self.engine, "continued_prompt"):
            raise ConfigError(f"prompt: {type(self.engine).__name__} takes no token ids: send messages, or a text")

    def _describe(self, call: UpstreamCall) -> Callable[..., JSONObject]:
        """Return a function that writes log-probabilities, with texts and alternatives of tokens if asked for."""
        if self._detailed is None or not call.logprob_details or call.request.get("return_tokens_as_token_ids"):
            return logprobs_of
        return partial(logprobs_of, bytes_of=self._detailed.token_bytes)

    def _params(self, call: UpstreamCall, index: int) -> JSONObject:
        """Return the sampling fields for one choice: equal seeds would give `n` equal answers."""
        params = {name: call.request[name] for name in SAMPLING_FIELDS if name in call.request and name != "n"}
        if "seed" in params:
            params["seed"] += index
        if call.prompt_ids is not None:
            params["prompt_token_ids"] = call.prompt_ids
        if self._detailed is not None and call.logprob_details and call.request.get("top_logprobs"):
            params["top_logprobs"] = call.request["top_logprobs"]
        return params

    def _head(self, call_id: str, object: str) -> JSONObject:
        return {"id": call_id, "object": object, "created": int(time.time()), "model": self.model_name}

    async def _outputs(self, call: UpstreamCall) -> list[ModelOutput]:
        messages = for_template(call.request["messages"])
        calls = [
            self._output(messages, tools=call.request.get("tools"), **self._params(call, index))
            for index in range(_num_choices(call.request))
        ]
        if len(calls) == 1:
            return [await calls[0]]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # The first failure cancelled the others.
        return [task.result() for task in tasks]

    async def _output(self, messages: Sequence[Message], **params: Any) -> ModelOutput:
        with _engine_at_work():
            return await self.engine.get_model_response(messages, **params)

    async def _pieces(self, call: UpstreamCall) -> AsyncGenerator[OutputDelta | ModelOutput, None]:
        """Yield the engine's only answer, in one piece if it cannot stream."""
        messages, tools = for_template(call.request["messages"]), call.request.get("tools")
        params = self._params(call, 0)
        if not offers(self.engine, "stream_model_response"):
            yield await self._output(messages, tools=tools, **params)
            return
        stream = self.engine.stream_model_response(messages, tools=tools, **params)
        try:
            with _engine_at_work():
                async for piece in stream:
                    yield piece
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


@contextmanager
def _engine_at_work() -> Iterator[None]:
    """Turn anything that an engine raises into a failure of its call, unless the call was ended from outside.

    Raises:
        InferenceError: 503, in place of a cancellation by the engine itself, or of an error that would end this
        process.
    """
    try:
        yield
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise InferenceError("the engine cancelled the call by itself: ask again", status_code=503) from error
    except BaseException as error:  # such as SystemExit
        raise InferenceError(f"the engine raised {type(error).__name__}: {error}", status_code=503) from error


class _ChoiceChunks:
    """Chunks of one choice of a stream; the whole answer adds only the text that was not sent yet."""

    def __init__(self, index: int, describe: Callable[..., JSONObject]) -> None:
        self.index = index
        self._describe = describe
        self.output: ModelOutput | None = None
        self._reasoning = ""
        self._text = ""
        self._num_ids = 0
        self._began = False

    def feed(self, piece: OutputDelta | ModelOutput) -> JSONObject:
        """Return the `choices` entry of the next chunk."""
        delta: JSONObject = {} if self._began else {"role": "assistant", "content": ""}
        self._began = True
        if isinstance(piece, OutputDelta):
            reasoning, text, reason, stop_string = piece.reasoning, piece.text, None, None
            token_ids, logprobs, others = piece.token_ids, piece.logprobs, piece.top_logprobs
        else:
            self.output = piece
            reasoning, text = _unsent(piece.reasoning, self._reasoning), _unsent(piece.content, self._text)
            reason, stop_string = piece.finish_reason, piece.stop_string
            token_ids, logprobs = piece.completion_ids[self._num_ids :], piece.logprobs[self._num_ids :]
            others = piece.top_logprobs[self._num_ids :]
            if piece.tool_calls:
                delta["tool_calls"] = [{"index": position, **call} for position, call in enumerate(piece.tool_calls)]
        if reasoning:
            delta["reasoning_content"] = reasoning
        if text:
            delta["content"] = text
        self._reasoning += reasoning
        self._text += text
        self._num_ids += len(token_ids)
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": self._describe(token_ids, logprobs, alternatives=others),
            "finish_reason": reason,
            "token_ids": list(token_ids),
            **({"stop_reason": stop_string} if stop_string else {}),
        }


def _unsent(whole: str, sent: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""


def _num_choices(request: JSONMapping) -> int:
    return request.get("n") or 1


def _present(sampling: JSONMapping) -> JSONObject:
    """Return the fields with values; tuples become lists, as stores return them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in sampling.items()
        if value is not None and value != ()
    }


def _usage(outputs: Sequence[ModelOutput]) -> dict[str, int]:
    num_prompt = outputs[0].prompt_length
    num_completion = sum(output.completion_length for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _queued(outputs: Sequence[ModelOutput]) -> float:
    """Return the seconds that the call waited in the engine's queue, if the engine reports them."""
    return max((float(output.metrics.get("queue_s", 0.0)) for output in outputs), default=0.0)


def _facts(outputs: Sequence[ModelOutput]) -> JSONObject:
    versions = [output.weight_version for output in outputs if output.weight_version is not None]
    # The weights may be updated between the choices of one call; its version is the oldest of theirs.
    oldest = min(versions, default=None)
    # A choice that newer weights sampled entirely has an update before its first token.
    begun = [[] if output.weight_version in (None, oldest) else [[0, output.weight_version]] for output in outputs]
    updates = [[*first, *output.weight_updates] for first, output in zip(begun, outputs, strict=True)]
    return {
        "weight_version": oldest,
        "weight_updates": updates if any(updates) else [],
        "template_hash": outputs[0].template_hash,
        "logprobs_kind": outputs[0].logprobs_kind,
        "sampling": _present(outputs[0].sampling),
    }
