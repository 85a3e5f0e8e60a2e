"""The data every layer speaks: traces from the gateway, steps and trajectories from agents, episodes from rollouts.

Plain dataclasses (a step of 5,120 tokens is built in about a microsecond); this module imports next to nothing of ours.
Two rules run through all of it:

* **Rewards come from the agent, tokens come from the store, and they are joined by trace id** (`Step.id == Trace.id`).
* **Unscored is not zero.** A reward nobody set equals `0.0` in arithmetic, and is still told apart by `is_scored`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, TypeAlias

from rllm._runtime.ids import new_id

Task: TypeAlias = dict[str, Any]
"""One row of a dataset: what an agent function receives as `**task`."""

TASK_ID_FIELDS = ("task_id", "id")
"""Where a task keeps its own id, the first one that is there."""

Message: TypeAlias = dict[str, Any]
"""One chat message in the OpenAI format: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `name`."""

LogprobsKind: TypeAlias = Literal["processed", "raw", "unknown"]
"""`processed`: of the distribution really sampled from (after temperature, top-p, top-k). `raw`: of the model's own
distribution at temperature 1. `unknown`: the server did not say."""


class Unscored(float):
    """The value of a reward that nobody has set: `0.0` in arithmetic, recognised by `is_scored`."""

    def __new__(cls) -> Unscored:
        return super().__new__(cls, 0.0)

    def __reduce__(self) -> tuple[type[Unscored], tuple[()]]:
        return (Unscored, ())

    def __repr__(self) -> str:
        return "UNSCORED"


UNSCORED = Unscored()


def is_scored(reward: float | None) -> bool:
    """Whether somebody set this reward; `None` and `UNSCORED` mean that nobody did."""
    return reward is not None and not isinstance(reward, Unscored)


RESERVED_PREFIX = "rllm."
"""How the names in metadata begin that are ours; those of agents and users may not."""

DRIFT_KEY = "rllm.drift"
LOST_KEY = "rllm.not_in_prompt"
"""Kinds of content of a request that its prompt lacks, in the metadata of a trace and the info of an episode."""
"""Where the metadata of a trace keeps why its prompt does not go on from the tokens of the answer that it follows."""

CLIENT_KEY = "rllm.client"
"""Where the metadata of a trace without a session of its own keeps which client and process made the call."""

SIDE_CALL_KEY = "rllm.side_call"
"""Where the metadata of a trace keeps why the call is none of its task's, such as one that asks for a title."""
NUM_SIDE_CALLS_KEY = "num_side_calls"
"""Where the `info` of a trajectory keeps how many calls it was not given for that reason."""
NUM_UNUSABLE_CALLS_KEY = "num_unusable_calls"
"""Likewise, how many it lost because they had no usable tokens, such as those that failed or were broken off."""

REFERENCE_KEY = "rllm.reference"
"""Where a trajectory's `info` says that it would be trained on, but for its attempt, which others are compared with: a greedy one."""
NOT_TEXT_KEY = "rllm.not_text"
"""Where the `info` of a step keeps the types of its prompt's parts that are no text, if it has any; see `parts_beside_text`."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""The types of the parts of a message's content that are text."""

