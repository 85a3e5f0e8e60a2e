"""HTTP calls to vLLM and SGLang servers besides completions: health, pause, sleep, weights and their version.

Most of vLLM's routes exist only where it runs with VLLM_SERVER_DEV_MODE=1. SGLang's are from version 0.5
(https://docs.sglang.io/advanced_features/sglang_for_rl.html), which always has them.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rllm.errors import ConfigError, InferenceError
from rllm.types import JSONObject

_START_OF_BODY = 500
# As in the gateway, no proxy named by the environment is used: it would receive the key.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
HEAVY_S = 1800.0
"""Seconds that loading or moving all weights may take; minutes for a large model."""
_NO_ANSWER = (503, 504)
"""Status codes of errors for a server that cannot be reached, or is too slow."""
_UPDATE_ROUTE = "/update_weights_from_disk"
"""A server with this route is SGLang."""

WEIGHTS_FILE = "model.safetensors"
FILE_BACKEND = "rllm_file"
"""Name of our weight transfer; see `plugin/rllm_vllm.py`."""
_RESTART = "start it as `rllm doctor --base-url URL` shows, or leave out vllm.url and let rllm start one of its own"


@dataclass(frozen=True)
class SampledTokens:
    """A short completion."""

    token_ids: list[int]
    logprobs: list[float]


class ServerClient:
    """Client of one server that answers with JSON or text; calls block, one at a time."""

    def __init__(self, root: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        """Set the URL that paths are appended to; nothing is sent yet."""
        self.root = root
        self.api_key = api_key
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON or text at a path.

        Raises:
            InferenceError: with the server's answer; status 503 if it cannot be reached, 504 if it took too long.
        """
        return self._send("GET", path, None, timeout_s)

    def post(self, path: str, body: object = None, *, timeout_s: float | None = None) -> Any:
        """Post a JSON body and return the answer. Raises as `get` does."""
        return self._send("POST", path, {} if body is None else body, timeout_s)

    def _send(self, method: str, path: str, body: object, timeout_s: float | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.root}{path}", data, self._headers, method=method)
        try:
            with _DIRECT.open(request, timeout=timeout_s or self._timeout_s) as response:
                content, is_json = response.read(), "json" in response.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            raise InferenceError(
                f"{method} {self.root}{path} was answered with {error.code}: {_start_of(error)}", status_code=error.code
            ) from error
        except OSError as error:  # TimeoutError and URLError, too
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                limit = timeout_s or self._timeout_s
                raise InferenceError(f"{self.root}{path} did not answer within {limit:g} s", status_code=504) from error
            raise InferenceError(f"{self.root} cannot be reached: {reason}", status_code=503) from error
        except http.client.HTTPException as error:
            raise InferenceError(
                f"{self.root} closed the connection before its answer was complete ({type(error).__name__})",
                status_code=503,
            ) from error
        if not is_json:
            return content.decode(errors="replace")
        try:
            return json.loads(content)
        except ValueError as error:
            raise InferenceError(f"{self.root}{path} did not answer with JSON: {content[:80]!r}") from error


