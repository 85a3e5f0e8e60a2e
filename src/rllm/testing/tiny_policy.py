"""A real language model of about a million parameters, built in a minute or two from conversations, without downloads.

It is an ordinary Hugging Face folder (Qwen3 architecture, byte-level BPE tokenizer, ChatML template with tools) that
`transformers` and vLLM load like any other. A short supervised warm-up teaches it to imitate the conversations, so that
reinforcement learning has something to improve. Everything follows from the seed.

Two choices make the warm-up short. The conversations of a batch are merged into a token tree, so that their common
beginning, the tools, is computed once; and the weight matrices are updated by Muon (Jordan et al. 2024), which learns
to copy from the context in a quarter of the steps that AdamW needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rllm._runtime.files import cache_folder, whole_folder
from rllm.algorithms.tree import build_tree
from rllm.backends.local.forward import hidden_states
from rllm.backends.local.logprobs import logprobs_and_entropy
from rllm.inference.local.loading import save_model
from rllm.inference.local.model_forward import use_grouped_attention
from rllm.parser.chat_template import ChatTemplate
from rllm.types import JSONMapping, Message

END_OF_TURN, END_OF_TEXT, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
TOKENIZER_SAMPLE = 2000
"""Number of conversations that the tokenizer is trained on."""

OnProgress = Callable[[int, int], None]

MATRIX_LR, VECTOR_LR = 0.02, 3e-3
LR_RISE, LR_FALL = 10, 0.5
"""Steps over which the learning rate rises, and the fraction of all steps, at the end, over which it falls to zero."""

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
"""ChatML, with tools listed below the first message and called in the Hermes format."""

Conversations = Callable[[int], Iterator[list[Message]]]
"""Function from a seed to an endless stream of conversations, each of which ends with an assistant message."""


@dataclass(frozen=True, kw_only=True)
class TinyPolicyRecipe:
    """Sizes, steps and seed of a policy. Equal recipes and conversations give equal policies."""

    hidden_size: int = 160
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 512
    vocab_size: int = 1024
    """Maximum; a small language needs fewer entries."""
    context_length: int = 1024
    skill_steps: int = 100
    """Warm-up steps on the first conversations, which show how to do the task."""
    habit_steps: int = 30
    """Warm-up steps on the second conversations, which show how it is usually done."""
    batch_size: int = 32
    seed: int = 0


def tiny_policy(
    skill: Conversations,
    habit: Conversations,
    tools: Sequence[JSONMapping] | None = None,
    *,
    recipe: TinyPolicyRecipe | None = None,
    cache_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Return the folder of a policy that first learns `skill` and then `habit`; it is built once and cached.

    Args:
        skill: Conversations that the policy should be able to have.
        habit: Conversations that it usually has; the rate of good decisions in them is roughly its initial accuracy.
        tools: The tools, as the agent will send them.
        recipe: Sizes, steps and seed.
        cache_dir: By default `$RLLM_CACHE`, or `$XDG_CACHE_HOME/rllm`, or `~/.cache/rllm`.
        on_progress: Called with the number of completed steps and of all steps. By default a terminal shows a bar, and
            a file gets ten lines.
    """
    recipe = recipe or TinyPolicyRecipe()
    samples = [list(islice(conversations(recipe.seed), 20)) for conversations in (skill, habit)]
    made_from = json.dumps([samples, tools, asdict(recipe), CHAT_TEMPLATE])
    folder = Path(cache_dir or cache_folder(), "tiny-policy", sha256(made_from.encode()).hexdigest()[:16])
    if (folder / "config.json").exists():
        return folder
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("building a tiny model (once)", total=None, visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)
            if not console.is_interactive and done * 10 % total < 10:
                console.print(f"building a tiny model (once): {done} of {total} steps")

        _build(folder, skill, habit, tools, recipe, on_progress or show)
    return folder


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with one token for each digit, and a ChatML template that renders tools."""
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
    """Return a randomly initialized Qwen3 of the recipe's size, deterministic in its seed."""
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
        model = Qwen3ForCausalLM(config)
    use_grouped_attention(model)
    return model


