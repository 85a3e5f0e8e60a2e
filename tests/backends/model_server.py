"""A small server with a real model and vLLM's routes for weights, in a thread: it loads weights from files, or fails."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROUTES = """/health /v1/models /weight_info /pause /resume /reset_prefix_cache /update_weight_version /sleep /wake_up
    /start_weight_update /update_weights /finish_weight_update /collective_rpc""".split()


ANSWERS = {
    "/openapi.json": {"paths": {route: {} for route in ROUTES}},
    "/v1/models": {"data": [{"id": "policy"}]},
}


class ModelServer:
    """Server of a copy of a model, with faults that tests switch on and off."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model)
        self.original = copy.deepcopy(model)
        self.cached = self.model
        """Weights with which the states of prompts were computed."""
        self.weight_version = "default"
        self.calls: list[str] = []
        self.ignores = 0
        """Number of updates that it will accept without applying them."""
        self.keeps_cache = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}"))

            def answer(self, body: dict[str, Any]) -> None:
                data = json.dumps(server.answer(self.path.partition("?")[0], body)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def restart(self) -> None:
        """Restore the initial weights, as a restart does."""
        self.model = self.cached = copy.deepcopy(self.original)
        self.weight_version = "default"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path not in ("/health", "/weight_info"):
            self.calls.append(path)
        if path in ANSWERS:
            return ANSWERS[path]
        match path:
            case "/collective_rpc" if body["method"] == "rllm_bits":
                return {"results": [bits(self.model)]}
            case "/collective_rpc":
                return {"results": [{"backend": "rllm_file"}]}
            case "/weight_info":
                return {"weight_version": self.weight_version}
            case "/update_weight_version":
                self.weight_version = body["new_version"]
            case "/update_weights":
                self._load(Path(body["update_info"]["path"]))
            case "/reset_prefix_cache" if not self.keeps_cache:
                self.cached = self.model
            case "/v1/completions":
                return {"choices": [self._complete(body)]}
        return {}

    def _load(self, path: Path) -> None:
        if self.ignores:
            self.ignores -= 1
            return
        self.model = copy.deepcopy(self.model)
        self.model.load_state_dict(load_file(path), strict=False)
        self.model.tie_weights()

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        if "prompt_logprobs" in body:
            numbers = logprobs_of(self.model, ids)
            entries = [{str(token): {"logprob": number}} for token, number in zip(ids[1:], numbers, strict=True)]
            return {"prompt_logprobs": [None, *entries]}
        answer = [7, 8, 9][: body["max_tokens"]]
        return {
            "token_ids": answer,
            "logprobs": {"token_logprobs": logprobs_of(self.cached, [*ids, *answer])[-len(answer) :]},
        }


def bits(model: Any) -> dict[str, Any]:
    """Return checksums like the extension; weights that vLLM fuses are missing."""
    weights = {name: weight.detach() for name, weight in model.named_parameters() if "q_proj" not in name}
    return {
        name: [
            list(weight.shape),
            str(weight.dtype),
            int(weight.view(torch.int16 if weight.element_size() == 2 else torch.int32).sum(dtype=torch.int64)),
        ]
        for name, weight in weights.items()
    }


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probabilities of all ids but the first."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    numbers: list[float] = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    return numbers