OUTCOME_KEY = "rllm.outcome"
"""Where the metadata of a session keeps how its rollout ended; see `rllm.trainer.outcomes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One sampled answer of one model call, exactly as the inference server produced it.

    Everything here is impossible to recover later, which is why it is stored. A call with `n > 1` gives one trace a
    choice; they share `call_id`. Built only in `rllm.capture`, where ids, logprobs and lengths are checked.
    """

    id: str
    """The id of the response that the agent saw; `"{call_id}:{choice_index}"` for every choice after the first."""
    call_id: str
    choice_index: int = 0
    session_id: str
    parent_id: str | None = None
    """The trace of this session whose prompt and answer are the longest token prefix of this prompt."""
    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    response: Message
    """The assistant message, as the agent saw it."""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    """Every sampled id, end-of-turn and stop strings included. Empty where the server gave no ids (not trainable)."""
    logprobs: list[float] = field(default_factory=list)
    """Natural-log probabilities, one per response id."""
    logprobs_kind: LogprobsKind = "unknown"
    sampling: dict[str, Any] = field(default_factory=dict)
    """The sampling parameters that were really sent to the server."""
    requested_sampling: dict[str, Any] = field(default_factory=dict)
    """Those that the agent asked for, where they differ."""
    finish_reason: str | None = None
    weight_version: int | None = None
    """Which weights sampled the answer, or its beginning if they were updated meanwhile."""
    weight_updates: list[list[int]] = field(default_factory=list)
    """Updates that fell into the answer: `[position of the first response id sampled after it, version]` of each."""
    template_hash: str | None = None
    """SHA-256 of the chat template that rendered the prompt, in hex; `None` where the server did not say."""
    started_at: float = 0.0
    """Unix seconds at which the gateway received the request."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `total_s`, `first_token_s`, `queue_s`, ..., as far as they were measured."""
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the call gave no usable tokens; a trace with an error is never trained on."""

    def to_dict(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        return cls(**data)


@dataclass
class Action:
    """What an agent decided to do, wrapped so that an environment can tell it from text."""

    action: Any = None


@dataclass(kw_only=True)
class Step:
    """One model call inside a trajectory: the agent's view of it, and once joined with its trace, its exact tokens."""

    id: str = field(default_factory=new_id)
    """The trace id: the `id` of the response that the agent received."""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    """As in `Trace`."""
    logprobs: list[float] = field(default_factory=list)
    """Sampler log-probabilities, aligned to `response_ids`."""
    chat_completions: list[Message] = field(default_factory=list)
    """The prompt's messages followed by the answer."""
    observation: Any = None
    thought: str = ""
    action: Any = None
    model_response: str = ""
    model_output: Any = None
    """The `ModelOutput` of the call; a step made with it has its id and tokens."""
    info: dict[str, Any] = field(default_factory=dict)
    reward: float | None = UNSCORED
    """What this step itself earned, if anybody says so."""
    done: bool = False
    mc_return: float = 0.0
    """Its reward and the later ones, discounted."""
    advantage: float | None = None
    """Set by the trainer: the advantage that this step's tokens were trained with."""
    weight_version: int | None = None
    weight_updates: list[list[int]] = field(default_factory=list)
    """As in `Trace`."""
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.model_output is not None and not self.response_ids:
            self.fill_from_output(self.model_output)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.info

    @property
    def input(self) -> dict[str, Any]:
        """The prompt: `messages` and `prompt_token_ids`."""
        return {"messages": self.chat_completions[:-1], "prompt_token_ids": self.prompt_ids}

    @property
    def output(self) -> dict[str, Any]:
        """The answer: `message`, `finish_reason`, `output_token_ids`, `rollout_logprobs`; and as a chat completion has it,
        in `choices`."""
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
        """The step of this trace, not yet rewarded."""
        return cls(
            id=trace.id,
            prompt_ids=trace.prompt_ids,
            response_ids=trace.response_ids,
            logprobs=trace.logprobs,
            chat_completions=[*trace.messages, trace.response],
            model_response=text_of(trace.response),
            info=dict(trace.metadata) | _beside_text(trace),
            weight_version=trace.weight_version,
            weight_updates=trace.weight_updates,
            finish_reason=trace.finish_reason,
        )

    @classmethod
    def from_model_output(cls, output: Any, messages: Sequence[Message] = (), action: Any = None) -> Step:
        """The step of a model call made through an engine: its tokens, the prompt's messages and the answer."""
        chat = [*messages, output.to_message()]
        return cls(model_output=output, chat_completions=chat, action=action, thought=output.reasoning)

    def fill_from_output(self, output: Any) -> None:
        """Take the id and the tokens, and whatever the agent left empty, from the `ModelOutput` of the call."""
        self.model_output = output
        self.id = output.id or self.id
        self.prompt_ids = output.prompt_ids
        self.response_ids = output.completion_ids
        self.logprobs = output.logprobs
        self.weight_version = output.weight_version
        self.weight_updates = output.weight_updates
        self.finish_reason = output.finish_reason
        self.model_response = self.model_response or output.text

    def fill_from(self, trace: Trace) -> None:
        """Take the tokens, and whatever the agent left empty, from the trace of the same id."""
        if DRIFT_KEY in trace.metadata:
            self.info[DRIFT_KEY] = trace.metadata[DRIFT_KEY]
        self.info |= _beside_text(trace)
        self.prompt_ids = trace.prompt_ids
        self.response_ids = trace.response_ids
        self.logprobs = trace.logprobs
        self.weight_version = trace.weight_version
        self.weight_updates = trace.weight_updates
        self.finish_reason = trace.finish_reason
        self.chat_completions = self.chat_completions or [*trace.messages, trace.response]
        self.model_response = self.model_response or text_of(trace.response)

    def to_dict(self) -> dict[str, Any]:
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["action"] = self.action.action if isinstance(self.action, Action) else self.action
        data["model_output"] = None  # its facts are the step's own fields
        data["reward"] = _reward_or_none(self.reward)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Step:
        # What the rLLM framework writes has the model output, too, as a dict; its facts are the step's own fields there as well.
        return cls(**{**data, "model_output": None, "reward": _reward_or_unscored(data.get("reward"))})


@dataclass(kw_only=True)
class Trajectory:
    """What one agent did in one rollout: its steps in call order, and its reward."""

    uid: str = field(default_factory=new_id)
    name: str = "agent"
    """The role. Trajectories of one task and one name are compared with each other."""
    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float | None = UNSCORED
    """See `final_reward`."""
    trainable: bool = True
    """False for a baseline, an opponent or a judge that must not be learned from."""
    input: Any = None
    output: Any = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> Any:
        """What the agent function returned."""
        return self.output

    @result.setter
    def result(self, value: Any) -> None:
        self.output = value

    @property
    def metadata(self) -> dict[str, Any]:
        return self.info

    def final_reward(self) -> float | None:
        """The trajectory's own reward, else the sum of its steps' rewards, else `None`: unscored."""
        if is_scored(self.reward):
            return self.reward
        scored = [step.reward for step in self.steps if step.reward is not None and is_scored(step.reward)]
        return sum(scored) if scored else None

    def is_cumulative(self) -> bool:
        """Whether every step's messages extend those of the step before."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return all(
            later.chat_completions[: len(earlier.chat_completions)] == earlier.chat_completions
            for earlier, later in pairs
        )

    def to_dict(self) -> dict[str, Any]:
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["steps"] = [step.to_dict() for step in self.steps]
        data["reward"] = _reward_or_none(self.reward)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        steps = [Step.from_dict(step) for step in data.get("steps", [])]
        return cls(**{**data, "steps": steps, "reward": _reward_or_unscored(data.get("reward"))})


class TerminationReason(Enum):
    """Why a rollout ended."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"


