from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ModelServer:
    """A small OpenAI-compatible server: it repeats the prompt, after `sleep` seconds if the request has them."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    compress: bool = False
    redirect_to: str | None = None
    errors: list[int] = field(default_factory=list)
    """Status codes to answer with first."""

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        model = self.server.model
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        model.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        time.sleep(body.get("sleep", 0))
        if model.errors:
            self._answer(model.errors.pop(0), b'{"error": {"message": "scripted"}}')
        elif model.redirect_to and not self.path.startswith("/there"):
            self._answer(307, b"", location=model.redirect_to)
        elif body.get("stream"):
            self._stream(body)
        else:
            self._answer(200, json.dumps(_completion(body)).encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        if self.server.model.compress:
            body = gzip.compress(body)
            headers["content-encoding"] = "gzip"
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, body: dict[str, Any]) -> None:
        whole = _completion(body)
        head = {"id": whole["id"], "object": "chat.completion.chunk", "created": 1, "model": "m"}
        text = whole["choices"][0]["message"]["content"]
        choices = [{"index": 0, "delta": {"content": letter}} for letter in text]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        events = [json.dumps({**head, "choices": [choice]}) for choice in choices] + ["[DONE]"]
        self._answer(
            200, "".join(f"data: {event}\n\n" for event in events).encode(), **{"content-type": "text/event-stream"}
        )

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    model: ModelServer


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    text = body["messages"][-1]["content"]
    return {
        "id": f"chatcmpl-{text}",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "token_ids": [3],
                "logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]},
            }
            for index in range(body.get("n") or 1)
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with _Server(("127.0.0.1", 0), _Handler) as http:
        http.model = ModelServer(url=f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield http.model
        http.shutdown()
        thread.join()
