"""Any OpenAI-compatible endpoint as an `InferenceEngine`: vLLM, SGLang, rllm's gateway, OpenAI itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import openai

from rllm._runtime.untrusted import LARGE, parse_json
from rllm.capture import SAMPLING_FIELDS
from rllm.errors import ConfigError, InferenceError, PromptTooLongError
from rllm.inference.engine import ModelOutput, SamplingParams, output_of_answer
from rllm.types import JSONMapping, JSONObject, Message

_MAX_ANSWER_BYTES, _MAX_VALUE_BYTES = 64 * LARGE, 512 * LARGE
"""Bounds of a server's answer, and of its values in memory."""
_OPENAI_HOST = "api.openai.com"
_BEYOND_OPENAI = ("top_k", "stop_token_ids")
_TYPED = {item.name for item in fields(SamplingParams)}
_OWN_FIELDS = _TYPED | {"max_completion_tokens", "n"}
_PASSED_ON = set(SAMPLING_FIELDS) - _OWN_FIELDS
"""Sampling fields that are sent unchanged."""
_LIMITS = {"max_tokens", "max_completion_tokens"}
_TOO_LONG = ("context length", "maximum model length")
"""Texts of servers that refuse a prompt as too long without a code: vLLM, SGLang, some of OpenAI's."""


