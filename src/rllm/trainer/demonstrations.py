"""Demonstrations from conversations or from sampled tokens: token ids, and the spans of them that are learned.

Rows that hold token ids (`steps`) keep them byte for byte. Rows that hold messages only are rendered by the model's
chat template, once, before training begins, so that a row that cannot be learned from is named before any work is done.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import TYPE_CHECKING, TypeGuard

from rllm.config.schema import SFTConfig
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError
from rllm.inference.local.loading import LoadedTokenizer
from rllm.parser import ChatTemplateParser
from rllm.parser.append_only import is_assistant
from rllm.parser.chat_template import lost_warning
from rllm.parser.template_shape import SERIOUS
from rllm.types import JSONMapping, Message, Step, Trajectory, parts_beside_text, task_id_of, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FIELD = "demonstration"
"""Field of a prepared row that holds its `Demonstration`."""


@dataclass(frozen=True, slots=True)
class LabeledSequence:
    """A token sequence with the spans that are to be learned."""

    ids: array[int]
    spans: tuple[tuple[int, int], ...]
    """Start and stop of each answer, in order and disjoint; the first one follows a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """Token sequences of one row."""

    shown: tuple[LabeledSequence, ...]
    name: str = "agent"
    reward: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(part.ids) for part in self.shown)

    def trajectory(self) -> Trajectory:
        """Return a trajectory as if rolled out: a step for each answer, without log-probabilities."""
        steps = [
            Step(prompt_ids=part.ids[:start].tolist(), response_ids=part.ids[start:stop].tolist())
            for part in self.shown
            for start, stop in part.spans
        ]
        return Trajectory(name=self.name, steps=steps, reward=self.reward)


def prepared(rows: Sequence[JSONMapping], of: LoadedTokenizer, config: SFTConfig, max_length: int | None) -> Dataset:
    """Return the rows as demonstrations in order, without those longer than `max_length` tokens, which are counted.

    Raises:
        ConfigError: naming the first row that cannot be learned from; or if all are too long, or were sampled by a
            model with another tokenizer.
    """
    reader = _Reader(of, config)
    tasks = [(task_id_of(row, number), reader.read(number, row)) for number, row in enumerate(rows)]
    for kind, number in reader.num_lost.items():
        logger.warning("%d of %d rows have %s: %s", number, len(tasks), kind, lost_warning(kind))
    _check_words(rows, of.tokenizer)
    kept = [task for task in tasks if max_length is None or task[1].num_tokens <= max_length]
    if len(kept) < len(tasks):
        too_long = (
            f"{len(tasks) - len(kept)} of {len(tasks)} demonstrations are longer than the {max_length} tokens that "
            "model.max_length or the model's own context allows; the longest has "
            f"{max(shown.num_tokens for _, shown in tasks)}"
        )
        if not kept:
            raise ConfigError(
                f"{too_long}: nothing is left to learn from; raise model.max_length up to the model's context, or "
                "split them into shorter ones"
            )
        logger.warning("%s, and are skipped", too_long)
    return Dataset(({"task_id": task_id, FIELD: shown} for task_id, shown in kept), name="demonstrations")


def _check_words(rows: Sequence[JSONMapping], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` for token ids of another tokenizer, which stand for other words here.

    An agent's messages may differ from the sampled text, so this is reported only if no row has its sampled text in its
    messages.
    """
    example = None
    for row in rows:
        messages = row["messages"] if row.get("steps") and isinstance(row.get("messages"), list) else ()
        if answers := [text for message in messages if _is_answer(message) and (text := text_of(message).strip())]:
            ids = [token for step in row["steps"] for token in step.get("response_ids") or ()]
            read = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if any(answer in read for answer in answers):
                return
            example = example or (read, answers[-1])
    if example is not None:
        raise ConfigError(
            f"no row's token ids decode to its messages with this model, such as {example[0]!r:.60} instead of "
            f"{example[1]!r:.60}: a model with another tokenizer sampled them; train on their text (`rllm export RUN "
            "--chat FILE`, or rows without 'steps')"
        )


