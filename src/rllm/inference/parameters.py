"""Fields of a chat request and their effect on the embedded engine; other dialects have tables of the same form.

A field has a key: `name`; `name.member` of an object; `name[kind]` of a text, of an object with a `type`, or of one in
a list; `name[*]` stands for all other kinds. `tools[].member` is a member of any tool. The date at the end of a kind is
left out: `tools[bash]` is `bash_20250124`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rllm.capture.side_calls import asks_for_title
from rllm.inference.engine import ParameterError
from rllm.types import JSONMapping, JSONObject

logger = logging.getLogger(__name__)

HONOURED, NO_EFFECT, NAMED, REFUSED = "honoured", "no effect", "named", "refused"
"""Effects of a field. `named` fields ask for something that is not done; `no effect` cannot change an answer by its
meaning."""
PASSED_ON = "passed on"
"""Fate of a field that is sent to a server unchanged; `passed on as NAME` names its chat field."""

MAX_TOP_LOGPROBS = 20
_DATE = re.compile(r"_20\d\d_?\d\d_?\d\d\Z")
_INNER = re.compile(r"[.\[]")
_TRANSLATED = frozenset({"messages", "input", "content"})
"""Fields whose kinds are checked where they are translated."""
_LONGEST_KIND = 80
_MAX_LOGGED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One documented field."""

    key: str
    fates: tuple[str, ...]  # one for each column of the table
    remark: str
    """Printed in the documentation; of a refused field, the remedy in the error message."""


def field_of(key: str) -> str:
    """Return the name of a key's field."""
    return _INNER.split(key)[0]


def _start_of(key: str) -> str:
    """Return a key up to the bracket of its kind, or to the point of its member."""
    head, bracket, _ = key.partition("[")
    return head + bracket if bracket else f"{field_of(key)}."


class Table:
    """The documented fields of a dialect, by key, which `docs/parameters.md` prints.

    Chat completions have a fate on the embedded engine, and reach a server unchanged. Other dialects have two
    fates. `=KEY` stands for the fate of the chat field that the field is translated to; a field with the fate `=` is
    sent to the server unchanged.
    """

    def __init__(self, text: str) -> None:
        """Read lines such as `KEY, KEY | FATE | FATE | REMARK`."""
        self.rows: dict[str, Row] = {}
        for line in filter(None, map(str.strip, text.split("\n"))):
            keys, *fates, remark = (cell.strip() for cell in line.split("|"))
            self.rows |= {key: Row(key=key, fates=tuple(fates), remark=remark) for key in keys.split(", ")}
        inner = {_start_of(key) for key in self.rows if field_of(key) not in _TRANSLATED | {key}}
        self._inner = frozenset(inner)
        """Beginnings of the keys of kinds and of members, such as `tools[` and `text.`."""
        self._nested = set(map(field_of, inner))
        self.own_fields = frozenset(
            key for key, row in self.rows.items() if key == field_of(key) and not row.fates[-1].startswith("=")
        ) - {"model", "stream"}
        """Fields of another dialect that a chat request does not have, or has under another name."""
        self.own_names: dict[str, str] = {}
        """The dialect's own keys of chat fields, by the chat's, where they differ."""
        for key, row in self.rows.items():
            for fate, prefix in zip(row.fates, ("=", f"{PASSED_ON} as "), strict=False):
                chat_key = fate.removeprefix(prefix)
                if fate.startswith(prefix) and len(row.fates) > 1 and chat_key not in self.rows:
                    self.own_names.setdefault(chat_key, key)

    def row_of(self, key: str) -> Row | None:
        """Return the row of a key, or of all other kinds of its field, if there is one."""
        others = None if "[]" in key else f"{key.partition('[')[0]}[*]"
        return self.rows.get(key) or self.rows.get(others or key)

    def rows_in(self, request: JSONMapping) -> dict[str, Row | None]:
        """Return the rows of all that a request asks for, by key; `None` for what has none.

        That is a field, a kind of a field that has kinds, or a member of one that has members; a tool has any members.
        """
        rows: dict[str, Row | None] = {}
        for name, value in request.items():
            if value is not None and value not in NEUTRAL.get(name, ()):
                rows[name] = self.rows.get(name)
                for key in _inner_keys(name, value) if name in self._nested else ():
                    row = self.row_of(key)
                    if row is not None or ("[]" not in key and _start_of(key) in self._inner):
                        rows[key] = row
        return rows


