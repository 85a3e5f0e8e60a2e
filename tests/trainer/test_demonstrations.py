"""Rows to demonstrations: exactly the answers' tokens are trained, and sampled tokens are kept."""

from __future__ import annotations

import json
import logging
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rllm.config.schema import SFTConfig
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedTokenizer
from rllm.testing.tiny_policy import train_tokenizer
from rllm.trainer.demonstrations import FIELD, Demonstration, prepared
from rllm.trainer.sampled_rows import rows_of_items
from rllm.types import Message

TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "price", "arguments": '{"item": "fig"}'}}
SHOP: list[Message] = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "What does a fig cost?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
    {"role": "assistant", "content": "It costs 42"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
LOOK: Message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
ANSWERS = [
    '<tool_call>\n{"name": "price", "arguments": {"item": "fig"}}\n</tool_call><|im_end|>',
    "It costs 42<|im_end|>",
    "Yes<|im_end|>",
]


FORGETFUL = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1].lstrip() if not loop.last else message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


@pytest.fixture(scope="module")
def of() -> LoadedTokenizer:
    tokenizer = train_tokenizer(["What does a fig cost? It costs 42. Sure? Yes"] * 4, vocab_size=300)
    return LoadedTokenizer(tokenizer=tokenizer, num_ids=len(tokenizer), context_length=None)


def read(of: LoadedTokenizer, *rows: dict[str, Any], max_length: int | None = None, **config: Any) -> Dataset:
    return prepared(rows, of, SFTConfig(**config), max_length)


def only(of: LoadedTokenizer, row: dict[str, Any], **config: Any) -> Demonstration:
    (task,) = read(of, row, **config)
    shown: Demonstration = task[FIELD]
    return shown


def learned(of: LoadedTokenizer, shown: Demonstration) -> list[str]:
    return [of.tokenizer.decode(part.ids[start:stop]) for part in shown.shown for start, stop in part.spans]


def test_unknown_tokens_are_rejected(of: LoadedTokenizer) -> None:
    largest = max(only(of, {"messages": [SHOP[1], SHOP[6]]}).shown[0].ids)
    with pytest.raises(ConfigError, match=rf"row 0: messages have .*, token {largest} of the tokenizer"):
        read(replace(of, num_ids=largest), {"messages": [SHOP[1], SHOP[6]]})


def test_table_rows_are_trained_like_json_rows(of: LoadedTokenizer, tmp_path: Path) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", "properties": {field: {"type": "string"} for field in arguments}}
        called = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        asked = {"role": "assistant", "content": None, "tool_calls": [called]}
        return {"messages": [SHOP[1], asked, *SHOP[3:5]], "tools": tools}

    rows = [row("price", {"item": "fig"}), row("order", {"fruit": "fig", "number": "2"})]
    as_text = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_text), tmp_path / "text.parquet")
    of_json = [task[FIELD] for task in read(of, *Dataset.load(tmp_path / "t.jsonl"))]
    text = "".join(of.tokenizer.decode(part.ids) for shown in of_json for part in shown.shown)
    assert ("fig" in text, "null" in text, "None" in text) == (True, False, False)
    for rows in (Dataset.load(tmp_path / "t.parquet"), Dataset.load(tmp_path / "text.parquet"), rows_of_items(as_text)):
        assert [task[FIELD] for task in read(of, *rows)] == of_json


@pytest.mark.parametrize("method", ["cumulative", "stepwise"])
def test_only_answers_are_trained(of: LoadedTokenizer, method: str) -> None:
    row = {"messages": SHOP, "tools": TOOLS}
    assert learned(of, only(of, row, tokenize_method=method)) == ANSWERS
    assert learned(of, only(of, row, tokenize_method=method, train_on="last")) == ANSWERS[-1:]


@pytest.mark.parametrize("method", ["cumulative", "stepwise"])
def test_quoted_control_tokens_are_text(of: LoadedTokenizer, method: str) -> None:
    quoted = "<|im_end|>\n<|im_start|>assistant\n"
    messages = [{**message, "content": f"{message['content'] or ''}{quoted}!"} for message in SHOP]
    end, start = of.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    for part in only(of, {"messages": messages, "tools": TOOLS}, tokenize_method=method).shown:
        for span_start, stop in part.spans:
            assert list(part.ids[span_start:stop]).count(end) == 1
            assert part.ids[stop - 1] == end
            assert start not in part.ids[span_start:stop]
    assert list(part.ids).count(start) == len(SHOP)


def test_conversation_is_one_text_up_to_its_last_answer(of: LoadedTokenizer) -> None:
    (part,) = only(of, {"messages": [*SHOP, {"role": "user", "content": "Thanks"}], "tools": TOOLS}).shown
    whole = of.tokenizer.apply_chat_template(SHOP, tools=TOOLS, tokenize=False)
    assert of.tokenizer.decode(part.ids) == whole.removesuffix("\n")


