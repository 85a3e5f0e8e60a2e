"""Our losses against those of TRL's GRPOTrainer, on the same random numbers; deliberate differences are explained in the tests."""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import textwrap
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.algorithms.gdpo import GDPO
from rllm.algorithms.grpo import CISPO, DAPO, GRPO, GSPO, DrGRPO
from rllm.algorithms.losses import pull_of_teacher
from rllm.algorithms.sapo import SAPO
from rllm.algorithms.sdft import SDFT
from rllm.trainer.text_teacher import align_pieces
from rllm.types import Trajectory, TrajectoryGroup

from .rows import Rows

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]

SEEDS = pytest.mark.parametrize("rows", [Rows(seed) for seed in range(8)], ids=str)


def trl_loss(rows: Rows, batch: Batch, logprobs: Tensor, *, delta: float | None = None, **settings: Any) -> Tensor:
    """Return the loss of a GRPOTrainer whose model gave these log-probabilities.

    The trainer is not initialized, which would need a model and a dataset: only the inputs of its loss are set.
    """
    trainer_class = importlib.import_module("trl").GRPOTrainer
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    trainer = trainer_class.__new__(trainer_class)
    trainer.__dict__.update(
        {
            "_get_per_token_logps_and_entropies": lambda *a, **k: (
                rows.pad(logprobs),
                torch.zeros_like(rows.mask),
                None,
            ),
            "model": SimpleNamespace(training=True),
            "args": SimpleNamespace(
                delta=delta,
                use_bias_correction_kl=False,
                steps_per_generation=1,
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
            ),
            "accelerator": accelerator,
            "_metrics": {"train": defaultdict(list)},
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "top_entropy_quantile": 1.0,
            "current_gradient_accumulation_steps": 1,
            "off_policy_mask_threshold": None,
            "aux_loss_enabled": False,
            "use_vllm": False,
            "_entropy_bonus_enabled": False,
            **settings,
        }
    )
    ids = torch.zeros_like(rows.mask).long()
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": rows.mask,
        "advantages": rows.pad(batch.advantages),
        "old_per_token_logps": rows.pad(batch.old_logprobs),
        "ref_per_token_logps": rows.pad(batch.ref_logprobs),
        "num_items_in_batch": rows.mask.sum(),
    }
    return trainer._compute_loss(trainer.model, inputs)


