"""Unusable models are rejected by their files, with one message, before weights are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.inference.local import LocalEngine, load_model
from rllm.inference.local.loading import check_source, warn_of_ends
from rllm.parser.chat_template import ChatTemplate


@pytest.fixture
def folder(tmp_path: Path, new_model: Any, tokenizer: Any) -> Path:
    new_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_gguf_is_rejected_with_the_way_to_convert_it(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()  # a tokenizer and config.json beside the GGUF file
    files = [path / "small.Q4_K_M.gguf" for path in (tmp_path, folder)]
    for file in files:
        file.write_bytes(b"GGUF")
    for source in (files[0], tmp_path, folder):
        with pytest.raises(ConfigError, match=r"gguf_file='small\.Q4_K_M\.gguf'"):
            check_source(source)
    with pytest.raises(ConfigError, match="original model"):
        check_source("someone/Small-1B-GGUF")


@pytest.mark.parametrize(("left_out", "lacks"), [("model.safetensors", "weights"), ("tokenizer.json", "a tokenizer")])
def test_incomplete_folder_is_rejected(folder: Path, left_out: str, lacks: str) -> None:
    (folder / left_out).unlink()
    with pytest.raises(ConfigError, match=f"lacks {lacks}"):
        check_source(folder)


def test_truncated_weights_are_rejected(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"cut off: model\.safetensors"):
        check_source(folder)


def test_base_model_needs_a_chat_template(folder: Path, tokenizer: Any) -> None:
    plain = deepcopy(tokenizer)
    plain.chat_template = None
    (folder / "chat_template.jinja").unlink()
    plain.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"model\.chat_template=PATH"):
        check_source(folder)


def test_tokenizer_of_another_model_is_rejected(folder: Path, tokenizer: Any) -> None:
    """A model whose further tokens are in no prompt is accepted: Gemma 3 1B has a token for images."""
    larger = deepcopy(tokenizer)
    larger.add_tokens(["<|unused|>"])
    larger.save_pretrained(folder)
    check_source(folder)
    larger.add_tokens(["<|begin|>"])
    larger.chat_template = "<|begin|>" + larger.chat_template
    larger.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"'<\|begin\|>', id \d+, which the model lacks"):
        check_source(folder)
    loaded = load_model(folder, device="cpu")
    with pytest.raises(ConfigError, match="which the model lacks"):
        LocalEngine(loaded.model, loaded.tokenizer)


@pytest.fixture
def quantized(folder: Path) -> Path:
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("check", [check_source, load_model])
def test_quantized_weights_are_not_trained(quantized: Path, check: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"quantized \(gptq\).*model\.quantize=nf4"):
        check(quantized, to_train=True)


@pytest.mark.parametrize("offline", [True, False])
def test_quantized_weights_in_the_cache_of_the_hub_are_not_trained(
    quantized: Path, put_in_hub_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    put_in_hub_cache(quantized)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    check_source("owner/name")
    with pytest.raises(ConfigError, match=r"'owner/name': .*quantized \(gptq\)"):
        check_source("owner/name", to_train=True)


def test_package_that_quantized_weights_need_is_named(quantized: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a package that is not installed.*optimum"):
        load_model(quantized)


def test_remote_code_of_a_model_is_not_run(folder: Path) -> None:
    about = json.loads((folder / "config.json").read_text())
    about |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigError, match="RLLM_TRUSTED_MODELS"):
        check_source(folder)


async def test_end_token_of_the_template_ends_answers(
    folder: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As in models converted from GGUF, whose tokenizer names the beginning of a turn as eos, and no pad token."""
    converted = deepcopy(tokenizer)
    converted.eos_token, converted.pad_token = "<|im_start|>", None
    loaded = load_model(folder, device="cpu")
    end, start = converted.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    loaded.model.config.eos_token_id = loaded.model.generation_config.eos_token_id = start
    loaded.model.config.pad_token_id = loaded.model.generation_config.pad_token_id = None
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(loaded.model, converted)
    assert engine.end_ids == {end, start}
    assert [record.message.count("<|im_end|>") for record in caplog.records] == [1]
    output = await engine.get_model_response([{"role": "user", "content": "hi"}], max_tokens=4)
    assert output.completion_ids
    engine.close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_ends(loaded.model, converted, ChatTemplate(converted), on_server=True)
    [record] = caplog.records
    assert "the server does not end it there; add it to eos_token_id in generation_config.json" in record.message


@pytest.mark.parametrize(
    ("template", "further", "named"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [], "model.chat_template=PATH"),
        (None, ["<|image|>", "<|audio|>"], "'<|image|>'"),
    ],
    ids=["answers without an end", "more tokens than embeddings"],
)
def test_doubtful_tokenizer_is_reported_when_it_is_loaded(
    folder: Path,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    template: str | None,
    further: list[str],
    named: str,
) -> None:
    doubtful = deepcopy(tokenizer)
    doubtful.chat_template = template or tokenizer.chat_template
    doubtful.add_tokens(further)
    with caplog.at_level(logging.WARNING):
        LocalEngine(load_model(folder, device="cpu").model, doubtful).close()
    [record] = caplog.records
    assert named in record.getMessage()


def test_listed_end_token_is_not_logged(folder: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(folder, device="cpu")
    with caplog.at_level(logging.WARNING):
        LocalEngine(loaded.model, loaded.tokenizer).close()
    assert not caplog.records
