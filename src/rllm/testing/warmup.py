"""A short supervised warm-up: next-token training on what the assistant says in example conversations.

Two choices make it short. The conversations of a batch are merged into a token tree, so that the tools they all begin
with are computed once; and the weight matrices are updated by Muon (Jordan et al. 2024), which learns to copy from the
context in a quarter of the steps that AdamW needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rllm.algorithms.tree import build_tree
from rllm.backends.local.forward import hidden_states
from rllm.backends.local.token_logprobs import logprobs_and_entropy
from rllm.parser.chat_template import ChatTemplate
from rllm.types import Message

OnProgress = Callable[[int, int], None]

MATRIX_LR, VECTOR_LR = 0.02, 3e-3
LR_RISE, LR_FALL = 10, 0.5
"""The learning rate rises for ten steps, and falls to zero over the last half of them."""


def warm_up(
    model: Any,
    template: ChatTemplate,
    phases: Sequence[tuple[Iterator[list[Message]], int]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    batch_size: int,
    on_progress: OnProgress | None = None,
) -> None:
    """Train on each phase's conversations for its number of steps, on the assistant's tokens only."""
    total = sum(steps for _, steps in phases)
    optimizers = _optimizers(model)
    schedule = [torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(total)) for optimizer in optimizers]
    end_id = model.config.eos_token_id
    done = 0
    model.train()
    for conversations, steps in phases:
        for _ in range(steps):
            examples = [encode(template, item, tools, end_id=end_id) for item in islice(conversations, batch_size)]
            loss = _loss(model, examples)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for step in (*optimizers, *schedule):
                step.step()
            model.zero_grad(set_to_none=True)
            done += 1
            if on_progress:
                on_progress(done, total)
    model.eval()


def encode(
    template: ChatTemplate,
    conversation: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    end_id: int,
) -> tuple[list[int], list[bool]]:
    """The conversation's token ids up to its last answer, and which of them the assistant says: both as long.

    Each turn is rendered as the prompt that an inference engine would see, so what is learned is what will be sampled.
    """
    ids: list[int] = []
    said: list[bool] = []
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = template.render(conversation[:turn], tools)
        whole = template.render(conversation[: turn + 1], tools, add_generation_prompt=False)
        answer = whole[len(prompt) :]
        while answer and answer[-1] != end_id:
            answer.pop()  # what the template writes behind the end of a turn is not said by the assistant
        assert whole[: len(prompt)] == prompt, "the template must render append-only"
        assert prompt[: len(ids)] == ids, "the template must render append-only"
        said += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = prompt + answer
    return ids, said


def _loss(model: Any, batch: Sequence[tuple[list[int], list[bool]]]) -> Tensor:
    """The mean negative log-probability of what the assistant says."""
    tree = build_tree([ids for ids, _ in batch])
    sources, targets = [], []
    for index, (ids, said) in enumerate(batch):
        positions = tree.positions(index)
        for place in range(1, len(ids)):
            if said[place]:
                sources.append(positions[place - 1])
                targets.append(ids[place])
    hidden = hidden_states(model.model, tree)[torch.tensor(sources)]
    logprobs, _ = logprobs_and_entropy(hidden, model.lm_head, torch.tensor(targets), temperature=1.0, entropy=False)
    return -logprobs.mean()


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between layers; AdamW for embeddings and vectors, where orthogonal updates mean nothing."""
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    return [Muon(matrices, lr=MATRIX_LR), torch.optim.AdamW(others, lr=VECTOR_LR, betas=(0.9, 0.95), weight_decay=0.0)]


def _schedule(total: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        return min((step + 1) / LR_RISE, 1.0, max(0.02, (total - step) / (LR_FALL * total)))

    return factor


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal (Jordan et al. 2024).

    `torch.optim.Muon` works in bfloat16, which CPUs without such instructions emulate slowly; this one keeps float32.
    """

    def __init__(self, matrices: Sequence[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix from its gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(average, group["momentum"]))
                weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1, weight.shape[0] / weight.shape[1])))


def orthogonal(matrix: Tensor, *, iterations: int = 5) -> Tensor:
    """Nearly the closest matrix with singular values of 1, by the quintic Newton-Schulz iteration of the Muon paper."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if tall else wide
