"""Which requests are decoded together: admission between decode steps, sampling, and the end of each answer.

All of it runs on one thread and knows neither asyncio nor text formats.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch

from rllm.errors import InferenceError
from rllm.inference.engine import SamplingParams
from rllm.inference.local.decoder import Decoder
from rllm.inference.local.sampling import RowSettings, likeliest, sample
from rllm.parser.decoding import TextDecoder
from rllm.parser.streaming import IncrementalText, first_stop


@dataclass(eq=False, kw_only=True)
class Request:
    """One answer in the making. The scheduler's thread appends to it; others only read it, or cancel it."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    end_ids: frozenset[int]
    """Ids that end the answer."""
    seed: int
    wake: Callable[[Request], None]
    """Called when there is news: the end of the answer, and for `streaming` requests each token."""
    streaming: bool = False
    num_top: int = 0
    """Alternatives to keep of each token."""

    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Empty where no alternatives are asked for; else never shorter than `logprobs`."""
    finish_reason: str | None = None
    error: Exception | None = None
    cancelled: bool = False
    weight_version: int | None = None
    """Of the weights that the answer was begun with."""
    weight_updates: list[list[int]] = field(default_factory=list)
    """Where the weights changed: `[position of the first token sampled after it, version]` of each time."""
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
        return len(self.prompt_ids) + self.max_tokens

    def metrics(self) -> dict[str, float]:
        """Seconds by phase, and how much of the prompt was cached."""
        admitted_at = self.admitted_at or self.finished_at
        prefilled_at = self.prefilled_at or self.finished_at
        return {
            "queue_s": admitted_at - self.submitted_at,
            "prefill_s": prefilled_at - admitted_at,
            "decode_s": self.finished_at - prefilled_at,
            "total_s": self.finished_at - self.submitted_at,
            "cached_prompt_tokens": self.num_cached,
        }

    def go_on(self, weight_version: int) -> None:
        """From here on, tokens are sampled from other weights."""
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
    """What the scheduler has done so far."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


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
        """Admit what there is room for, then decode one token of every admitted request."""
        while self._admit():
            pass
        if self._live:
            self._step()

    def publish(self, weight_version: int) -> None:
        """The weights have changed: forget what was computed with the old ones.

        Answers that were begun go on from the tokens they have, whose states are computed again: so each token's
        log-probability is that of one set of weights, given all tokens before it.
        """
        self._waiting.extendleft(reversed(self._live))
        self._live.clear()
        self._settings = None
        self._decoder.clear()
        self.weight_version = weight_version

    def fail(self, error: Exception) -> None:
        """End every request with this error."""
        for request in (*self._live, *self._waiting):
            if not request.done:
                request.finish(None, error)
        self._live.clear()
        self._waiting.clear()

    def _admit(self) -> bool:
        """Take waiting requests in; returns whether those left out should be tried again at once."""
        chosen = self._take_waiting()
        if not chosen:
            return False
        admitted_at = time.perf_counter()
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
                request.go_on(self.weight_version)
                continue
            request.weight_version, request.num_cached = self.weight_version, item.num_cached
            request.admitted_at, request.prefilled_at = admitted_at, prefilled_at
            if request.sampling.stop:
                self._stop_texts[request] = IncrementalText(self._text)
            self.counters.requests += 1
            self.counters.prompt_tokens += len(request.prompt_ids)
            self.counters.cached_prompt_tokens += item.num_cached
        self.counters.prefill_s += prefilled_at - admitted_at
        self._settings = None
        taken = {item.index for item in added}
        self._waiting.extendleft(reversed([item for index, item in enumerate(chosen) if index not in taken]))
        return len(taken) < len(chosen)

    def _take_waiting(self) -> list[Request]:
        """The next requests, in order of arrival, for which there are slots and memory. One alone is always taken."""
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

    def _step(self) -> None:
        began = time.perf_counter()
        live = self._live
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
        self.counters.decode_s += time.perf_counter() - began

    def _sampled(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """The next token of each live request, and its log-probability."""
        if self._settings is None:
            self._settings = self._new_settings(logits)
        counts = np.array([len(item.completion_ids) for item in self._live], dtype=np.uint64)
        tokens, logprobs, probabilities = sample(logits, self._settings, counts)
        numbers = logprobs.tolist()
        if not all(map(isfinite, numbers)):
            raise InferenceError(
                f"the model gave logits that are no numbers (weight version {self.weight_version}): its weights are not finite, "
                "or its states overflow; load weights that are, or use dtype=float32"
            )
        for number, request in enumerate(self._live):
            if request.num_top:
                request.top_logprobs += likeliest(probabilities[number : number + 1], request.num_top)
        return tokens.tolist(), numbers

    def _new_settings(self, logits: torch.Tensor) -> RowSettings:
        live = self._live
        return RowSettings.of(
            [item.sampling for item in live], [item.seed for item in live], logits.shape[1], logits.device
        )

    def _end_of(self, request: Request, token: int) -> str | None:
        """Why the answer ends with this token, if it does."""
        if request.cancelled:
            return "abort"
        if token in request.end_ids:
            return "stop"
        if request.sampling.stop and self._has_stop_string(request, token):
            return "stop"
        return "length" if len(request.completion_ids) >= request.max_tokens else None

    def _has_stop_string(self, request: Request, token: int) -> bool:
        return first_stop(self._stop_texts[request].extend([token]), request.sampling.stop) is not None

    def _remove(self, reasons: Mapping[int, str]) -> None:
        """End live requests, for the reason that is given for their number."""
        ended = {number: self._live[number] for number in reasons}
        self._decoder.remove({number: request.prompt_ids + request.completion_ids for number, request in ended.items()})
        self._live = [request for number, request in enumerate(self._live) if number not in ended]
        self._settings = None
        for number, request in ended.items():
            self._stop_texts.pop(request, None)
            request.finish(reasons[number])


def clamp_max_tokens(prompt_ids: Sequence[int], wanted: int | None, max_length: int) -> int:
    """How many tokens an answer may have: those asked for, as far as the context has room for them."""
    room = max_length - len(prompt_ids)
    return room if wanted is None else min(wanted, room)
