"""Each template of TRL's wheel renders a plain conversation through our parser, or is rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from rllm.parser.chat_template import ChatTemplate

from .conftest import template_names

pytestmark = pytest.mark.models


def test_wheel_contains_its_templates() -> None:
    assert len(template_names()) >= 41


def test_template_renders_a_question(template: str, tokenizer: Any) -> None:
    text = ChatTemplate(tokenizer).render_text([{"role": "user", "content": "What is 2 + 2?"}])
    assert text
