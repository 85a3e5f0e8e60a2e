"""Data types of every layer: traces from the gateway, steps and trajectories from agents, episodes from rollouts.

Two rules hold for all of them:

* **Rewards come from the agent, tokens come from the store, and they are joined by trace id** (`Step.id == Trace.id`).
* **Unscored is not zero.** A reward that was never set equals `0.0` in arithmetic; `is_scored` distinguishes it.

Token ids are vocabulary indices; log-probabilities are natural logarithms, one for each sampled token; times are Unix
seconds, and durations seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, TypeAlias, TypeVar

from rllm._runtime.ids import new_id

K = TypeVar("K")
V = TypeVar("V")

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object, with values of clients, servers or users."""

JSONMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""

Task: TypeAlias = JSONObject
"""One row of a dataset: the arguments of the agent function."""

TASK_ID_FIELDS = ("task_id", "id")
"""Fields in which a task may have its own id; the first one that is set counts."""

Message: TypeAlias = JSONObject
"""One chat message in the OpenAI format: `role`, `content`, and optionally `tool_calls`, `tool_call_id`, `name`."""

LogprobsKind: TypeAlias = Literal["processed", "raw", "unknown"]
"""Distribution of the log-probabilities. `processed`: the one sampled from (after temperature, top-p, top-k). `raw`:
the model's own at temperature 1. `unknown`: the server did not specify."""


class Unscored(float):
    """Value of a reward that was never set: `0.0` in arithmetic, recognized by `is_scored`."""

    def __new__(cls) -> Unscored:
        return super().__new__(cls, 0.0)

    def __reduce__(self) -> tuple[type[Unscored], tuple[()]]:
        return (Unscored, ())

    def __repr__(self) -> str:
        return "UNSCORED"


UNSCORED = Unscored()


def is_scored(reward: float | None) -> bool:
    """Return True if a reward was set; `None` and `UNSCORED` mean that it was not."""
    return reward is not None and not isinstance(reward, Unscored)


RESERVED_PREFIX = "rllm."
"""Prefix of the metadata keys of this package; keys of agents and users must not have it."""

DRIFT_KEY = "rllm.drift"
"""Metadata key of a trace: the reason why its prompt does not continue the tokens of the answer that it follows."""
LOST_KEY = "rllm.not_in_prompt"
"""Metadata key of a trace, and info key of an episode: kinds of a request's content that its prompt does not have."""

NO_TOKENS_KEY = "rllm.no_tokens"
"""Info key of an episode: the reason, such as a refusal, why its first model call without usable tokens has none."""

CLIENT_KEY = "rllm.client"
"""Metadata key of a trace without a session of its own: the client and process that made the call."""

SIDE_CALL_KEY = "rllm.side_call"
"""Metadata key of a trace: the reason why the call is not part of its task, such as a request for a title."""
NUM_SIDE_CALLS_KEY = "num_side_calls"
"""Info key of a trajectory: the number of calls left out because they are not part of its task."""
NUM_UNUSABLE_CALLS_KEY = "num_unusable_calls"
"""Info key of a trajectory: the number of calls left out because they failed, were cut off, or had no usable tokens."""

REFERENCE_KEY = "rllm.reference"
"""Info key of a trajectory from a greedy rollout: others are compared with it, and it is not trained on."""
NOT_TEXT_KEY = "rllm.not_text"
"""Info key of a step: types of the parts of its prompt that are not text, if any; see `parts_beside_text`."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""Types of the parts of a message's content that are text."""

REWARD_KEY = "reward"
"""Metadata key of a gateway's session: its reward, a number that may be known long after its calls."""
SOURCE_KEY = "source"
"""Key of an episode's `info`, and of its session's metadata: name of the dataset of its task, if there are several."""
VERDICT_KEY = "verdict"
"""Info key of a trajectory: metadata of its reward, such as a judge's reasons."""

OUTCOME_KEY = "rllm.outcome"
"""Metadata key of a session: the outcome of its rollout; see `rllm.trainer.episode_records`."""


