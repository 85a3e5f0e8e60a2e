"""What a SGLang server is asked and told beside its answers, in the words that vLLM's is.

Its routes are those of SGLang 0.5 (https://docs.sglang.io/advanced_features/sglang_for_rl.html); none of them has to be switched on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rllm.inference.vllm.control import HEAVY_S, Sampled, VLLMControl

UPDATE_ROUTE = "/update_weights_from_disk"
"""A server that has it is one of SGLang's."""


class SGLangControl(VLLMControl):
    """One server; blocking calls, one at a time."""

    def pause(self) -> None:
        """Freeze what is being answered: it gives its cached states up, which are computed again after `resume`."""
        self.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self.post("/continue_generation")

    def reset_prefix_cache(self) -> None:
        """New weights have done it, see `DiskUpdate`; asked apart, the server refuses while calls wait."""

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

    def sample(self, model: str, prompt_ids: Sequence[int], num_tokens: int, *, seed: int = 0) -> Sampled:
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        answer = self.post("/generate", body)
        return Sampled(answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


class DiskUpdate:
    """All weights anew from a folder, in place; what was cached is forgotten with them."""

    name = "disk"
    shows_bits = False

    def send(self, control: VLLMControl, folder: Path, served_name: str) -> None:
        update = {"model_path": str(folder), "abort_all_requests": False, "flush_cache": True}
        control.post(UPDATE_ROUTE, update, timeout_s=HEAVY_S)


def control_of(url: str, *, api_key: str | None = None) -> VLLMControl:
    """The control of a server, of whichever kind its routes say that it is.

    Raises:
        ConfigError: if it is not a web address.
        InferenceError: if nothing answers there.
    """
    control = VLLMControl(url, api_key=api_key)
    return SGLangControl(url, api_key=api_key) if UPDATE_ROUTE in control.routes() else control