def _build(
    folder: Path,
    skill: Conversations,
    habit: Conversations,
    tools: Sequence[JSONMapping] | None,
    recipe: TinyPolicyRecipe,
    on_progress: OnProgress,
) -> None:
    """Train the tokenizer and the model, and put the finished folder in place in one step."""
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
    with whole_folder(folder) as finished:
        save_model(model, finished)
        tokenizer.save_pretrained(finished)
        (finished / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2))


def _with_template(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=END_OF_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def warm_up(
    model: Qwen3ForCausalLM,
    template: ChatTemplate,
    phases: Sequence[tuple[Iterator[list[Message]], int]],
    tools: Sequence[JSONMapping] | None,
    *,
    batch_size: int,
    on_progress: OnProgress | None = None,
) -> None:
    """Train on the conversations of each phase for its number of steps, on the assistant's tokens only."""
    total = sum(steps for _, steps in phases)
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    optimizers = [
        Muon(matrices, lr=MATRIX_LR),
        torch.optim.AdamW(others, lr=VECTOR_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def factor(step: int) -> float:
        return min((step + 1) / LR_RISE, 1.0, max(0.02, (total - step) / (LR_FALL * total)))

    schedule = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    end_id = model.config.eos_token_id
    done = 0
    model.train()
    for conversations, steps in phases:
        for _ in range(steps):
            examples = [encode(template, item, tools, end_id=end_id) for item in islice(conversations, batch_size)]
            loss = _loss(model, examples)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for step in (*optimizers, *schedule):
                step.step()
            model.zero_grad(set_to_none=True)
            done += 1
            if on_progress:
                on_progress(done, total)
    model.eval()


def encode(
    template: ChatTemplate,
    conversation: Sequence[Message],
    tools: Sequence[JSONMapping] | None,
    *,
    end_id: int,
) -> tuple[list[int], list[bool]]:
    """Return a conversation's token ids up to its last answer, and for each whether it is the assistant's.

    Each turn is rendered as the prompt that an inference engine would see, so that training matches sampling.
    """
    ids: list[int] = []
    is_answer: list[bool] = []
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = template.render(conversation[:turn], tools)
        whole = template.render(conversation[: turn + 1], tools, add_generation_prompt=False)
        answer = whole[len(prompt) :]
        while answer and answer[-1] != end_id:
            answer.pop()  # text of the template after the end of a turn is not the assistant's
        assert whole[: len(prompt)] == prompt, "the template must render append-only"
        assert prompt[: len(ids)] == ids, "the template must render append-only"
        is_answer += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = prompt + answer
    return ids, is_answer


def _loss(model: Qwen3ForCausalLM, batch: Sequence[tuple[list[int], list[bool]]]) -> Tensor:
    """Return the mean negative log-probability of the assistant's tokens."""
    tree = build_tree([ids for ids, _ in batch])
    sources, targets = [], []
    for index, (ids, is_answer) in enumerate(batch):
        positions = tree.positions(index)
        for place in range(1, len(ids)):
            if is_answer[place]:
                sources.append(positions[place - 1])
                targets.append(ids[place])
    hidden = hidden_states(model.model, tree)[torch.tensor(sources)]
    logprobs, _ = logprobs_and_entropy(hidden, model.lm_head, torch.tensor(targets), temperature=1.0, entropy=False)
    return -logprobs.mean()


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised update of each matrix (Jordan et al. 2024).

    `torch.optim.Muon` works in bfloat16, which many CPUs emulate slowly; this one keeps float32.
    """

    def __init__(self, matrices: Sequence[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix from its gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(average, group["momentum"]))
                weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1, weight.shape[0] / weight.shape[1])))


def orthogonal(matrix: Tensor, *, iterations: int = 5) -> Tensor:
    """Return approximately the closest orthogonal matrix, by the quintic Newton-Schulz iteration of the Muon paper."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if tall else wide
