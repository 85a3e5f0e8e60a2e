"""Teacher on an OpenAI-compatible server that returns the log-probabilities of a prompt's tokens, as vLLM does.

POST /v1/completions {"prompt": [1, 437, ...], "max_tokens": 1, "prompt_logprobs": 0}
  -> choices[0].prompt_logprobs: [null, {"437": {"logprob": -2.1, "rank": 5, "decoded_token": " con"}}, ...]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import openai
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.errors import ConfigError, InferenceError
from rllm.sdk.variables import key_of_user

_NUM_PROBED = 64
"""Ids of which the server must know the same text as the policy's tokenizer."""


class TeacherEndpoint:
    """Asks about one sequence a request, several at once; a request that fails for a while is sent again."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        max_concurrent: int = 16,
        timeout_s: float = 120.0,
        num_retries: int = 3,
    ) -> None:
        """Prepare without connecting. `url` includes `/v1`; a `model` of `None` is the only one served."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"teacher.url={url!r}: use an address such as http://127.0.0.1:8000/v1")
        self._url = url
        self._model = model
        self.context_length: int | None = None
        """Tokens that a prompt may have, if the server states it."""
        self._client = openai.OpenAI(
            base_url=url,
            api_key=key_of_user() or "EMPTY",
            timeout=timeout_s,
            max_retries=num_retries,
        )
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix="rllm teacher")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._client.close()

    def check(self, tokenizer: Any) -> None:
        """Check that the server can teach a policy with this tokenizer.

        Raises:
            ConfigError: if it does not return log-probabilities of prompts, or has another vocabulary.
            InferenceError: if it cannot be reached.
        """
        self._choose_model()
        ids = _telling_ids(tokenizer)
        try:
            entries = self._prompt_logprobs(ids)
        except InferenceError as error:
            if error.status_code == 400:  # such as: token id 4711 is out of vocabulary
                raise ConfigError(
                    f"teacher.url={self._url!r} refuses ids of the policy's vocabulary, or to return the "
                    f"log-probabilities of a prompt: {error}"
                ) from error
            raise
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            text, own = entry.get("decoded_token"), tokenizer.decode([token_id])
            if isinstance(text, str) and text.strip() != own.strip():
                raise ConfigError(
                    f"teacher.url={self._url!r} has another vocabulary than the policy: token {token_id} is {text!r} "
                    f"there and {own!r} here. Serve a teacher of the same family"
                )

    def score(self, batch: Batch) -> Tensor:
        """Return [N] the teacher's log-probabilities of the batch's tokens.

        Raises:
            InferenceError: if the server fails for good, or leaves some out.
        """
        entries = self._pool.map(self._prompt_logprobs, [sequence.ids for sequence in batch.sequences])
        values = [
            float(logprobs[place]["logprob"])
            for sequence, logprobs in zip(batch.sequences, entries, strict=True)
            for place in sequence.sampled_positions()
        ]
        return torch.tensor(values, dtype=torch.float32)

    def _choose_model(self) -> None:
        """Choose the named model or the only one, and read its length: `{"id": "m", "max_model_len": 4096}`."""
        try:
            served = {item.id: item for item in self._client.models.list().data}
        except openai.OpenAIError as error:
            if self._model is not None and isinstance(error, openai.APIStatusError):
                return  # not every server has a list, and the name is known
            raise _named(error, self._url) from error
        if self._model is None and len(served) != 1:
            raise ConfigError(f"teacher.model is missing: {self._url} serves {', '.join(served) or 'none'}; choose one")
        self._model = self._model or next(iter(served))
        length = getattr(served.get(self._model), "max_model_len", None)
        # The last place is for the token that it samples after a prompt: servers sample at least one.
        self.context_length = length - 1 if isinstance(length, int) else None

    def _prompt_logprobs(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the server's entry for each token of a prompt; `{}` for the first, which has none."""
        try:
            response = self._client.completions.create(
                model=str(self._model),
                prompt=list(ids),
                max_tokens=1,
                temperature=1.0,
                extra_body={"prompt_logprobs": 0},
            )
        except openai.OpenAIError as error:
            raise _named(error, self._url) from error
        entries = getattr(response.choices[0], "prompt_logprobs", None) if response.choices else None
        if not isinstance(entries, list):
            raise ConfigError(
                f"teacher.url={self._url!r} leaves out prompt_logprobs: it must be a server that returns the "
                "log-probabilities of a prompt's tokens on /v1/completions, such as vLLM; or run the teacher in this "
                "process, with teacher.path"
            )
        if len(entries) != len(ids):
            raise InferenceError(
                f"{self._url} returns {len(entries)} log-probabilities of a prompt of {len(ids)} tokens"
            )
        return [{}, *(_entry(entries[place], token_id, place) for place, token_id in enumerate(ids) if place)]


def _entry(value: Any, token_id: int, place: int) -> dict[str, Any]:
    """Return the entry of the prompt's own token; the server may list others beside it."""
    entry = value.get(str(token_id)) if isinstance(value, Mapping) else None
    logprob = entry.get("logprob") if isinstance(entry, Mapping) else None
    if not isinstance(logprob, int | float) or math.isnan(logprob):
        raise InferenceError(
            f"the teacher's server returned {value!r:.200} for token {token_id}, number {place} of a prompt"
        )
    return dict(entry or {})


def _telling_ids(tokenizer: Any) -> list[int]:
    """Return ids across the vocabulary whose texts are plain words, which look the same however decoded."""
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    some = vocabulary[:: max(1, len(vocabulary) // (8 * _NUM_PROBED))]
    words = [token_id for token_id in some if tokenizer.decode([token_id]).strip().isalnum()]
    return words[:: max(1, len(words) // _NUM_PROBED)]


def _named(error: openai.OpenAIError, url: str) -> InferenceError:
    if isinstance(error, openai.APIStatusError):
        return InferenceError(
            f"the teacher at {url} answered {error.status_code}: {error.message}", status_code=error.status_code
        )
    if isinstance(error, openai.APITimeoutError):
        return InferenceError(
            f"the teacher at {url} gave no answer in time: raise teacher.timeout_s if it is merely slow"
        )
    return InferenceError(f"the teacher at {url} cannot be reached ({error.__cause__ or error}): is it running?")
