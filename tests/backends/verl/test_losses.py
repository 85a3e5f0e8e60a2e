"""The losses that verl's workers minimize, in pieces, against those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Aggregation, Batch, StepSpan, TokenSequence
from rllm.algorithms.grpo import GRPO, GSPO
from rllm.algorithms.ppo import PPO
from rllm.backends.verl.rows import LOGPROBS, LOSS, ROWS, PolicyLoss, Rows, ValueLoss, sizes_of_whole

LENGTHS = (3, 1, 4, 2, 6)


@pytest.fixture
def batch() -> Batch:
    sequences = [
        TokenSequence(
            ids=list(range(2 + size)),
            spans=[StepSpan(step_id="s", start=2, stop=2 + size)],
            logprobs=[-2.0] * size,
        )
        for size in LENGTHS
    ]
    batch = Batch.of(sequences)
    batch.trajectory_of = torch.tensor([0, 0, 1, 1, 1])[batch.sequence_of]
    random = torch.Generator().manual_seed(0)
    for name in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "values", "returns"):
        setattr(batch, name, -2.0 + 0.3 * torch.randn(batch.num_tokens, generator=random))
    return batch


def micro_batches(rows: Rows, outputs: dict[str, torch.Tensor], size: int, dp_size: int) -> list[tuple[Any, Any]]:
    """Yield (model outputs, data) of `size` rows at a time, as verl's engines pass them to a loss."""
    columns = {name: column.unbind() for name, column in rows.columns().items()}
    pieces = []
    for start in range(0, len(rows.order), size):
        chosen = slice(start, start + size)
        data: dict[str, Any] = {name: nested(list(column[chosen])) for name, column in columns.items()}
        data |= {"row": torch.arange(len(rows.order))[chosen], "temperature": 1.0, "dp_size": dp_size}
        answer = {name: nested(on_rows(values, rows)[chosen]) for name, values in outputs.items()}
        pieces.append((answer, data))
    return pieces


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def on_rows(values: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
    """Return values [N] at the position where an engine returns them: at the token before."""
    flat = torch.zeros(len(rows.mask)).masked_scatter(rows.mask, values[rows.tokens])
    return [torch.cat([row[1:], row[:1]]) for row in flat.split(rows.offsets.diff().tolist())]


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "trajectory-mean-token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
)
@pytest.mark.parametrize("kind", [GRPO, GSPO])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_losses_of_parts_sum_to_the_loss_of_the_whole(
    batch: Batch, kind: type[Algorithm], aggregation: Aggregation, size: int
) -> None:
    algorithm = kind(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01, correction="truncate")
    batch = batch.with_weights(aggregation)
    random = torch.Generator().manual_seed(1)
    logprobs = (-2.0 + 0.1 * torch.randn(batch.num_tokens, generator=random)).requires_grad_()
    entropy = logprobs.square()
    whole, sums = algorithm.loss(logprobs, batch, entropy)
    (expected,) = torch.autograd.grad(whole, logprobs, retain_graph=True)

    found: dict[str, float] = {}
    total = torch.zeros(())
    for text, data in micro_batches(Rows.dealt(batch, 2), {"log_probs": logprobs, "entropy": entropy}, size, 2):
        loss, metrics = PolicyLoss(algorithm)(text, data)
        total = total + loss
        numbers = {name: value for name, value in metrics.items() if name not in (LOGPROBS, ROWS)}
        found = {name: found.get(name, 0.0) + value for name, value in numbers.items()}
    (gradient,) = torch.autograd.grad(total, logprobs)

    torch.testing.assert_close(gradient, 2 * expected, rtol=1e-5, atol=1e-6)  # verl averages over its two workers
    assert found[LOSS] == pytest.approx(whole.item(), rel=1e-5)
    for name, value in sums.items():
        assert found[name] == pytest.approx(float(value), rel=1e-4, abs=1e-4)


def test_critic_losses_of_parts_sum_to_the_loss_of_the_whole(batch: Batch) -> None:
    algorithm = PPO()
    values = torch.linspace(-1.0, 1.0, batch.num_tokens)
    whole, _ = algorithm.value_loss(values, batch)
    pieces = micro_batches(Rows.dealt(batch, 1), {"values": values}, 2, 1)
    assert sum(float(ValueLoss(algorithm)(*piece)[0]) for piece in pieces) == pytest.approx(whole.item(), rel=1e-5)


def test_micro_batch_of_padding_rows_changes_nothing(batch: Batch) -> None:
    rows = Rows.dealt(batch, 2)
    filler = rows.is_real.index(False)
    logprobs = torch.zeros(batch.num_tokens, requires_grad=True)
    pieces = micro_batches(rows, {"log_probs": logprobs, "entropy": logprobs}, 1, 2)
    loss, _ = PolicyLoss(GRPO(kl_coef=0.1))(*pieces[filler])
    assert (loss.item(), loss.requires_grad) == (0.0, True)


@pytest.mark.parametrize(
    ("aggregation", "count"), [("token-mean", 16), ("seq-mean-token-mean", 5), ("seq-mean-token-sum", 5)]
)
def test_denominators_come_from_the_whole_batch(batch: Batch, aggregation: Aggregation, count: int) -> None:
    part = batch.with_weights(aggregation).select([2, 3])
    sizes = sizes_of_whole(part, GRPO(aggregation=aggregation))
    assert sizes["batch_num_tokens" if aggregation == "token-mean" else "global_batch_size"] == pytest.approx(count)