class VLLMControl(ServerClient):
    """Client of one vLLM server."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        """Accept a URL with or without `/v1`, and send nothing; raise `ConfigError` if it is not a web address."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"vllm.url={url!r} (or rllm doctor --base-url): use an address such as http://127.0.0.1:8000/v1"
            )
        super().__init__(url.rstrip("/").removesuffix("/v1"), api_key=api_key, timeout_s=timeout_s)

    @property
    def base_url(self) -> str:
        """URL up to and including `/v1`."""
        return f"{self.root}/v1"

    def is_healthy(self, *, timeout_s: float = 5.0) -> bool:
        """Return whether the server takes calls."""
        try:
            self.get("/health", timeout_s=timeout_s)
        except InferenceError:
            return False
        return True

    def routes(self) -> set[str]:
        """Return the paths that the server lists; none if it has no list."""
        try:
            description = self.get("/openapi.json")
        except InferenceError as error:
            if error.status_code in _NO_ANSWER:
                raise
            return set()
        return set(description.get("paths", ())) if isinstance(description, dict) else set()

    def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return [model["id"] for model in self.get("/v1/models").get("data", ())]

    def transfer_backend(self) -> str | None:
        """Return the weight transfer of the server's workers; `None` where they lack our extension."""
        try:
            answer = self.post("/collective_rpc", {"method": "rllm_backend"})
        except InferenceError as error:
            if error.status_code in _NO_ANSWER:
                raise
            return None
        backend: str | None = answer["results"][0].get("backend")
        return backend

    def weight_bits(self) -> list[dict[str, tuple[list[int], str, int]]]:
        """Return, for each worker with our extension, each tensor's shape, type, and sum of its bits."""
        workers: list[JSONObject] = self.post("/collective_rpc", {"method": "rllm_bits"})["results"]
        return [{name: (shape, dtype, bits) for name, (shape, dtype, bits) in worker.items()} for worker in workers]

    def weight_version(self, *, timeout_s: float | None = None) -> str:
        """Return the version set last; a server that has restarted answers `default`."""
        return str(self.get("/weight_info", timeout_s=timeout_s)["weight_version"])

    def set_weight_version(self, version: str) -> None:
        """Set the version of the server's weights."""
        self.post("/update_weight_version", {"new_version": version})

    def pause(self) -> None:
        """Freeze running calls and hold new ones until `resume`."""
        self.post("/pause?mode=keep")

    def resume(self) -> None:
        """Continue after `pause`."""
        self.post("/resume")

    def reset_prefix_cache(self) -> None:
        """Drop states of other weights, including frozen answers' states; raise `InferenceError` if that fails."""
        answer = self.post("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise InferenceError(f"{self.root} could not reset its prefix cache")

    def sleep(self) -> None:
        """Release the GPU's memory: weights move to main memory, and running calls are aborted."""
        self.post("/sleep?level=1", timeout_s=HEAVY_S)

    def wake_up(self) -> None:
        """Take the GPU's memory again."""
        self.post("/wake_up", timeout_s=HEAVY_S)

    def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of all ids but the first, computed again at temperature 1."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        entries = self.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries[1:], strict=True)]

    def sample(self, model: str, prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> SampledTokens:
        """Sample tokens at temperature 1; cached states of the prompt are used."""
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
        return SampledTokens(choice["token_ids"], choice["logprobs"]["token_logprobs"])


class SGLangControl(VLLMControl):
    """The same calls to an SGLang server."""

    def pause(self) -> None:
        """Freeze running calls; their cached states are dropped, and computed again after `resume`."""
        self.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self.post("/continue_generation")

    def reset_prefix_cache(self) -> None:
        """Do nothing: `DiskUpdate` resets it, and a separate request is refused while calls wait."""

    def weight_version(self, *, timeout_s: float | None = None) -> str:
        return str(self.get("/model_info", timeout_s=timeout_s)["weight_version"])

    def set_weight_version(self, version: str) -> None:
        self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        entries = self.post("/generate", body)["meta_info"]["input_token_logprobs"]
        return [float(logprob) for logprob, _, _ in entries[1:]]

    def sample(self, model: str, prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> SampledTokens:
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        answer = self.post("/generate", body)
        return SampledTokens(answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def control_of(url: str, *, api_key: str | None = None) -> VLLMControl:
    """Return the client for a server, by the routes that it lists; raise `InferenceError` if it does not answer."""
    control = VLLMControl(url, api_key=api_key)
    return SGLangControl(url, api_key=api_key) if _UPDATE_ROUTE in control.routes() else control


class Handover:
    """Transfers weights from a folder to a paused server."""

    name: ClassVar[str]
    shows_bits: ClassVar[bool] = False
    """True if the server can report the bits of its weights."""

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        """Make the server use these weights; raise `InferenceError` if it refuses."""
        raise NotImplementedError


class FileTransfer(Handover):
    """In place, through vLLM's weight transfer and our engine for it: only tensors are read."""

    name = "transfer"
    shows_bits = True

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        control.post("/start_weight_update")
        control.post("/update_weights", {"update_info": {"path": str(folder / WEIGHTS_FILE)}}, timeout_s=HEAVY_S)
        control.post("/finish_weight_update", timeout_s=HEAVY_S)


class LoraLoad(Handover):
    """A peft adapter, which replaces the one of the same name."""

    name = "lora"

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        adapter = {"lora_name": served_name, "lora_path": str(folder), "load_inplace": True}
        control.post("/v1/load_lora_adapter", adapter, timeout_s=HEAVY_S)


class Reload(Handover):
    """All weights from disk, for vLLM servers without our extension."""

    name = "reload"

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        control.post("/collective_rpc", reload, timeout_s=HEAVY_S)


class DiskUpdate(Handover):
    """All weights from disk, for SGLang; its prefix cache is reset with them."""

    name = "disk"

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        update = {"model_path": str(folder), "abort_all_requests": False, "flush_cache": True}
        control.post(_UPDATE_ROUTE, update, timeout_s=HEAVY_S)


def choose_handover(control: VLLMControl, *, lora: bool) -> Handover:
    """Return the fastest transfer that the server offers; raise `ConfigError` if it offers none."""
    routes, setting = control.routes(), f"vllm.url={control.base_url!r}"
    if _UPDATE_ROUTE in routes:
        if lora:
            raise ConfigError(
                f"{setting}: this is SGLang, to which rllm transfers whole models only, and model.lora_rank is set: "
                "leave model.lora_rank out, or use vLLM"
            )
        return DiskUpdate()
    missing = {"/pause", "/resume", "/reset_prefix_cache", "/update_weight_version", "/weight_info"} - routes
    if missing:
        raise ConfigError(
            f"{setting}: this server takes no new weights, as it lacks {', '.join(sorted(missing))} "
            f"(VLLM_SERVER_DEV_MODE=1): {_RESTART}"
        )
    if lora:
        if "/v1/load_lora_adapter" not in routes:
            raise ConfigError(
                f"{setting}: this server takes no adapters while it runs (--enable-lora and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), and model.lora_rank is set: {_RESTART}"
            )
        return LoraLoad()
    if "/update_weights" in routes and control.transfer_backend() == FILE_BACKEND:
        return FileTransfer()
    return Reload()


def _start_of(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return error.read(_START_OF_BODY).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return "(the error text is incomplete)"