class _Reader:
    """Reads one row after another, for one model."""

    def __init__(self, of: LoadedTokenizer, config: SFTConfig) -> None:
        self._of = of
        self._config = config
        self._parser: ChatTemplateParser | None = None
        self.num_lost: Counter[str] = Counter()
        """Rows with content of each kind that is not in what is learned."""
        self._compared = False
        """Set once a conversation rendered as one text is known to equal an engine's prompt."""

    def read(self, number: int, row: JSONMapping) -> Demonstration:
        try:
            _check_text(row.get("messages"))
            shown = self._sampled(row["steps"]) if row.get("steps") else self._rendered(row)
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error
        return Demonstration(shown=tuple(shown), name=str(row.get("name") or "agent"), reward=row.get("reward"))

    def _sampled(self, steps: object) -> list[LabeledSequence]:
        """Return the steps' own tokens; all answers count, unless only the last one is wanted."""
        if not isinstance(steps, Sequence) or not all(isinstance(step, Mapping) for step in steps):
            raise ConfigError(f"steps={steps!r:.80}: use a list of objects with prompt_ids and response_ids")
        shown = []
        for place, step in enumerate(steps):
            prompt, answer = _ids(step, "prompt_ids", place), _ids(step, "response_ids", place)
            if not answer:
                continue
            if not prompt:
                raise ConfigError(f"steps[{place}] has response_ids but no prompt_ids: add the ids of its prompt")
            least, most = min(min(prompt), min(answer)), max(max(prompt), max(answer))
            if least < 0 or most >= self._of.num_ids:
                raise ConfigError(
                    f"steps[{place}] has the token id {least if least < 0 else most}, and the model has "
                    f"{self._of.num_ids}: another model sampled it; leave out 'steps' to render the messages for this "
                    "model"
                )
            shown.append(LabeledSequence(prompt + answer, ((len(prompt), len(prompt) + len(answer)),)))
        if not shown:
            raise ConfigError("steps hold no response_ids: there is nothing to learn")
        return shown[-1:] if self._config.train_on == "last" else shown

    def _rendered(self, row: JSONMapping) -> list[LabeledSequence]:
        messages, tools = row.get("messages"), row.get("tools") or None
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ConfigError(
                f"messages={messages!r:.80}: use a list of chat messages, or `steps` with prompt_ids and response_ids "
                f"(the row has {', '.join(map(repr, row)) or 'no fields'})"
            )
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(item, Mapping) for item in tools)
        ):
            raise ConfigError(f"tools={tools!r:.80}: use a list of tools, each an object, or the JSON text of one")
        answers = [place for place, message in enumerate(messages) if _is_answer(message)]
        learned = _learned(messages, answers, only_last=self._config.train_on == "last")
        if former := [place for place in learned if messages[place].get("function_call")]:
            raise ConfigError(
                f"messages[{former[0]}].function_call: chat templates do not print this deprecated field, so the "
                "answer would be learned without its call: use tool_calls"
            )
        parser = self._parser = self._parser or ChatTemplateParser(self._of.tokenizer)
        lost = parser.template.shape.lost_of(messages[: learned[-1] + 1], tools)
        if serious := next((kind for kind in lost if kind in SERIOUS), None):
            raise ConfigError(lost_warning(serious))
        self.num_lost.update(lost)
        if self._config.tokenize_method == "stepwise":
            # Each answer after the prompt that an engine would send.
            return [self._shown(*parser.tokenize_and_mask(messages[: place + 1], tools)) for place in learned]
        if len(answers) > 1 and not self._compared:
            self._compared = True
            if not parser.verify_equivalence(messages, tools):
                logger.warning(
                    "sft.tokenize_method=cumulative: the chat template prints earlier answers differently later (such "
                    "as without their reasoning), so the policy learns with another history than an engine will send; "
                    "use sft.tokenize_method=stepwise"
                )
        whole = self._shown(*parser.tokenize_and_mask_cumulative(messages[: learned[-1] + 1], tools))
        wanted = [place in learned for place in answers if place <= learned[-1]]
        if all(wanted):
            return [whole]
        if len(whole.spans) != len(wanted):
            raise ConfigError(
                f"the chat template prints {len(wanted)} answers as {len(whole.spans)}, so they cannot be "
                "distinguished: merge consecutive answers, or learn from all of them"
            )
        return [LabeledSequence(whole.ids, tuple(compress(whole.spans, wanted)))]

    def _shown(self, prompt: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> LabeledSequence:
        if not prompt:
            raise ConfigError("the chat template prints nothing before the first answer: begin with a user message")
        spans: list[tuple[int, int]] = []
        place = len(prompt)
        for is_learned, run in groupby(mask):
            stop = place + len(list(run))
            if is_learned:
                spans.append((place, stop))
            place = stop
        shown = [*prompt, *ids][: spans[-1][1]]
        if (most := max(shown)) >= self._of.num_ids:
            raise ConfigError(
                f"messages have {self._of.tokenizer.decode([most])!r}, token {most} of the tokenizer, but the model's "
                f"ids are 0 to {self._of.num_ids - 1}: leave it out"
            )
        return LabeledSequence(array("i", shown), tuple(spans))


def _check_text(messages: object) -> None:
    """Raise `ConfigError` if messages contain anything but text, which tokens do not represent."""
    if kinds := parts_beside_text(messages if isinstance(messages, list) else ()):
        raise ConfigError(
            f"messages have parts of type {', '.join(kinds)}, and the policy learns from text only: leave the row "
            "out, or describe them in words"
        )


def _is_answer(message: object) -> TypeGuard[Message]:
    return isinstance(message, dict) and is_assistant(message)


def _learned(messages: Sequence[Message], answers: Sequence[int], *, only_last: bool) -> list[int]:
    for place in answers:
        weight = messages[place].get("weight")
        if weight not in (None, 0, 1):
            raise ConfigError(
                f"messages[{place}].weight={weight!r}: use 1 for an answer to learn from, or 0 for one that is only "
                "read"
            )
    learned = [place for place in answers if messages[place].get("weight") != 0]
    if not learned:
        of_weight = " whose weight is not 0" if answers else ""
        raise ConfigError(f"no assistant message{of_weight}: there is nothing to learn")
    return learned[-1:] if only_last else learned


def _ids(step: JSONMapping, name: str, place: int) -> array[int]:
    try:
        return array("i", step.get(name) or ())
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"steps[{place}].{name}: use a list of whole numbers, the ids of tokens ({error})") from error
