"""The embedded engine with sampling replaced by a script, and nothing else.

Chat template, tool parser, continuation, log-probabilities (of the script's tokens, under a tiny random model) are real.
Like a model, the script sees only the prompt's tokens, as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from rllm.inference.local import LocalEngine
from rllm.inference.local.scheduler import Request
from rllm.testing.tiny_policy import END_OF_TURN, train_tokenizer

from ..inference.conftest import build_model
from ..parser.conftest import TEMPLATES

CONTEXT = 131_072
Script: TypeAlias = Callable[[str], str]
"""The whole prompt, special tokens included, to the answer up to its end of turn."""


class ForcedEngine(LocalEngine):
    """Engine that samples the text of `script`, which may be replaced between calls."""

    def __init__(self, script: Script, *, template: str = "qwen") -> None:
        """Sample the text of `script`; `template` is one of the names of `TEMPLATES`, or a template's text."""
        tokenizer = train_tokenizer(_texts(), vocab_size=2000)
        tokenizer.chat_template = TEMPLATES.get(template, template)
        model = build_model("Qwen3", len(tokenizer), num_hidden_layers=1, max_position_embeddings=CONTEXT)
        super().__init__(model, tokenizer, max_length=CONTEXT, max_concurrent=64)
        self.script = script
        self.sampled: list[Request] = []
        """Every call since the list was last emptied, as seen by the sampler."""
        self._answers: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        self._scheduler._sampled = self._forced  # type: ignore[method-assign]

    def check_request(self, request: Mapping[str, Any]) -> None:
        """Accept every request: the script answers in the requested format, as constrained decoding would."""

    def _forced(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        tokens = [self._next_token(request) for request in self._scheduler._live]
        logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1))
        return tokens, logprobs.squeeze(1).tolist()

    def _next_token(self, request: Request) -> int:
        if not request.completion_ids:
            self._answers[request] = self._answer_to(request)
        return self._answers[request][len(request.completion_ids)]

    def _answer_to(self, request: Request) -> list[int]:
        self.sampled.append(request)
        answer = self.script(self.tokenizer.decode(request.prompt_ids)) + END_OF_TURN
        ids: list[int] = self.tokenizer.encode(answer, add_special_tokens=False)
        return ids


def _texts() -> list[str]:
    """Return typical prompts of agents: English and JSON."""
    docs = Path(__file__).parents[2] / "docs"
    return [path.read_text() for path in (docs / "architecture.md", docs / "gateway.md")] * 2
