"""The teacher of a configuration: a model in this process, a server, or the policy itself with a demonstration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

import openai
import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.algorithms.sdft import SDFT
from rllm.backends.base import TrainingBackend
from rllm.config.schema import TeacherConfig, TrainConfig, refuse_changes
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, InferenceError, concerning
from rllm.inference.local.loading import LoadedTokenizer, load_model, load_tokenizer, tokenizer_of
from rllm.parser.chat_template import ChatTemplate
from rllm.sdk.variables import key_of_user
from rllm.types import JSONObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rllm.trainer.credit import Sample


class Teacher(Protocol):
    """A model that the policy learns from. It blocks, so it is called in a thread."""

    def score(self, batch: Batch, samples: Sequence[Sample] = ()) -> Tensor:
        """Return [N] the teacher's log-probabilities of the batch's tokens.

        Args:
            batch: its `trajectory_of` counts the samples.
            samples: the trajectories of the tokens, for teachers that read tasks or messages.

        Raises:
            InferenceError: if it cannot be reached, or does not return them.
        """
        ...


def check_teacher(config: TrainConfig, algorithm: Algorithm) -> None:
    """Raise `ConfigError` if a teacher is missing or unused, or differs from the policy in vocabulary or context."""
    teacher = config.teacher
    if not algorithm.needs_teacher:
        if teacher != TeacherConfig():
            raise ConfigError("teacher is set but not used: set algorithm.name=distill, or algorithm.teacher_coef")
        return
    if algorithm.is_own_teacher:
        refuse_changes(teacher, "teacher", TeacherConfig.model_fields, "where the policy teaches itself; leave it out")
        return
    if (teacher.path is None) == (teacher.url is None):
        raise ConfigError(
            f"teacher.path={teacher.path!r} and teacher.url={teacher.url!r}: algorithm.teacher_coef="
            f"{algorithm.teacher_coef} needs a teacher: set one of the two"
        )
    if teacher.url is not None:
        refuse_changes(teacher, "teacher", ("align",), "on a server, which is asked about ids; use teacher.path")
        refuse_changes(teacher, "teacher", ("dtype", "device"), "on a server; leave it out")
        if config.rollout.temperature != 1.0:
            raise ConfigError(
                f"rollout.temperature={config.rollout.temperature}: the prompt log-probabilities of a server are "
                "those at temperature 1; sample at 1, or run the teacher in this process with teacher.path"
            )
        return
    assert teacher.path is not None
    of_servers = ("model", "max_concurrent", "timeout_s", "num_retries")
    refuse_changes(teacher, "teacher", of_servers, "on a teacher in this process (teacher.path); leave it out")
    if teacher.align == "tokens":
        _check_model(config, teacher.path)


@contextmanager
def open_teacher(config: TrainConfig, algorithm: Algorithm) -> Iterator[Teacher | None]:
    """Yield the teacher; `None` if the algorithm needs none other than the policy.

    Raises:
        ConfigError: if the server does not return log-probabilities of prompts, has another vocabulary, or a shorter
            context than the policy.
        InferenceError: if it cannot be reached.
    """
    teacher = config.teacher
    if algorithm.is_own_teacher or not algorithm.needs_teacher:
        yield None
    elif teacher.path is not None:
        from rllm.backends.local.policy import LocalTeacher
        from rllm.trainer.text_teacher import TextTeacher

        with concerning("teacher"):
            loaded = load_model(teacher.path, dtype=teacher.dtype, device=teacher.device)
        same = LocalTeacher(loaded, micro_batch_tokens=config.optim.micro_batch_tokens)
        if teacher.align == "tokens":
            yield same
        else:
            policy = tokenizer_of(config.model)
            yield TextTeacher(same, own=policy, theirs=load_tokenizer(teacher.path))
    else:
        with TeacherEndpoint(teacher) as endpoint:
            own = load_tokenizer(config.model.path)
            endpoint.check(own.tokenizer)
            _check_length(config, own.context_length, f"teacher.url={teacher.url!r}", endpoint.context_length)
            yield endpoint


def _check_model(config: TrainConfig, teacher: str) -> None:
    """Raise `ConfigError` unless both models have the same ids, compared token by token, and enough context."""
    student = config.model.path
    policy = load_tokenizer(student)
    with concerning("teacher"):
        judge = load_tokenizer(teacher)
    own, other = policy.tokenizer.get_vocab(), judge.tokenizer.get_vocab()
    if own != other:
        differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        raise ConfigError(
            f"teacher.path={teacher!r} has another vocabulary than model.path={student!r}: {len(differing)} tokens "
            f"differ, such as {differing[0]!r}; use a teacher of the same family, or teacher.align=text"
        )
    _check_length(config, policy.context_length, f"teacher.path={teacher!r}", judge.context_length)


def _check_length(config: TrainConfig, own: int | None, teacher: str, room: int | None) -> None:
    """Raise `ConfigError` if the teacher takes fewer tokens than the policy; `None` is unknown."""
    bounds = [length for length in (config.model.max_length, own) if length is not None]
    if room is not None and bounds and min(bounds) > room:
        raise ConfigError(
            f"{teacher} takes {room} tokens, fewer than a prompt and its answer may have ({min(bounds)}): set "
            f"model.max_length={room}"
        )


_NUM_PROBED = 64
"""Number of ids that must stand for the same text on the server as in the policy's tokenizer."""


