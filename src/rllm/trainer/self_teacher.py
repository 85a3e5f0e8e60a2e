"""The teacher of self-distillation: the policy's own model, with a demonstration before the conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.sdft import SDFT
from rllm.backends.base import TrainingBackend
from rllm.config.schema import TrainConfig
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedTokenizer, load_tokenizer
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.tool_prompt import TemplateChoice

if TYPE_CHECKING:
    from rllm.trainer.credit import Sample


def own_teacher(config: TrainConfig, algorithm: Algorithm, backend: TrainingBackend) -> SelfTeacher | None:
    """Return the policy as its own teacher, if the algorithm has it teach itself."""
    if not isinstance(algorithm, SDFT):
        return None
    loaded = load_tokenizer(config.model.path, template=TemplateChoice.of(config.model))
    return SelfTeacher(backend, algorithm, loaded)


class SelfTeacher:
    """Scores each sequence after a user's message with the demonstration of its task.

    The message precedes the conversation, whose tokens are not changed.
    """

    def __init__(self, backend: TrainingBackend, algorithm: SDFT, tokenizer: LoadedTokenizer) -> None:
        self._score = backend.score if algorithm.teacher_weights == "current" else backend.score_reference
        self._algorithm = algorithm
        self._template = ChatTemplate(tokenizer.tokenizer)
        self._bos_id = tokenizer.tokenizer.bos_token_id
        self._context_length = tokenizer.context_length

    def score(self, batch: Batch, samples: Sequence[Sample] = ()) -> Tensor:
        """Return [N] the log-probabilities of the batch's tokens after the demonstrations of their tasks.

        Args:
            batch: its `trajectory_of` counts `samples`.
            samples: their episodes have the tasks.

        Raises:
            ConfigError: if a demonstration is missing, or does not fit into the model's context.
        """
        assert batch.trajectory_of is not None, "each sequence is of a task"
        shown, start = [], 0
        for sequence in batch.sequences:
            sample = samples[int(batch.trajectory_of[start])]
            message = {"role": "user", "content": self._shown_text(sample.episode.task)}
            prefix = self._template.render([message], add_generation_prompt=False)
            shown.append(self._after(prefix, sequence, sample.episode.task_id))
            start += sequence.num_sampled
        return self._score(Batch.of(shown, temperature=batch.temperature))

    def _shown_text(self, task: object) -> str:
        return f"{self._algorithm.instruction}\n\n{demonstration_of(task, self._algorithm.demonstration)}"

    def _after(self, prefix: list[int], sequence: TokenSequence, task_id: str) -> TokenSequence:
        own = sequence.ids
        if prefix[:1] == own[:1] == [self._bos_id]:  # keep a single BOS token
            prefix, own = prefix[:1], prefix[1:] + own[1:]
        ids = prefix + own
        if self._context_length is not None and len(ids) > self._context_length:
            raise ConfigError(
                f"task {task_id!r}: its demonstration and conversation have {len(ids)} tokens, and the model takes "
                f"{self._context_length}: shorten the demonstration, or lower rollout.max_tokens"
            )
        offset = len(ids) - len(sequence.ids)
        spans = [
            StepSpan(step_id=span.step_id, start=span.start + offset, stop=span.stop + offset)
            for span in sequence.spans
        ]
        return TokenSequence(ids=ids, spans=spans, logprobs=sequence.logprobs)


def demonstration_of(task: object, name: str) -> str:
    """Return the demonstration of a task; raise `ConfigError` if it has none."""
    found = task.get(name) if isinstance(task, Mapping) else getattr(task, name, None)
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            f"algorithm.demonstration={name!r}: a task has {found!r} there; give each task a text to learn from, or "
            "name the field that has it"
        )
    return found


def check_demonstrations(algorithm: Algorithm, data: Dataset) -> None:
    """Raise `ConfigError`, naming the row, if the algorithm needs demonstrations and a task has none."""
    if not isinstance(algorithm, SDFT):
        return
    for number, task in enumerate(data):
        try:
            demonstration_of(task, algorithm.demonstration)
        except ConfigError as error:
            raise ConfigError(f"train_dataset, row {number}: {error}") from None
