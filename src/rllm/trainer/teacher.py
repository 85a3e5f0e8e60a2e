"""The teacher of a configuration: a model in this process or a server, with the policy's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.config.schema import TeacherConfig, TrainConfig, refuse_changes
from rllm.errors import ConfigError


class Teacher(Protocol):
    """A model that the policy learns from, with the policy's tokens. It blocks, and is called in a thread."""

    def score(self, batch: Batch) -> Tensor:
        """Return [N] the teacher's log-probabilities of the batch's tokens.

        Raises:
            InferenceError: if it cannot be reached, or does not return them.
        """
        ...


def check_teacher(config: TrainConfig, algorithm: Algorithm) -> None:
    """Check the teacher's settings before a model is loaded or a server is called.

    Raises:
        ConfigError: if a teacher is missing or unused, has another vocabulary, or a shorter context than the policy.
    """
    teacher = config.teacher
    if not algorithm.needs_teacher:
        if teacher != TeacherConfig():
            raise ConfigError("teacher is set but not used: set algorithm.name=distill, or algorithm.teacher_coef")
        return
    if (teacher.path is None) == (teacher.url is None):
        raise ConfigError(
            f"teacher.path={teacher.path!r} and teacher.url={teacher.url!r}: algorithm.teacher_coef="
            f"{algorithm.teacher_coef} asks a teacher, so set one of the two"
        )
    if teacher.url is not None:
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
    _check_model(config, teacher.path)


@contextmanager
def open_teacher(config: TrainConfig, algorithm: Algorithm) -> Iterator[Teacher | None]:
    """Yield the teacher; `None` if the algorithm needs none.

    Raises:
        ConfigError: if the server does not return log-probabilities of prompts, has another vocabulary, or a shorter
            context than the policy.
        InferenceError: if it cannot be reached.
    """
    teacher = config.teacher
    if not algorithm.needs_teacher:
        yield None
    elif teacher.path is not None:
        from rllm.backends.local.policy import LocalTeacher
        from rllm.inference.local.loading import load_model

        loaded = load_model(teacher.path, dtype=teacher.dtype, device=teacher.device)
        yield LocalTeacher(loaded, micro_batch_tokens=config.optim.micro_batch_tokens)
    else:
        from rllm.inference.local.loading import load_tokenizer
        from rllm.trainer.teacher_endpoint import TeacherEndpoint

        assert teacher.url is not None, "checked before"
        with TeacherEndpoint(
            teacher.url,
            model=teacher.model,
            max_concurrent=teacher.max_concurrent,
            timeout_s=teacher.timeout_s,
            num_retries=teacher.num_retries,
        ) as endpoint:
            own = load_tokenizer(config.model.path)
            endpoint.check(own.tokenizer)
            _check_length(config, own.context_length, f"teacher.url={teacher.url!r}", endpoint.context_length)
            yield endpoint


def _check_model(config: TrainConfig, teacher: str) -> None:
    """Raise `ConfigError` unless both models have the same ids, compared token by token, and enough context."""
    from rllm.inference.local.loading import load_tokenizer

    student = config.model.path
    policy, judge = load_tokenizer(student), load_tokenizer(teacher)
    own, other = policy.tokenizer.get_vocab(), judge.tokenizer.get_vocab()
    if own != other:
        differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        raise ConfigError(
            f"teacher.path={teacher!r} has another vocabulary than model.path={student!r}: {len(differing)} tokens "
            f"differ, such as {differing[0]!r}. Take a teacher of the same family"
        )
    _check_length(config, policy.context_length, f"teacher.path={teacher!r}", judge.context_length)


def _check_length(config: TrainConfig, own: int | None, teacher: str, room: int | None) -> None:
    """Raise `ConfigError` if the teacher takes fewer tokens than the policy; `None` is unknown."""
    bounds = [length for length in (config.model.max_length, own) if length is not None]
    if room is not None and bounds and min(bounds) > room:
        raise ConfigError(
            f"{teacher} takes {room} tokens, and a prompt and its answer may have {min(bounds)}: set "
            f"model.max_length={room}"
        )
