import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from rllm.inference.model_folder import missing_files
from rllm.trainer.checkup import (
    generation_finding,
    model_findings,
    template_findings,
    training_bytes,
)

from ...parser.conftest import TEMPLATES, _trained

PLAIN = """{{- tools -}}
{%- for m in messages -%}{{ "<|im_start|>" + m.role + "\n" + m.content }}{{ m.tool_calls }}{{ "<|im_end|>\n" }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}"""
LAST_FIRST = """{{- tools -}}
{%- for m in messages | reverse -%}{{ m.role + ":" + m.content + "\n" }}{{ m.tool_calls }}{%- endfor -%}"""
NO_TOOLS = PLAIN.replace("{{- tools -}}", "").replace("{{ m.tool_calls }}", "")
NO_SYSTEM = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}" + PLAIN


def finding(template: str):
    tokenizer = deepcopy(_trained())
    tokenizer.chat_template = template
    [found] = template_findings(tokenizer)
    return found


def test_append_only_template_passes() -> None:
    found = finding(PLAIN)
    assert (found.ok, found.detail) == (True, "append-only: it prints earlier turns as it did at first")


CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"


def test_template_without_generation_prompt_is_append_only() -> None:
    """Mistral's: the user's turn ends with the token that opens an answer."""
    end = "{{ '<|im_end|>' if m.role == 'assistant' else '[/INST]' }}"
    found = finding("{{ tools }}{% for m in messages %}[INST]{{ m.content }}" + CALLS + end + "{% endfor %}")
    assert (found.ok, found.detail) == (True, "append-only: it prints earlier turns as it did at first")


def test_template_that_opens_an_answer_after_every_message_is_reported() -> None:
    """Command A's: the header of an answer follows each message of any role."""
    header = "<|im_end|>assistant<|im_start|>"
    found = finding("{{ tools }}{% for m in messages %}{{ m.content }}" + CALLS + header + "{% endfor %}")
    assert not found.ok
    assert "after an answer" in found.detail


def test_template_that_drops_earlier_reasoning_is_reported() -> None:
    found = finding(TEMPLATES["qwen"])
    assert (found.ok, found.needed) == (False, False)
    assert found.detail == "not append-only: it prints earlier answers, reasoning, tool calls differently than at first"
    assert "gateway.exact_turns" in found.fix


def test_template_that_reorders_messages_cannot_be_continued() -> None:
    found = finding(LAST_FIRST)
    assert not found.ok
    assert "sampled tokens" in found.detail


@pytest.mark.parametrize(
    ("template", "expected", "remedy"),
    [
        (NO_TOOLS, "prints no tools, tool calls", "model.tool_prompt=hermes"),
        (NO_SYSTEM, "refuses system messages (TemplateError: no system role)", "model.chat_template=PATH"),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "prints no text of user messages",
            "model.chat_template=PATH",
        ),
    ],
)
def test_template_that_omits_content_is_reported(template: str, expected: str, remedy: str) -> None:
    found = finding(template)
    assert not found.ok
    assert found.detail.endswith(expected) or expected in found.detail
    assert remedy in found.fix
    assert found.fix.count("model.chat_template=PATH") == 1


def test_missing_template_is_reported() -> None:
    tokenizer = deepcopy(_trained())
    tokenizer.chat_template = None
    [found] = template_findings(tokenizer)
    assert (found.ok, found.needed) == (False, True)
    assert "chat_template.jinja" in found.fix


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, ""),
        ({"eos_token_id": 2, "temperature": 1.0, "top_k": 0, "do_sample": True}, ""),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "asks for temperature=0.6, top_p=0.95, top_k=20"),
        ({"repetition_penalty": 1.05}, "asks for repetition_penalty=1.05"),
    ],
)
def test_sampling_recommended_by_the_model_is_reported(
    settings: dict[str, float] | None, expected: str, tmp_path: Path
) -> None:
    if settings is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    found = generation_finding(tmp_path)
    assert found.ok == (not expected)
    assert expected in found.detail


def test_files_missing_from_a_download_are_reported(
    tmp_path: Path, put_in_hub_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_files(tmp_path) == ["config.json", "weights (*.safetensors)", "a tokenizer (tokenizer.json)"]
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert missing_files(tmp_path) == ["model-00002-of-00002.safetensors"]
    [found] = model_findings(str(tmp_path))
    assert (found.ok, found.name) == (False, "model")
    assert "lacks model-00002-of-00002.safetensors" in found.detail
    put_in_hub_cache(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    [found] = model_findings("owner/name")
    assert found.detail == "owner/name lacks model-00002-of-00002.safetensors"


def test_truncated_files_are_reported(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3)}, weights)
    assert training_bytes(str(tmp_path)) == 6 * 16
    weights.write_bytes(weights.read_bytes()[:-1])
    [found] = model_findings(str(tmp_path))
    assert "has files that were cut off: model.safetensors" in found.detail
    weights.write_bytes(weights.read_bytes()[:20])
    [found] = model_findings(str(tmp_path))
    assert "has files that were cut off: model.safetensors" in found.detail
    assert training_bytes(str(tmp_path)) is None
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "mod')
    [found] = model_findings(str(tmp_path))
    assert not found.ok
    assert "not JSON: model.safetensors.index.json" in found.detail


@pytest.mark.parametrize(
    ("about", "of_tokenizer", "name", "detail", "fix"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, {}, "model", "quantized (gptq)", "use the original model"),
        ({}, {"chat_template": None}, "chat template", "there is none", "use an instruction-tuned model"),
        ({"vocab_size": 8}, {}, "model", "which the model lacks", "use the tokenizer that the model was trained with"),
        ({}, {"eos_token": "<|endoftext|>"}, "end token", "ends an answer with '<|im_end|>'", "add it to eos_token_id"),
    ],
)
def test_model_that_is_refused_or_warned_of_in_training_has_one_finding(
    about: dict[str, Any], of_tokenizer: dict[str, Any], name: str, detail: str, fix: str, tmp_path: Path
) -> None:
    tokenizer = deepcopy(_trained())
    tokenizer.chat_template = PLAIN
    for key, value in of_tokenizer.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(tmp_path)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaConfig(**{**sizes, "num_attention_heads": 2, "eos_token_id": None, **about}).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    [found] = [item for item in model_findings(str(tmp_path)) if not item.ok]
    assert (found.name, found.needed) == (name, name != "end token")
    assert detail in found.detail
    assert found.fix.startswith(fix)


def test_missing_folder_is_reported() -> None:
    [found] = model_findings("./nowhere")
    assert not found.ok
    assert "no such folder" in found.detail