def test_steps_of_a_demonstration_continue_each_other(of: LoadedTokenizer) -> None:
    steps = only(of, {"messages": SHOP, "tools": TOOLS}).trajectory().steps
    assert [of.tokenizer.decode(step.response_ids) for step in steps] == ANSWERS
    for earlier, later in pairwise(steps):
        whole = [*earlier.prompt_ids, *earlier.response_ids]
        assert later.prompt_ids[: len(whole)] == whole
    assert {len(step.logprobs) for step in steps} == {0}


def test_messages_of_weight_zero_are_read_but_not_trained(of: LoadedTokenizer) -> None:
    messages = [dict(message) for message in SHOP]
    messages[4]["weight"] = 0
    for method in ("cumulative", "stepwise"):
        shown = only(of, {"messages": messages, "tools": TOOLS}, tokenize_method=method)
        assert learned(of, shown) == [ANSWERS[0], ANSWERS[2]]


def test_null_field_counts_as_missing(of: LoadedTokenizer) -> None:
    messages = [{**message, "weight": None} for message in SHOP]
    row = {"messages": messages, "tools": None, "steps": None, "name": None, "task_id": None, "reward": None}
    (with_nulls,), (without,) = read(of, row), read(of, {"messages": SHOP})
    assert with_nulls == without


def test_sampled_tokens_are_kept(of: LoadedTokenizer) -> None:
    steps = [
        {"prompt_ids": [5, 6], "response_ids": [7, 7, 7]},
        {"prompt_ids": [5, 6, 7, 7, 7, 8], "response_ids": [9]},
        {"prompt_ids": [1], "response_ids": []},
    ]
    row = {"steps": steps, "messages": SHOP[:2], "reward": 0.5, "name": "solver"}
    trajectory = only(of, row).trajectory()
    assert [(step.prompt_ids, step.response_ids) for step in trajectory.steps] == [
        ([5, 6], [7, 7, 7]),
        ([5, 6, 7, 7, 7, 8], [9]),
    ]
    assert (trajectory.reward, trajectory.name) == (0.5, "solver")
    assert [step.response_ids for step in only(of, row, train_on="last").trajectory().steps] == [[9]]


@pytest.mark.parametrize(
    ("row", "expected_message"),
    [
        ({}, r"row 0: messages=None: use a list of chat messages, or `steps`.*the row has no fields"),
        ({"question": "?"}, r"the row has 'question'"),
        ({"messages": "hello"}, "messages='hello'"),
        ({"messages": SHOP, "tools": "price"}, "row 0: tools='price'"),
        ({"messages": SHOP, "tools": ["price"]}, r"row 0: tools=\['price'\]"),
        ({"messages": []}, "row 0: no assistant message"),
        ({"messages": SHOP[:2]}, "no assistant message"),
        (
            {"messages": [SHOP[1], {**SHOP[6], "weight": 0}]},
            "no assistant message whose weight is not 0",
        ),
        (
            {"messages": [SHOP[1], {**SHOP[6], "weight": 0.5}]},
            r"messages\[1\].weight=0.5: use 1 for an answer to learn",
        ),
        ({"messages": [SHOP[6]]}, r"messages\[0\]\.role='assistant'"),
        ({"messages": [SHOP[1], {"content": "no role"}, SHOP[6]]}, r"messages\[1\].*string 'role'"),
        ({"messages": [{"role": "user", "content": 7}, SHOP[6]]}, r"messages\[0\]\.content=7"),
        (
            {"messages": [SHOP[1], {"role": "assistant", "content": None, "function_call": CALL["function"]}]},
            r"row 0: messages\[1\]\.function_call",
        ),
        ({"messages": [LOOK, SHOP[6]]}, "row 0: messages have parts of type image_url, .*: leave the row out"),
        ({"messages": [LOOK], "steps": [{"prompt_ids": [1], "response_ids": [1]}]}, "parts of type image_url"),
        ({"steps": [{"response_ids": [1]}]}, r"steps\[0\] has response_ids but no prompt_ids"),
        ({"steps": [{"prompt_ids": [1]}]}, "steps hold no response_ids"),
        ({"steps": "all"}, "row 0: steps='all': use a list of objects with prompt_ids and response_ids"),
        (
            {"steps": [{"prompt_ids": ["a"], "response_ids": [1]}]},
            r"steps\[0\].prompt_ids: use a list of whole numbers",
        ),
        ({"steps": [{"prompt_ids": [-3], "response_ids": [1]}]}, r"steps\[0\] has the token id -3, and"),
        ({"steps": [{"prompt_ids": [1], "response_ids": [999_999]}]}, "token id 999999, and the model has"),
    ],
)
def test_untrainable_row_is_reported(of: LoadedTokenizer, row: dict[str, Any], expected_message: str) -> None:
    with pytest.raises(ConfigError, match=expected_message):
        read(of, row)


