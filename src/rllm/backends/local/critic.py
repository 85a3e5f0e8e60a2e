"""Critic: the policy's body with a head that estimates, before each token is chosen, the return from it on."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.backends.local.optimizer import MasterAdamW, accumulate
from rllm.backends.local.policy import Policy, score_in_parts
from rllm.backends.update import aligned
from rllm.config.schema import CriticConfig, OptimConfig

FILE = "critic.pt"


class Critic:
    """Value model that starts as a copy of the policy's body, and estimates 0 for everything at first.

    It trains the same weights as the policy does, and shares the frozen ones with it.
    """

    def __init__(self, policy: Policy, settings: CriticConfig, optim: OptimConfig) -> None:
        """Copy the policy's body; `optim` has the settings that `settings` does not override."""
        body = policy.trunk.module
        frozen = {id(weight): weight for weight in body.parameters() if not weight.requires_grad}
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
            optim.model_copy(update={"lr": settings.lr, "max_grad_norm": settings.max_grad_norm, "warmup_steps": 0}),
        )
        self._settings = settings
        self._max_tokens, self._aim = optim.micro_batch_tokens, self._trunk.pass_tokens()
        self._num_batches = 0

    @property
    def is_warming_up(self) -> bool:
        """True while the critic has learned from too few batches for the policy to be updated."""
        return self._num_batches <= self._settings.warmup_steps

    def begin(self) -> None:
        """Count a batch to learn from."""
        self._num_batches += 1

    def values(self, batch: Batch) -> Tensor:
        return score_in_parts(batch, self._max_tokens, self._estimates)

    def accumulate(self, batch: Batch, algorithm: Algorithm, *, scale: float = 1.0) -> tuple[Tensor, Counter[str]]:
        """Add the gradient of `algorithm.value_loss`; see `optimizer.accumulate`."""

        def loss_of(part: Batch) -> tuple[Tensor, Sums, Tensor]:
            estimates = self._estimates(part)
            return *algorithm.value_loss(estimates, aligned(part, estimates)), estimates

        return accumulate(batch, loss_of, self._optimizer, max_tokens=self._max_tokens, aim=self._aim, scale=scale)

    def step(self) -> float:
        return self._optimizer.step()

    def memory(self) -> int:
        """Return the bytes of its trained weights, their gradients and AdamW's averages."""
        weights = sum(int(weight.nbytes) for weight in self._trained().values())
        return weights + sum(self._optimizer.memory().values())

    def save(self, folder: Path) -> None:
        state = {
            "weights": self._trained(),
            "optimizer": self._optimizer.state_dict(),
            "num_batches": self._num_batches,
        }
        torch.save(state, folder / FILE)

    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote; raise `ValueError` if it is a critic with other weights."""
        state = torch.load(folder / FILE, weights_only=True, map_location="cpu")
        own, saved = self._trained(), state["weights"]
        if own.keys() != saved.keys():
            raise ValueError("its critic has other weights")
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(saved[name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_batches = state["num_batches"]

    def _trained(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._module.named_parameters() if weight.requires_grad}

    def _estimates(self, batch: Batch) -> Tensor:
        with self._trunk.arithmetic():
            hidden, state_of = self._trunk.before_tokens(batch)
        estimates: Tensor = self._head(hidden.to(self._head.weight.dtype)).squeeze(-1)
        return estimates[state_of]
