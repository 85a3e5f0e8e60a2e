"""`GymnasiumEnv`: any Gymnasium environment, played in text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rllm.environments.base.action import unwrapped
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.base.from_task import named_code, refuse_code
from rllm.environments.gymnasium_text import (
    legal_actions,
    observation_to_text,
    parse_action,
    rendering_to_text,
    to_plain,
)
from rllm.errors import ConfigError, EnvError, MissingDependencyError, boundary, counted, raised

_SETTINGS = ("env", "env_kwargs", "seed", "action_labels", "observation_to_text", "parse_action")


class GymnasiumEnv(BaseEnv):
    """Observations, rewards and infos as plain Python values; answers that name no legal action are sent back.

    A rollout is over when the environment says `terminated` or `truncated`. The step's info has which of them it was, and
    `num_invalid_actions`, the answers so far that were sent back with reward 0. Steps may run in different threads: for an
    environment that is bound to one, such as one that renders with OpenGL, inherit and let `is_multithread_safe` return
    False.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        action_labels: Sequence[str] = (),
        observation_to_text: Callable[[Any], str] | None = None,
        parse_action: Callable[[str, Any], Any] | None = None,
    ) -> None:
        """Make the environment.

        Args:
            env: an id that `gymnasium.make` knows, or a function or class that gives the environment.
            env_kwargs: keyword arguments for either. With `render_mode="ansi"` what the agent observes is the rendering.
            seed: given to every `reset`, so that each begins alike. `None`: Gymnasium's own random start.
            action_labels: names of a Discrete space's actions, in order.
            observation_to_text: from an observation to what the agent reads; JSON where it is not given.
            parse_action: from the model's text and the action space to an action; it raises `ValueError` for what it
                cannot read. Where it is not given, `rllm.environments.gymnasium_text.parse_action`.

        Raises:
            ConfigError: if there is no such environment, it is a vector of several, or the labels do not fit its action space.
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
            _check_single(self.env, self._name)
            _check_labels(self._labels, self.env.action_space)
        except ConfigError:
            self.close()
            raise

    prepare_args = staticmethod(named_code)

    @classmethod
    def from_dict(cls, info: Mapping[str, Any]) -> Self:
        """The environment of a task: its `env`, and any other argument of the constructor by its name.

        Raises:
            ConfigError: if there is no `env`.
        """
        if info.get("env") is None:
            raise ConfigError(
                f"a Gymnasium task with the keys {sorted(info)} has no 'env': give an id, or env_args.env"
            )
        if isinstance(info["env"], str) and ":" in info["env"]:
            refuse_code("env", info["env"])
        return cls(**{key: info[key] for key in _SETTINGS if info.get(key) is not None})

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Begin anew, with the seed if there is one."""
        self._num_invalid_actions = 0
        with boundary(EnvError, f"{self._name}.reset"):
            returned = self.env.reset(seed=self._seed)
        observation, info = _parts(returned, f"{self._name}.reset", ("observation", "info"))
        return self._to_text(observation), self._info(info)

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Do what the model's text says; an action that is no text goes to the environment as it is.

        Raises:
            EnvError: if the environment raises, or returns something else than Gymnasium's five values.
        """
        action = unwrapped(action)
        if isinstance(action, str):
            try:
                action = self._parsed(action)
            except ValueError as reason:
                return self._refusal(reason)
        with boundary(EnvError, f"{self._name}.step"):
            returned = self.env.step(action)
        names = ("observation", "reward", "terminated", "truncated", "info")
        observation, reward, terminated, truncated, info = _parts(returned, f"{self._name}.step", names)
        # Gymnasium's time limit says so of an end that comes with its last step, too; ours is the rollout that was cut off.
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

    def _refusal(self, reason: ValueError) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_invalid_actions += 1
        legal = legal_actions(self.env.action_space, self._labels)
        message = f"Invalid action: {reason}. Nothing happened. Legal actions: {legal}."
        return message, 0.0, False, self._info({"terminated": False, "truncated": False})

    def _to_text(self, observation: Any) -> str:
        if self._observation_to_text is not None:
            with boundary(EnvError, f"observation_to_text of {self._name}"):
                return self._observation_to_text(observation)
        if getattr(self.env, "render_mode", None) == "ansi":
            with boundary(EnvError, f"{self._name}.render"):
                return rendering_to_text(self.env.render())
        return observation_to_text(observation)

    def _info(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {**to_plain(info), "num_invalid_actions": self._num_invalid_actions}


def _make(env: str | Callable[..., Any], kwargs: dict[str, Any], name: str) -> Any:
    if not isinstance(env, str):
        with boundary(EnvError, name):
            return env(**kwargs)
    try:
        import gymnasium
    except ImportError as error:
        raise MissingDependencyError.of("gymnasium", "gym", f"the environment {env!r}") from error
    try:
        with boundary(EnvError, f"gymnasium.make({env!r})"):
            return gymnasium.make(env, **kwargs)
    except EnvError as error:
        if isinstance(error.__cause__, gymnasium.error.UnregisteredEnv):
            raise ConfigError(f"env={env!r}: {error.__cause__}; import the package that registers it") from error
        raise


def _check_single(env: Any, name: str) -> None:
    if hasattr(env, "single_action_space"):
        raise ConfigError(f"env={name!r} is a vector of environments: give a single one; the engine runs many of them")


def _check_labels(labels: tuple[str, ...], space: Any) -> None:
    if labels and getattr(space, "n", None) != len(labels):
        raise ConfigError(f"action_labels={list(labels)!r}: give one label for each action of {space}")


def _parts(returned: Any, where: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(returned, tuple) or len(returned) != len(names):
        seen = counted(len(returned), "value") if isinstance(returned, tuple) else type(returned).__name__
        raise EnvError(f"{where} returned {seen}: Gymnasium's API returns ({', '.join(names)})")
    return returned
