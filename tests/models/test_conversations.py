"""Random conversations of several turns: each prompt begins with the prompt and the answer before it, token for token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.parser import ChatTemplateParser
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.continuation import Continuation
from rllm.parser.template_shape import BESIDE_CALLS, CALLS, FURTHER_CALLS, RESULTS, SYSTEM
from rllm.parser.template_shape import TOOLS as TOOLS_LOST
from rllm.trainer.checkup import judged_turns
from rllm.types import Message

from .calls import QUESTION, TEMPLATES, TOOLS, arguments
from .conftest import template_folder, tokenizer_for

pytestmark = pytest.mark.models

ASKED = ("How many?", "Go on.\n", "  And\n\n then?", "<b>why</b>", "ok 🎉", "1")
ANSWERS = ("Seven.", "It is 4,\nso yes.", "Well: {x}", "Sure 🎉", "no")
SYSTEM_PROMPT: Message = {"role": "system", "content": "Be kind."}
THOUGHTS = ("I count.", "two,\n\ntwo", "Hm, 日本")
TEXT_AFTER_RESULTS = (
    *("trl/gemma4", "trl/gemma4_v3", "trl/gemma4_v4", "trl/gemma4_v5", "trl/diffusion_gemma"),
    "llama.cpp/google-gemma-4-31B-it",
)
"""Templates that print the text beside calls after the calls' results, where no model writes it."""
HEADER_AFTER_RESULTS = ("trl/diffusion_gemma",)
"""Templates that print a header before an answer to results, but not in the prompt for it."""
RESULT_TEXTS = ("4", '{"a": 1}', "no\nfigs")


class Conversations:
    """Generator of conversations that a template takes."""

    def __init__(self, template: ChatTemplate) -> None:
        self._lost = template.shape.lost
        self.takes_tools = not {TOOLS_LOST, CALLS, RESULTS} & self._lost.keys()
        call = self._calls(random.Random(0), 0, 1)
        result = self._results(random.Random(0), call)
        self._takes_two_users = _takes(template, [QUESTION, QUESTION])
        self._takes_user_after_result = _takes(template, [QUESTION, call, *result, QUESTION])

    def draw(self, source: random.Random, *, with_tools: bool, with_reasoning: bool) -> list[Message]:
        """Return a conversation with three answers, the last of which another message follows."""
        messages: list[Message] = []
        if SYSTEM not in self._lost and source.random() < 0.5:
            messages.append(SYSTEM_PROMPT)
        messages += self._users(source)
        for turn in range(3):
            answer: Message = {"role": "assistant", "content": source.choice(ANSWERS)}
            if with_tools and source.random() < 0.6:
                number = 1 if FURTHER_CALLS in self._lost else source.randint(1, 2)
                answer = self._calls(source, turn, number)
                messages += [answer, *self._results(source, answer)]
                if self._takes_user_after_result and source.random() < 0.2:
                    messages += self._users(source)
            else:
                messages += [answer, *self._users(source)]
            if with_reasoning and source.random() < 0.6:
                answer["reasoning_content"] = source.choice(THOUGHTS)
                answer["content"] = "" if answer.get("tool_calls") else answer["content"]  # gpt-oss takes one of them
        return messages

    def _users(self, source: random.Random) -> list[Message]:
        number = 2 if self._takes_two_users and source.random() < 0.3 else 1
        return [{"role": "user", "content": source.choice(ASKED)} for _ in range(number)]

    def _calls(self, source: random.Random, turn: int, number: int) -> Message:
        names = [source.choice(["look_up", "add-2"]) for _ in range(number)]
        calls = [
            {"id": f"call0{turn}{place:03}", "type": "function", "function": {"name": name, "arguments": written}}
            for place, name in enumerate(names)
            for written in [json.dumps(arguments(source))]
        ]
        text = "" if BESIDE_CALLS in self._lost or source.random() < 0.5 else source.choice(ANSWERS)
        return {"role": "assistant", "content": text, "tool_calls": calls}

    def _results(self, source: random.Random, answer: Message) -> list[Message]:
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": source.choice(RESULT_TEXTS),
            }
            for call in answer["tool_calls"]
        ]


def _takes(template: ChatTemplate, messages: list[Message]) -> bool:
    try:
        return bool(template.render_text(messages, TOOLS))
    except ConfigError:
        return False


def moved(template: ChatTemplate, first: list[Message], tools: Any) -> bool:
    """Return whether a later question changes how the first messages are printed, as Mistral's templates move tools."""
    answer: Message = {"role": "assistant", "content": "Seven."}
    printed = template.render_text(first, tools, add_generation_prompt=False)
    return not template.render_text([*first, answer, QUESTION], tools).startswith(printed)


def sampled(template: ChatTemplate, answer: Message, tools: Any) -> list[int]:
    """Return a model's tokens for this answer: as the template renders it after a first question, up to its end."""
    tokenizer: Any = template.tokenizer
    try:
        _, ids, mask = ChatTemplateParser(tokenizer).tokenize_and_mask([QUESTION, answer], tools)
        return [token for token, learned in zip(ids, mask, strict=True) if learned]
    except ConfigError:  # the prompt has a part that the printed answer lacks
        ids, _ = template.printed_answer(QUESTION, answer, tools)
        ends = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        return ids[: max(place for place, token in enumerate(ids, 1) if token in ends)]


def drawn(template: ChatTemplate, number: int) -> Iterator[tuple[set[str], list[Message]]]:
    """Yield conversations, each with the kinds of turns in it as `judged_turns` names them."""
    conversations = Conversations(template)
    for seed in range(number):
        with_tools, with_reasoning = conversations.takes_tools and seed % 2 == 1, seed % 3 == 2
        messages = conversations.draw(random.Random(seed), with_tools=with_tools, with_reasoning=with_reasoning)
        kinds = {"answers"}
        kinds |= {"tool calls"} if any("tool_calls" in message for message in messages) else set()
        kinds |= {"reasoning"} if any("reasoning_content" in message for message in messages) else set()
        yield kinds, messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_begin_with_earlier_turns(name: str) -> None:
    if template_folder() is None:
        pytest.skip("run `make test-models`")
    tokenizer = tokenizer_for(name)
    template = ChatTemplate(tokenizer)
    continuation, judged = Continuation(tokenizer, template), judged_turns(template, tokenizer)
    for kinds, messages in drawn(template, 6):
        if not all(judged[kind].continued for kind in kinds):
            continue
        tools = TOOLS if "tool calls" in kinds else None
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        first = messages[: places[0]]
        changes_turns = "reasoning" in kinds or moved(template, first, tools) or any(judged[kind].why for kind in kinds)
        changes_turns |= name in HEADER_AFTER_RESULTS and "tool calls" in kinds
        prompt = template.render(messages[: places[0]], tools)
        for place, end in zip(places, [*places[1:], len(messages)], strict=True):
            known = prompt + sampled(template, messages[place], tools)
            prompt = continuation.prompt_ids(known, messages[:end], place + 1, tools)
            assert prompt[: len(known)] == known
            by_template = template.render_text(messages[:end], tools)
            if messages[place].get("tool_calls") and messages[place]["content"] and name in TEXT_AFTER_RESULTS:
                break
            assert by_template.endswith(tokenizer.decode(prompt[len(known) :]))
            assert by_template == tokenizer.decode(prompt) or changes_turns