_COLUMN = {"store": "column"}
"""Declares a field that stores keep in its own column: it has a number for each token, or queries select by it."""
_SHARED = {"store": "shared"}
"""Declares a field of a trace's document that is often equal in consecutive calls and is then stored once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One sampled answer of one model call, exactly as the inference server produced it.

    Nothing here can be recovered later, which is why it is stored. A call with `n > 1` gives one trace for each choice;
    they share `call_id`. Traces are built only in `rllm.capture`, which checks ids, log-probabilities and lengths.

    Each field declares how it is stored; stores and exports follow from that. A field without a declaration is part of
    the JSON document of its trace, so a new optional one needs no other change. A new column needs a new
    `rllm.store.rows.SCHEMA`.
    """

    id: str = field(metadata=_COLUMN)
    """Id of the response that the agent received; `"{call_id}:{choice_index}"` for every choice after the first."""
    call_id: str = field(metadata=_COLUMN)
    choice_index: int = field(default=0, metadata=_COLUMN)
    session_id: str = field(metadata=_COLUMN)
    parent_id: str | None = field(default=None, metadata=_COLUMN)
    """Trace of this session whose prompt and answer are the longest token prefix of this prompt; see `SessionTree`."""
    model: str = field(metadata=_COLUMN)
    messages: list[Message]
    tools: list[JSONObject] | None = field(default=None, metadata=_SHARED)
    response: Message
    """Assistant message, as the agent received it."""
    prompt_ids: list[int] = field(default_factory=list, metadata=_COLUMN)
    """An `array("I")` in a trace that a gateway is about to store; stores and `to_dict` return lists."""
    response_ids: list[int] = field(default_factory=list, metadata=_COLUMN)
    """Every sampled id, including end-of-turn and stop strings. Empty if the server gave no ids (not trainable)."""
    logprobs: list[float] = field(default_factory=list, metadata=_COLUMN)
    """Natural-log probabilities, one for each response id."""
    logprobs_kind: LogprobsKind = field(default="unknown", metadata=_COLUMN)
    sampling: JSONObject = field(default_factory=dict, metadata=_SHARED)
    """Sampling parameters that were sent to the server."""
    requested_sampling: JSONObject = field(default_factory=dict, metadata=_SHARED)
    """Sampling parameters that the agent asked for, as far as they differ from those sent."""
    finish_reason: str | None = field(default=None, metadata=_COLUMN)
    weight_version: int | None = field(default=None, metadata=_COLUMN)
    """Weights that sampled the answer, or its beginning if they were updated meanwhile."""
    weight_updates: list[list[int]] = field(default_factory=list)
    """Weight updates during the answer, each as `[position of the first response id sampled after it, version]`."""
    template_hash: str | None = field(default=None, metadata=_COLUMN)
    """SHA-256 of the chat template that rendered the prompt, in hex; `None` if unknown."""
    started_at: float = field(default=0.0, metadata=_COLUMN)
    """Unix seconds at which the gateway received the request."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `total_s`, `first_token_s`, `queue_s`, ..., as far as they were measured."""
    metadata: JSONObject = field(default_factory=dict, metadata=_SHARED)
    error: str | None = field(default=None, metadata=_COLUMN)
    """Reason why the call gave no usable tokens; a trace with an error is never trained on."""

    def to_dict(self) -> JSONObject:
        return {**_fields_of(self), "prompt_ids": list(self.prompt_ids)}

    @classmethod
    def from_dict(cls, data: JSONMapping) -> Trace:
        return cls(**data)


@dataclass
class Action:
    """Action of an agent, wrapped so that an environment can distinguish it from text."""

    action: Any = None


