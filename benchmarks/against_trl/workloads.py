"""Training tasks, conversations about strings of digits (every digit one token) or sums, and their rewards."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

END_OF_TURN = "<|im_end|>"
"""Text of the token that ends a turn in the chat templates of both models."""

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Shape of one training step."""

    title: str
    num_prompts: int
    group_size: int
    num_digits: int
    """Digits in a user's turn; the chat template adds about 12 tokens."""
    answer_tokens: int
    """Tokens of every answer; with `warm` the maximum."""
    num_turns: int = 1
    warm: bool = False
    """True if the policy is partly trained: it ends its answers itself, and is rewarded for right ones."""
    sums: bool = False
    """True if the task is to add two or three numbers, instead of reversing digits."""

    @property
    def num_rollouts(self) -> int:
        return self.num_prompts * self.group_size


SHORT = Workload(
    title="16 prompts x 8, 19-token prompts, 8-token answers",
    num_prompts=16,
    group_size=8,
    num_digits=7,
    answer_tokens=8,
)
WORKLOADS = {
    "short": SHORT,
    "task": replace(
        SHORT, title="as short, by a policy that reverses a third of the strings and is rewarded for it", warm=True
    ),
    "long": Workload(
        title="4 prompts x 16, 320-token prompts, 64-token answers",
        num_prompts=4,
        group_size=16,
        num_digits=308,
        answer_tokens=64,
    ),
    "longer": Workload(
        title="4 prompts x 16, 640-token prompts, 128-token answers",
        num_prompts=4,
        group_size=16,
        num_digits=628,
        answer_tokens=128,
    ),
    "turns": Workload(
        title="8 conversations x 8, five turns of 24-token messages and 16-token answers",
        num_prompts=8,
        group_size=8,
        num_digits=12,
        answer_tokens=16,
        num_turns=5,
    ),
    "sums": Workload(
        title="8 prompts x 8, sums of two or three numbers, answers of up to 48 tokens, by a pretrained policy",
        num_prompts=8,
        group_size=8,
        num_digits=2,
        answer_tokens=48,
        warm=True,
        sums=True,
    ),
}
WORKLOADS["fixed"] = replace(WORKLOADS["sums"], title="8 prompts x 8, sums, 48-token answers", warm=False)
RANDOM_POLICY = [name for name, workload in WORKLOADS.items() if not workload.sums]
"""Workloads that need no pretrained policy."""


def digits(rng: random.Random, number: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(number))


def questions(workload: Workload, seed: int) -> Iterator[list[str]]:
    """Yield conversations without end, each as the user's messages."""
    rng = random.Random(seed)
    while True:
        yield [
            _sum(rng) if workload.sums else f"reverse {digits(rng, workload.num_digits)}"
            for _ in range(workload.num_turns)
        ]


def _sum(rng: random.Random) -> str:
    """Return a question like those of reasoning-gym's `chain_sum`: two or three terms of one or two digits."""
    terms = [str(rng.randint(1, 99)) for _ in range(rng.randint(2, 3))]
    signed = [terms[0], *(f"{rng.choice('+-')} {term}" for term in terms[1:])]
    return f"State the final answer to the following arithmetic problem: {' '.join(signed)} ="


def turns_apart(workload: Workload, seed: int) -> Iterator[list[Message]]:
    """Yield prompts without end: of every `num_prompts` conversations, all first turns, then all second ones, and so on.

    The answers of earlier turns are made up; they are as long as sampled ones.
    """
    source, rng = questions(workload, seed), random.Random(seed + 1)
    while True:
        chats: list[list[Message]] = [[] for _ in range(workload.num_prompts)]
        asked = [next(source) for _ in chats]
        for turn in range(workload.num_turns):
            for chat, turns in zip(chats, asked, strict=True):
                chat.append({"role": "user", "content": turns[turn]})
                yield list(chat)
                chat.append({"role": "assistant", "content": digits(rng, workload.answer_tokens)})


def correctness(question: str, answer: str) -> float:
    """Return 1 if the answer is the question's digits, reversed, or if its last number is the sum."""
    if question.startswith("reverse "):
        return float(answer.strip() == question.removeprefix("reverse ")[::-1])
    terms = question.partition(": ")[2].removesuffix(" =").replace("+ ", "").replace("- ", "-").split()
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == sum(map(int, terms)))


def vowels(question: str, answer: str) -> float:
    """Return the share of vowels, a reward that differs between the answers of a random policy."""
    letters = [letter for letter in answer if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)
