"""Access control and content policy of the viewer.

Programs of this machine connect by its own names, others with the token. Pages show text of models, which may attack
its reader. Jinja escapes it; should that fail, the policy below runs only our scripts, and sends nothing to other
hosts.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rllm._runtime.network import is_loopback

COOKIE = "rllm_viewer"
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Middleware that refuses unauthorised requests, and adds the content policy to all responses."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        """Guard an application.

        Args:
            app: the pages.
            token: token that callers must present. `None` admits every program of this machine that uses a loopback
                name as the host; a page of another site whose name resolves to this machine is refused.
        """
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refused = self._refusal(scope)
        await (refused or self._app)(scope, receive, send_with_policy)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response to an unauthorised request; `None` if it is authorised."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the viewer is read-only: use GET", 405)
        if self._token is None:
            name, _ = _name_and_port(headers)
            if is_loopback(name):
                return None
            return PlainTextResponse(
                f"this viewer answers to localhost, 127.0.0.1 and [::1] only, not to {name!r}\n", 421
            )
        return self._refusal_without_token(scope, headers)

    def _refusal_without_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self._token is not None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        presented = next((value for name, value in query if name == "token"), None)
        if presented is not None and self._is_token(presented):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            path = quote("/" + scope["path"].lstrip("/\\"))  # never `//host`, which would be another host
            answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            answer.set_cookie(_cookie_of(headers), self._mark, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if hmac.compare_digest(_cookie(headers).encode(), self._mark.encode()):
            return None
        return PlainTextResponse("this viewer needs its token: open the address that `rllm view` printed\n", 401)

    def _is_token(self, presented: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(presented.encode(errors="replace"), self._token.encode())

    @property
    def _mark(self) -> str:
        """Value of the cookie: it proves knowledge of the token without revealing it."""
        assert self._token is not None
        return hmac.digest(self._token.encode(), b"rllm viewer", "sha256").hex()


def _name_and_port(headers: Headers) -> tuple[str, str]:
    """Return host, in lower case, and port of a request."""
    host = headers.get("host", "").lower()
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, ""
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name, port


def _cookie_of(headers: Headers) -> str:
    """Return the cookie's name, with the port, since browsers share cookies between ports of a host."""
    _, port = _name_and_port(headers)
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() else COOKIE


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_cookie_of(headers))
    except CookieError:
        return ""
    return found.value if found else ""