class TeacherEndpoint:
    """Teacher on a server, which gets one request for each sequence, several at a time; failed requests are retried."""

    def __init__(self, teacher: TeacherConfig) -> None:
        """Prepare without connecting; raise `ConfigError` if `teacher.url` is not an address."""
        self._url, self._model = teacher.url or "", teacher.model
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"teacher.url={self._url!r}: use an address such as http://127.0.0.1:8000/v1")
        self.context_length: int | None = None
        """Tokens that a prompt may have, if the server states it."""
        self._client = openai.OpenAI(
            base_url=self._url,
            api_key=key_of_user() or "EMPTY",
            timeout=teacher.timeout_s,
            max_retries=teacher.num_retries,
        )
        self._pool = ThreadPoolExecutor(teacher.max_concurrent, thread_name_prefix="rllm teacher")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._client.close()

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the server can teach a policy with this tokenizer.

        Raises:
            ConfigError: if it does not return log-probabilities of prompts, or has another vocabulary.
            InferenceError: if it cannot be reached.
        """
        self._choose_model()
        # Ids across the vocabulary whose texts are plain words, which look the same however decoded.
        vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        some = vocabulary[:: max(1, len(vocabulary) // (8 * _NUM_PROBED))]
        words = [token_id for token_id in some if tokenizer.decode([token_id]).strip().isalnum()]
        ids = words[:: max(1, len(words) // _NUM_PROBED)]
        try:
            entries = self._prompt_logprobs(ids)
        except InferenceError as error:
            if error.status_code == 400:  # such as: token id 4711 is out of vocabulary
                raise ConfigError(
                    f"teacher.url={self._url!r} does not accept ids of the policy's vocabulary, or does not return the "
                    f"log-probabilities of a prompt: {error}"
                ) from error
            raise
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            text, own = entry.get("decoded_token"), tokenizer.decode([token_id])
            if isinstance(text, str) and text.strip() != own.strip():
                raise ConfigError(
                    f"teacher.url={self._url!r} has another vocabulary than the policy: token {token_id} is {text!r} "
                    f"there and {own!r} here; use a teacher of the same family"
                )

    def score(self, batch: Batch, samples: Sequence[Sample] = ()) -> Tensor:
        """Return [N] the teacher's log-probabilities of the batch's tokens; see `Teacher.score`."""
        entries = self._pool.map(self._prompt_logprobs, [sequence.ids for sequence in batch.sequences])
        values = [
            float(logprobs[place]["logprob"])
            for sequence, logprobs in zip(batch.sequences, entries, strict=True)
            for place in sequence.sampled_positions()
        ]
        return torch.tensor(values, dtype=torch.float32)

    def _choose_model(self) -> None:
        """Choose the named model or the only one, and read its length: `{"id": "m", "max_model_len": 4096}`."""
        try:
            served = {item.id: item for item in self._client.models.list().data}
        except openai.OpenAIError as error:
            if self._model is not None and isinstance(error, openai.APIStatusError):
                return  # not every server has a list, and the name is known
            raise _named(error, self._url) from error
        if self._model is None and len(served) != 1:
            raise ConfigError(f"teacher.model is missing: {self._url} serves {', '.join(served) or 'none'}; choose one")
        self._model = self._model or next(iter(served))
        length = getattr(served.get(self._model), "max_model_len", None)
        # The last place is for the token that it samples after a prompt: servers sample at least one.
        self.context_length = length - 1 if isinstance(length, int) else None

    def _prompt_logprobs(self, ids: Sequence[int]) -> list[JSONObject]:
        """Return the server's entry for each token of a prompt; `{}` for the first, which has none."""
        try:
            response = self._client.completions.create(
                model=str(self._model),
                prompt=list(ids),
                max_tokens=1,
                temperature=1.0,
                extra_body={"prompt_logprobs": 0},
            )
        except openai.OpenAIError as error:
            raise _named(error, self._url) from error
        entries = getattr(response.choices[0], "prompt_logprobs", None) if response.choices else None
        if not isinstance(entries, list):
            raise ConfigError(
                f"teacher.url={self._url!r} returns no prompt_logprobs: use a server that does on /v1/completions, "
                "such as vLLM, or run the teacher in this process with teacher.path"
            )
        if len(entries) != len(ids):
            raise InferenceError(
                f"{self._url} returns {len(entries)} log-probabilities of a prompt of {len(ids)} tokens"
            )
        found: list[JSONObject] = [{}]
        for place, token_id in enumerate(ids[1:], 1):
            entry = (entries[place] or {}).get(str(token_id))  # others may be listed with the prompt's own token
            if not entry or not isinstance(entry.get("logprob"), int | float) or math.isnan(entry["logprob"]):
                raise InferenceError(
                    f"the teacher at {self._url} returned {entries[place]!r:.200} for token {token_id}, number {place} "
                    "of a prompt"
                )
            found.append(entry)
        return found


