"""Steps to token sequences, without ever re-tokenising.

A step whose prompt begins with all tokens of an earlier sequence, prompt and answer, continues it: a conversation is one
sequence, however many turns it has. A step that does not (the agent edited its history, or the template renders an
answer differently from how it was sampled) begins a sequence of its own. Nothing is guessed and nothing is re-rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rllm.algorithms.batch import StepSpan, TokenSequence
from rllm.capture.session_tree import continues
from rllm.errors import TokenMismatchError
from rllm.types import Step


@dataclass(slots=True)
class _Open:
    """A sequence that later steps may continue."""

    last: Step
    ids: list[int] = field(default_factory=list)
    spans: list[StepSpan] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append(self, step: Step) -> None:
        start = len(step.prompt_ids)
        self.last = step
        self.ids = [*step.prompt_ids, *step.response_ids]
        self.spans.append(StepSpan(step_id=step.id, start=start, stop=len(self.ids)))
        self.logprobs.extend(step.logprobs)


def sequences_of(steps: Sequence[Step], *, demonstrated: bool = False) -> list[TokenSequence]:
    """The token sequences of one trajectory's steps, in the order in which they begin.

    Steps without sampled tokens are passed over. What was `demonstrated` has no log-probabilities; those of the policy that
    once sampled it, if one did, are left behind here.

    Raises:
        TokenMismatchError: if a step's ids and log-probabilities disagree.
    """
    opened: list[_Open] = []
    for step in steps:
        if not step.response_ids:
            continue
        _check(step, demonstrated)
        earlier = [item for item in opened if continues(step.prompt_ids, item.last)]
        if earlier:
            max(earlier, key=lambda item: len(item.ids)).append(step)
        else:
            opened.append(_Open(last=step))
            opened[-1].append(step)
    return [
        TokenSequence(ids=item.ids, spans=item.spans, logprobs=None if demonstrated else item.logprobs)
        for item in opened
    ]


def _check(step: Step, demonstrated: bool) -> None:
    if not demonstrated and len(step.response_ids) != len(step.logprobs):
        raise TokenMismatchError(
            f"step {step.id}: {len(step.response_ids)} response ids but {len(step.logprobs)} log-probabilities"
        )
    if not step.prompt_ids:
        raise TokenMismatchError(f"step {step.id}: {len(step.response_ids)} response ids behind an empty prompt")
