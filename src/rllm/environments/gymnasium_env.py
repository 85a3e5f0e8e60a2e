"""`GymnasiumEnv`: any Gymnasium environment as text, and the conversion of its observations and actions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from rllm._runtime.untrusted import MAX_ANSWER_CHARS, last_json
from rllm.environments.base.base_env import BaseEnv, load_named_code, refuse_code, unwrapped
from rllm.environments.named import NamedEnvironment, take_seeded_tasks, take_whole_number, values_of
from rllm.errors import ConfigError, EnvError, boundary, counted, needed, raised
from rllm.types import JSONMapping, JSONObject

_SETTINGS = ("env", "env_kwargs", "seed", "action_labels", "observation_to_text", "parse_action")


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the environment of an id, with one task for each seed: `gymnasium:FrozenLake-v1?render_mode=ansi`.

    Args:
        name: an id, or `module:id` where a module registers it.
        params: `size` (100) and `seed` (0) of the tasks, whose seeds follow each other; `max_steps` (50); `labels` of
            the actions, separated by commas; others are arguments of the environment, as JSON or text.

    Raises:
        ConfigError: if the environment or a parameter is refused.
    """
    own = dict(params)
    tasks, max_steps = take_seeded_tasks(name, own), take_whole_number(own, "max_steps", 50, least=1)
    labels = [label for label in own.pop("labels", "").split(",") if label]
    env_args = {"env": name, "env_kwargs": values_of(own), "action_labels": labels}
    GymnasiumEnv.from_dict(load_named_code(env_args)).close()
    return NamedEnvironment(tasks=tasks, env_class=GymnasiumEnv, env_args=env_args, max_steps=max_steps)


