"""The model that a run began with, against which divergence is measured.

It comes from where the run's model came from and never from the weights in training, so it is the same one after any
number of updates and in every resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from rllm.backends.adapter import Adapter
from rllm.backends.local.head import body_of
from rllm.backends.local.policy import Policy
from rllm.inference.local.loading import LoadedModel

Reference: TypeAlias = Callable[[], AbstractContextManager[Policy]]
"""Lends the reference for as long as it is needed."""


class FrozenCopy:
    """A second model, loaded when it is first asked for."""

    def __init__(self, load: Callable[[], LoadedModel], policy: Policy, *, offload: bool = False) -> None:
        """`load` gives the original; `policy` is what it is run like; `offload` keeps it in main memory between uses."""
        self._load = load
        self._like = policy
        self.offload = offload
        self._policy: Policy | None = None

    @contextmanager
    def __call__(self) -> Iterator[Policy]:
        if self._policy is None:
            self._policy = self._loaded()
        model = self._policy.model
        model.to(self._like.trunk.device)
        try:
            yield self._policy
        finally:
            if self.offload:
                model.to("cpu")

    def _loaded(self) -> Policy:
        model = self._load().model.requires_grad_(False)
        # Not the buffers: the frequencies of positions are in float32, whatever the format of the weights.
        for weight in model.parameters():
            weight.data = weight.data.to(self._like.model.dtype)
        # With other kernels the untrained policy would differ from it, if only in the last bit.
        model.set_attn_implementation(self._like.model.config._attn_implementation)
        return Policy.of(model, self._like.trunk.like(body_of(model)))


class WithoutAdapter:
    """The policy itself, with its adapter off."""

    def __init__(self, adapter: Adapter, policy: Policy) -> None:
        self._adapter = adapter
        self._policy = policy

    @contextmanager
    def __call__(self) -> Iterator[Policy]:
        with self._adapter.off():
            yield self._policy
