"""One TLS context for the clients that agents make anew in every rollout: each would read all certificates again, for 20 ms."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def sharing(library: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What replaces the `__init__` of a transport of httpx, or of its successor. Clients with certificates of their own, or
    with HTTP/2, which changes a context, keep contexts of their own."""

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def init_sharing(self: Any, *arguments: Any, **options: Any) -> None:
            if not arguments and _is_plain(options):
                named = tuple(os.environ.get(name) for name in _VARIABLES)
                options["verify"] = _context(library, options.get("trust_env", True), named, ssl.SSLContext)
            init(self, *arguments, **options)

        return init_sharing

    return wrap


def _is_plain(options: Mapping[str, Any]) -> bool:
    return options.get("verify", True) is True and not options.get("cert") and not options.get("http2")


@lru_cache(maxsize=8)
def _context(library: Any, trust_env: bool, named: tuple[str | None, ...], kind: type[ssl.SSLContext]) -> Any:
    """The context that a library makes for these variables; `kind` is another class where somebody has replaced it."""
    return library.create_ssl_context(trust_env=trust_env)
