from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rllm.parser.decoding import TextDecoder, TokenBytes


def test_special_tokens_are_skipped_except_for_markup() -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "[END]": 3}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="[END]")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<think>"), AddedToken("[ARGS]")]})
    think, args = tokenizer.convert_tokens_to_ids(["<think>", "[ARGS]"])
    ids = [think, 1, args, 2, 0, 3]
    assert TextDecoder(tokenizer, ()).text(ids) == "<think> a b"
    assert TextDecoder(tokenizer, (), ["[ARGS]", "[UNHEARD_OF]"]).text(ids) == "<think> a [ARGS] b"
    assert TextDecoder(tokenizer, [2]).text(ids) == "<think> a"


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
def test_token_bytes_spell_the_text(family: str) -> None:
    if family == "byte-level":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        words = Tokenizer(models.BPE({sign: number for number, sign in enumerate(sorted(alphabet))}, []))
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words.decoder = decoders.ByteLevel()
    else:
        pieces = {
            "<unk>": 0,
            **{f"<0x{value:02X}>": value + 1 for value in range(256)},
            "\u2581": 257,
            "a": 258,
            "b": 259,
        }
        words = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    words.add_tokens(["<tool_call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    text = "a b\u00e9\U0001f600<tool_call>a<end>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = [TokenBytes(tokenizer).of(token_id) for token_id in ids]
    assert b"".join(spelled) == text.encode()
    assert {b"\xc3", b"<tool_call>"} <= set(spelled)
    assert TokenBytes(tokenizer).of(len(tokenizer) + 5) == b""
