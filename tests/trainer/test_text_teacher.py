"""A teacher with another tokenizer, compared by pieces of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.distill import Distill
from rllm.backends.local.policy import LocalTeacher
from rllm.config.loading import load_config
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedModel, LoadedTokenizer
from rllm.parser.chat_template import ChatTemplate
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.credit import Assembled, assemble
from rllm.trainer.teacher import check_teacher, open_teacher
from rllm.trainer.text_teacher import UNALIGNED, TextTeacher, align_pieces
from rllm.types import Episode, Step, Trajectory

ANSWER = "a kiwi costs two"
QUESTION = {"role": "user", "content": "what is it?"}


def tokens(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def test_piece_ends_at_a_common_boundary() -> None:
    own, theirs, count = align_pieces(tokens("a", " ki", "wi", " costs"), tokens("a", " kiwi", " co", "s", "ts"))
    assert (own, theirs, count) == ([0, 1, 1, 2], [0, 1, 2, 2, 2], 3)


def test_tokens_after_the_last_common_boundary_are_not_compared() -> None:
    assert align_pieces(tokens("a", "bc"), tokens("a", "b")) == ([0, UNALIGNED], [0, UNALIGNED], 1)
    assert align_pieces(tokens("a", "b", "c"), tokens("a", "x", "c")) == (
        [0, UNALIGNED, UNALIGNED],
        [0, UNALIGNED, UNALIGNED],
        1,
    )
    assert align_pieces([], tokens("a")) == ([], [UNALIGNED], 0)


def test_parts_of_a_character_are_one_piece() -> None:
    euro = "€".encode()
    assert align_pieces([euro[:1], euro[1:]], [euro]) == ([0, 0], [0], 1)


@given(st.text(min_size=1, max_size=12), st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_pieces_cover_the_same_bytes_on_both_sides(text: str, own_cuts: set[int], their_cuts: set[int]) -> None:
    whole = text.encode()

    def cut(cuts: set[int]) -> list[bytes]:
        bounds = [0, *sorted(place for place in cuts if place < len(whole)), len(whole)]
        return [whole[start:stop] for start, stop in pairwise(bounds)]

    own, theirs = cut(own_cuts), cut(their_cuts)
    own_pieces, their_pieces, count = align_pieces(own, theirs)
    for piece in range(count):
        one, other = (
            b"".join(part for part, of in zip(parts, numbers, strict=True) if of == piece)
            for parts, numbers in ((own, own_pieces), (theirs, their_pieces))
        )
        assert one == other != b""
    assert UNALIGNED not in (*own_pieces, *their_pieces)


def tokenizer_of(*texts: str) -> LoadedTokenizer:
    tokenizer = train_tokenizer([*texts] * 4, vocab_size=290)
    return LoadedTokenizer(tokenizer=tokenizer, num_ids=len(tokenizer), context_length=None)


@pytest.fixture(scope="module")
def own() -> LoadedTokenizer:
    return tokenizer_of("a kiwi costs two", "user assistant what is it?")


@pytest.fixture(scope="module")
def other() -> LoadedTokenizer:
    return tokenizer_of("kiwis wit two towers", "it is what a user asks")


def teacher_of(theirs: LoadedTokenizer, own: LoadedTokenizer) -> tuple[TextTeacher, Any]:
    recipe = TinyPolicyRecipe(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, seed=1)
    model = new_model(theirs.tokenizer, recipe).eval()
    loaded = LoadedModel(model=model, tokenizer=theirs.tokenizer, device=torch.device("cpu"))
    return TextTeacher(LocalTeacher(loaded), own=own, theirs=theirs), model


def assembled(own: LoadedTokenizer, teacher: TextTeacher, ids: Sequence[int]) -> Assembled:
    prompt = ChatTemplate(own.tokenizer).render([QUESTION])
    answer = {"role": "assistant", "content": ANSWER}
    step = Step(
        prompt_ids=prompt, response_ids=list(ids), logprobs=[-1.0] * len(ids), chat_completions=[QUESTION, answer]
    )
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=[step])])
    return assemble([episode], Distill(), step=0, temperature=1.0, teacher=teacher)


def logprobs_of(model: Any, theirs: LoadedTokenizer, ids: list[int]) -> list[float]:
    prompt = ChatTemplate(theirs.tokenizer).render([QUESTION])
    table = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1).detach()
    return [float(table[len(prompt) + place - 1, token]) for place, token in enumerate(ids)]


def test_pieces_are_compared_by_their_summed_logprobs(own: LoadedTokenizer, other: LoadedTokenizer) -> None:
    teacher, model = teacher_of(other, own)
    ids = [*own.tokenizer.encode(ANSWER), own.tokenizer.eos_token_id]
    theirs = [*other.tokenizer.encode(ANSWER), other.tokenizer.eos_token_id]
    own_texts, their_texts = (
        [each.tokenizer.decode([token]) for token in these[:-1]] for each, these in ((own, ids), (other, theirs))
    )
    assert own_texts != their_texts
    own_pieces, their_pieces, count = align_pieces(tokens(*own_texts), tokens(*their_texts))
    logprobs = logprobs_of(model, other, theirs)
    expected = []
    for piece in (*own_pieces, count):
        given = sum(value for value, of in zip(logprobs, (*their_pieces, count), strict=True) if of == piece)
        size = [*own_pieces, count].count(piece)  # of log-probabilities of -1 each
        expected.append((given + size) / size)
    found = assembled(own, teacher, ids).batch.advantages
    assert found.tolist() == pytest.approx([min(max(value, -20.0), 20.0) for value in expected], abs=1e-4)


def test_same_tokenizer_compares_tokens(own: LoadedTokenizer) -> None:
    teacher, model = teacher_of(own, own)
    for end in ([own.tokenizer.eos_token_id], []):
        ids = [*own.tokenizer.encode(ANSWER), *end]
        found = assembled(own, teacher, ids).batch.teacher_logprobs
        assert found is not None
        assert found.tolist() == pytest.approx(logprobs_of(model, own, ids), abs=1e-4)


def test_other_vocabulary_requires_alignment_by_text(
    own: LoadedTokenizer, other: LoadedTokenizer, tmp_path: Path
) -> None:
    recipe = TinyPolicyRecipe(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32)
    for name, loaded in (("own", own), ("other", other)):
        new_model(loaded.tokenizer, recipe).save_pretrained(tmp_path / name)
        loaded.tokenizer.save_pretrained(tmp_path / name)
    settings = [f"model.path={tmp_path / 'own'}", "algorithm.name=distill"]
    here = f"teacher.path={tmp_path / 'other'}"
    with pytest.raises(ConfigError, match=r"another vocabulary.*or teacher\.align=text"):
        check_teacher(load_config([*settings, here]), Distill())
    config = load_config([*settings, here, "teacher.align=text"])
    check_teacher(config, Distill())
    with open_teacher(config, Distill()) as opened:
        assert isinstance(opened, TextTeacher)
    with pytest.raises(ConfigError, match=r"teacher\.align='text' would have no effect on a server"):
        check_teacher(load_config([*settings, "teacher.url=http://b", "teacher.align=text"]), Distill())
