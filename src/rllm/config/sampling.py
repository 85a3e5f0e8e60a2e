"""Sampling that a run imposes on the model calls of its agents: parameters, and a seed for each call.

Seeds depend on the content of calls, not on their order, so a rollout samples the same tokens in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import orjson

from rllm.types import JSONMapping, JSONObject

_LENGTH_LIMITS = ("max_completion_tokens", "max_tokens")
"""Two names of one limit; the first one counts if a request has both."""
NEUTRAL: JSONMapping = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that leave the whole distribution of the model as it is, as the trainer's log-probabilities are."""
_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def is_neutral(name: str, value: object) -> bool:
    """Return whether a sampling parameter leaves the distribution as it is; those not in `NEUTRAL` do at 1."""
    return value == NEUTRAL.get(name, 1.0) or (name == "top_k" and value in (0, None))


def with_fixed_sampling(request: JSONMapping, fixed: JSONMapping) -> JSONObject:
    """Return the agent's request with imposed parameters; it may still ask for a shorter answer."""
    changed = {**request, **fixed}
    limits = [name for name in _LENGTH_LIMITS if fixed.get(name) is not None]
    if limits:
        asked = next((request[name] for name in _LENGTH_LIMITS if isinstance(request.get(name), int)), None)
        # The imposed limit must not lose to the other name.
        for name in _LENGTH_LIMITS:
            changed.pop(name, None)
        changed[limits[0]] = fixed[limits[0]] if asked is None else min(asked, fixed[limits[0]])
    return changed


def derived_seed(*parts: object) -> int:
    """Return a seed below 2**53, which JSON keeps exactly; it depends on the parts alone."""
    return int.from_bytes(_digest(parts)[:8], "big") >> 11


class CallSeeds:
    """Seeds of a session's calls: the n-th of several equal calls has the same seed in every run.

    Equal calls that are made at the same time are numbered as they arrive, which over HTTP may differ between runs.
    Their answers together are the same.
    """

    def __init__(self) -> None:
        self._asked: Counter[bytes] = Counter()

    def next(
        self,
        base: int,
        messages: Sequence[JSONMapping],
        tools: Sequence[JSONMapping] | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> int:
        """Return the seed of a call, from its session's seed; `prompt_ids` identify a call without messages."""
        content: list[object] = [_without_ids(message) for message in messages]
        asked = _digest((content or list(prompt_ids or ()), tools or None))
        self._asked[asked] += 1
        return derived_seed(base, asked.hex(), self._asked[asked])


@dataclass(slots=True)
class ImposedSampling:
    """Sampling parameters that a session imposes on its calls, and the seeds of these calls."""

    parameters: JSONMapping = field(default_factory=dict)
    seeds: CallSeeds = field(default_factory=CallSeeds)
    """Counts the calls if the parameters have a `seed`, from which each call's own is derived."""

    def impose(
        self,
        request: JSONMapping,
        messages: Sequence[JSONMapping],
        tools: Sequence[JSONMapping] | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> JSONObject:
        """Return a request with the parameters and with the seed of this call, which counts as made."""
        imposed = with_fixed_sampling(request, self.parameters)
        if (seed := self.parameters.get("seed")) is not None:
            imposed["seed"] = self.seeds.next(seed, messages, tools, prompt_ids)
        return imposed


def _without_ids(message: JSONMapping) -> JSONObject:
    """Return the message without the ids of tool calls, which are random in every run."""
    kept = {name: value for name, value in message.items() if name != "tool_call_id"}
    if isinstance(calls := message.get("tool_calls"), list):
        kept["tool_calls"] = [
            {name: value for name, value in call.items() if name != "id"} if isinstance(call, Mapping) else call
            for call in calls
        ]
    return kept


def _digest(value: object) -> bytes:
    try:
        text = orjson.dumps(value, default=_plain, option=_OPTIONS)
    except TypeError:  # text that is not Unicode, or integers that are too long
        text = repr(value).encode(errors="backslashreplace")
    return sha256(text).digest()


def _plain(value: object) -> object:
    """Return a representation of a value that JSON lacks, without memory addresses."""
    for method in ("model_dump", "to_dict", "tolist"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    return type(value).__qualname__