def ours_and_theirs(rows: Rows, algorithm: Algorithm, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return our loss and theirs, each with its gradient with respect to the log-probabilities."""
    batch = rows.batch().with_weights(algorithm.aggregation, algorithm.fixed_length)
    logprobs = rows.moved(batch)
    found = []
    for loss in (algorithm.loss(logprobs, batch)[0], trl_loss(rows, batch, logprobs, **settings)):
        found.append([loss.detach(), *torch.autograd.grad(loss, logprobs)])
    return found[0], found[1]


CASES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo": (GRPO(aggregation="seq-mean-token-mean"), {"loss_type": "grpo"}),
    "grpo with token-mean": (GRPO(), {"loss_type": "bnpo"}),
    "dual clip": (GRPO(dual_clip=1.5), {"loss_type": "bnpo", "delta": 1.5}),
    "dr_grpo": (DrGRPO(fixed_length=16), {"loss_type": "dr_grpo", "max_completion_length": 16}),
    "dapo": (DAPO(), {"loss_type": "dapo", "epsilon_high": 0.28}),
    # Their bound of the ratio is a number, ours its distance from 1.
    "cispo": (CISPO(clip_high=0.3), {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sapo": (SAPO(), {"loss_type": "sapo"}),
}


@SEEDS
@pytest.mark.parametrize("name", CASES)
def test_losses_agree_with_trl(rows: Rows, name: str) -> None:
    algorithm, settings = CASES[name]
    ours, theirs = ours_and_theirs(rows, algorithm, **settings)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@SEEDS
def test_gspo_agrees_with_trl_for_equal_advantages_of_a_sequence(rows: Rows) -> None:
    """Theirs is the sequence form, in which siblings' tokens share an advantage; ours equals it in that case."""
    algorithm = GSPO(clip_low=0.05, clip_high=0.1)
    batch = rows.batch().with_weights(algorithm.aggregation)
    batch.advantages = rows.flat(rows.scores[:, None].expand_as(rows.mask))
    logprobs = rows.moved(batch)
    ours, _ = algorithm.loss(logprobs, batch)
    settings = {"epsilon_low": 0.05, "epsilon_high": 0.1, "loss_type": "grpo", "importance_sampling_level": "sequence"}
    theirs = trl_loss(rows, batch, logprobs, **settings)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    slopes = [torch.autograd.grad(loss, logprobs)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)


@SEEDS
def test_divergence_in_the_loss_has_the_value_of_trl(rows: Rows) -> None:
    """The value is the same. The gradient is not, on purpose: theirs is that of k3, whose expectation belongs to the
    divergence the other way round."""
    algorithm = GRPO(kl_coef=0.3)
    ours, theirs = ours_and_theirs(rows, algorithm, loss_type="bnpo", beta=0.3)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    batch = rows.batch()
    assert batch.ref_logprobs is not None
    distance = rows.moved(batch).detach() - batch.ref_logprobs
    their_part, our_part = 1 - (-distance).exp(), distance
    difference = 0.3 * (our_part - their_part) / batch.num_tokens
    torch.testing.assert_close(ours[1] - theirs[1], difference, rtol=1e-4, atol=1e-6)


@SEEDS
def test_pieces_of_two_tokenizations_agree_with_trl(rows: Rows) -> None:
    """Theirs are lists of tokens for each piece, of offsets in bytes; ours are the piece of each token."""
    align = importlib.import_module("trl.experimental.gold.gold_trainer").ULDLoss._align_by_byte_offsets
    chance, text = random.Random(rows.seed), b"abcdefghijklmnopqrst"
    cuts = [sorted({0, len(text), *chance.sample(range(1, len(text)), 8)}) for _ in range(2)]
    own, theirs = ([text[start:stop] for start, stop in pairwise(bounds)] for bounds in cuts)
    expected = align(*([list(pair) for pair in pairwise(bounds)] for bounds in cuts))
    for found, groups in zip(align_pieces(own, theirs), expected, strict=False):
        assert found == [piece for piece, group in enumerate(groups) for _ in group]


@SEEDS
def test_self_distillation_has_the_gradient_of_trl(rows: Rows) -> None:
    """The gradient is the same; the value of ours is that of the ratio to the policy before the update, which is 1."""
    compute = importlib.import_module("trl.experimental.sdft.loss_utils").compute_sampled_token_self_distillation_loss
    batch = rows.batch()
    generator = torch.Generator().manual_seed(rows.seed)
    student, teacher = (torch.randn((batch.num_tokens, 11), generator=generator) for _ in range(2))
    student.requires_grad_()
    theirs = compute(student, teacher, batch.ids, distillation_alpha=1.0).mean()
    logprobs, targets = (logits.log_softmax(-1).gather(1, batch.ids[:, None])[:, 0] for logits in (student, teacher))
    batch.advantages, batch.old_logprobs = pull_of_teacher(logprobs.detach(), targets), None
    ours, _ = SDFT().loss(logprobs, batch)
    slopes = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)


def test_overlong_penalty_agrees_with_trl() -> None:
    punish = importlib.import_module("trl.rewards").get_soft_overlong_punishment(20, 5)
    ours, lengths = DAPO(overlong_length=20, overlong_buffer=5), range(1, 30)
    theirs = punish(completion_ids=[[0] * length for length in lengths])
    assert [-ours.overlong_penalty(length) for length in lengths] == pytest.approx(theirs)


def trl_advantages_by_part(parts: Tensor, weights: Tensor, *, group_size: int) -> Tensor:
    """Return advantages of TRL's normalize_then_sum: its statements, taken from the method that also samples."""
    module = importlib.import_module("trl.trainer.grpo_trainer")
    tree = ast.parse(textwrap.dedent(inspect.getsource(module.GRPOTrainer._generate_and_score_completions)))
    [branch] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("== 'normalize_then_sum'")
    ]
    names = {
        **vars(module),
        "self": SimpleNamespace(reward_weights=weights, reward_funcs=[None] * len(weights)),
        "device": "cpu",
        "rewards_per_func": parts,
        "num_generations": group_size,
        "unscorable_mask": torch.isnan(parts).all(dim=1),
    }
    exec(compile(ast.Module(branch.body, []), "trl", "exec"), names)
    advantages: Tensor = names["advantages"]
    return advantages


@pytest.mark.parametrize("seed", range(8))
def test_gdpo_agrees_with_trl(seed: int) -> None:
    """TRL's deviation of the batch is that of a sample, larger by the root of N / (N - 1)."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.rand((24, 3), generator=generator) * torch.tensor([1.0, 10.0, 0.1])
    groups = [
        TrajectoryGroup(
            trajectories=[
                Trajectory(reward=1.0, reward_parts=dict(zip("abc", row, strict=True))) for row in members.tolist()
            ]
        )
        for members in parts.view(3, 8, 3)
    ]
    ours = torch.tensor(GDPO(weights={"b": 0.5, "c": 2.0}).credits(groups)).flatten()
    theirs = trl_advantages_by_part(parts, torch.tensor([1.0, 0.5, 2.0]), group_size=8)
    torch.testing.assert_close(ours, theirs * (24 / 23) ** 0.5, rtol=0, atol=2e-2)
