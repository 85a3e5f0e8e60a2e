from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GlmMoeDsaConfig
from transformers.utils.logging import enable_progress_bar

from rllm.errors import ConfigError
from rllm.inference.local import LocalEngine, load_model
from rllm.inference.local.loading import check_source, load_outline, load_tokenizer, save_model


def test_loading_and_saving_show_no_progress_bars(
    tmp_path: Path, new_model: Any, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    enable_progress_bar()  # a command that ran in this process has disabled them
    save_model(new_model(), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load_model(tmp_path, device="cpu")
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "Loading weights" in capfd.readouterr().err, "other callers still see progress bars"


@pytest.fixture
def folder(tmp_path: Path, new_model: Any, tokenizer: Any) -> Path:
    new_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_folder_is_loaded_ready_to_use(folder: Path, new_model: Any) -> None:
    loaded = load_model(folder, device="cpu")
    assert loaded.device.type == "cpu"
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    for mine, theirs in zip(new_model().parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert loaded.tokenizer.get_chat_template()


def test_generation_config_is_saved_unchanged(folder: Path, tmp_path: Path) -> None:
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "pad_token_id": -1}  # do_sample is not set
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load_model(folder, device="cpu").model
    save_model(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: saved[name] for name in settings} == settings
    assert model.generation_config.temperature == 0.6


async def test_bfloat16_models_are_sampled(folder: Path) -> None:
    loaded = load_model(str(folder), dtype="bfloat16", device="cpu")
    engine = LocalEngine(loaded.model, loaded.tokenizer)
    output = await engine.complete(list(range(5, 30)), max_tokens=10, ignore_eos=True)
    engine.close()
    with torch.no_grad():
        logits = loaded.model(torch.tensor([output.prompt_ids + output.completion_ids]), use_cache=False).logits[0]
    expected = logits[24:-1].float().log_softmax(-1).gather(1, torch.tensor(output.completion_ids).unsqueeze(1))
    torch.testing.assert_close(torch.tensor(output.logprobs), expected.squeeze(1), atol=0.3, rtol=0)


SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.5}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(
            **SIZES, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, attn_logit_softcapping=1.0
        ),
        GlmMoeDsaConfig(
            **SIZES,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            mlp_layer_types=["dense"],
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            index_topk=4,
            index_head_dim=16,
            index_n_heads=16,
        ),
        BloomConfig(**SIZES, n_head=2),
    ],
    ids=["capped scores", "sparse attention", "position bias"],
)
def test_model_computes_all_of_its_attention(tmp_path: Path, tokenizer: Any, config: Any) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu").model
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("source", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c", Path("nothing"), "nothing"])
def test_missing_folder_is_not_looked_up_on_the_hub(source: str | Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(source)


def test_missing_subfolder_is_treated_as_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(f"{folder.name}/nothing")


def test_folder_without_a_model_is_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is a file"):
        load_model(folder / "config.json")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="cannot load its tokenizer"):
        load_model(folder)


def test_folder_without_weights_is_reported(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load its weights"):
        load_model(folder)


def test_missing_weights_are_not_initialized(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    match = r"Qwen3ForCausalLM .* \(model.layers.1.mlp.up_proj.weight, model.norm.weight\)"
    with pytest.raises(ConfigError, match=match):
        load_model(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_rejected(folder: Path, bad: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is infinite or NaN"):
        load_model(folder)


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_outline, check_source])
def test_unavailable_hub_id_is_reported(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*HF_HUB_OFFLINE"):
        load("nobody/nothing")


def test_partially_cached_hub_model_is_rejected_before_loading(
    folder: Path, put_in_hub_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = put_in_hub_cache(folder)
    check_source("owner/name")
    (cached / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks weights"):
        check_source("owner/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_source("owner/name")  # the weights are downloaded


def test_invalid_settings_error_has_their_values(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype='int4'"):
        load_model(folder, dtype="int4")
    with pytest.raises(ConfigError, match="device='toaster'"):
        load_model(folder, device="toaster")


def test_tokenizer_without_chat_template_is_rejected(folder: Path) -> None:
    loaded = load_model(folder)
    loaded.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        LocalEngine(loaded.model, loaded.tokenizer)


def test_tokenizer_is_loaded_without_its_model(folder: Path) -> None:
    alone, loaded = load_tokenizer(folder), load_model(folder, device="cpu")
    config = loaded.model.config
    assert (alone.num_ids, alone.context_length) == (config.vocab_size, config.max_position_embeddings)
    assert alone.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


def test_lora_adapter_is_merged_into_its_base_model(folder: Path, tmp_path: Path, new_model: Any) -> None:
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    ids = torch.tensor([[5, 6, 7]])
    expected = adapted(ids).logits
    target = tmp_path / "adapter"
    adapted.save_pretrained(target)
    loaded = load_model(target, device="cpu")
    assert type(loaded.model) is type(new_model())
    torch.testing.assert_close(loaded.model(ids).logits, expected, atol=1e-4, rtol=0)
    assert (load_model(folder, device="cpu").model(ids).logits - expected).abs().max() > 1e-2
    assert load_tokenizer(target).tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    (target / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config.json names no base model"):
        load_model(target)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapter_on_tied_weights_leaves_the_other_end_unchanged(
    folder: Path, tmp_path: Path, new_model: Any, target: str
) -> None:
    new_model(tie_word_embeddings=True).save_pretrained(folder)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2, target_modules=[target])
    )
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.fill_(0.1)
    ids = torch.tensor([[5, 6, 7]])
    expected = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    loaded = load_model(tmp_path / "adapter", device="cpu")
    torch.testing.assert_close(loaded.model(ids).logits, expected, atol=1e-4, rtol=0)
    save_model(loaded.model, tmp_path / "merged")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(saved(ids).logits, expected, atol=1e-4, rtol=0)


def test_adapter_folder_tokenizer_is_used(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    target = tmp_path / "adapter"
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2))
    adapted.save_pretrained(target)
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(target)
    for loaded in (load_model(target, device="cpu"), load_tokenizer(target)):
        assert loaded.tokenizer.chat_template == own.chat_template


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_adapter_of_a_model_with_more_tokens_is_rejected(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    base.resize_token_embeddings(len(tokenizer) + 2, mean_resizing=False)
    whole = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    peft.get_peft_model(base, whole).save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    with pytest.raises(ConfigError, match=r"adapter does not fit"):
        load_model(tmp_path / "adapter", device="cpu")


def test_adapter_of_another_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2, target_modules=["q_proj"])
    ).save_pretrained(target)
    weights = load_file(target / "adapter_model.safetensors")
    renamed = {name.replace(".layers.", ".language_model.layers."): weight for name, weight in weights.items()}
    save_file(renamed, target / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM, so it would change nothing"):
        load_model(target, device="cpu")