def test_tokens_of_another_tokenizer_are_rejected(of: LoadedTokenizer) -> None:
    message = "It costs 42"
    row = {
        "messages": [SHOP[1], {"role": "assistant", "content": message}],
        "steps": [{"prompt_ids": [5], "response_ids": of.tokenizer.encode(message)}],
    }
    other = {**row, "steps": [{"prompt_ids": [5], "response_ids": list(message.encode())}]}
    own_words = {
        "messages": [SHOP[1], {"role": "assistant", "content": "As the agent tells it"}],
        "steps": row["steps"],
    }
    assert len(read(of, row, own_words)) == 2
    with pytest.raises(ConfigError, match=r"no row's token ids .* 'It costs 42'"):
        read(of, other, other)


@pytest.mark.parametrize("method", ["cumulative", "stepwise"])
def test_template_without_tool_calls_is_rejected_with_the_row(method: str) -> None:
    tokenizer = train_tokenizer(["What does a fig cost? It costs 42. Sure? Yes"] * 4, vocab_size=300)
    tokenizer.chat_template = FORGETFUL
    silent = LoadedTokenizer(tokenizer=tokenizer, num_ids=len(tokenizer), context_length=None)
    with pytest.raises(ConfigError, match=r"row 0: .* leaves out tools.*model\.tool_prompt=hermes"):
        read(silent, {"messages": SHOP, "tools": TOOLS}, tokenize_method=method)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{% if m.role != 'system' %}", "system"),
        ("{% if m.role in ('system', 'user', 'assistant') %}", "tool"),
        ("{% if 1 %}", ""),
    ],
)
def test_rows_with_incomplete_prompts_are_rejected(of: LoadedTokenizer, text: str, named: str) -> None:
    tokenizer = deepcopy(of.tokenizer)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}"
        + text
        + "<|im_start|>{{ m.role }}{{ m.content }}{{ m.tool_calls }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    other = LoadedTokenizer(tokenizer=tokenizer, num_ids=of.num_ids, context_length=None)
    if not named:
        assert len(read(other, {"messages": SHOP, "tools": TOOLS})) == 1
        return
    with pytest.raises(ConfigError, match=rf"row 0: .*role '{named}'.*model\.chat_template"):
        read(other, {"messages": SHOP, "tools": TOOLS})


def test_untrained_text_next_to_calls_is_counted(of: LoadedTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = deepcopy(of.tokenizer)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}"
        "{{ m.tool_calls if m.tool_calls else m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    other = LoadedTokenizer(tokenizer=tokenizer, num_ids=of.num_ids, context_length=None)
    beside = [{**message, "content": "Let me see."} if message.get("tool_calls") else message for message in SHOP]
    read(other, {"messages": beside, "tools": TOOLS}, {"messages": SHOP[-2:]})
    assert "1 of 2 rows have text alongside tool calls" in caplog.text


def test_template_that_is_not_append_only_is_rejected() -> None:
    tokenizer = train_tokenizer(["a fig"], vocab_size=300)
    tokenizer.chat_template = (
        "{% for message in messages | reverse %}{{ message.role }}{{ message.content }}{% endfor %}"
    )
    of = LoadedTokenizer(tokenizer=tokenizer, num_ids=len(tokenizer), context_length=None)
    with pytest.raises(ConfigError, match=r"row 0: the chat template.*append-only"):
        read(of, {"messages": SHOP[:2] + SHOP[4:]})


def test_template_that_drops_reasoning_is_logged_once(of: LoadedTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    thoughtful = [SHOP[1], {"role": "assistant", "content": "<think>\n40 + 2\n</think>\n\n42"}, SHOP[5], SHOP[6]]
    tokenizer = train_tokenizer(["a fig"], vocab_size=300)
    tokenizer.chat_template = FORGETFUL
    forgetful = LoadedTokenizer(tokenizer=tokenizer, num_ids=len(tokenizer), context_length=None)
    rows = [{"messages": thoughtful}] * 2
    with caplog.at_level(logging.WARNING):
        read(of, *rows)
        read(forgetful, *rows, tokenize_method="stepwise")
        assert not caplog.records
        read(forgetful, *rows)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["sft.tokenize_method=cumulative"]


def test_overlong_rows_are_counted_and_left_out(of: LoadedTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    short = {"messages": [SHOP[1], SHOP[6]]}
    limit = only(of, short).num_tokens
    with caplog.at_level(logging.WARNING):
        data = read(of, {"messages": SHOP}, short, {**short, "task_id": "own"}, max_length=limit)
    assert [data.task_id(row) for row in range(len(data))] == ["1", "own"]
    assert f"1 of 3 demonstrations are longer than the {limit} tokens that model.max_length or" in caplog.text
    with pytest.raises(ConfigError, match=r"1 of 1 demonstrations are longer.*nothing is left"):
        read(of, {"messages": SHOP}, max_length=limit)
