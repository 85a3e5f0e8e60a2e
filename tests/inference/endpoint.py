"""A small OpenAI-compatible server on loopback with the abilities that a test gives it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOGITS = {"one": 3.0, "two": 2.0, "three": 0.5}
PROMPT_IDS, ANSWER_IDS = [1, 5, 9], [7, 8]
WEIGHT_ROUTES = [
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/weight_info",
    "/update_weights",
]


@dataclass
class Abilities:
    """Abilities of the server; the defaults are those of a vLLM that supports training."""

    models: list[str] = field(default_factory=lambda: ["policy"])
    gives_ids: bool = True
    ids_field: str = "token_ids"
    streams: bool = True
    streams_ids: bool = True
    kind: str = "processed"
    takes_token_prompts: bool = True
    takes_tools: bool = True
    num_choices: int = 2
    routes: list[str] = field(default_factory=lambda: WEIGHT_ROUTES)
    key: str | None = None


class Refused(Exception):
    """Rejection of a request, with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def endpoint(**abilities: Any) -> Iterator[str]:
    """Serve with these abilities, and yield the URL, up to and including `/v1`."""
    able = Abilities(**abilities)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers.get("content-length", 0)))))

        def answer(self, body: dict[str, Any]) -> None:
            status, kind = 200, "text/event-stream" if body.get("stream") else "application/json"
            try:
                if able.key is not None and self.headers.get("authorization") != f"Bearer {able.key}":
                    raise Refused(401, "no key")
                answers = answer(able, self.path, body)
            except Refused as error:
                status, answers = error.status, json.dumps({"error": {"message": str(error)}})
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(answers.encode())

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(able: Abilities, path: str, body: dict[str, Any]) -> str:
    match path:
        case "/v1/models":
            return json.dumps({"data": [{"id": name} for name in able.models]})
        case "/openapi.json":
            return json.dumps({"paths": {route: {} for route in able.routes}})
        case "/collective_rpc":
            return json.dumps({"results": [{"backend": "rllm_file"}]})
        case "/v1/completions":
            if not able.takes_token_prompts:
                raise Refused(400, "prompt must be a string")
            return json.dumps({"choices": [{"prompt_token_ids": body["prompt"], "token_ids": ANSWER_IDS[:1]}]})
        case "/v1/chat/completions":
            if body.get("tools") and not able.takes_tools:
                raise Refused(400, '"auto" tool choice requires --enable-auto-tool-choice')
            if body.get("stream") and not able.streams:
                raise Refused(400, "return_token_ids is not supported with streaming")
            return streamed(able) if body.get("stream") else json.dumps(chat(able, body))
    raise Refused(404, "not found")


def chat(able: Abilities, body: dict[str, Any]) -> dict[str, Any]:
    found = {} if not able.gives_ids else {able.ids_field: ANSWER_IDS}
    logprobs = {
        "content": [{"token": "x", "logprob": -0.5, "top_logprobs": alternatives(able, body)}] * len(ANSWER_IDS)
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "logprobs": logprobs, **found}
    return {"prompt_token_ids": PROMPT_IDS, "choices": [choice] * min(body.get("n", 1), able.num_choices)}


def alternatives(able: Abilities, body: dict[str, Any]) -> list[dict[str, Any]]:
    temperature = body.get("temperature", 1.0) if able.kind == "processed" else 1.0
    scaled = {token: logit / temperature for token, logit in LOGITS.items()}
    total = math.log(sum(math.exp(value) for value in scaled.values()))
    return [{"token": token, "logprob": value - total} for token, value in scaled.items()]


def streamed(able: Abilities) -> str:
    chunks: list[dict[str, Any]] = [{"choices": [], "prompt_token_ids": PROMPT_IDS}]
    for token in ANSWER_IDS:
        found = {"token_ids": [token]} if able.streams_ids else {}
        delta = {"content": "a line\u2028separator, which ends no line of the stream"}
        chunks.append(
            {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": [{"logprob": -0.5}]}, **found}]}
        )
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
