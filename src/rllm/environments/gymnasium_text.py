"""Text of a Gymnasium environment's observations, and the actions that a model's text names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm._runtime.untrusted import MAX_ANSWER_CHARS, last_json
from rllm.errors import needed


def to_plain(value: object) -> Any:
    """Return a value that JSON can hold: numpy values as Python ones, unknown types as their text."""
    if hasattr(value, "tolist"):
        plain = value.tolist()
        return str(value) if type(plain) is type(value) else to_plain(plain)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return str(value)


def rendering_to_text(rendering: object) -> str:
    """Return an `ansi` rendering without terminal codes; coloured text is put into brackets: `[P]`."""
    marked = re.sub(r"\x1b\[(?=[0;]*[1-9])[\d;]*+m([^\x1b]*+)\x1b\[0?m", r"[\1]", str(rendering))
    return re.sub(r"\x1b\[[\d;]*m", "", marked)


def observation_to_text(observation: Any) -> str:
    """Return text unchanged, and everything else as JSON."""
    return observation if isinstance(observation, str) else json.dumps(to_plain(observation), ensure_ascii=False)


def parse_action(text: str, action_space: Any, labels: Sequence[str] = ()) -> Any:
    """Return the last action of this space in the text.

    A Discrete action is an integer, or one of `labels`, the names of the space's actions in order, in any letter
    case. An action of any other space is JSON: a list for Box, MultiDiscrete, MultiBinary and Tuple, an object for
    Dict.

    Raises:
        ValueError: if the text has no action, or one that is not in the space.
    """
    spaces = _spaces()
    action: Any
    if isinstance(action_space, spaces.Discrete):
        action = _last_discrete(text[-MAX_ANSWER_CHARS:], action_space, labels)
    elif isinstance(action_space, spaces.Text):
        action = text.strip()
    else:
        action = _of_space(last_json(text), action_space)
    if not action_space.contains(action):
        raise ValueError(f"{str(to_plain(action))[:200]} is not among the legal actions")
    return action


def legal_actions(action_space: object, labels: Sequence[str] = ()) -> str:
    """Describe the legal actions: `0 (left), 1 (right)`, or the space as Gymnasium prints it."""
    if not isinstance(action_space, _spaces().Discrete):
        return f"JSON of {action_space}"
    if not labels and action_space.n > 20:
        return f"an integer from {action_space.start} to {action_space.start + action_space.n - 1}"
    names = [f" ({label})" for label in labels] or [""] * int(action_space.n)
    return ", ".join(f"{action_space.start + index}{name}" for index, name in enumerate(names))


def _last_discrete(text: str, space: Any, labels: Sequence[str]) -> int:
    actions = {label.lower(): int(space.start) + index for index, label in enumerate(labels)}
    words = "|".join(re.escape(label) for label in sorted(actions, key=len, reverse=True))
    number = r"(?<![\w.+-])-?\d{1,18}(?!\.?\w)"  # not a part of a word or of a decimal number
    pattern = rf"(?<!\w)(?:{words})(?!\w)|{number}" if words else number
    found = re.findall(pattern, text.lower())
    if not found:
        raise ValueError("the answer names no action")
    return actions[found[-1]] if found[-1] in actions else int(found[-1])


def _of_space(value: object, space: object) -> Any:
    """Convert a JSON value to the types of this space's actions."""
    import numpy as np

    spaces = _spaces()
    if isinstance(space, spaces.Dict) and isinstance(value, dict):
        return {key: _of_space(item, space[key]) if key in space.spaces else item for key, item in value.items()}
    if isinstance(space, spaces.Tuple) and isinstance(value, list) and len(value) == len(space.spaces):
        return tuple(_of_space(item, part) for item, part in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        array = np.asarray(value)
        if array.dtype.kind not in "iufb" or (array.dtype.kind == "f" and np.dtype(space.dtype).kind != "f"):
            raise ValueError(f"{str(value)[:200]} does not hold numbers of the type {space.dtype}")
        action = array.astype(space.dtype)
        if action.dtype.kind != "f" and not np.array_equal(action, array):  # 257 as a byte is 1
            raise ValueError(f"{str(value)[:200]} does not fit in {space.dtype}")
        return action
    return value


def _spaces() -> Any:
    with needed("gymnasium", "gym", "a Gymnasium environment"):
        from gymnasium import spaces
    return spaces
