"""A critic: the policy's body with a head that estimates, before each token is chosen, what is earned from it on."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.backends.local.accumulate import accumulate
from rllm.backends.local.optimizer import MasterAdamW, OptimizerSettings
from rllm.backends.local.policy import Policy
from rllm.backends.local.trunk import in_parts
from rllm.backends.updates import aligned

FILE = "critic.pt"


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """See `CriticConfig` for the meaning of each."""

    lr: float = 1e-5
    max_grad_norm: float = 1.0
    warmup_steps: int = 0


class Critic:
    """Begins as a copy of the policy's body, of which the same weights are trained, and estimates 0 for everything."""

    def __init__(self, policy: Policy, settings: CriticSettings, optim: OptimizerSettings) -> None:
        """`optim` decides whatever `settings` does not."""
        body = policy.trunk.module
        frozen = {id(weight): weight for weight in body.parameters() if not weight.requires_grad}  # these they share
        self._trunk = policy.trunk.like(copy.deepcopy(body, memo=frozen))
        weight = next(self._trunk.module.parameters())
        precise = torch.promote_types(weight.dtype, torch.float32)
        width = policy.model.get_output_embeddings().in_features
        self._head = torch.nn.Linear(width, 1, device=weight.device, dtype=precise)
        for parameter in self._head.parameters():
            torch.nn.init.zeros_(parameter)
        self._module = torch.nn.ModuleDict({"trunk": self._trunk.module, "head": self._head})
        self._optimizer = MasterAdamW(
            self._module,
            replace(optim, lr=settings.lr, max_grad_norm=settings.max_grad_norm, warmup_steps=0, decay_steps=None),
        )
        self._settings = settings
        self._max_tokens = optim.micro_batch_tokens
        self._num_batches = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether the policy has to wait, because the critic has learnt from too few batches."""
        return self._num_batches <= self._settings.warmup_steps

    def begin(self) -> None:
        """The next batch is to be learnt from."""
        self._num_batches += 1

    def values(self, batch: Batch) -> Tensor:
        """[N] the estimates, without gradient."""
        return in_parts(batch, self._max_tokens, self._estimates)

    def accumulate(self, batch: Batch, algorithm: Algorithm, *, scale: float = 1.0) -> tuple[Tensor, Counter[str]]:
        """Add the gradient of `algorithm.value_loss`; see `accumulate.accumulate`."""

        def loss_of(part: Batch) -> tuple[Tensor, Sums, Tensor]:
            estimates = self._estimates(part)
            return *algorithm.value_loss(estimates, aligned(part, estimates)), estimates

        return accumulate(batch, loss_of, self._optimizer, max_tokens=self._max_tokens, scale=scale)

    def step(self) -> float:
        """Update the weights; returns the gradient's norm."""
        return self._optimizer.step()

    def save(self, folder: Path) -> None:
        """Write all that `load` needs to go on exactly."""
        torch.save(
            {
                "weights": self._trained(),
                "optimizer": self._optimizer.state_dict(),
                "num_batches": self._num_batches,
            },
            folder / FILE,
        )

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            Exception: of `torch.load`, or a ValueError, if that is not there in full.
        """
        state = torch.load(folder / FILE, weights_only=True, map_location="cpu")
        own, saved = self._trained(), state["weights"]
        if own.keys() != saved.keys():
            raise ValueError("its critic has other weights")
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(saved[name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_batches = state["num_batches"]

    def _trained(self) -> dict[str, Any]:
        return {name: weight.detach() for name, weight in self._module.named_parameters() if weight.requires_grad}

    def _estimates(self, batch: Batch) -> Tensor:
        with self._trunk.arithmetic():
            hidden, state_of = self._trunk.before_tokens(batch)
        estimates: Tensor = self._head(hidden.to(self._head.weight.dtype)).squeeze(-1)
        return estimates[state_of]