@dataclass(kw_only=True)
class Step:
    """One model call inside a trajectory: the agent's view of it, and once joined with its trace, its exact tokens."""

    id: str = field(default_factory=new_id)
    """Trace id: the `id` of the response that the agent received."""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    """As in `Trace`."""
    logprobs: list[float] = field(default_factory=list)
    """Sampler log-probabilities, aligned to `response_ids`."""
    chat_completions: list[Message] = field(default_factory=list)
    """Messages of the prompt, followed by the answer."""
    observation: Any = None
    thought: str = ""
    action: Any = None
    model_response: str = ""
    model_output: Any = None
    """`ModelOutput` of the call; a step made with it takes its id and tokens."""
    info: JSONObject = field(default_factory=dict)
    reward: float | None = UNSCORED
    """Reward of this step alone, if it has one."""
    done: bool = False
    mc_return: float = 0.0
    """Discounted sum of this reward and the later ones."""
    advantage: float | None = None
    """Advantage that this step's tokens were trained with; set by the trainer."""
    weight_version: int | None = None
    weight_updates: list[list[int]] = field(default_factory=list)
    """As in `Trace`."""
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.model_output is not None and not self.response_ids:
            self.fill_from_output(self.model_output)

    @property
    def metadata(self) -> JSONObject:
        return self.info

    @property
    def input(self) -> JSONObject:
        """Return the prompt: `messages` and `prompt_token_ids`."""
        return {"messages": self.chat_completions[:-1], "prompt_token_ids": self.prompt_ids}

    @property
    def output(self) -> JSONObject:
        """Return the answer: `message`, `finish_reason`, `output_token_ids`, `rollout_logprobs`.

        `choices` has it in the form of a chat completion.
        """
        message = self.chat_completions[-1] if self.chat_completions else None
        return {
            "message": message,
            "finish_reason": self.finish_reason,
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}],
            "output_token_ids": self.response_ids,
            "rollout_logprobs": self.logprobs,
        }

    @classmethod
    def from_trace(cls, trace: Trace) -> Step:
        """Return the step of a trace, without a reward."""
        step = cls(id=trace.id, info=dict(trace.metadata))
        step.fill_from(trace)
        return step

    @classmethod
    def from_model_output(cls, output: Any, messages: Sequence[Message] = (), action: Any = None) -> Step:
        """Return the step of a model call made through an engine."""
        chat = [*messages, output.to_message()]
        return cls(model_output=output, chat_completions=chat, action=action, thought=output.reasoning)

    def fill_from_output(self, output: Any) -> None:
        """Take the id and the tokens from the `ModelOutput` of the call, and other fields if they are empty."""
        self.model_output = output
        self.id = output.id or self.id
        self._take_sampled(output, output.completion_ids)
        self.model_response = self.model_response or output.text

    def fill_from(self, trace: Trace) -> None:
        """Take the tokens from the trace of the same id, and other fields if they are empty."""
        if DRIFT_KEY in trace.metadata:
            self.info[DRIFT_KEY] = trace.metadata[DRIFT_KEY]
        if found := parts_beside_text(trace.messages):
            self.info[NOT_TEXT_KEY] = found
        self._take_sampled(trace, trace.response_ids)
        self.chat_completions = self.chat_completions or [*trace.messages, trace.response]
        self.model_response = self.model_response or text_of(trace.response)

    def _take_sampled(self, sampled: Any, response_ids: list[int]) -> None:
        self.prompt_ids = sampled.prompt_ids
        self.response_ids = response_ids
        self.logprobs = sampled.logprobs
        self.weight_version = sampled.weight_version
        self.weight_updates = sampled.weight_updates
        self.finish_reason = sampled.finish_reason

    def to_dict(self) -> JSONObject:
        data = _fields_of(self)
        data["action"] = self.action.action if isinstance(self.action, Action) else self.action
        data["model_output"] = None  # its content is in the step's own fields
        data["reward"] = _reward_or_none(self.reward)
        return data

    @classmethod
    def from_dict(cls, data: JSONMapping) -> Step:
        # Files of the rLLM framework have the model output as a dict, too; its content is in the step's own fields.
        return cls(**{**data, "model_output": None, "reward": _unscored_if_none(data)})