class GymnasiumEnv(BaseEnv):
    """Environment whose observations, rewards and infos become plain Python values.

    A rollout ends when the environment is `terminated` or `truncated`. The step's info has these two flags, and
    `num_invalid_actions`, the number of answers so far without a legal action: those get an explanation and reward 0.
    Steps may run in different threads: for an environment that is bound to one, such as one that renders with OpenGL,
    subclass and let `is_multithread_safe` return False.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        env_kwargs: JSONMapping | None = None,
        *,
        seed: int | None = None,
        action_labels: Sequence[str] = (),
        observation_to_text: Callable[[Any], str] | None = None,
        parse_action: Callable[[str, Any], Any] | None = None,
    ) -> None:
        """Create the environment.

        Args:
            env: an id that `gymnasium.make` knows, or a function or class that returns the environment.
            env_kwargs: keyword arguments for either. With `render_mode="ansi"` the agent observes the rendering.
            seed: passed to every `reset`, so that all start alike; `None` for Gymnasium's own random start.
            action_labels: names of a Discrete space's actions, in order.
            observation_to_text: converts an observation to the text that the agent reads; JSON by default.
            parse_action: converts the model's text and the action space to an action, or raises `ValueError`; by
                default `rllm.environments.gymnasium_env.parse_action`.

        Raises:
            ConfigError: if the environment does not exist, it is vectorized, or the labels do not
                match its action space.
            EnvError: if its constructor raises.
            MissingDependencyError: if gymnasium is not installed.
        """
        self._labels = tuple(action_labels)
        self._seed = seed
        self._observation_to_text = observation_to_text
        self._parse_action = parse_action
        self._num_invalid_actions = 0
        self._open = True
        self._name = env if isinstance(env, str) else getattr(env, "__name__", repr(env))
        self.env = _make(env, dict(env_kwargs or {}), self._name)
        try:
            if hasattr(self.env, "single_action_space"):
                raise ConfigError(f"env={self._name!r} is a vectorized environment: pass a single one")
            space = self.env.action_space
            if action_labels and getattr(space, "n", None) != len(action_labels):
                raise ConfigError(f"action_labels={list(action_labels)!r}: pass one label for each action of {space}")
        except ConfigError:
            self.close()
            raise

    prepare_args = staticmethod(load_named_code)

    @classmethod
    def from_dict(cls, info: JSONMapping) -> Self:
        """Return the environment of a task: its `env`, and any other argument of the constructor by name.

        Raises:
            ConfigError: if there is no `env`.
        """
        if info.get("env") is None:
            raise ConfigError(
                f"a Gymnasium task with the keys {sorted(info)} has no 'env': pass an id, or env_args.env"
            )
        if isinstance(info["env"], str) and ":" in info["env"]:
            refuse_code("env", info["env"])
        return cls(**{key: info[key] for key in _SETTINGS if info.get(key) is not None})

    @classmethod
    def argument_names(cls) -> Collection[str]:
        """Return the constructor's arguments."""
        return _SETTINGS

    def reset(self) -> tuple[str, JSONObject]:
        """Start a new rollout, with the seed if there is one."""
        self._num_invalid_actions = 0
        with boundary(EnvError, f"{self._name}.reset"):
            returned = self.env.reset(seed=self._seed)
        observation, info = _parts(returned, f"{self._name}.reset", ("observation", "info"))
        return self._to_text(observation), self._info(info)

    def step(self, action: Any) -> tuple[str, float, bool, JSONObject]:
        """Perform the action in the model's text; an action that is not text is passed to the environment unchanged.

        Raises:
            EnvError: if the environment raises, or does not return Gymnasium's five values.
        """
        action = unwrapped(action)
        if isinstance(action, str):
            try:
                action = self._parsed(action)
            except ValueError as reason:
                self._num_invalid_actions += 1
                legal = legal_actions(self.env.action_space, self._labels)
                message = f"Invalid action: {reason}. Nothing happened. Legal actions: {legal}."
                return message, 0.0, False, self._info({"terminated": False, "truncated": False})
        with boundary(EnvError, f"{self._name}.step"):
            returned = self.env.step(action)
        names = ("observation", "reward", "terminated", "truncated", "info")
        observation, reward, terminated, truncated, info = _parts(returned, f"{self._name}.step", names)
        # Gymnasium sets both flags if the task ends in the last allowed step; `truncated` means cut off here.
        ends = {"terminated": bool(terminated), "truncated": bool(truncated) and not terminated}
        return self._to_text(observation), float(reward), any(ends.values()), self._info(info) | ends

    def close(self) -> None:
        """Close the environment, once."""
        if self._open:
            self._open = False
            with boundary(EnvError, f"{self._name}.close"):
                self.env.close()

    def _parsed(self, text: str) -> Any:
        if self._parse_action is None:
            return parse_action(text, self.env.action_space, self._labels)
        try:
            return self._parse_action(text, self.env.action_space)
        except ValueError:
            raise
        except Exception as error:
            raise EnvError(raised(f"parse_action of {self._name}", error)) from error

    def _to_text(self, observation: object) -> str:
        if self._observation_to_text is not None:
            with boundary(EnvError, f"observation_to_text of {self._name}"):
                return self._observation_to_text(observation)
        if getattr(self.env, "render_mode", None) == "ansi":
            with boundary(EnvError, f"{self._name}.render"):
                return rendering_to_text(self.env.render())
        return observation_to_text(observation)

    def _info(self, info: JSONMapping) -> JSONObject:
        return {**to_plain(info), "num_invalid_actions": self._num_invalid_actions}


def _make(env: str | Callable[..., Any], kwargs: JSONObject, name: str) -> Any:
    if not isinstance(env, str):
        with boundary(EnvError, name):
            return env(**kwargs)
    with needed("gymnasium", "gym", f"the environment {env!r}"):
        import gymnasium
    try:
        with boundary(EnvError, f"gymnasium.make({env!r})"):
            return gymnasium.make(env, **kwargs)
    except EnvError as error:
        if isinstance(error.__cause__, gymnasium.error.UnregisteredEnv):
            reason = str(error.__cause__).rstrip(".")
            raise ConfigError(f"{env!r}: {reason} (write module:id if a module of yours registers it)") from error
        raise


def _parts(returned: object, where: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(returned, tuple) or len(returned) != len(names):
        seen = counted(len(returned), "value") if isinstance(returned, tuple) else type(returned).__name__
        raise EnvError(f"{where} returned {seen}: Gymnasium's API returns ({', '.join(names)})")
    return returned


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
