"""Who may look: programs of this machine by its own names, others with the token; and what a page may do in a browser.

The pages show what models wrote, which may have been made to attack whoever reads it. Jinja escapes it, and should that ever
fail, the policy below lets no script run that is not a file of ours, and lets nothing be sent to another host.
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
    """Answers only those who may ask, and adds to every answer what it may do."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        """
        Args:
            app: the pages.
            token: what a caller must present. `None` lets every program of this machine in that calls it by a name which
                leads nowhere else: a page of another site that has made its own name lead here is refused by that.
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
        """What to answer instead of the page; `None` for those who may see it."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the viewer only shows things: use GET", 405)
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
            path = quote("/" + scope["path"].lstrip("/\\"))  # never `//host`, which would lead elsewhere
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
        """What the cookie holds: it proves that the token was known, and does not tell it."""
        assert self._token is not None
        return hmac.digest(self._token.encode(), b"rllm viewer", "sha256").hex()


def _name_and_port(headers: Headers) -> tuple[str, str]:
    """By which name, in small letters, and at which port the browser calls."""
    host = headers.get("host", "").lower()
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, ""
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name, port


def _cookie_of(headers: Headers) -> str:
    """The cookie's name. A browser keeps cookies by host alone, so each viewer of a host has one of its own, by its port."""
    _, port = _name_and_port(headers)
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() else COOKIE


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_cookie_of(headers))
    except CookieError:
        return ""
    return found.value if found else ""