@dataclass(kw_only=True)
class Trajectory:
    """Steps of one agent in one rollout, in call order, and its reward."""

    uid: str = field(default_factory=new_id)
    name: str = "agent"
    """Role of the agent. Trajectories of one task and one name are compared with each other."""
    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float | None = UNSCORED
    """See `final_reward`."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, unweighted, if it has several."""
    trainable: bool = True
    """False for a baseline, an opponent or a judge that must not be trained on."""
    input: Any = None
    output: Any = None
    info: JSONObject = field(default_factory=dict)

    @property
    def result(self) -> Any:
        """Return value of the agent function."""
        return self.output

    @result.setter
    def result(self, value: Any) -> None:
        self.output = value

    @property
    def metadata(self) -> JSONObject:
        return self.info

    def final_reward(self) -> float | None:
        """Return the trajectory's own reward, or the sum of its steps' rewards, or `None` if neither is set."""
        if is_scored(self.reward):
            return self.reward
        scored = [step.reward for step in self.steps if step.reward is not None and is_scored(step.reward)]
        return sum(scored) if scored else None

    def is_cumulative(self) -> bool:
        """Return True if the messages of every step extend the previous step's messages."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return all(
            later.chat_completions[: len(earlier.chat_completions)] == earlier.chat_completions
            for earlier, later in pairs
        )

    def to_dict(self) -> JSONObject:
        data = _fields_of(self)
        data["steps"] = [step.to_dict() for step in self.steps]
        data["reward"] = _reward_or_none(self.reward)
        return data

    @classmethod
    def from_dict(cls, data: JSONMapping) -> Trajectory:
        steps = [Step.from_dict(step) for step in data.get("steps", [])]
        return cls(**{**data, "steps": steps, "reward": _unscored_if_none(data)})


class TerminationReason(Enum):
    """Reason for the end of a rollout."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"


@dataclass(kw_only=True)
class Episode:
    """One rollout of one task: the trajectories of all its agents, or the reason why there are none."""

    id: str = ""
    """`"{task_id}:{index}"`. Both parts are fields of their own, so a task id may contain any character."""
    task: Any = None
    task_id: str = ""
    index: int = 0
    """Number of this rollout among its task's rollouts, from 0."""
    session_id: str = ""
    """Session of this rollout's traces in the store."""
    termination_reason: TerminationReason | None = None
    is_correct: bool | None = None
    """`None` while the rollout is running."""
    trajectories: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    info: JSONObject = field(default_factory=dict)
    """Free data; a failed rollout has `info["error"]` with `type`, `message` and `traceback`."""

    def __post_init__(self) -> None:
        if self.id and not self.task_id:
            head, separator, tail = self.id.rpartition(":")
            if separator and tail.isdecimal():
                self.task_id, self.index = head, int(tail)
            else:
                self.task_id = self.id
        elif self.task_id and not self.id:
            self.id = f"{self.task_id}:{self.index}"

    @property
    def failed(self) -> bool:
        """True if the rollout crashed, timed out or was not captured; it is not trained on and counts as wrong."""
        return "error" in self.info

    def to_dict(self) -> JSONObject:
        data = _fields_of(self)
        data["trajectories"] = [trajectory.to_dict() for trajectory in self.trajectories]
        data["termination_reason"] = self.termination_reason.value if self.termination_reason else None
        return data

    @classmethod
    def from_dict(cls, data: JSONMapping) -> Episode:
        reason = data.get("termination_reason")
        return cls(
            **{
                **data,
                "trajectories": [Trajectory.from_dict(item) for item in data.get("trajectories", [])],
                "termination_reason": TerminationReason(reason) if reason else None,
            }
        )