CHAT = Table("""
messages, stream, seed, temperature, top_p, stop, logprobs | honoured |
model | no effect | there is one model, under any name
n | honoured | each answer with a seed of its own
max_tokens, max_completion_tokens | honoured | limited by the remaining context
top_logprobs | honoured | up to 20, with `logprobs`
messages[system], messages[developer], messages[user], messages[assistant], messages[tool] | honoured |
messages[function] | honoured | as far as the chat template prints it
content[text], content[refusal] | honoured |
content[image_url], content[input_audio], content[file] | refused | send text; the embedded engine reads nothing else
tools, tools[function], tool_choice, tool_choice[auto], tool_choice[none] | honoured |
tools[custom], tools[*] | refused | define it as a function
tools[].strict | named | arguments are not held to the schema
tool_choice[required], tool_choice[function] | named | the model may answer without a call
tool_choice[custom] | refused | define the tool as a function
tool_choice[allowed_tools] | honoured | only these tools are shown
parallel_tool_calls | named | the model may make several calls
functions, function_call | refused | send `tools` and `tool_choice`
response_format, response_format[text] | honoured |
response_format[json_object], response_format[json_schema] | refused | decoding is not constrained: sample with vLLM
response_format[*] | refused | decoding is not constrained: sample with vLLM
modalities, modalities[text] | honoured |
modalities[audio], modalities[*], audio | refused | answers are text
web_search_options | refused | web search is not supported: provide it as a tool
stream_options, stream_options.include_usage | honoured |
stream_options.include_obfuscation | no effect |
frequency_penalty, presence_penalty, logit_bias | named |
reasoning_effort | named | `chat_template_kwargs` has the template's own switches
verbosity, moderation | named |
metadata, store, user, service_tier, safety_identifier | no effect |
prompt_cache_key, prompt_cache_options, prompt_cache_retention | no effect | common prefixes are cached in any case
prediction | no effect |
top_k, stop_token_ids, ignore_eos, chat_template_kwargs | honoured | vLLM's
return_token_ids, return_tokens_as_token_ids | honoured | vLLM's
min_p, repetition_penalty, length_penalty, min_tokens, bad_words, allowed_token_ids | named | vLLM's
structured_outputs, guided_json, guided_regex | refused | decoding is not constrained: sample with vLLM
guided_choice, guided_grammar | refused | decoding is not constrained: sample with vLLM
""")
"""Chat completions on the embedded engine: `KEY | FATE | REMARK`. Any other field is named."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include": ([],),
    "background": (False,),
    "echo": (False,),
}
"""Values of fields that ask for nothing, besides `null`."""


def _inner_keys(name: str, value: object) -> Iterator[str]:
    """Yield the keys of the kinds and members of a field."""
    values = value if isinstance(value, list) else [value]
    for kind in filter(None, map(_kind, values)):
        yield f"{name}[{_DATE.sub('', kind)}]"
    if isinstance(value, dict):
        for member, inner in value.items():
            if inner is not None and member != "type":
                yield f"{name}.{member}"
                if isinstance(inner, dict) and (inner_kind := _kind(inner)):
                    yield f"{name}.{member}[{inner_kind}]"
    elif name == "tools":
        for tool in values:
            described = {**_object(tool), **_object(_object(tool).get("function"))}
            yield from (f"tools[].{member}" for member, inner in described.items() if inner not in (None, False, []))


def _kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else value
    return kind[:_LONGEST_KIND] if isinstance(kind, str) else None


def _object(value: object) -> JSONObject:
    return value if isinstance(value, dict) else {}


def ignored(request: JSONMapping) -> list[str]:
    """Return the keys of a chat request that the embedded engine ignores."""
    rows = CHAT.rows_in(request)
    named = [key for key, row in rows.items() if row is None or NAMED in row.fates]
    title = ["response_format[json_schema]"] if asks_for_title(request.get("response_format")) else []
    return named + title


def check_request(request: JSONMapping) -> None:
    """Check a chat request for what the embedded engine refuses.

    Titles that programs such as Claude Code and opencode request besides their task may have any format.

    Raises:
        ParameterError: naming the field and the remedy.
    """
    title = asks_for_title(request.get("response_format"))
    for key, row in CHAT.rows_in(request).items():
        if row is not None and REFUSED in row.fates and not (title and key.startswith("response_format")):
            raise ParameterError(f"{key} is not supported by the embedded engine: {row.remark}", key)
    for name in ("tool_choice", "response_format"):
        if (value := request.get(name)) is not None and not _kind(value):
            raise ParameterError(f"{name}={value!r:.80}: use a text, or an object with a 'type'", name)
    top = request.get("top_logprobs")
    if top is not None and not (type(top) is int and 0 <= top <= MAX_TOP_LOGPROBS):
        raise ParameterError(
            f"top_logprobs={top!r:.80}: use a whole number from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs"
        )


_logged: set[str] = set()


def log_ignored(keys: Iterable[str], shown: Mapping[str, str] | None = None) -> None:
    """Log each key once per process, under its name in `shown`; a few hundred at most."""
    for key in keys:
        if key not in _logged and len(_logged) < _MAX_LOGGED:
            _logged.add(key)
            logger.warning(
                "%s has no effect (logged once; the gateway names it in the header x-rllm-ignored of each answer)",
                printable((shown or {}).get(key, key)),
            )


def printable(key: str) -> str:
    """Return a key without characters that are not allowed in headers and log lines: clients send any."""
    return re.sub(r"[^\w.\[\]-]", "?", key, flags=re.ASCII)[:80]