@dataclass(kw_only=True)
class Episode:
    """One rollout of one task: the trajectories of every agent that took part, or the reason why there are none."""

    id: str = ""
    """`"{task_id}:{index}"`; the parts are fields of their own, so a task id may contain anything."""
    task: Any = None
    task_id: str = ""
    index: int = 0
    """Which of the task's rollouts this is."""
    session_id: str = ""
    """Where the store keeps this rollout's traces."""
    termination_reason: TerminationReason | None = None
    is_correct: bool | None = None
    """`None`: nobody has said so yet; a rollout that has ended says yes or no."""
    trajectories: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    """Free; a failed rollout has `info["error"]` with `type`, `message` and `traceback`."""

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
        """Whether the rollout crashed, timed out or could not be captured; nothing is learned from it, and it counts as wrong."""
        return "error" in self.info

    def to_dict(self) -> dict[str, Any]:
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["trajectories"] = [trajectory.to_dict() for trajectory in self.trajectories]
        data["termination_reason"] = self.termination_reason.value if self.termination_reason else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
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
    """Trajectories that are compared with each other: one task, one role, several rollouts."""

    trajectories: list[Trajectory]
    group_id: str = ""
    references: list[Trajectory] = field(default_factory=list)
    """Scored trajectories of the same task and role in attempts that are made to be compared with: greedy ones."""
    penalties: list[float] = field(default_factory=list)
    """What is taken off each trajectory's reward, such as its divergence from a reference model; empty for nothing."""

    @property
    def rewards(self) -> list[float]:
        """The reward of each trajectory, penalties taken off; only scored trajectories belong in a group."""
        rewards = [reward for reward in (item.final_reward() for item in self.trajectories) if reward is not None]
        if not self.penalties:
            return rewards
        return [reward - penalty for reward, penalty in zip(rewards, self.penalties, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """How many tokens each trajectory sampled."""
        return [sum(len(step.response_ids) for step in item.steps) for item in self.trajectories]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCredit:
    """What the trainer decided about one step; kept beside its trace so that every gradient can be explained."""

    trace_id: str
    session_id: str
    training_step: int
    episode_id: str
    trajectory_name: str
    trajectory_index: int = 0
    """Which of the episode's trajectories: a step that several of them share has a credit in each."""
    reward: float | None
    """`None`: unscored."""
    group_id: str | None = None
    baseline: float | None = None
    advantage: float | None = None
    trainer_logprobs: Sequence[float] | None = None
    """The trainer's log-probabilities of the same response ids, before the update."""
    dropped: str | None = None
    """Why this step was not trained on; `None` means that it was."""


def credits_by_trace(credits: Iterable[StepCredit]) -> dict[str, list[StepCredit]]:
    """The credits of each call: one for each trajectory that it is a step of, and for each training step."""
    found: dict[str, list[StepCredit]] = {}
    for credit in credits:
        found.setdefault(credit.trace_id, []).append(credit)
    return found


def task_id_of(task: Mapping[str, Any], place: object) -> str:
    """The task's own id as text, else its place among the others; `?` stands for what is not Unicode."""
    own = (task[name] for name in TASK_ID_FIELDS if task.get(name) is not None)
    return str(next(own, place)).encode(errors="replace").decode()


def token_versions(sampled: Step | Trace) -> list[int]:
    """Which weights sampled each token of an answer; empty where that is not known."""
    if sampled.weight_version is None:
        return []
    versions = [sampled.weight_version] * len(sampled.response_ids)
    for start, version in sampled.weight_updates:
        versions[start:] = [version] * (len(versions) - start)
    return versions


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a chat message, whether its content is a string, a list of parts, or absent."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not content:
        return ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


def parts_beside_text(messages: Iterable[Any]) -> list[str]:
    """The types of those parts of chat messages that are no text, such as `image_url`: tokens alone do not say what is in them."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping))
    return sorted({str(part.get("type") or "text") for part in parts} - TEXT_PARTS)


def _beside_text(trace: Trace) -> dict[str, Any]:
    """What a step keeps of it."""
    found = parts_beside_text(trace.messages)
    return {NOT_TEXT_KEY: found} if found else {}


def _reward_or_none(reward: float | None) -> float | None:
    return reward if is_scored(reward) else None


def _reward_or_unscored(reward: float | None) -> float:
    return UNSCORED if reward is None else reward
