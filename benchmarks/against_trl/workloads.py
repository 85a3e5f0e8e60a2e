"""Training tasks: conversations about strings of digits, every digit one token, and their rewards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of one training step."""

    title: str
    num_prompts: int
    group_size: int
    num_digits: int
    """Digits in a user's turn; the chat template adds about 12 tokens."""
    answer_tokens: int
    """At most; a random policy nearly always uses them all."""
    num_turns: int = 1
    warm: bool = False
    """True if the policy has begun to learn the task, and is rewarded for right answers."""

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
}


def digits(rng: random.Random, number: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(number))


def questions(workload: Workload, seed: int) -> Iterator[list[str]]:
    """Yield conversations without end, each as the user's messages: reverse these digits."""
    rng = random.Random(seed)
    while True:
        yield [f"reverse {digits(rng, workload.num_digits)}" for _ in range(workload.num_turns)]


def turns_apart(workload: Workload, seed: int) -> Iterator[list[Message]]:
    """Endless prompts: the turns of every `num_prompts` conversations, first turns first.

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
    """1 for the digits of the question, turned round."""
    return float(answer.strip() == question.removeprefix("reverse ")[::-1])


def vowels(question: str, answer: str) -> float:
    """The share of vowels: something that differs between the answers of a policy that knows nothing."""
    letters = [letter for letter in answer if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)
