"""Training on this machine: one torch model that the sampler and the optimiser share."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.backends.base import UpdateResult
from rllm.backends.local.forward import choose_forward, logprobs_and_entropy
from rllm.backends.local.optimizer import MasterAdamW, OptimizerSettings
from rllm.errors import ConfigError, WeightSyncError
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import LoadedModel, load_model

logger = logging.getLogger(__name__)

RECOVERY_FILE = "recovery.pt"


class LocalBackend:
    """Policy, sampler and AdamW in one process.

    Publishing copies nothing: the sampler decodes with the very tensors that the optimiser updates, so a publish is a
    new version number and an empty prefix cache.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: OptimizerSettings,
        *,
        max_concurrent: int = 64,
        max_length: int | None = None,
        tool_parser: str = "hermes",
        seed: int = 0,
    ) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.device = loaded.device
        self.settings = settings
        self.optimizer = MasterAdamW(self.model, settings)
        self._hidden_states = choose_forward(self.model.base_model)
        self._unpublished = ExitStack()
        """Holds the sampler still between an update and its publish."""
        self._engine = LocalEngine(
            self.model,
            self.tokenizer,
            max_concurrent=max_concurrent,
            max_length=max_length,
            tool_parser=tool_parser,
            seed=seed,
            device=loaded.device,
        )

    @classmethod
    def from_config(cls, config: Any) -> LocalBackend:
        """The backend of a `TrainConfig`."""
        model, optim = config.model, config.optim
        names = {item.name for item in fields(OptimizerSettings)} & type(optim).model_fields.keys()
        updates = config.num_steps * optim.num_minibatches * optim.num_epochs
        settings = OptimizerSettings(
            decay_steps=updates if optim.schedule == "linear" else None,
            **{name: getattr(optim, name) for name in names},
        )
        return cls(
            load_model(model.path, dtype=model.dtype, device=model.device),
            settings,
            max_concurrent=config.rollout.max_concurrent,
            max_length=model.max_length,
            tool_parser=model.tool_parser,
            seed=config.seed,
        )

    @property
    def inference(self) -> LocalEngine:
        return self._engine

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def score(self, batch: Batch) -> Tensor:
        """[N] log-probabilities under the current weights, without gradient."""
        pieces = [torch.zeros(0)]
        with torch.no_grad(), self._engine.paused():
            for run in batch.split(self.settings.micro_batch_tokens):
                logprobs, _ = self._forward(batch.select(run))
                pieces.append(logprobs.cpu())
        return torch.cat(pieces)

    def update(self, batch: Batch, algorithm: Algorithm) -> UpdateResult:
        """One optimiser step for each minibatch of each epoch. Sampling rests from here until `publish`, so that no answer
        is sampled from new weights under the old version."""
        self._unpublished.enter_context(self._engine.paused())
        if len(batch) == 0:
            return UpdateResult()
        several = self.settings.num_minibatches * self.settings.num_epochs > 1
        if several:
            batch.old_logprobs = self.score(batch)
        sums: Counter[str] = Counter()
        norms, first = [], None
        for indices in self._minibatches(len(batch)):
            part = batch.select(indices)
            # Weights are shares of the whole batch: scaled up, each minibatch is a mean of its own.
            scale = batch.weights.sum() / part.weights.sum()
            logprobs, part_sums = self.accumulate(part, algorithm, scale=float(scale))
            norms.append(self.optimizer.step())
            first = logprobs if first is None else first
            sums.update(part_sums)
        seen = batch.old_logprobs if several else first
        assert seen is not None
        return UpdateResult(metrics=self._metrics(batch, sums, norms, seen), logprobs=seen)

    def accumulate(self, batch: Batch, algorithm: Algorithm, *, scale: float = 1.0) -> tuple[Tensor, Counter[str]]:
        """Add the gradient of a batch's loss to the parameters, micro-batch by micro-batch.

        Returns the log-probabilities [N], detached, and the sums over tokens that `algorithm.loss` reports.
        """
        sums: Counter[str] = Counter()
        pieces = []
        for run in batch.split(self.settings.micro_batch_tokens):
            part = batch.select(run)
            logprobs, entropy = self._forward(part)
            loss, reported = algorithm.loss(logprobs, _to(part, self.device))
            (loss * scale).backward()
            self.optimizer.collect()
            sums.update({name: float(value) for name, value in reported.items()})
            sums.update({"policy/loss": float(loss.detach()) * scale, "policy/entropy": float(entropy.sum())})
            pieces.append(logprobs.detach().cpu())
        return torch.cat(pieces), sums

    def publish(self) -> int:
        """Bump the version, and let sampling go on.

        Raises:
            WeightSyncError: if an update left weights that are not numbers.
        """
        with self._unpublished:
            for name, weight in self.model.named_parameters():
                if not torch.isfinite(weight).all():
                    raise WeightSyncError(
                        f"the update made {name} infinite or NaN, so it was not published: lower optim.lr "
                        "or optim.max_grad_norm, and resume from the last checkpoint"
                    )
            self._engine.publish(self._engine.weight_version + 1)
        return self._engine.weight_version

    def save(self, folder: Path) -> None:
        """An ordinary Hugging Face folder, and `recovery.pt` with the optimiser's state."""
        with self._engine.paused():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            state = {"optimizer": self.optimizer.state_dict(), "weight_version": self.weight_version}
            torch.save(state, folder / RECOVERY_FILE)

    def load(self, folder: Path) -> None:
        """Take up the weights and the optimiser's state from a folder that `save` wrote.

        Raises:
            ConfigError: if the folder is of another model, or incomplete.
        """
        try:
            saved = load_model(folder, dtype=str(self.model.dtype).removeprefix("torch."), device="cpu").model
            if type(saved) is not type(self.model):
                raise ValueError(f"it holds a {type(saved).__name__}, and this is a {type(self.model).__name__}")
            state = torch.load(folder / RECOVERY_FILE, weights_only=True, map_location="cpu")
            version: int = state["weight_version"]
            with self._engine.paused():
                self.model.load_state_dict(saved.state_dict())
                self.optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as error:
            raise ConfigError(
                f"checkpoint={str(folder)!r} cannot be taken up: it is incomplete or of another model "
                f"({type(error).__name__}: {error})"
            ) from error
        self._engine.publish(version)

    def close(self) -> None:
        self._unpublished.close()
        self._engine.close()

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] with gradient, and entropies [N], of the batch's tokens."""
        sources = torch.tensor(_predecessors(batch), device=self.device)
        hidden = self._hidden_states(self.model.base_model, batch.tree).index_select(0, sources)
        return logprobs_and_entropy(
            hidden, self.model.get_output_embeddings(), batch.ids.to(self.device), temperature=batch.temperature
        )

    def _minibatches(self, num_sequences: int) -> Iterator[Sequence[int]]:
        """Sequence indices, neighbours together: they share prefixes."""
        count = min(self.settings.num_minibatches, num_sequences)
        bounds = [num_sequences * part // count for part in range(count + 1)]
        for _ in range(self.settings.num_epochs):
            yield from (range(start, stop) for start, stop in itertools.pairwise(bounds))

    def _metrics(self, batch: Batch, sums: Counter[str], norms: list[float], logprobs: Tensor) -> dict[str, float]:
        gap = (logprobs - batch.sampler_logprobs).abs()
        tokens = batch.num_tokens * self.settings.num_epochs
        per_token = {name: value / tokens for name, value in sums.items() if name != "policy/loss"}
        return {
            **per_token,
            "policy/loss": sums["policy/loss"] / len(norms),
            "policy/grad_norm": sum(norms) / len(norms),
            "policy/sampler_gap_mean": float(gap.mean()),
            "policy/sampler_gap_max": float(gap.max()),
            "optim/lr": self.optimizer.lr,
            "optim/num_updates": float(len(norms)),
            "tokens/trained": float(batch.num_tokens),
            "tokens/forward": float(len(batch.tree.ids)),
            "tokens/shared": 1.0 - len(batch.tree.ids) / sum(len(item.ids) - 1 for item in batch.sequences),
        }


def _predecessors(batch: Batch) -> list[int]:
    """For each of the N sampled tokens, where in the tree the token before it lies."""
    sources: list[int] = []
    for index, sequence in enumerate(batch.sequences):
        positions = batch.tree.positions(index)
        sources.extend(positions[place - 1] for place in sequence.sampled_positions())
    return sources


def _to(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device."""
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return Batch(**{**vars(batch), **moved})
