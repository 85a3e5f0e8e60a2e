"""The table of families: each row is computed, and has a reason for each inexact property."""

from __future__ import annotations

import pytest

from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_parser import chosen_format, log_unread_calls, tool_parser

from .conftest import template_folder, template_names, tokenizer_for
from .survey import FAMILIES, row

pytestmark = pytest.mark.models


def test_every_inference_template_of_trl_is_listed() -> None:
    listed = {name for names in FAMILIES.values() for name in names}
    assert {f"trl/{name}" for name in template_names()} <= listed


@pytest.mark.parametrize("family", FAMILIES)
def test_inexact_templates_have_a_reason(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """A template with a format of calls, not all of which are read, is also reported when its model is loaded."""
    if template_folder() is None:
        pytest.skip("run `make test-models`")
    for name in FAMILIES[family]:
        found = row(family, name)
        assert found.reason or (found.reads_calls and found.exact_turns)
        caplog.clear()
        template = ChatTemplate(tokenizer_for(name))
        log_unread_calls(template, tool_parser(chosen_format(None, template.text)))
        assert len(caplog.records) == bool(found.tool_format and not found.reads_calls)