def _named(error: openai.OpenAIError, url: str) -> InferenceError:
    if isinstance(error, openai.APIStatusError):
        return InferenceError(
            f"the teacher at {url} answered {error.status_code}: {error.message}", status_code=error.status_code
        )
    if isinstance(error, openai.APITimeoutError):
        return InferenceError(
            f"the teacher at {url} did not answer within teacher.timeout_s: raise it if the server is only slow"
        )
    return InferenceError(
        f"the teacher at {url} cannot be reached ({error.__cause__ or error}): check that the server is running"
    )


def own_teacher(config: TrainConfig, algorithm: Algorithm, backend: TrainingBackend) -> SelfTeacher | None:
    """Return the policy as its own teacher, if the algorithm has it teach itself."""
    if not isinstance(algorithm, SDFT):
        return None
    loaded = tokenizer_of(config.model)
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
            demonstration = demonstration_of(sample.episode.task, self._algorithm.demonstration)
            message = {"role": "user", "content": f"{self._algorithm.instruction}\n\n{demonstration}"}
            prefix = self._template.render([message], add_generation_prompt=False)
            shown.append(self._after(prefix, sequence, sample.episode.task_id))
            start += sequence.num_sampled
        return self._score(Batch.of(shown, temperature=batch.temperature))

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
            f"algorithm.demonstration={name!r}: this field of a task is {found!r}; give each task a text to learn "
            "from, or name the field that has it"
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