class OpenAIEngine:
    """Client of a chat-completions endpoint that keeps its exact token ids.

    Ids are never made from text: without ids from the server the output has none, and can be scored but not trained on.
    """

    def __init__(
        self,
        model: str,
        tokenizer: object = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        sampling_params: JSONMapping | None = None,
        tools: Sequence[JSONMapping] | None = None,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        api_retries: int = 3,
        timeout_s: float = 600.0,
        kind: Literal["vllm", "openai"] | None = None,
        max_model_length: int | None = None,
        accumulate_reasoning: bool = False,
    ) -> None:
        """Configure the client; nothing is sent before the first call.

        Args:
            model: model name to request.
            tokenizer: ignored; accepted because code for other frameworks passes it.
            base_url: address up to and including `/v1`; by default `OPENAI_BASE_URL`.
            api_key: by default `OPENAI_API_KEY`; local servers need none.
            sampling_params: defaults for every call.
            tools: default tools: `Tool`s, or dicts in the OpenAI format.
            max_prompt_length: most tokens of a prompt, as counted by the server.
            max_response_length: default `max_tokens` of an answer.
            api_retries: retries of a call whose server was busy or unreachable.
            timeout_s: seconds to wait for an answer.
            kind: `vllm` requests token ids; `openai` sends only fields that OpenAI knows; the default depends on the
                address.
            max_model_length: ignored: the server knows it.
            accumulate_reasoning: ignored: the server's chat template decides.
        """
        self.model = model
        self.tools = list(tools) if tools else None
        self.sampling_params = dict(sampling_params or {})
        if max_response_length is not None:
            self.sampling_params.setdefault("max_tokens", max_response_length)
        self.max_prompt_length = max_prompt_length
        self._kind = kind
        if base_url is not None and not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url!r}: use an address such as http://127.0.0.1:8000/v1")
        self._client_settings: JSONObject = {
            "base_url": base_url,
            "api_key": api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY",
            "max_retries": api_retries,
            "timeout": timeout_s,
        }
        # Open connections belong to the event loop that made them.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = WeakKeyDictionary()

    @property
    def _client(self) -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            # The default client closes itself when collected, in whichever loop then runs, and fails.
            http_client = openai.DefaultAsyncHttpxClient(
                timeout=self._client_settings["timeout"],
                headers={"accept-encoding": "identity"},
                event_hooks={"response": [_refuse_unbounded]},
            )
            client = self._clients[loop] = openai.AsyncOpenAI(**self._client_settings, http_client=http_client)
        return client

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> ModelOutput:
        """Request one answer. Raises what `InferenceEngine.get_model_response` does.

        Of `params`, the sampling fields of OpenAI and vLLM are sent, such as `min_p` or `response_format`, and all
        fields of `extra_body`.
        """
        asked = {name: value for name, value in params.items() if value is not None}
        # One limit under two names: a call's must override the default under the other name.
        replaced = _LIMITS if _LIMITS & asked.keys() else set()
        given = {name: value for name, value in self.sampling_params.items() if name not in replaced} | asked
        beyond = given.pop("extra_body", None) or {}
        given = {**beyond, **given}
        sampling = SamplingParams.from_request(given)
        sent = _PASSED_ON | set(beyond) - _OWN_FIELDS
        others = {name: value for name, value in given.items() if name in sent and value is not None}
        client = self._client
        try:
            response = await client.chat.completions.with_raw_response.create(
                **self._request(client, messages, tools or self.tools, sampling, others)
            )
        except openai.APIStatusError as error:
            raise _refusal(error) from error
        except openai.APITimeoutError as error:
            raise InferenceError(f"{client.base_url} did not answer within timeout_s={client.timeout}") from error
        except openai.APIConnectionError as error:
            raise InferenceError(
                f"{client.base_url} cannot be reached ({error.__cause__ or error}): check that the server is running"
            ) from error
        parsed = await _parsed(response.content)
        lists = {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
        output = output_of_answer(parsed, {**sampling.to_dict(), **lists, **others})
        length = output.metrics.get("prompt_tokens", output.prompt_length)
        if self.max_prompt_length is not None and length > self.max_prompt_length:
            raise PromptTooLongError(
                f"the prompt has {length:g} tokens, and max_prompt_length={self.max_prompt_length}: shorten the "
                "messages, or raise max_prompt_length of the engine"
            )
        return output

    def _request(
        self,
        client: openai.AsyncOpenAI,
        messages: Sequence[Message],
        tools: Sequence[JSONMapping] | None,
        sampling: SamplingParams,
        others: JSONMapping,
    ) -> JSONObject:
        sent = {name: value for name, value in sampling.to_dict().items() if value is not None and value != ()}
        body = {name: sent.pop(name) for name in _BEYOND_OPENAI if name in sent}
        request: JSONObject = {"model": self.model, "messages": list(messages), "logprobs": True, **sent}
        kind = self._kind or ("openai" if client.base_url.host == _OPENAI_HOST else "vllm")
        request["extra_body"] = {**body, **others, "return_token_ids": True} if kind == "vllm" else dict(others)
        if tools:
            request["tools"] = [getattr(tool, "json", tool) for tool in tools]
        return request

    async def close(self) -> None:
        """Close the connections of the running event loop. Repeatable; later calls open new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()


async def _refuse_unbounded(response: Any) -> None:
    """Refuse an answer that is compressed or too long: the client would unpack and keep all of it."""
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise InferenceError(f"the server's answer has content-encoding={coding!r}, but none was requested")
    stream = response.stream

    class Bounded(type(stream)):  # type: ignore[misc]  # the client checks its class, which is httpx's or httpx2's
        def __init__(self) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_read = 0
            async for piece in stream:
                num_read += len(piece)
                if num_read > _MAX_ANSWER_BYTES:
                    raise InferenceError(f"the server's answer is longer than {_MAX_ANSWER_BYTES:,} bytes")
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = Bounded()


async def _parsed(body: bytes) -> JSONObject:
    """Return the chat completion, checked to have a choice with a message."""
    read = partial(parse_json, body, limit=_MAX_VALUE_BYTES)
    try:
        response = read() if len(body) < LARGE else await asyncio.to_thread(read)
    except ValueError as error:
        raise InferenceError(f"the server's answer is not JSON ({error}): {_start_of(body)}") from error
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict) or not isinstance(first.get("message"), dict):
        raise InferenceError(f"the server's answer has no choice with a message: {_start_of(body)}")
    return response  # type: ignore[no-any-return]


def _start_of(body: bytes) -> str:
    return repr(body[:200].decode(errors="replace"))


def _refusal(error: openai.APIStatusError) -> InferenceError:
    message = str(error).lower()
    too_long = error.status_code == 400 and (
        error.code == "context_length_exceeded" or any(words in message for words in _TOO_LONG)
    )
    kind = PromptTooLongError if too_long else InferenceError
    return kind(f"the server answered {error.status_code}: {error.message}", status_code=error.status_code)
