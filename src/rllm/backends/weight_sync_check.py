"""Check that an update arrived: the sampler's log-probabilities of a probe moved with the trainer's, and equal them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rllm.errors import WeightSyncError
from rllm.inference.servers.control import VLLMControl

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_TOKENS = 160
"""Longer than a block of any prefix cache, so that a cache which was not emptied is detected."""
NUM_SAMPLED = 2
LARGEST_GAP = {torch.float32: 1e-3}
"""Root mean square of the differences between sampler and trainer allowed; other number formats differ much more."""
_LARGEST_GAP_OTHERWISE = 0.3
_SIGNIFICANT = 3.0
"""Ratio of a movement to the gap above which the movement is significant."""


@dataclass(frozen=True)
class ProbeLogprobs:
    """[T - 1] log-probabilities of all tokens of the probe but the first, in float32."""

    trainer: Tensor
    sampler: Tensor

    @property
    def gap(self) -> float:
        """Root mean square of the differences."""
        return rms(self.sampler - self.trainer)


class Probe:
    """Fixed sequence of ordinary tokens that trainer and sampler both score."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        largest_gap: float | None = None,
    ) -> None:
        """Draw the tokens; `largest_gap` replaces the one that suits the number format of the weights."""
        special = set(tokenizer.all_special_ids)
        ordinary = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        limits = [limit - NUM_SAMPLED for limit in (max_length, context) if limit is not None]
        length = min([NUM_TOKENS, *limits])
        self.ids = random.Random(0).choices(ordinary, k=length)
        self.model = model
        self.largest_gap = largest_gap or LARGEST_GAP.get(model.dtype, _LARGEST_GAP_OTHERWISE)

    def check(self, control: VLLMControl, name: str) -> ProbeLogprobs:
        """Compare the server's log-probabilities with the trainer's, of the probe and of tokens sampled after it.

        The server has the probe in its cache when it samples, so states of old weights are detected, too.

        Raises:
            WeightSyncError: if the server has other weights than the trainer, or uses cached states of other weights.
        """
        served = torch.tensor(control.prompt_logprobs(name, self.ids))
        sampled = control.sample(name, self.ids, NUM_SAMPLED)
        ids = torch.tensor([[*self.ids, *sampled.token_ids]], device=self.model.device)
        with torch.no_grad():
            logits = self.model(ids).logits[0, :-1].float()
        trainer = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
        found = self._equal(ProbeLogprobs(trainer[: len(served)], served))
        gap = rms(torch.tensor(sampled.logprobs) - trainer[len(served) :])
        if not gap <= self.largest_gap:
            raise WeightSyncError(
                "the sampler has the new weights, but still uses cached states of the old ones: after a prompt that "
                f"it had cached, its log-probabilities differ from the trainer's by {gap:.2g} (root mean square)"
            )
        return found

    def check_again(self, trainer: Tensor, control: VLLMControl, name: str) -> None:
        """Raise `WeightSyncError` unless the server has the trainer's earlier log-probabilities [T - 1]."""
        self._equal(ProbeLogprobs(trainer, torch.tensor(control.prompt_logprobs(name, self.ids))))

    def _equal(self, found: ProbeLogprobs) -> ProbeLogprobs:
        if not found.gap <= self.largest_gap:
            raise WeightSyncError(
                "the weights did not arrive: the sampler's log-probabilities of a probe differ from the trainer's by "
                f"{found.gap:.2g} (root mean square over {len(found.trainer)} tokens; up to {self.largest_gap:g} "
                "counts as rounding, see vllm.largest_gap)"
            )
        return found

    def check_bits(self, control: VLLMControl) -> int:
        """Compare the weights bit by bit, so that kernels that round cannot hide a difference.

        Only tensors that the server keeps as they were sent can be compared: vLLM joins some, and splits others among
        its workers.

        Returns:
            The number of weights compared.

        Raises:
            WeightSyncError: naming one that differs.
        """
        ours = {
            _bare(name): (list(weight.shape), str(weight.dtype), weight)
            for name, weight in self.model.named_parameters()
        }
        num_compared = 0
        for worker in control.weight_bits():
            for served, (shape, dtype, bits) in worker.items():
                name = _bare(served)
                if name not in ours or ours[name][:2] != (shape, dtype):
                    continue
                num_compared += 1
                if bits_of(ours[name][2]) != bits:
                    raise WeightSyncError(f"the weights did not arrive: {served} is not the trainer's, bit for bit")
        return num_compared


def check_moved(before: ProbeLogprobs, after: ProbeLogprobs) -> None:
    """Compare the sampler's movement with the trainer's, if that is larger than the gap between the two.

    Raises:
        WeightSyncError: if the sampler is nearer to the trainer's old weights than to the new ones.
    """
    moved = rms(after.trainer - before.trainer)
    if moved <= _SIGNIFICANT * before.gap:
        return
    if rms(after.sampler - before.trainer) <= after.gap:
        raise WeightSyncError(
            f"the weights did not arrive: the update moved the trainer's log-probabilities of a probe by {moved:.2g}, "
            f"and the sampler's by {rms(after.sampler - before.sampler):.2g} (root mean square)"
        )


def _bare(name: str) -> str:
    """Return a weight's name without the parts that servers nest in another order in models with images."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def bits_of(weight: Tensor) -> int:
    """Return the sum of a weight's bits as integers, which is the same in any order of summing."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().contiguous().view(integers).sum(dtype=torch.int64))


def rms(values: Tensor) -> float:
    """Return the root mean square."""
    return float(values.double().square().mean().sqrt())
