"""Admission of requests between decode steps, sampling, and the end of each answer.

Everything runs on one thread and knows neither asyncio nor text formats.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

import numpy as np
import torch

from rllm.errors import InferenceError
from rllm.inference.engine import SamplingParams
from rllm.inference.local.sampling import RowSettings, likeliest, sample
from rllm.parser.answer import IncrementalText, first_stop
from rllm.parser.decoding import TextDecoder


@dataclass(frozen=True, slots=True)
class Added:
    """A sequence that a decoder has added."""

    index: int
    num_cached: int
    """Number of its tokens that were not computed again."""


class Decoder(Protocol):
    """The sequences in progress, numbered from 0 without gaps: tokens in, logits of the next tokens out.

    A sequence's last token is the next step's input. So adding a sequence computes all of its tokens but the last,
    and a prompt that is cached up to there costs nothing.
    """

    def fits(self, num_sequences: int, length: int) -> bool:
        """Return whether there is memory for this many sequences of up to this many tokens."""
        ...

    def add(self, prompts: Sequence[list[int]]) -> list[Added]:
        """Add sequences; return them in the order of their numbers.

        Those that are missing wait for a prefix that another one has just computed: add them again at once.
        """
        ...

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each sequence; return the logits of the next ones, [sequences, vocabulary]."""
        ...

    def remove(self, ended: Mapping[int, Sequence[int]]) -> None:
        """Drop sequences, given as tokens by number; the others keep their order and are numbered again."""
        ...

    def clear(self) -> None:
        """Drop all sequences and forget all prefixes: the weights have changed."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values; 0 if unknown."""
        ...


