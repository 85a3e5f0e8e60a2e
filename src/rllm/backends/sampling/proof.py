"""The proof that an update arrived: the sampler's log-probabilities of a probe moved with the trainer's, and equal them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllm.errors import WeightSyncError
from rllm.inference.servers.control import VLLMControl

NUM_TOKENS = 160
"""More than a block of any prefix cache, so that a cache which was not emptied shows."""
NUM_SAMPLED = 2
LARGEST_GAP = {torch.float32: 1e-3}
"""Root mean square of the differences between sampler and trainer; kernels of other number formats differ much more."""
_LARGEST_GAP_OTHERWISE = 0.3
_CERTAIN = 3.0
"""How many times larger than the gap a movement must be, to be told from it."""


@dataclass(frozen=True)
class Likelihoods:
    """[T - 1] log-probabilities of all tokens of the probe but the first, in float32."""

    trainer: Tensor
    sampler: Tensor

    @property
    def gap(self) -> float:
        """Root mean square of the differences."""
        return rms(self.sampler - self.trainer)


class Probe:
    """A fixed sequence of ordinary tokens."""

    def __init__(self, model: Any, tokenizer: Any, *, max_length: int | None = None, largest_gap: float | None = None):
        """`largest_gap` replaces the one that follows from the number format of the weights."""
        special = set(tokenizer.all_special_ids)
        ordinary = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        limits = [limit - NUM_SAMPLED for limit in (max_length, context) if limit is not None]
        length = min([NUM_TOKENS, *limits])
        self.ids = random.Random(0).choices(ordinary, k=length)
        self.model = model
        self.largest_gap = largest_gap or LARGEST_GAP.get(model.dtype, _LARGEST_GAP_OTHERWISE)

    def check(self, control: VLLMControl, name: str) -> Likelihoods:
        """Ask the server, have it sample behind what it then has cached, and compare with the trainer's weights as they are.

        Raises:
            WeightSyncError: if the server's are not the trainer's, or if it uses states of other weights.
        """
        told = torch.tensor(control.prompt_logprobs(name, self.ids))
        sampled = control.sample(name, self.ids, NUM_SAMPLED)
        trainer = self._logprobs([*self.ids, *sampled.token_ids])
        found = self._equal(Likelihoods(trainer[: len(told)], told))
        gap = rms(torch.tensor(sampled.logprobs) - trainer[len(told) :])
        if not gap <= self.largest_gap:
            raise WeightSyncError(
                "the sampler has the new weights, and still uses cached states of the old ones: behind a prompt that it had "
                f"cached, its log-probabilities differ from the trainer's by {gap:.2g} (root mean square)"
            )
        return found

    def check_again(self, trainer: Tensor, control: VLLMControl, name: str) -> None:
        """Compare with what the trainer's log-probabilities were, [T - 1], while it may be changing.

        Raises:
            WeightSyncError: if the server's are not these.
        """
        self._equal(Likelihoods(trainer, torch.tensor(control.prompt_logprobs(name, self.ids))))

    def _equal(self, found: Likelihoods) -> Likelihoods:
        if not found.gap <= self.largest_gap:
            raise WeightSyncError(
                f"the weights did not arrive: the sampler's log-probabilities of a probe differ from the trainer's by "
                f"{found.gap:.2g} (root mean square over {len(found.trainer)} tokens; at most {self.largest_gap:g} is taken "
                "for rounding, see vllm.largest_gap)"
            )
        return found

    def check_bits(self, control: VLLMControl) -> int:
        """Compare the weights themselves, as far as the server keeps tensors as they were sent: vLLM joins some, and cuts
        others among its workers. Returns how many were compared. Kernels that round cannot hide anything from this.

        Raises:
            WeightSyncError: naming one that is not the trainer's.
        """
        ours = {
            _bare(name): (list(weight.shape), str(weight.dtype), weight)
            for name, weight in self.model.named_parameters()
        }
        num_compared = 0
        for worker in control.weight_bits():
            for told, (shape, dtype, bits) in worker.items():
                name = _bare(told)
                if name not in ours or ours[name][:2] != (shape, dtype):
                    continue
                num_compared += 1
                if bits_of(ours[name][2]) != bits:
                    raise WeightSyncError(f"the weights did not arrive: {told} is not the trainer's, bit for bit")
        return num_compared

    def _logprobs(self, ids: list[int]) -> Tensor:
        inputs = torch.tensor([ids], device=self.model.device)
        with torch.no_grad():
            logits = self.model(inputs).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, inputs[0, 1:, None])[:, 0].cpu()


def check_moved(before: Likelihoods, after: Likelihoods) -> None:
    """Hold the sampler's movement against the trainer's, as far as that is larger than what separates the two anyway.

    Raises:
        WeightSyncError: if the sampler is nearer to the trainer's old weights than to the new ones.
    """
    moved = rms(after.trainer - before.trainer)
    if moved <= _CERTAIN * before.gap:
        return
    if rms(after.sampler - before.trainer) <= after.gap:
        raise WeightSyncError(
            f"the weights did not arrive: the update moved the trainer's log-probabilities of a probe by {moved:.2g}, and "
            f"the sampler's by {rms(after.sampler - before.sampler):.2g} (root mean square)"
        )


def _bare(name: str) -> str:
    """A weight's name without the parts that models with images nest in another order than servers do."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def bits_of(weight: Tensor) -> int:
    """The sum of its bits as integers, which no order of summing changes."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().contiguous().view(integers).sum(dtype=torch.int64))


def rms(values: Tensor) -> float:
    """Root mean square."""
    return float(values.double().square().mean().sqrt())
