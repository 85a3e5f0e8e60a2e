"""What Gymnasium speaks, arrays and spaces, to what a language model speaks, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm.errors import MissingDependencyError

MAX_ACTION_CHARS = 20_000
"""An action is looked for in this many characters at the end of an answer."""


def to_plain(value: Any) -> Any:
    """A value that JSON can hold: numpy's numbers and arrays as Python's, and what is unknown as its text."""
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


def rendering_to_text(rendering: Any) -> str:
    """An `ansi` rendering without its terminal codes; what was coloured is put into brackets: `[P]`."""
    marked = re.sub(r"\x1b\[(?=[0;]*[1-9])[\d;]*+m([^\x1b]*+)\x1b\[0?m", r"[\1]", str(rendering))
    return re.sub(r"\x1b\[[\d;]*m", "", marked)


def observation_to_text(observation: Any) -> str:
    """A text as it is, everything else as JSON."""
    return observation if isinstance(observation, str) else json.dumps(to_plain(observation), ensure_ascii=False)


def parse_action(text: str, action_space: Any, labels: Sequence[str] = ()) -> Any:
    """The last action of this space that the text names.

    A Discrete action is an integer, or one of `labels`: the name of the space's first action, its second, and so on, in
    any case of letters. Every other space's action is JSON: a list for Box, MultiDiscrete, MultiBinary and Tuple, an
    object for Dict.

    Raises:
        ValueError: if the text names no action, or one that is not in the space.
    """
    spaces = _spaces()
    tail = text[-MAX_ACTION_CHARS:]
    action: Any
    if isinstance(action_space, spaces.Discrete):
        action = _last_discrete(tail, action_space, labels)
    elif isinstance(action_space, spaces.Text):
        action = text.strip()
    else:
        action = _of_space(_last_json(tail), action_space)
    if not action_space.contains(action):
        raise ValueError(f"{str(to_plain(action))[:200]} is not among the legal actions")
    return action


def legal_actions(action_space: Any, labels: Sequence[str] = ()) -> str:
    """What may be answered, in words: `0 (left), 1 (right)`, or the space as Gymnasium prints it."""
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


def _last_json(text: str) -> Any:
    values = list(_json_values(text))
    if not values:
        raise ValueError("the answer holds no JSON")
    return values[-1]


def _json_values(text: str) -> Iterator[Any]:
    """Each list and object in the text that is not inside another one; the text itself if it is a number."""
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        decoder, position = json.JSONDecoder(), 0
        while begin := re.compile(r"[\[{]").search(text, position):
            try:
                value, position = decoder.raw_decode(text, begin.start())
                yield value
            except ValueError:
                position = begin.end()
            except RecursionError:  # so many brackets that what follows is no action either
                return


def _of_space(value: Any, space: Any) -> Any:
    """The JSON value as this space's actions are: arrays of its data type, integers, dicts and tuples of them."""
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
        if action.dtype.kind != "f" and not np.array_equal(
            action, array
        ):  # 257 is no 1, though a byte holds it as that
            raise ValueError(f"{str(value)[:200]} does not fit in {space.dtype}")
        return action
    return value


def _spaces() -> Any:
    try:
        from gymnasium import spaces
    except ImportError as error:
        raise MissingDependencyError.of("gymnasium", "gym", "a Gymnasium environment") from error
    return spaces
