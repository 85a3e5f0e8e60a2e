"""A model behind HTTP that answers `/v1/completions` as vLLM does, prompt log-probabilities included."""

from __future__ import annotations

import threading
from typing import Any, Self

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rllm.gateway.server import ServerThread


class TeacherServer:
    """Server of a teacher model; set `fault` to make it fail. `requests` has the received requests."""

    def __init__(self, model: Any, tokenizer: Any, *, names: tuple[str, ...] = ("teacher",), **about: Any) -> None:
        """Serve the model under these names; `about` has further fields of each model in `/v1/models`."""
        self.model, self.tokenizer, self.names = model, tokenizer, names
        self.about = about
        self.fault: str | None = None
        """`busy` (one request), `no list` (of models), `omits` (prompt_logprobs), `short` (one is missing) or `nan`."""
        self.requests: list[dict[str, Any]] = []
        self.live = self.most_live = 0
        self._lock = threading.Lock()
        routes = [Route("/v1/completions", self._complete, methods=["POST"]), Route("/v1/models", self._models)]
        self._thread = ServerThread(Starlette(routes=routes), shutdown_timeout_s=1.0)

    @property
    def url(self) -> str:
        return f"{self._thread.url}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    async def _models(self, request: Request) -> Response:
        if self.fault == "no list":
            return JSONResponse({"error": {"message": "no such page", "code": 404}}, status_code=404)
        found = [{"id": name, "object": "model", **self.about} for name in self.names]
        return JSONResponse({"object": "list", "data": found})

    async def _complete(self, request: Request) -> Response:
        asked = await request.json()
        self.requests.append(asked)
        if self.fault == "busy":
            self.fault = None
            return JSONResponse({"error": {"message": "try again", "code": 503}}, status_code=503)
        ids = asked["prompt"]
        if max(ids) >= self.model.config.vocab_size:
            message = f"Token id {max(ids)} is out of vocabulary"
            return JSONResponse({"error": {"message": message, "code": 400}}, status_code=400)
        if (total := len(ids) + asked["max_tokens"]) > self.about.get("max_model_len", total):
            message = f"This model's maximum context length is {self.about['max_model_len']} tokens"
            return JSONResponse({"error": {"message": message, "code": 400}}, status_code=400)
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        if self.fault != "omits":
            choice["prompt_logprobs"] = self._prompt_logprobs(ids)
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 0,
            "model": asked["model"],
            "choices": [choice],
        }
        return JSONResponse(answer)

    def _prompt_logprobs(self, ids: list[int]) -> list[Any]:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found: list[Any] = [None]
        for place, token_id in enumerate(ids[1:]):
            text = self.tokenizer.decode([token_id])
            found.append(
                {str(token_id): {"logprob": float(logprobs[place, token_id]), "rank": 1, "decoded_token": text}}
            )
        if self.fault == "nan":
            found[1] = {"0": {"logprob": None}}
        return found[:-1] if self.fault == "short" else found
