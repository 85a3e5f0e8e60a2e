"""Calls rendered by chat templates are parsed alike by our formats and by vLLM's parsers, which run in its environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rllm.parser.chat_template import ChatTemplate
from rllm.parser.decoding import TextDecoder
from rllm.parser.template_shape import CALLS
from rllm.parser.tool_parser import tool_format_of_template, tool_parser

from ..models.calls import TEMPLATES, TOOLS, printed_calls
from ..models.conftest import template_folder, tokenizer_for

pytestmark = pytest.mark.vllm

NOT_READABLE = {
    "harmony": "vLLM's parser downloads a vocabulary",
    "cohere_command3": "vLLM's parser needs the package cohere_melody",
}
VLLM_DIFFERS = {
    "gemma4": "takes numbers within lists and objects as text, although the template quotes text and nothing else",
    "seed_oss": "takes lists, objects and None as text; the template prints them in Python's syntax",
    "qwen3_coder": "takes None as text, which most of the templates print for null",
    "lfm2": "finds no call of a tool with a hyphen in its name",
    "llama4_json": "finds no second call without a semicolon before it, which the template does not print",
    "phi4_mini_json": "ends the list of calls at the first bracket that closes, also one in the arguments",
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506": "takes the call's id as a part of the tool's name",
}
"""Formats, or templates, of which vLLM parses some calls differently from the rendered ones."""
CALLS_END_THE_ANSWER = ("llama3_json", "llama4_json", "mistral", "granite")
"""Formats in which calls followed by text are text for us, as the templates end the turn; vLLM parses them as calls."""
VLLM_NAMES = {"deepseek_r1": "deepseek_v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1": "deepseek_v31"}

TEXTS = ('it\'s a "quoted" café', "line\n🎉 {[<&>]}", "null", "\\d, k: v")
ARGUMENTS = [{"text": text, "count": 7, "more": {"list": [1.5, None, True], "text": text}} for text in TEXTS]


def _object(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _pair(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({name: arguments})


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


BY_HAND: dict[str, tuple[str, Callable[[str, dict[str, Any]], str], str]] = {
    "granite": ("<|tool_call|>[", _object, "]"),
    "hunyuan_a13b": ("<tool_calls>[", _object, "]</tool_calls>"),
    "jamba": ("<tool_calls>[", _object, "]</tool_calls>"),
    "phi4_mini_json": ("functools[", _object, "]"),
    "apertus": ("<|tools_prefix|>[", _pair, "]<|tools_suffix|>"),
    "pythonic": ("[", _python, "]"),
    "llama4_pythonic": ("<|python_start|>[", _python, "]<|python_end|>"),
}
"""Formats that no template of the survey renders: the text before the calls, the format of one, the text after."""


@dataclass(frozen=True)
class Case:
    """Texts of one template or format, each with its calls as lists of name and arguments."""

    name: str
    format: str
    tokenizer: Any
    texts: list[tuple[str, list[Any]]]

    def read(self, text: str) -> list[Any]:
        calls = tool_parser(self.format).for_tools(TOOLS).parse(text).tool_calls
        return [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in calls]


def printed(name: str) -> Case | None:
    """Return calls as a template prints them; None if it prints none that vLLM could read."""
    template = ChatTemplate(tokenizer_for(name))
    format_ = tool_format_of_template(template.text)
    if format_ is None or format_ in NOT_READABLE or CALLS in template.shape.lost:
        return None
    decoder = TextDecoder(template.tokenizer, markup=tool_parser(format_).markup)
    texts = [(decoder.text(each.ids), [list(call) for call in each.calls]) for each in printed_calls(name, 8)]
    return Case(name, format_, template.tokenizer, texts)


def written(name: str) -> Case:
    """Return calls in a format, two in each text."""
    before, write, after = BY_HAND[name]
    pairs = [[["look_up", one], ["look_up", two]] for one, two in pairwise(ARGUMENTS)]
    texts = [(before + ", ".join(write(*call) for call in calls) + after, calls) for calls in pairs]
    return Case(name, name, tokenizer_for("trl/llama3_1", "<tool_calls>", "</tool_calls>", "<|tool_call|>"), texts)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    found = [printed(name) for name in TEMPLATES if template_folder()] + [written(name) for name in BY_HAND]
    return {case.name: case for case in found if case}


@pytest.fixture(scope="module")
def read_by_vllm(cases: dict[str, Case], vllm_command: str, tmp_path_factory: Any) -> dict[str, list[Any]]:
    """Return what vLLM reads in the texts of each case, and in the same texts with a further line."""
    asked = []
    for number, case in enumerate(cases.values()):
        folder = str(tmp_path_factory.mktemp(f"tokenizer{number}"))
        case.tokenizer.save_pretrained(folder)
        parser = VLLM_NAMES.get(case.name) or VLLM_NAMES.get(case.format, case.format)
        texts = [text + end for end in ("", "\nDone.") for text, _ in case.texts]
        asked.append({"parser": parser, "tokenizer": folder, "tools": TOOLS, "texts": texts})
    program = [Path(vllm_command).with_name("python"), Path(__file__).with_name("parse_calls.py")]
    done = subprocess.run(program, input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", [*TEMPLATES, *BY_HAND])
def test_calls_are_parsed_alike(name: str, cases: dict[str, Case], read_by_vllm: dict[str, list[Any]]) -> None:
    if name not in cases:
        pytest.skip("prints no calls, or none that vLLM reads here")
    case = cases[name]
    assert [case.read(text) for text, _ in case.texts] == [calls for _, calls in case.texts]
    if not VLLM_DIFFERS.keys() & {case.name, case.format}:
        num_texts = len(case.texts)
        assert read_by_vllm[name][:num_texts] == [calls for _, calls in case.texts]
        if case.format not in CALLS_END_THE_ANSWER:
            assert read_by_vllm[name][num_texts:] == [case.read(f"{text}\nDone.") for text, _ in case.texts]


@pytest.mark.parametrize("known", VLLM_DIFFERS)
def test_known_differences_exist(known: str, cases: dict[str, Case], read_by_vllm: dict[str, list[Any]]) -> None:
    differing = [case for case in cases.values() if known in (case.name, case.format)]
    if not differing:
        pytest.skip("run `make test-vllm`")
    assert any(read_by_vllm[case.name][: len(case.texts)] != [calls for _, calls in case.texts] for case in differing)
