"""A real sampler with an HTTP server that answers chat and completions like vLLM, rendering chat messages itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rllm.gateway.server import ServerThread
from rllm.inference.engine import ModelOutput
from rllm.inference.local import LocalEngine


class TokenServer:
    """Server over a local engine; `paths` has the requested paths, in order."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.paths: list[str] = []
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self._thread = ServerThread(Starlette(routes=routes), shutdown_timeout_s=1.0)

    @property
    def url(self) -> str:
        return f"{self._thread.url}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    async def _output(self, request: Request) -> tuple[dict[str, Any], ModelOutput]:
        self.paths.append(request.url.path)
        asked = await request.json()
        params = {name: asked.get(name) for name in ("max_tokens", "seed", "temperature", "stop")}
        messages = asked.get("messages", ())
        output = await self.engine.get_model_response(
            messages, tools=asked.get("tools"), prompt_token_ids=asked.get("prompt"), **params
        )
        return asked, output

    async def _chat(self, request: Request) -> Response:
        asked, output = await self._output(request)
        entries = [{"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for value in output.logprobs]
        choice: dict[str, Any] = {"index": 0, "finish_reason": output.finish_reason, "token_ids": output.completion_ids}
        choice["stop_reason"] = output.stop_string
        choice["logprobs"] = {"content": entries}
        shared = {"id": "chatcmpl-1", "created": 0, "model": "m", "prompt_token_ids": output.prompt_ids}
        if not asked.get("stream"):
            choice["message"] = output.to_message()
            return JSONResponse({**shared, "object": "chat.completion", "choices": [choice]})
        choice["delta"] = output.to_message()
        return _events([{**shared, "object": "chat.completion.chunk", "choices": [choice]}])

    async def _complete(self, request: Request) -> Response:
        asked, output = await self._output(request)
        shared = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m"}

        def choice(start: int, stop: int) -> dict[str, Any]:
            is_last = stop == len(output.completion_ids)
            return {
                "index": 0,
                "text": "not what is read",
                "token_ids": output.completion_ids[start:stop],
                "logprobs": {"token_logprobs": output.logprobs[start:stop]},
                "prompt_token_ids": output.prompt_ids if start == 0 else None,
                "finish_reason": output.finish_reason if is_last else None,
                "stop_reason": output.stop_string if is_last else None,
            }

        length = len(output.completion_ids)
        if not asked.get("stream"):
            return JSONResponse({**shared, "choices": [choice(0, length)]})
        return _events(
            [{**shared, "choices": [choice(start, min(start + 3, length))]} for start in range(0, length, 3)]
        )


def _events(chunks: list[dict[str, Any]]) -> Response:
    async def events() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
