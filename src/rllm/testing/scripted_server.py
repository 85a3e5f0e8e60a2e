"""A real HTTP server for the scripted engine, which answers in vLLM's format and can fail on request.

    with ScriptedServer(ScriptedEngine(["Hello."])) as server:
        client = OpenAI(base_url=server.base_url, api_key="unused")

It shares no code with the gateway's wire formats, so that tests do not compare the gateway with itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Literal, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Address
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rllm.errors import ConfigError, InferenceError
from rllm.gateway.server import ServerThread
from rllm.inference.engine import ModelOutput
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.types import JSONObject

Fault: TypeAlias = Literal["html", "malformed", "error", "cut", "stall", "mismatch", "no_tokens"]
"""`html`: a proxy's error page. `malformed`: 200 with half a JSON object. `error`: 500 with an OpenAI error. `cut`: the
stream's connection breaks in the middle. `stall`: the stream stops in the middle. `mismatch`: one
log-probability is missing. `no_tokens`: no ids, as with OpenAI."""


class ScriptedServer(ServerThread):
    """A server in a thread. Set `fault` to make the next calls fail; `requests` has the bodies it received."""

    def __init__(self, engine: ScriptedEngine, *, model: str = "scripted", port: int = 0) -> None:
        self.engine = engine
        self.model = model
        self.fault: Fault | None = None
        self.requests: list[JSONObject] = []
        self.clients: set[Address | None] = set()
        """Addresses of the clients' connections."""
        self.num_cancelled = 0
        """Streams that the client closed before their end."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        super().__init__(Starlette(routes=routes), port=port, shutdown_timeout_s=1.0)

    @property
    def base_url(self) -> str:
        """Return the URL, including `/v1`."""
        return f"{self.url}/v1"

    async def _models(self, request: Request) -> Response:
        if self.fault == "html":
            return HTMLResponse("<html>502 Bad Gateway</html>", status_code=502)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "scripted"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        self.requests.append(asked)
        self.clients.add(request.client)
        if self.fault == "html":
            return HTMLResponse("<html>502 Bad Gateway</html>", status_code=502)
        if self.fault == "malformed":
            return Response('{"id": "chatcmpl-1", "choices": [', media_type="application/json")
        if self.fault == "error":
            return _error("the engine core has died", 500)
        params = {name: asked[name] for name in ("temperature", "top_p", "max_tokens", "stop") if name in asked}
        try:
            answers = (
                self.engine.get_model_response(asked["messages"], tools=asked.get("tools"), **params)
                for _ in range(asked.get("n") or 1)
            )
            outputs = await asyncio.gather(*answers)
        except (InferenceError, ConfigError) as error:
            return _error(str(error), getattr(error, "status_code", 400))
        head = {"id": "chatcmpl-the-same-for-all", "created": 1_700_000_000, "model": self.model}
        if asked.get("stream"):
            events = self._events(asked, outputs, {**head, "object": "chat.completion.chunk"})
            return StreamingResponse(events, media_type="text/event-stream")
        choices = [self._choice(asked, index, output) for index, output in enumerate(outputs)]
        answer = {**head, "object": "chat.completion", "choices": choices, "usage": _usage(outputs)}
        if self._returns_ids(asked):
            answer["prompt_token_ids"] = outputs[0].prompt_ids
        return JSONResponse(answer)

    def _returns_ids(self, asked: JSONObject) -> bool:
        return bool(asked.get("return_token_ids")) and self.fault != "no_tokens"

    def _choice(self, asked: JSONObject, index: int, output: ModelOutput) -> JSONObject:
        message = {"refusal": None, "tool_calls": [], **output.to_message()}
        choice = {"index": index, "message": message, "finish_reason": output.finish_reason}
        choice["stop_reason"] = output.stop_string
        choice["logprobs"] = self._logprobs(output, 0, len(output.completion_ids)) if asked.get("logprobs") else None
        if self._returns_ids(asked):
            choice["token_ids"] = output.completion_ids
        return choice

    def _logprobs(self, output: ModelOutput, start: int, end: int) -> JSONObject:
        entries = [
            {"token": decode([token_id]), "logprob": logprob, "bytes": [token_id % 256], "top_logprobs": []}
            for token_id, logprob in zip(output.completion_ids[start:end], output.logprobs[start:end], strict=True)
        ]
        return {"content": entries[1:] if self.fault == "mismatch" else entries}

    async def _events(self, asked: JSONObject, outputs: list[ModelOutput], head: JSONObject) -> AsyncIterator[str]:
        """Stream as vLLM does: an opening chunk for each choice, then one for each token, with choices in turns."""
        ids = self._returns_ids(asked)
        try:
            for index, output in enumerate(outputs):
                opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                chunk = {**head, "choices": [{**opening, "finish_reason": None}]}
                yield _event({**chunk, "prompt_token_ids": output.prompt_ids} if ids else chunk)
            for position in range(max(len(output.completion_ids) for output in outputs)):
                if self.fault == "cut" and position == 2:
                    raise ConnectionResetError("cut on request")
                if self.fault == "stall" and position == 2:
                    await asyncio.Event().wait()  # until its client leaves
                for index, output in enumerate(outputs):
                    if position < len(output.completion_ids):
                        choice = self._streamed_choice(asked, index, output, position)
                        yield _event({**head, "choices": [choice]})
                await asyncio.sleep(0)
            if (asked.get("stream_options") or {}).get("include_usage"):
                yield _event({**head, "choices": [], "usage": _usage(outputs)})
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise

    def _streamed_choice(self, asked: JSONObject, index: int, output: ModelOutput, position: int) -> JSONObject:
        last = position == len(output.completion_ids) - 1
        # Reasoning with the first token, content one character at a time, tool calls with the last token.
        delta: JSONObject = {}
        if position == 0 and output.reasoning:
            delta["reasoning_content"] = output.reasoning
        if text := output.content[position:] if last else output.content[position : position + 1]:
            delta["content"] = text
        if last and output.tool_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(output.tool_calls)]
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(output, position, position + 1) if asked.get("logprobs") else None,
            "finish_reason": output.finish_reason if last else None,
            "stop_reason": output.stop_string if last else None,
        }
        if self._returns_ids(asked):
            choice["token_ids"] = [output.completion_ids[position]]
        return choice


def _usage(outputs: list[ModelOutput]) -> dict[str, int]:
    prompt, completion = outputs[0].prompt_length, sum(output.completion_length for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(chunk: JSONObject) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _error(message: str, status: int) -> Response:
    body = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}}
    return JSONResponse(body, status_code=status)