@dataclass(kw_only=True)
class TrajectoryGroup:
    """Trajectories of one task and one role in several rollouts, which are compared with each other."""

    trajectories: list[Trajectory]
    group_id: str = ""
    references: list[Trajectory] = field(default_factory=list)
    """Scored trajectories of the same task and role in greedy rollouts, which serve as a baseline."""
    penalties: list[float] = field(default_factory=list)
    """Penalty for each trajectory, such as its divergence from a reference model; empty for none."""

    @property
    def rewards(self) -> list[float]:
        """Return the reward of each trajectory minus its penalty. Only scored trajectories belong to a group."""
        rewards = [reward for reward in (item.final_reward() for item in self.trajectories) if reward is not None]
        if not self.penalties:
            return rewards
        return [reward - penalty for reward, penalty in zip(rewards, self.penalties, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """Return the number of sampled tokens of each trajectory."""
        return [sum(len(step.response_ids) for step in item.steps) for item in self.trajectories]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCredit:
    """Decision of the trainer about one step, stored with its trace so that every gradient can be explained."""

    trace_id: str
    session_id: str
    training_step: int
    episode_id: str
    trajectory_name: str
    trajectory_index: int = 0
    """Number of the trajectory in its episode: a step that several of them share has a credit in each."""
    reward: float | None
    """`None` if unscored."""
    group_id: str | None = None
    baseline: float | None = None
    advantage: float | None = None
    trainer_logprobs: Sequence[float] | None = None
    """Log-probabilities of the same response ids under the trained policy before the update, in nats."""
    dropped: str | None = None
    """Reason why this step was not trained on; `None` if it was."""


_LEFT_OUT = {
    "unscored": "it has no reward",
    "not_trainable": "its trajectory is not trained on",
    "no_tokens": "it has no sampled tokens",
    "too_few_siblings": "its group has no other rollout to compare it with",
    "no_greedy_rollout": "its group has no greedy rollout to compare it with",
    "zero_variance": "all rollouts of its group have the same reward",
    "not_text": "its prompt has content that is not text",
    "truncated": "an answer was truncated at its maximum length",
    "error": "its rollout failed",
    "timeout": "its rollout did not end in time",
}


def why_left_out(reason: str) -> str:
    """Return in words why a step was not trained on; `reason` is `StepCredit.dropped`."""
    return _LEFT_OUT.get(reason, f"its rollout ended early: {reason.replace('_', ' ')}")


def credits_by_trace(credits: Iterable[StepCredit]) -> dict[str, list[StepCredit]]:
    """Return the credits of each call: one for each trajectory that it is a step of, in each training step."""
    return grouped((credit.trace_id, credit) for credit in credits)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def task_id_of(task: JSONMapping, place: object) -> str:
    """Return the task's own id, or else `place`, its position among the tasks, as valid Unicode."""
    own = (task[name] for name in TASK_ID_FIELDS if task.get(name) is not None)
    return str(next(own, place)).encode(errors="replace").decode()


def token_versions(sampled: Step | Trace) -> list[int]:
    """Return the version of the weights that sampled each token of an answer; empty if unknown."""
    if sampled.weight_version is None:
        return []
    versions = [sampled.weight_version] * len(sampled.response_ids)
    for start, version in sampled.weight_updates:
        versions[start:] = [version] * (len(versions) - start)
    return versions


def text_of(message: JSONMapping) -> str:
    """Return the text of a chat message, whose content may be a string, a list of parts, or missing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not content:
        return ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


def parts_beside_text(messages: Iterable[object]) -> list[str]:
    """Return the types of the parts of chat messages that are not text, such as `image_url`."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping))
    return sorted({str(part.get("type") or "text") for part in parts} - TEXT_PARTS)


def _fields_of(record: Trace | Step | Trajectory | Episode) -> JSONObject:
    return {item.name: getattr(record, item.name) for item in fields(record)}


def _reward_or_none(reward: float | None) -> float | None:
    return reward if is_scored(reward) else None


def _unscored_if_none(data: JSONMapping) -> float:
    reward: float | None = data.get("reward")
    return UNSCORED if reward is None else reward


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return each reward plus the discounted rewards after it."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]
