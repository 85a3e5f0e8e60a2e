"""Tiny random models and a small real tokenizer, built in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rllm.inference.local import LocalEngine

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a ChatML template like that of Qwen3."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the user asks the assistant, and the assistant answers"] * 8, trainer)
    bpe.add_tokens(MARKUP)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    """Return the tokenizer with another chat template, if one is given."""
    if template is None:
        return tokenizer
    other = deepcopy(tokenizer)
    other.chat_template = template
    return other


def build_model(family: str, vocab_size: int, *, seed: int = 0, **options: Any) -> Any:
    """Return a tiny random model whose distributions are neither flat nor certain."""
    model_class = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    config = model_class.config_class(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            **options,
        }
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4 if "embed" in name else 0.3)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def new_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """`new_model("Qwen3", sliding_window=8)`: a tiny random model for the tokenizer."""
    return lambda family="Qwen3", **options: build_model(family, len(tokenizer), **options)


@pytest.fixture
def make_engine(
    tokenizer: PreTrainedTokenizerFast, new_model: Callable[..., Any]
) -> Iterator[Callable[..., LocalEngine]]:
    """Engines over tiny random models; closed after the test."""
    engines: list[LocalEngine] = []

    def make(
        family: str = "Qwen3",
        *,
        model: Any = None,
        model_options: Any = None,
        template: str | None = None,
        **options: Any,
    ) -> LocalEngine:
        model = model or new_model(family, **(model_options or {}))
        engines.append(LocalEngine(model, with_template(tokenizer, template), **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def taught(
    make_engine: Callable[..., LocalEngine], new_model: Callable[..., Any], tokenizer: PreTrainedTokenizerFast
) -> Callable[..., LocalEngine]:
    """Engines whose model answers one conversation with a given text."""

    def make(
        messages: list[dict[str, str]], answer: str, tools: Any = None, *, template: str | None = None
    ) -> LocalEngine:
        engine = make_engine(model=new_model(), template=template)
        answer_ids = tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
        with engine.paused():
            _teach(engine.model, engine.template.render(messages, tools), answer_ids)
            engine.publish(1)
        return engine

    return make


def _teach(model: Any, prompt_ids: list[int], answer_ids: list[int], *, steps: int = 150) -> None:
    """Train the model until each token of this answer is much more probable than all others together."""
    ids, answer = torch.tensor([prompt_ids + answer_ids]), torch.tensor(answer_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, answer, reduction="none")
        if losses.max() < 0.3:
            break
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    optimizer.zero_grad()
