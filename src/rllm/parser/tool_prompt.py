"""Chat templates other than the model's own: a user's file, and one that teaches tools to a model without them.

`model.tool_prompt=hermes` is a chat template, too: a prelude that puts tools, calls and results into messages of roles
that the model knows, in front of the model's own template. So whatever renders messages (this process, a server, an
export) prints the same, and later turns continue sampled tokens as with any other template.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError

from rllm.config.schema import ModelConfig
from rllm.errors import ConfigError
from rllm.parser.bounded_template import render_bounded
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.decoding import Tokenizer
from rllm.parser.template_shape import SYSTEM
from rllm.parser.tool_parser import get_tool_parser

logger = logging.getLogger(__name__)

_MARK = "{#- rllm tool prompt: hermes -#}"
_PRELUDE = (
    _MARK
    + """
{%- macro rllm_text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}{%- for part in content -%}{{- part if part is string else part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set rllm = namespace(system="", list=[], text="", open=false) -%}
{%- for message in messages -%}
  {%- if loop.first and message.role in ("system", "developer") -%}
    {%- set rllm.system = rllm_text(message.content) -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {%- set rllm.system = rllm.system + ("\\n\\n" if rllm.system else "") + BEFORE_TOOLS -%}
  {%- for tool in tools -%}
    {%- set rllm.system = rllm.system + ("" if loop.first else "\\n") + (tool | tojson) -%}
  {%- endfor -%}
  {%- set rllm.system = rllm.system + AFTER_TOOLS -%}
{%- endif -%}
{%- if rllm.system and TAKES_SYSTEM -%}
  {%- set rllm.list = [{"role": "system", "content": SYSTEM(rllm.system)}] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {%- set rllm.text = rllm.text + ("\\n" if rllm.open else "") -%}
    {%- set rllm.text = rllm.text + "<tool_response>\\n" + rllm_text(message.content) + "\\n</tool_response>" -%}
    {%- set rllm.open = true -%}
  {%- elif message.role == "user" and (rllm.open or (rllm.system and not TAKES_SYSTEM)) -%}
    {%- set rllm.text = rllm.text if rllm.open else rllm.system -%}
    {%- set rllm.text = rllm.text + ("\\n" if rllm.open else "\\n\\n") + rllm_text(message.content) -%}
    {%- if not rllm.open and not TAKES_SYSTEM -%}{%- set rllm.system = "" -%}{%- endif -%}
    {%- set rllm.list = rllm.list + [{"role": "user", "content": USER(rllm.text)}] -%}
    {%- set rllm.open = false -%}{%- set rllm.text = "" -%}
  {%- elif not (loop.first and message.role in ("system", "developer")) -%}
    {%- if rllm.open -%}
      {%- set rllm.list = rllm.list + [{"role": "user", "content": USER(rllm.text)}] -%}
      {%- set rllm.open = false -%}{%- set rllm.text = "" -%}
    {%- endif -%}
    {%- if message.tool_calls -%}
      {%- set rllm.text = rllm_text(message.content) -%}
      {%- for call in message.tool_calls -%}
        {%- set call = call.function if call.function else call -%}
        {%- set rllm.text = rllm.text + ("\\n" if rllm.text else "") + '<tool_call>\\n{"name": "' + call.name -%}
        {%- set rllm.text = rllm.text + '", "arguments": ' -%}
        {%- set rllm.text = rllm.text + (call.arguments if call.arguments is string else call.arguments | tojson) -%}
        {%- set rllm.text = rllm.text + "}\\n</tool_call>" -%}
      {%- endfor -%}
      {%- set message = dict(message.items() | rejectattr("0", "equalto", "tool_calls"), content=ANSWER(rllm.text)) -%}
      {%- set rllm.text = "" -%}
    {%- endif -%}
    {%- set rllm.list = rllm.list + [message] -%}
  {%- endif -%}
{%- endfor -%}
{%- if rllm.open -%}{%- set rllm.list = rllm.list + [{"role": "user", "content": USER(rllm.text)}] -%}{%- endif -%}
{%- set messages = rllm.list -%}
{%- set tools = none -%}
{{- "" }}"""
)
"""Consecutive results are one turn, and a user's message after them joins it, as roles must alternate in many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateChoice:
    """Chat template to use in place of a model's own (`model.chat_template`, `model.tool_prompt`)."""

    chat_template: Path | None = None
    tool_prompt: str | None = None
    setting: str = "model.chat_template"
    """Name of the setting in error messages."""

    @classmethod
    def of(cls, model: ModelConfig) -> TemplateChoice:
        """Return the choice of a configuration's `model` section.

        Raises:
            ConfigError: if calls would be read in another format than they are taught in.
        """
        if model.tool_prompt is not None and model.tool_parser not in (None, model.tool_prompt):
            raise ConfigError(
                f"model.tool_parser={model.tool_parser!r}: model.tool_prompt={model.tool_prompt} teaches calls in "
                "its own format, which is also how they are read: leave model.tool_parser out"
            )
        return cls(chat_template=model.chat_template, tool_prompt=model.tool_prompt)

    def __bool__(self) -> bool:
        return self.chat_template is not None or self.tool_prompt is not None

    def read(self) -> str | None:
        """Return the text of the file that is named, or None if none is.

        Raises:
            ConfigError: if it cannot be read, or is not a jinja template.
        """
        if self.chat_template is None:
            return None
        name = f"{self.setting}={str(self.chat_template)!r}"
        try:
            text = self.chat_template.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} cannot be read ({error}): name a Jinja template file") from error
        if not text.strip():
            raise ConfigError(f"{name} is empty: name a Jinja template that prints messages")
        return text

    def apply(self, tokenizer: Tokenizer) -> None:
        """Give the tokenizer the chosen template, which is then saved with it.

        Raises:
            ConfigError: if the file cannot be read, or what it holds prints no messages; or if there is no template to
                put a tool prompt in front of.
        """
        if (text := self.read()) is not None:
            tokenizer.chat_template = text
            name = f"{self.setting}={str(self.chat_template)!r}"
            try:
                render_bounded(tokenizer, [{"role": "user", "content": "Hello."}], None, {})
            except TemplateSyntaxError as error:
                raise ConfigError(
                    f"{name} is not a valid Jinja template (line {error.lineno}: {error}): correct the file, or leave "
                    "out the setting"
                ) from error
            except Exception as error:  # it may want other messages, which the probes find out
                logger.debug("%s refuses a first probe: %s", name, error)
            try:
                _ = ChatTemplate(tokenizer).shape
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        if self.tool_prompt is not None:
            tokenizer.chat_template = with_tool_prompt(tokenizer)


def with_tool_prompt(tokenizer: Tokenizer) -> str:
    """Return the tokenizer's chat template with the tool prompt in front; unchanged if it has one already."""
    template = ChatTemplate(tokenizer)
    if template.text.startswith(_MARK):
        return template.text
    shape = template.shape
    before, after = get_tool_parser("hermes")().get_tool_prompt("\0").rstrip("\n").split("\0")
    values = {"BEFORE_TOOLS": before, "AFTER_TOOLS": after}
    prelude = _PRELUDE.replace("TAKES_SYSTEM", "false" if SYSTEM in shape.lost else "true")
    for name, value in values.items():
        prelude = prelude.replace(name, json.dumps(value, ensure_ascii=False))  # jinja reads JSON's escapes
    for name, role in {"SYSTEM": "system", "USER": "user", "ANSWER": "assistant"}.items():
        as_role = r'[{"type": "text", "text": \1}]' if role in shape.parts else r"\1"
        prelude = re.sub(rf"\b{name}\(([^()]*)\)", as_role, prelude)
    return prelude + template.text