@dataclass(eq=False, kw_only=True)
class Request:
    """One answer in progress. The scheduler's thread appends to it; others only read it, or cancel it."""

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    end_ids: frozenset[int]
    seed: int
    wake: Callable[[Request], None]
    """Called at the end of the answer, and for `streaming` requests at each token."""
    streaming: bool = False
    num_top: int = 0
    """Number of alternatives to keep of each token."""

    prompt_ids: list[int] = field(default_factory=list)
    """The prompt as a list, made at admission, since converting a long array would block an event loop."""
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Empty unless `num_top`; else never shorter than `logprobs`."""
    finish_reason: str | None = None
    error: Exception | None = None
    cancelled: bool = False
    weight_version: int | None = None
    """Version of the weights that sampled the first token."""
    weight_updates: list[list[int]] = field(default_factory=list)
    """Weight changes: `[position of the first token sampled after it, version]` of each."""
    num_cached: int = 0
    submitted_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0
    prefilled_at: float = 0.0
    finished_at: float = 0.0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_tokens

    def metrics(self) -> dict[str, float]:
        """Return seconds by phase, and the number of cached tokens of the prompt."""
        admitted_at = self.admitted_at or self.finished_at
        prefilled_at = self.prefilled_at or self.finished_at
        return {
            "queue_s": admitted_at - self.submitted_at,
            "prefill_s": prefilled_at - admitted_at,
            "decode_s": self.finished_at - prefilled_at,
            "total_s": self.finished_at - self.submitted_at,
            "cached_prompt_tokens": self.num_cached,
        }

    def continue_with(self, weight_version: int) -> None:
        """Record that later tokens are sampled from other weights."""
        self.weight_updates = [item for item in self.weight_updates if item[0] < len(self.completion_ids)]
        if self.completion_ids:
            self.weight_updates.append([len(self.completion_ids), weight_version])
        else:
            self.weight_version = weight_version

    def finish(self, reason: str | None, error: Exception | None = None) -> None:
        self.finished_at = time.perf_counter()
        self.finish_reason, self.error = reason, error
        self.wake(self)


@dataclass(kw_only=True)
class Counters:
    """Work done so far."""

    requests: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0


class Scheduler:
    """The waiting requests, and those being decoded. Not thread-safe."""

    def __init__(self, decoder: Decoder, text: TextDecoder, *, max_concurrent: int) -> None:
        self._decoder = decoder
        self._text = text
        self._max_concurrent = max_concurrent
        self._waiting: deque[Request] = deque()
        self._live: list[Request] = []
        self._stop_texts: dict[Request, IncrementalText] = {}
        self._settings: RowSettings | None = None
        self.weight_version = 0
        self.counters = Counters()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._live)

    def submit(self, requests: Iterable[Request]) -> None:
        self._waiting.extend(requests)

    def advance(self) -> None:
        """Admit waiting requests that fit, then decode one token of every admitted request."""
        while self._admit():
            pass
        live = self._live
        if not live:
            return
        logits = self._decoder.step([(item.completion_ids or item.prompt_ids)[-1] for item in live])
        tokens, logprobs = self._sampled(logits)
        reasons: dict[int, str] = {}
        for number, (request, token, logprob) in enumerate(zip(live, tokens, logprobs, strict=True)):
            request.completion_ids.append(token)
            request.logprobs.append(logprob)
            reason = self._end_of(request, token)
            if reason:
                reasons[number] = reason
            elif request.streaming:
                request.wake(request)
        if reasons:
            self._remove(reasons)
        self.counters.decode_steps += 1
        self.counters.completion_tokens += len(tokens)

    def publish(self, weight_version: int) -> None:
        """Switch to changed weights, dropping all states of the old ones.

        Answers in progress continue from their tokens, whose states are computed again: each token's
        log-probability comes from one set of weights, given all tokens before it.
        """
        self.drop_states()
        self.weight_version = weight_version

    def drop_states(self) -> None:
        """Let answers in progress wait, and forget all states."""
        self._waiting.extendleft(reversed(self._live))
        self._live.clear()
        self._settings = None
        self._decoder.clear()

    @property
    def cache_bytes(self) -> int:
        return self._decoder.cache_bytes

    def fail(self, error: Exception) -> None:
        """End every request with this error."""
        for request in (*self._live, *self._waiting):
            if not request.done:
                request.finish(None, error)
        self._live.clear()
        self._waiting.clear()

    def _admit(self) -> bool:
        """Add waiting requests; return whether those left out should be tried again at once."""
        chosen = self._take_waiting()
        if not chosen:
            return False
        admitted_at = time.perf_counter()
        for request in chosen:
            request.prompt_ids = list(request.prompt)
        try:
            added = self._decoder.add([request.prompt_ids + request.completion_ids for request in chosen])
        except BaseException:
            self._waiting.extendleft(reversed(chosen))  # where `fail` finds them
            raise
        prefilled_at = time.perf_counter()
        for item in added:
            request = chosen[item.index]
            self._live.append(request)
            if request.weight_version is not None:
                request.continue_with(self.weight_version)
                continue
            request.weight_version, request.num_cached = self.weight_version, item.num_cached
            request.admitted_at, request.prefilled_at = admitted_at, prefilled_at
            if request.sampling.stop:
                self._stop_texts[request] = IncrementalText(self._text)
            self.counters.requests += 1
        self._settings = None
        taken = {item.index for item in added}
        self._waiting.extendleft(reversed([item for index, item in enumerate(chosen) if index not in taken]))
        return len(taken) < len(chosen)

    def _take_waiting(self) -> list[Request]:
        """Return the next requests, in order of arrival, that fit into slots and memory. One alone always does."""
        chosen: list[Request] = []
        longest = max((request.max_length for request in self._live), default=0)
        while self._waiting and len(self._live) + len(chosen) < self._max_concurrent:
            request = self._waiting[0]
            if request.cancelled:
                self._waiting.popleft()
                self._stop_texts.pop(request, None)
                request.finish("abort")
                continue
            longest = max(longest, request.max_length)
            number = len(self._live) + len(chosen) + 1
            if number > 1 and not self._decoder.fits(number, longest):
                break
            chosen.append(self._waiting.popleft())
        return chosen

    def _sampled(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the next token of each live request, and its log-probability."""
        if self._settings is None:
            params, seeds = [item.sampling for item in self._live], [item.seed for item in self._live]
            self._settings = RowSettings.of(params, seeds, logits.shape[1], logits.device)
        counts = np.array([len(item.completion_ids) for item in self._live], dtype=np.uint64)
        tokens, logprobs, probabilities = sample(logits, self._settings, counts)
        numbers = logprobs.tolist()
        if not all(map(isfinite, numbers)):
            raise InferenceError(
                f"the model's logits are infinite or NaN (weight version {self.weight_version}): its weights are "
                "broken, or its states overflow: load other weights, or set model.dtype=float32"
            )
        for number, request in enumerate(self._live):
            if request.num_top:
                request.top_logprobs += likeliest(probabilities[number : number + 1], request.num_top)
        return tokens.tolist(), numbers

    def _end_of(self, request: Request, token: int) -> str | None:
        """Return the reason why the answer ends with this token; `None` if it does not."""
        if request.cancelled:
            return "abort"
        if token in request.end_ids:
            return "stop"
        stop = request.sampling.stop
        if stop and first_stop(self._stop_texts[request].extend([token]), stop) is not None:
            return "stop"
        return "length" if len(request.completion_ids) >= request.max_tokens else None

    def _remove(self, reasons: Mapping[int, str]) -> None:
        """End live requests, given the reason for each number."""
        ended = {number: self._live[number] for number in reasons}
        self._decoder.remove({number: request.prompt_ids + request.completion_ids for number, request in ended.items()})
        self._live = [request for number, request in enumerate(self._live) if number not in ended]
        self._settings = None
        for number, request in ended.items():
            self._stop_texts.pop(request, None)
            request.finish(reasons[number])
