"""A teacher with another tokenizer: its probabilities of the same texts, piece by piece.

The teacher sees the messages through its own chat template, and the answer in its own tokens. Where both tokenizers
have a boundary, a piece of text ends: its log-probability is the sum over the tokens on either side, by the chain rule.
The boundaries are found as in GOLD and ULD (Boizard et al. 2024), which compare whole distributions there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedTokenizer
from rllm.parser.append_only import common_length
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.decoding import TokenBytes
from rllm.trainer.sequences import step_spans
from rllm.types import Step

if TYPE_CHECKING:
    from rllm.trainer.credit import Sample
    from rllm.trainer.teacher import Teacher

UNALIGNED = -1
"""Piece of tokens with no common boundary after them. These are not compared."""
MIN_SURPRISE = 1e-6
"""Smallest surprise of a token in nats, so that a piece of certain tokens can be divided."""


class TextTeacher:
    """Compares the policy's answers with a teacher of another vocabulary.

    The difference of a piece is divided among its tokens by the policy's surprise at each: a token that the policy was
    sure of was hardly a choice. A piece of one token on either side is compared as by a teacher with the same
    vocabulary. The differences in an answer add up to the whole text's.

    Where the teacher cuts a word differently depending on how it continues, a wrong end lowers the difference of the
    tokens before it, and not its own: in one long word a policy learns less than in words between spaces.
    """

    def __init__(self, teacher: Teacher, *, own: LoadedTokenizer, theirs: LoadedTokenizer) -> None:
        """`teacher` scores ids of the tokenizer `theirs`; `own` is the policy's."""
        self._teacher = teacher
        self._own, self._theirs = ChatTemplate(own.tokenizer), ChatTemplate(theirs.tokenizer)
        self._own_bytes, self._their_bytes = TokenBytes(own.tokenizer), TokenBytes(theirs.tokenizer)
        self._tokenizer, self._context_length = theirs.tokenizer, theirs.context_length

    def score(self, batch: Batch, samples: Sequence[Sample] = ()) -> Tensor:
        """Return [N] the policy's log-probability of each token plus its part of the log-ratio of its piece."""
        own = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        assert own is not None, "a teacher scores what was sampled"
        steps = {(number, step.id): step for number, item in enumerate(samples) for step in item.trajectory.steps}
        places, views = [], []
        for key, tokens in step_spans(batch):
            places.append(tokens)
            views.append(self._view_of(steps[key]))
        given = self._teacher.score(Batch.of([item.sequence for item in views], temperature=batch.temperature))
        leads = torch.zeros_like(own)
        sizes = [len(item.their_pieces) for item in views]
        for tokens, item, theirs in zip(places, views, given.split(sizes), strict=True):
            leads[tokens] = _log_ratios(own[tokens], item.own_pieces, theirs, item.their_pieces)
        return own + leads

    def _view_of(self, step: Step) -> _TeacherView:
        """Return the step in the teacher's tokens, aligned with the policy's."""
        if not step.chat_completions:
            raise ConfigError(
                f"teacher.align='text': step {step.id} has no messages for the teacher's chat template; use a teacher "
                "with the policy's vocabulary"
            )
        answer = step.response_ids
        ends = self._own.end_id is not None and answer[-1] == self._own.end_id and self._theirs.end_id is not None
        own = [self._own_bytes.of(token) for token in (answer[:-1] if ends else answer)]
        text = b"".join(own).decode(errors="ignore")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        theirs = [self._their_bytes.of(token) for token in ids]
        # Some tokenizers put a space before a text.
        if theirs and theirs[0].startswith(b" ") and not text.startswith(" "):
            theirs[0] = theirs[0][1:]
        own_pieces, their_pieces, count = align_pieces(own, theirs)
        if ends:
            ids = [*ids, self._theirs.end_id]
            own_pieces, their_pieces = [*own_pieces, count], [*their_pieces, count]
        prompt = self._theirs.render(step.chat_completions[:-1])
        if self._context_length is not None and len(prompt) + len(ids) > self._context_length:
            raise ConfigError(
                f"teacher.path: step {step.id} has {len(prompt) + len(ids)} of the teacher's tokens, and it takes "
                f"{self._context_length}: lower model.max_length"
            )
        span = StepSpan(step_id=step.id, start=len(prompt), stop=len(prompt) + len(ids))
        sequence = TokenSequence(ids=[*prompt, *ids], spans=[span], logprobs=None)
        return _TeacherView(sequence=sequence, own_pieces=own_pieces, their_pieces=their_pieces)


@dataclass(frozen=True, kw_only=True)
class _TeacherView:
    sequence: TokenSequence
    own_pieces: list[int]
    """Piece of text that each of the policy's tokens belongs to."""
    their_pieces: list[int]


def align_pieces(own: Sequence[bytes], theirs: Sequence[bytes]) -> tuple[list[int], list[int], int]:
    """Return the piece that each token of two tokenizations belongs to, and the number of pieces.

    A piece ends where both have a boundary. Where the texts themselves differ, and after that, tokens are `UNALIGNED`.
    """
    own_ends, their_ends = (list(accumulate(map(len, tokens))) for tokens in (own, theirs))
    one, other = b"".join(own), b"".join(theirs)
    agreed = common_length(one, other)
    ends = sorted(end for end in {*own_ends} & {*their_ends} if end <= agreed)

    def piece_of(end: int) -> int:
        return bisect_left(ends, end) if ends and end <= ends[-1] else UNALIGNED

    return [piece_of(end) for end in own_ends], [piece_of(end) for end in their_ends], len(ends)


def _log_ratios(own: Tensor, own_pieces: list[int], theirs: Tensor, their_pieces: list[int]) -> Tensor:
    """Return [n] each policy token's part of the teacher's log-ratio of its piece; 0 for unaligned tokens."""
    own_of, their_of = torch.tensor(own_pieces), torch.tensor(their_pieces, dtype=torch.long)
    surprise = -own + MIN_SURPRISE
    none = torch.zeros(max([*own_pieces, *their_pieces], default=0) + 2)  # the last is for `UNALIGNED`
    leads = none.index_add(0, their_of % len(none), theirs).index_add(0, own_of % len(none), -own)
    parts = surprise / none.index_add(0, own_of % len(none), surprise)[own_of]
    return torch.where(own_of == UNALIGNED, torch.zeros_like(own), parts * leads[own_of])
