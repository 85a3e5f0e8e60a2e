"""Costs of a training run, step by step, and the accuracy of its policy."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .jobs import Job
from .judge import sampled_accuracy
from .matrix_rate import Flops, matrix_rate

STEPS_BETWEEN_TESTS = 5


class Watch:
    """Counter of CPU and wall seconds of each step; testing the policy is not counted."""

    def __init__(self, job: Job, on_news: Callable[[str], None]) -> None:
        self._job = job
        self._on_news = on_news
        self._seconds: list[tuple[float, float]] = []
        self._accuracies: dict[int, float] = {}
        self.num_tokens = 0
        """Sampled tokens so far; the trainer adds to it."""
        self._updates: list[tuple[float, float]] = []
        """CPU-seconds and floating-point operations of each update, if the trainer reports them."""

    def start(self, model: Any, tokenizer: Any) -> None:
        """Test the policy, and start counting; training must begin with the next statement."""
        self._model = model
        self._test(model, tokenizer)
        self._resume()

    @contextmanager
    def updating(self, num_forward: int, num_trained: int) -> Iterator[None]:
        """Measure an update with these numbers of tokens in the forward pass, and of tokens with a log-probability."""
        cpu = time.process_time()
        yield
        flops = Flops.of(self._model)
        self._updates.append((time.process_time() - cpu, 3 * (flops.body * num_forward + flops.head * num_trained)))

    def step_done(self, model: Any, tokenizer: Any) -> bool:
        """Return True if training should continue."""
        cpu, wall = self._since
        self._seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
        if len(self._seconds) % STEPS_BETWEEN_TESTS == 0:
            self._test(model, tokenizer)
        self._resume()
        return not (self.reached or self._spent)

    @property
    def reached(self) -> bool:
        """Return True if the policy has reached the target."""
        target = self._job.target
        return target is not None and max(self._accuracies.values()) >= target

    @property
    def _spent(self) -> bool:
        limit = self._job.most_cpu_s
        return len(self._seconds) >= self._job.num_steps or (limit is not None and sum(self._cpu_s) > limit)

    @property
    def _cpu_s(self) -> list[float]:
        return [cpu for cpu, _ in self._seconds]

    def _resume(self) -> None:
        self._since = time.process_time(), time.perf_counter()

    def _test(self, model: Any, tokenizer: Any) -> None:
        if self._job.target is not None:
            step = len(self._seconds)
            self._accuracies[step] = sampled_accuracy(model, tokenizer, self._job.workload)
            self._on_news(f"step {step}: accuracy {self._accuracies[step]:.2f}, {sum(self._cpu_s):.0f} CPU-s")

    def _peak_memory_mb(self) -> float:
        if self._job.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def summary(self) -> dict[str, Any]:
        peak = self._peak_memory_mb()
        rate = matrix_rate(self._model, num_rows=512) if self._updates and self._job.device == "cpu" else None
        return {
            "cpu_s": self._cpu_s,
            "wall_s": [wall for _, wall in self._seconds],
            "tokens_per_step": self.num_tokens / len(self._seconds),
            "update_share": [flops / cpu / rate for cpu, flops in self._updates] if rate else [],
            "peak_memory_mb": peak,
            "accuracies": self._accuracies,
            "reached": self.reached,
        }
