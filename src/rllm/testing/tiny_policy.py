"""A real language model of about a million parameters, built in a minute or two from conversations: nothing is downloaded.

It is an ordinary Hugging Face folder (Qwen3 architecture, byte-level BPE tokenizer, ChatML template with tools) that
`transformers` and vLLM load like any other. A short supervised warm-up teaches it to speak as the conversations do;
reinforcement learning then has something to improve. Everything follows from the seed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rllm.inference.local.loading import save_model
from rllm.parser.chat_template import ChatTemplate
from rllm.testing.warmup import OnProgress, warm_up
from rllm.types import Message

END_OF_TURN, END_OF_TEXT, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
TOKENIZER_SAMPLE = 2000
"""Conversations that the tokenizer is trained on."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- if loop.first and tools %}
{%- for tool in tools %}
{{ tool.function | tojson }}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{% endif -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": \
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""ChatML; tools are listed below the first message, and called in the Hermes format."""

Conversations = Callable[[int], Iterator[list[Message]]]
"""`seed -> endless conversations`, each ending with an assistant message."""


@dataclass(frozen=True, kw_only=True)
class TinyPolicyRecipe:
    """Everything beside the conversations that decides what the policy is; equal recipes give equal policies."""

    hidden_size: int = 160
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 512
    vocab_size: int = 1024
    """At most; a small language needs fewer."""
    context_length: int = 1024
    skill_steps: int = 100
    """Warm-up steps on the first conversations: how to do the task."""
    habit_steps: int = 30
    """Warm-up steps on the second ones: how it is usually done."""
    batch_size: int = 32
    seed: int = 0


def tiny_policy(
    skill: Conversations,
    habit: Conversations,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    recipe: TinyPolicyRecipe | None = None,
    cache_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """The folder of the policy that first learns `skill` and then falls into `habit`; built once, then cached.

    Args:
        skill: what it should be able to say.
        habit: how it is used to speak; the share of good decisions here is roughly its first accuracy.
        tools: the tools, as the agent will send them.
        recipe: sizes, steps and seed.
        cache_dir: default `$RLLM_CACHE`, else `$XDG_CACHE_HOME/rllm`, else `~/.cache/rllm`.
        on_progress: called with (steps done, steps in all) while the policy warms up; by default a terminal shows a bar.
    """
    recipe = recipe or TinyPolicyRecipe()
    folder = Path(cache_dir or default_cache_dir(), "tiny-policy", _fingerprint(skill, habit, tools, recipe))
    if not (folder / "config.json").exists():
        with _bar() as show:
            _build(folder, skill, habit, tools, recipe, on_progress or show)
    return folder


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """On a terminal, how far the building has come; it is gone afterwards."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("building a tiny model (once)", total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def default_cache_dir() -> Path:
    """Where this user keeps what can be built again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("RLLM_CACHE") or Path(base) / "rllm").expanduser()


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose digits stay apart, with a ChatML template that renders tools."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_CALL_TAGS),
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # Single tokens that decode as text, as in the tokenizers of the models that speak this format.
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_CALL_TAGS])
    return _with_template(bpe)


def new_model(tokenizer: PreTrainedTokenizerFast, recipe: TinyPolicyRecipe) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of the recipe's size, deterministic in its seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.context_length,
        tie_word_embeddings=True,
        # Tied embeddings copy well only if their rows are about unit length from the start.
        initializer_range=recipe.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def _build(
    folder: Path,
    skill: Conversations,
    habit: Conversations,
    tools: Sequence[Mapping[str, Any]] | None,
    recipe: TinyPolicyRecipe,
    on_progress: OnProgress,
) -> None:
    """Train the tokenizer and the model, and put the folder in place in one step, so that none is ever half there."""
    words = ChatTemplate(_with_template(Tokenizer(models.BPE())))
    sample = islice(habit(recipe.seed), TOKENIZER_SAMPLE)
    texts = [words.render_text(conversation, tools, add_generation_prompt=False) for conversation in sample]
    tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
    model = new_model(tokenizer, recipe)
    phases = [
        (skill(recipe.seed + 1), recipe.skill_steps),
        (habit(recipe.seed + 2), recipe.habit_steps),
    ]
    warm_up(model, ChatTemplate(tokenizer), phases, tools, batch_size=recipe.batch_size, on_progress=on_progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        finished = Path(scratch) / "policy"
        save_model(model, finished)
        tokenizer.save_pretrained(finished)
        (finished / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2))
        try:
            finished.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise


def _with_template(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=END_OF_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _fingerprint(*parts: Any) -> str:
    """Changes with the recipe, the tools, and what the conversations say."""
    skill, habit, tools, recipe = parts
    said = [list(islice(conversations(recipe.seed), 20)) for conversations in (skill, habit)]
    return sha256(json.dumps([said, tools, asdict(recipe), CHAT_TEMPLATE]).encode()).hexdigest()[:16]
