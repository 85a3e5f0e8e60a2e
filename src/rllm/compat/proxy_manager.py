"""Gateway with which an agent can be tried and recorded outside of training.

manager = ProxyManager(proxy_port=4000)
manager.start_proxy_subprocess(config, db_path="traces.db")
client = get_chat_client(base_url=manager.get_proxy_url(), api_key="unused")
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from rllm.errors import ConfigError, RLLMError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import HTTPUpstream
from rllm.sdk.variables import operators_keys
from rllm.store import open_store
from rllm.types import JSONMapping

_OPENAI_URL = "https://api.openai.com/v1"
_PROVIDER = re.compile(r"^(?:openai|hosted_vllm)/")
"""Prefix of LiteLLM's model names that means an OpenAI-compatible server, and that this server does not know."""

_SHAPE = '{"model_list": [{"model_name": ..., "litellm_params": {"model": ..., "api_base": ..., "api_key": ...}}]}'


class ProxyManager:
    """Gateway in a thread, which ends with this process, or when the manager is garbage-collected."""

    def __init__(
        self,
        proxy_host: str = "127.0.0.1",
        proxy_port: int = 4000,
        admin_token: str | None = None,
        proxy_access_log: bool = False,
    ) -> None:
        """Set the address; nothing is started yet.

        Args:
            proxy_host: address to listen on; any but a loopback address needs a key in RLLM_GATEWAY_API_KEY.
            proxy_port: port to listen on; 0 takes a free one.
            admin_token: has no effect; nor has `proxy_access_log`.
        """
        self.proxy_host = proxy_host
        self.proxy_port = proxy_port
        self._url = f"http://{proxy_host}:{proxy_port}"
        self._running: ExitStack | None = None

    def start_proxy_subprocess(
        self,
        config: JSONMapping,
        db_path: str | os.PathLike[str] | None = None,
        project: str | None = None,
        snapshot_directory: str | None = None,
        *,
        sync_tracer: bool = True,
        add_logprobs: bool = True,
        add_return_token_ids: bool | None = None,
    ) -> None:
        """Start the gateway in front of the server that `config` names, and return once it answers.

        It runs in a thread of this process, and not in a subprocess.

        Args:
            config: as for LiteLLM's proxy, with models of one OpenAI-compatible server. Without `api_base` that is
                OpenAI's own, with the key in OPENAI_API_KEY unless one is given.
            db_path: the SQLite file for the traces; `None` is `$RLLM_HOME/traces.db`, or `~/.rllm/traces.db`.
            project: has no effect; nor have `snapshot_directory`, `sync_tracer` (a response is sent after its trace is
                durable) and `add_logprobs` (they are always requested).
            add_return_token_ids: request token ids from the server; `None` requests them from any server except
                OpenAI's own, which refuses such requests.

        Raises:
            ConfigError: if the config names no server, or several.
            RLLMError: if a gateway runs already, or does not start.
        """
        if self._running is not None:
            raise RLLMError(f"the proxy runs already at {self._url}: call shutdown_proxy() first")
        upstream = _Upstream.of_config(config)
        asks_for_ids = not upstream.is_openai if add_return_token_ids is None else add_return_token_ids
        keys = operators_keys()
        server = HTTPUpstream(
            upstream.url,
            api_key=upstream.api_key or keys.get("RLLM_UPSTREAM_API_KEY"),
            model=upstream.model,
            kind="vllm" if asks_for_ids else "openai",
        )
        listens = GatewayConfig(host=self.proxy_host, port=self.proxy_port, api_key=keys.get("RLLM_GATEWAY_API_KEY"))
        default = Path(os.environ.get("RLLM_HOME") or "~/.rllm", "traces.db")
        with ExitStack() as stack:
            store = stack.enter_context(open_store(str(Path(db_path or default).expanduser().absolute())))
            gateway = GatewayServer(store, server, listens)
            Context().run(stack.enter_context, gateway)  # outside of any session, to which its calls do not belong
            self._url = gateway.url
            self._running = stack.pop_all()
        weakref.finalize(self, self._running.close)

    def get_proxy_url(self, include_v1: bool = True) -> str:
        """Return the gateway's URL. A port of 0 becomes the real one once it has started."""
        return f"{self._url}/v1" if include_v1 else self._url

    async def flush_tracer(self, timeout: float = 30.0) -> bool:  # noqa: ASYNC109 - a name that users know
        """Return `True` at once: a response is only sent when its trace is durable, so nothing is left to flush."""
        return True

    def shutdown_proxy(self) -> None:
        """End the gateway; calls in flight are finished first, within its shutdown time. Repeatable."""
        if self._running is not None:
            self._running.close()
            self._running = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Upstream:
    """The one server of a LiteLLM-style config."""

    url: str
    api_key: str | None = field(repr=False)
    model: str | None = None
    """The server's name for the only model, where agents use another."""

    @property
    def is_openai(self) -> bool:
        return urlsplit(self.url).hostname == urlsplit(_OPENAI_URL).hostname

    @classmethod
    def of_config(cls, config: JSONMapping) -> Self:
        entries = config.get("model_list") if isinstance(config, Mapping) else None
        if not entries:
            raise ConfigError(f"proxy config has no models in its model_list: use {_SHAPE}")
        names, servers = set(), set()
        for position, entry in enumerate(entries):
            try:
                names.add((entry["model_name"], _PROVIDER.sub("", entry["litellm_params"]["model"])))
                servers.add(_server_of(entry["litellm_params"]))
            except (KeyError, TypeError) as error:
                where = f"model_list[{position}]={entry!r:.80}"
                raise ConfigError(f"the proxy config's {where} lacks {error}: use {_SHAPE}") from error
        if len(servers) > 1:
            urls = ", ".join(sorted(url for url, _ in servers))
            raise ConfigError(
                f"proxy config names several servers or keys ({urls}): one upstream is served; "
                "start a ProxyManager for each"
            )
        renamed = sorted((alias, target) for alias, target in names if alias != target)
        if renamed and len(names) > 1:
            raise ConfigError(
                f"proxy config calls the model {renamed[0][1]!r} {renamed[0][0]!r}: with several models, "
                "model_name must be the server's own name"
            )
        ((url, api_key),) = servers
        return cls(url=url, api_key=api_key, model=renamed[0][1] if renamed else None)


def _server_of(params: JSONMapping) -> tuple[str, str | None]:
    url, api_key = _resolved(params.get("api_base")), _resolved(params.get("api_key"))
    if url is not None:
        return url.rstrip("/"), api_key
    model: str = params["model"]
    if "/" in model.removeprefix("openai/"):
        raise ConfigError(
            f"proxy config model={model!r} has no api_base: give the base URL of an OpenAI-compatible server"
        )
    return _OPENAI_URL, api_key or os.environ.get("OPENAI_API_KEY")


def _resolved(value: str | None) -> str | None:
    """Return the value, or for LiteLLM's `os.environ/NAME` the value of the variable NAME."""
    if value is None or not value.startswith("os.environ/"):
        return value
    name = value.removeprefix("os.environ/")
    if name not in os.environ:
        raise ConfigError(f"proxy config {value!r}: the environment variable {name} is not set")
    return os.environ[name]
