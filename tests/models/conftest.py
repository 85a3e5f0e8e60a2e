"""Published chat templates, each with a small byte-level tokenizer that has the template's special tokens.

`make test-models` unpacks them into `.templates`; no model weights are needed.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_MARKED = re.compile(r"<\|[^|<>\s]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|</?s>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]+\]")
_FURTHER = ("<seed:bos>", "<seed:eos>", "[e~[", "]~b]", "<SPECIAL_11>", "<SPECIAL_12>", "hy_eos")
_REASONING_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_REASONING_MARKUP += ("<seed:think>", "</seed:think>")
_HUNYUAN_MARKUP = tuple(
    f"<{slash}{tag}:opensource>"
    for tag in ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    for slash in ("", "/")
)


def template_folder() -> Path | None:
    """Return the folder of the unpacked templates, or None without `RLLM_TEMPLATES`."""
    return Path(os.environ["RLLM_TEMPLATES"]) if "RLLM_TEMPLATES" in os.environ else None


def template_names() -> list[str]:
    """Return the names of TRL's inference templates."""
    folder = template_folder()
    paths = sorted((folder / "trl").glob("*.jinja")) if folder else []
    return [path.stem for path in paths if not path.stem.endswith("_training")]


@cache
def template_text(name: str) -> str:
    """Return the text of a template, such as `llama.cpp/Qwen3-Coder`; names without a source are TRL's.

    Those that end in `_training` mark the answers with `{% generation %}`.
    """
    folder = template_folder()
    assert folder is not None, "run `make test-models`, which unpacks the templates"
    return (folder / f"{name if '/' in name else f'trl/{name}'}.jinja").read_text()


@cache
def tokenizer_for(name: str, *further: str) -> Any:
    """Return a tokenizer with 256 byte tokens, the special tokens of the template, further ones, and the template.

    Qwen's and most other tokenizers hold `<think>` and `<tool_call>` as added tokens that are not special.
    """
    text = template_text(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    named = {token if token != "hy_eos" else "<｜hy_eos:opensource｜>" for token in _FURTHER if token in text}
    named |= {"<|python_tag|>"} if "<|header_start|>" in text or "<|start_header_id|>" in text else set()  # Llama's
    special = sorted({*_MARKED.findall(text), *named, *further, "<bos>", "<|endoftext|>"})
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    markup = [token for token in _REASONING_MARKUP if token in text]
    markup += _HUNYUAN_MARKUP if ":opensource" in text else ()  # its template puts the tags together
    backend.add_tokens([AddedToken(token, normalized=False) for token in markup])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=text,
        clean_up_tokenization_spaces=False,
        **({"token_suffix": ":opensource"} if ":opensource" in text else {}),  # as in Hunyuan's settings
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes `template` once for each template."""
    if "template" in metafunc.fixturenames:
        metafunc.parametrize("template", template_names() or [pytest.param("none", marks=pytest.mark.skip)])


@pytest.fixture
def tokenizer(template: str) -> Any:
    """Return the tokenizer of the test's template."""
    return tokenizer_for(template)
