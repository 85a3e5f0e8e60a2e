from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.demo.tasks import CAREFUL, conversations
from rllm.parser.chat_template import ChatTemplate
from rllm.testing.tiny_policy import (
    Muon,
    TinyPolicyRecipe,
    encode,
    orthogonal,
    tiny_policy,
    train_tokenizer,
    warm_up,
)
from rllm.types import Message

pytestmark = pytest.mark.usefixtures("policies")  # for its tokenizers of little text
SMALL = TinyPolicyRecipe(
    hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, skill_steps=3, habit_steps=2, batch_size=4
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_price", "parameters": {"type": "object", "properties": {}}}}
]


def speech(seed: int) -> Iterator[list[Message]]:
    return conversations(CAREFUL, system="Answer.", seed=seed)


build = partial(tiny_policy, speech, speech, TOOLS, recipe=SMALL)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """A small sample for the tokenizer, and one thread: two only wait for each other with such small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rllm.testing.tiny_policy.TOKENIZER_SAMPLE", 100)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def template(folder: Path) -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(folder))


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def test_same_recipe_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    again = build(cache_dir=str(tmp_path))
    assert again.name == folder.name
    one, other = state_of(folder), state_of(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert (folder / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


def test_global_random_state_is_not_changed(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build(cache_dir=tmp_path)
    assert torch.rand(1) == expected


def test_built_policy_is_cached(folder: Path) -> None:
    def never(done: int, total: int) -> None:
        raise AssertionError("built a second time")

    assert build(cache_dir=folder.parent.parent, on_progress=never) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name], "no scratch folder is left"


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": TinyPolicyRecipe(**{**vars(SMALL), "seed": 1})},
        {"recipe": TinyPolicyRecipe(**{**vars(SMALL), "skill_steps": 4})},
    ],
)
def test_another_recipe_is_another_policy(folder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    assert build(cache_dir=tmp_path, **change).name != folder.name


def test_other_conversations_or_tools_are_another_policy(folder: Path, tmp_path: Path) -> None:
    other = partial(conversations, CAREFUL, system="Speak.")
    assert (
        tiny_policy(lambda seed: other(seed=seed), speech, TOOLS, recipe=SMALL, cache_dir=tmp_path).name != folder.name
    )
    assert tiny_policy(speech, speech, None, recipe=SMALL, cache_dir=tmp_path).name != folder.name


def test_progress_without_a_terminal_is_a_few_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build(cache_dir=tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert 1 < err.count("\n") <= 10
    assert err.endswith("building a tiny model (once): 5 of 5 steps\n")


def test_terminal_shows_a_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    build(cache_dir=tmp_path)
    assert "building a tiny model (once)" in capfd.readouterr().err


def test_progress_is_reported(tmp_path: Path) -> None:
    found: list[tuple[int, int]] = []
    build(cache_dir=tmp_path, on_progress=lambda done, total: found.append((done, total)))
    assert found == [(done, 5) for done in range(1, 6)]


def test_policy_is_an_ordinary_model_folder(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) <= 400
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer.encode("2 figs, né?", add_special_tokens=False)) == "2 figs, né?"
    assert json.loads((folder / "recipe.json").read_text())["hidden_size"] == 32


def test_digits_are_separate_tokens(template: ChatTemplate) -> None:
    tokenizer = train_tokenizer(["1234 1234 1234"] * 20, vocab_size=300)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234", add_special_tokens=False)] == list("1234")


CONTENT = st.text("ab \n<>|{}\"'é1", max_size=8)
CALLS = st.builds(
    lambda name, arguments: {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    },
    st.sampled_from(["get_price", "x"]),
    st.dictionaries(CONTENT, CONTENT, max_size=2),
)
TURNS = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, CONTENT),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, CONTENT),
    st.builds(lambda text: {"role": "assistant", "content": text}, CONTENT),
    st.builds(
        lambda text, calls: {"role": "assistant", "content": text or None, "tool_calls": calls},
        CONTENT,
        st.lists(CALLS, min_size=1, max_size=2),
    ),
)


@given(st.lists(TURNS, min_size=1, max_size=5), st.booleans())
def test_earlier_messages_keep_their_tokens(template: ChatTemplate, messages: list[Message], with_tools: bool) -> None:
    tools = TOOLS if with_tools else None
    whole = template.render_text(messages, tools)
    for end in range(1, len(messages)):
        before = template.render_text(messages[:end], tools, add_generation_prompt=messages[end]["role"] == "assistant")
        assert whole.startswith(before)


def test_only_tokens_of_the_assistant_are_trained(template: ChatTemplate) -> None:
    conversation: list[Message] = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "What is a fig?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_price", "arguments": '{"item": "fig"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "37"},
        {"role": "assistant", "content": "37"},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    tokenizer = template.tokenizer
    ids, text = encode(template, conversation, TOOLS, end_id=tokenizer.eos_token_id)
    assert len(ids) == len(text)
    runs: list[list[int]] = []
    for place, (token, own) in enumerate(zip(ids, text, strict=True)):
        if own and not text[place - 1]:
            runs.append([])
        if own:
            runs[-1].append(token)
    assert [tokenizer.decode(run) for run in runs] == [
        '<tool_call>\n{"name": "get_price", "arguments": {"item": "fig"}}\n</tool_call><|im_end|>',
        "37<|im_end|>",
    ]
    assert text[-1], "no text follows the last answer"
    assert ids == template.render(conversation[:5], TOOLS, add_generation_prompt=False)[: len(ids)]


def test_trained_answers_can_be_generated(folder: Path, template: ChatTemplate) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    end_id = model.config.eos_token_id
    conversation: list[Message] = [{"role": "user", "content": "fig?"}, {"role": "assistant", "content": "42"}]

    def only() -> Iterator[list[Message]]:
        while True:
            yield conversation

    warm_up(model, template, [(only(), 30)], None, batch_size=2)
    assert not model.training
    prompt = torch.tensor([template.render(conversation[:1])])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)[0]
    assert answer[prompt.shape[1] :].tolist() == [*template.tokenizer.encode("42"), end_id]


@pytest.mark.parametrize("shape", [(8, 8), (40, 10), (10, 40)])
def test_orthogonal_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.min() > 0.5
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonal(matrix) * (left @ right)).sum() > 0.9 * min(shape) * 0.9, "the directions are kept"


def test_muon_steps_have_the_size_of_the_learning_rate() -> None:
    weight = torch.zeros(20, 5, requires_grad=True)
    weight.grad = 1e-4 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=0.1).step()
    values = torch.linalg.svdvals(weight.detach())
    assert values.tolist() == pytest.approx([0.1 * 2] * 5, rel=0.4), (
        "times the root of 20 / 5, however small the gradient"
    )


def test_conversations_are_endless_and_differ() -> None:
    some = speech(random.Random(0).randint(0, 9))
    assert next(some) != next(some)
