"""Environment variables that send a program's model clients to a gateway, and keep its framework quiet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from rllm._runtime.process import no_fork_meanwhile
from rllm.capture.wire_formats import WIRE_FORMATS
from rllm.errors import ConfigError

OWN_KEY_PREFIX = "rllm."
"""Prefix of keys that a gateway derives from its own; a session's key names the session."""
_PLACEHOLDER = "rllm"
"""Key for a gateway without keys."""

OPERATORS_KEYS = ("RLLM_GATEWAY_API_KEY", "RLLM_UPSTREAM_API_KEY", "RLLM_VIEW_TOKEN")
"""Keys of the operator of gateways and viewers, which programs running as agents must not see."""

QUIET = {
    # LiteLLM, and DSPy, ADK and CrewAI through it: do not fetch a list of prices at import.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # The OpenAI Agents SDK sends its traces, and the key with them, to api.openai.com.
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
    # Claude Code: no titles, no telemetry; and nothing in the prompt that changes from turn to turn.
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_PROMPT_CACHING": "1",
    "ENABLE_TOOL_SEARCH": "false",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    # mini-swe-agent: ask nothing at the first start, and do not require the model's price.
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
"""Settings that keep frameworks from contacting other services, and from changing earlier messages."""


def gateway_variables(
    url: str, *, api_key: str | None = None, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of a program whose calls go to this URL.

    Args:
        url: a gateway's or a session's URL, with or without `/v1`.
        api_key: the gateway's key, if it has one, or the session's.
        inherited: the environment that these are added to: its values for `QUIET` stay, `NO_PROXY` is extended, and a
            token that would take precedence over our key is replaced.

    Raises:
        ConfigError: if the URL is invalid.
    """
    inherited = inherited or {}
    root = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(root)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"environment(url={url!r}): use the address of a gateway, such as http://127.0.0.1:8000")
    key = _key_for(parts.path, api_key)
    hosts = ",".join([inherited.get("NO_PROXY", ""), inherited.get("no_proxy", ""), parts.hostname])
    named = dict.fromkeys(filter(None, map(str.strip, hosts.split(","))))
    no_proxy = "*" if "*" in named else ",".join(named)  # `*` only means all hosts if it is alone
    variables = {"NO_PROXY": no_proxy, "no_proxy": no_proxy}
    for row in WIRE_FORMATS:
        variables |= {name: url.format(root=root) for name, url in row.base_url_variables.items()}
        variables |= dict.fromkeys(row.key_variables, key)
        variables |= {name: key for name in row.token_variables if inherited.get(name)}
    return {**variables, **{name: value for name, value in QUIET.items() if name not in inherited}}


def without_operators_keys(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program running as an agent may see."""
    return {name: value for name, value in variables.items() if name not in OPERATORS_KEYS}


def _key_for(path: str, api_key: str | None) -> str:
    """Return a key that every client accepts; it also names the session, if that can be sent in a header."""
    _, separator, session = path.rpartition("/sessions/")
    named = f"rllm-{unquote(session)}" if separator and unquote(session).isascii() else ""
    if api_key is None:
        return named or _PLACEHOLDER
    return f"{api_key}:{named}" if named and not api_key.startswith(OWN_KEY_PREFIX) else api_key


def key_of_user() -> str | None:
    """Return OPENAI_API_KEY unless it is a key of one of our gateways."""
    key = os.environ.get("OPENAI_API_KEY")
    return None if not key or _is_of_gateway(key) else key


def _is_of_gateway(key: str) -> bool:
    return key == _PLACEHOLDER or key.startswith((f"{_PLACEHOLDER}-", OWN_KEY_PREFIX))


def beside_own_keys(variables: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that would replace a user's own keys."""

    def stays(name: str, ours: str) -> bool:
        own = inherited.get(name)
        if not own or not name.endswith(("_API_KEY", "_AUTH_TOKEN")):
            return False
        return ours == _PLACEHOLDER or not _is_of_gateway(own)

    return {name: value for name, value in variables.items() if not stays(name, value)}


_inside: list[tuple[str, str | None]] = []
"""URLs and keys of the gateways that this process uses; several engines' gateways overlap."""
_own: dict[str, str | None] = {}
"""Values that the variables set for these gateways had before."""
_hidden: dict[str, str] = {}
"""Operator's keys removed from the environment."""


@contextmanager
def led_to(url: str, *, api_key: str | None = None) -> Iterator[None]:
    """Send the model clients of this process to a gateway; if blocks overlap, to the latest block's.

    The operator's keys are removed from the environment meanwhile, so that no program inherits them.
    """
    place = url, api_key
    with no_fork_meanwhile():
        _inside.append(place)
        _lead()
    try:
        yield
    finally:
        with no_fork_meanwhile():
            _inside.remove(place)
            _lead()


def hide_operators_keys() -> None:
    """Remove the operator's keys from the environment that new processes inherit."""
    for name in OPERATORS_KEYS:
        if value := os.environ.pop(name, None):
            _hidden[name] = value


def restore_operators_keys() -> None:
    """Undo `hide_operators_keys`."""
    os.environ.update(_hidden)
    _hidden.clear()


def operators_keys() -> dict[str, str]:
    """Return the operator's keys of this process, including those removed from its environment."""
    keys = {name: os.environ.get(name) or _own.get(name) or _hidden.get(name) for name in OPERATORS_KEYS}
    return {name: value for name, value in keys.items() if value}


_RANDOM_KEY = secrets.token_urlsafe(32)


def run_key() -> str:
    """Return the key of the gateways that this process starts for runs: RLLM_GATEWAY_API_KEY, or a random one."""
    return operators_keys().get("RLLM_GATEWAY_API_KEY") or _RANDOM_KEY


def _lead() -> None:
    own = {name: value for name, value in {**os.environ, **_own}.items() if value is not None}
    led: dict[str, str | None] = {}
    if _inside:
        url, api_key = _inside[-1]
        led = dict.fromkeys(OPERATORS_KEYS)
        led |= beside_own_keys(gateway_variables(url, api_key=api_key, inherited=own), own)
    for name in {*_own, *led}:
        value = led[name] if name in led else own.get(name)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _own.clear()
    _own.update({name: own.get(name) for name in led})
