"""What a vLLM server is asked and told beside its answers: health, weights, pauses, sleep.

Most of these routes exist only where the server runs with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError, InferenceError

_START_OF_BODY = 500
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""As the gateway reaches it: through no proxy that the environment names, which would be given the key."""
HEAVY_S = 1800.0
"""How long it may take to load or move all weights; of a large model that is minutes."""


@dataclass(frozen=True)
class Sampled:
    """A short answer with its tokens."""

    token_ids: list[int]
    logprobs: list[float]


class VLLMControl:
    """One server; blocking calls, one at a time."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        """`url` with or without `/v1`; nothing is sent yet.

        Raises:
            ConfigError: if it is not a web address.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no address of a server (vllm.url, or rllm doctor --base-url): use one such as "
                "http://127.0.0.1:8000/v1"
            )
        self.root = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    @property
    def base_url(self) -> str:
        """Up to and including `/v1`."""
        return f"{self.root}/v1"

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """What is at a path: JSON, or text.

        Raises:
            InferenceError: with what the server said; status 503 if it cannot be reached, 504 if it took too long.
        """
        return self._send("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """What answers a body. Raises as `get` does."""
        return self._send("POST", path, {} if body is None else body, timeout_s)

    def _send(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.root}{path}", data, self._headers, method=method)
        try:
            with _DIRECT.open(request, timeout=timeout_s or self._timeout_s) as response:
                said, is_json = response.read(), "json" in response.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            text = _start_of(error)
            raise InferenceError(
                f"{method} {self.root}{path} was answered with {error.code}: {text}", status_code=error.code
            ) from error
        except TimeoutError as error:
            raise InferenceError(f"{self.root}{path} gave no answer in time", status_code=504) from error
        except OSError as error:  # a URLError, too
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise InferenceError(f"{self.root}{path} gave no answer in time", status_code=504) from error
            raise InferenceError(f"{self.root} cannot be reached: {reason}", status_code=503) from error
        except http.client.HTTPException as error:
            raise InferenceError(
                f"{self.root} broke off in its answer ({type(error).__name__})", status_code=503
            ) from error
        if not is_json:
            return said.decode(errors="replace")
        try:
            return json.loads(said)
        except ValueError as error:
            raise InferenceError(f"{self.root}{path} answered with something else than JSON: {said[:80]!r}") from error

    def is_healthy(self, *, timeout_s: float = 5.0) -> bool:
        """Whether it takes calls."""
        try:
            self.get("/health", timeout_s=timeout_s)
        except InferenceError:
            return False
        return True

    def routes(self) -> set[str]:
        """The paths that it says it has; none if it does not say."""
        try:
            said = self.get("/openapi.json")
        except InferenceError as error:
            if error.status_code in (503, 504):
                raise
            return set()
        return set(said.get("paths", ())) if isinstance(said, dict) else set()

    def models(self) -> list[str]:
        """The names that can be asked for."""
        return [model["id"] for model in self.get("/v1/models").get("data", ())]

    def transfer_backend(self) -> str | None:
        """The way in which its workers take weights, if they have our extension."""
        try:
            said = self.post("/collective_rpc", {"method": "rllm_backend"})
        except InferenceError as error:
            if error.status_code in (503, 504):
                raise
            return None
        backend: str | None = said["results"][0].get("backend")
        return backend

    def weight_bits(self) -> list[dict[str, tuple[list[int], str, int]]]:
        """Of each worker that has our extension: of each of its tensors the shape, the type, and the sum of the bits."""
        workers: list[dict[str, Any]] = self.post("/collective_rpc", {"method": "rllm_bits"})["results"]
        return [{name: (shape, dtype, bits) for name, (shape, dtype, bits) in worker.items()} for worker in workers]

    def weight_version(self, *, timeout_s: float | None = None) -> str:
        """What was last told about the weights; every server that starts anew says `default`."""
        return str(self.get("/weight_info", timeout_s=timeout_s)["weight_version"])

    def set_weight_version(self, version: str) -> None:
        """Tell it what its weights are."""
        self.post("/update_weight_version", {"new_version": version})

    def pause(self) -> None:
        """Freeze what is being answered, and hold what comes, until `resume`."""
        self.post("/pause?mode=keep")

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self.post("/resume")

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with other weights; frozen answers are computed again from their tokens.

        Raises:
            InferenceError: if it could not.
        """
        said = self.post("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(said, dict) and said.get("success") is False:
            raise InferenceError(f"{self.root} could not reset its prefix cache")

    def sleep(self) -> None:
        """Give the GPU's memory back: the weights wait in main memory, and answers that are being made are given up."""
        self.post("/sleep?level=1", timeout_s=HEAVY_S)

    def wake_up(self) -> None:
        """Take the memory again."""
        self.post("/wake_up", timeout_s=HEAVY_S)

    def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """The log-probabilities of all ids but the first, computed anew at temperature 1."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        entries = self.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries[1:], strict=True)]

    def sample(self, model: str, prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> Sampled:
        """A few tokens behind these, at temperature 1; of the prompt, what is cached is used."""
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = self.post("/v1/completions", body)["choices"][0]
        return Sampled(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def _start_of(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return error.read(_START_OF_BODY).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return "a text that broke off"
