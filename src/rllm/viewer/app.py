"""The viewer's pages over HTTP, and access to them.

Blocking reads run in threads, so that a slow store delays only its own pages. Programs on this machine connect by its
loopback names, others with the token. Pages show text of models, which may attack its reader: Jinja escapes it, and if
that fails, the content security policy below allows only our own scripts, and no requests to other hosts.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rllm.errors import ConfigError, RLLMError
from rllm.gateway.config import is_loopback
from rllm.types import JSONMapping, JSONObject
from rllm.viewer import pages
from rllm.viewer.pages import NotFoundError, Page, QueryArgs
from rllm.viewer.render import HERE, environment, render
from rllm.viewer.runs import Run, Runs

OfRun = Callable[[Run, JSONMapping, QueryArgs], Page | JSONObject]


def create_app(runs: Runs, *, token: str | None = None) -> Guard:
    """Return the viewer as an ASGI application.

    Args:
        runs: runs to show.
        token: token that callers must present; `None` if only this machine can connect.
    """
    environment()

    @asynccontextmanager
    async def closing(_: Starlette) -> AsyncIterator[None]:
        yield
        runs.close()

    app = Starlette(routes=_routes(runs), exception_handlers={404: _unknown, 500: _failed}, lifespan=closing)
    return Guard(app, token=token)


def _routes(runs: Runs) -> list[BaseRoute]:
    def of_run(path: str, page: OfRun) -> Route:
        def made(request: Request) -> Page | JSONObject:
            name = request.path_params["run"]
            run = runs.get(name)
            if run is None:
                raise NotFoundError(f"there is no run named {name!r} here")
            return page(run, request.path_params, request.query_params)

        return Route(f"/run/{{run}}{path}", _answering(made))

    return [
        Route("/", _answering(lambda _: pages.home(runs))),
        of_run("", lambda run, _, query: pages.run_page(run, runs, query)),
        of_run("/step/{step:int}", lambda run, path, query: pages.step_page(run, path["step"], query)),
        of_run("/batch/{step:int}", lambda run, path, query: pages.batch_page(run, path["step"], query)),
        of_run("/time/{step:int}", lambda run, path, query: pages.time_page(run, path["step"], query)),
        of_run("/group", lambda run, _, query: pages.group_page(run, query.get("task", ""), query)),
        of_run("/rollouts", lambda run, _, query: pages.rollouts_page(run, query)),
        of_run("/drift", lambda run, _, query: pages.drifts_page(run, query)),
        of_run("/drift/{session}", lambda run, path, _: pages.drift_page(run, path["session"])),
        of_run("/episode/{session}", lambda run, path, _: pages.episode_page(run, path["session"])),
        of_run("/tokens/{session}", lambda run, path, query: pages.tokens_page(run, path["session"], query)),
        of_run("/tokens/{session}/data.json", lambda run, path, query: pages.tokens_data(run, path["session"], query)),
        of_run("/pulse.json", lambda run, *_: pages.pulse(run)),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]


def _answering(page: Callable[[Request], Page | JSONObject]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a page: its HTML or JSON, or an error page."""

    async def endpoint(request: Request) -> Response:
        try:
            made = await run_in_threadpool(page, request)
            if isinstance(made, dict):
                return JSONResponse(made)
            template, context = made
            return HTMLResponse(await run_in_threadpool(render, template, context))
        except NotFoundError as error:
            return _error_page(404, str(error.args[0]))
        except ConfigError as error:
            return _error_page(400, str(error))
        except RLLMError as error:
            return _error_page(503, str(error))

    return endpoint


async def _unknown(_: Request, __: Exception) -> Response:
    return _error_page(404, "no such page")


async def _failed(_: Request, error: Exception) -> Response:
    # The server also logs the error with its traceback.
    return _error_page(500, f"this page failed because of a bug in the viewer: {type(error).__name__}: {error}")


def _error_page(status: int, sentence: str) -> Response:
    return HTMLResponse(render("error.html", {"status": status, "sentence": sentence, "run": None}), status)


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
    """Middleware that refuses unauthorized requests, and adds the content policy to all responses."""

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
        """Return the response to an unauthorized request; `None` if it is authorized."""
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
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(_cookie_of(headers))
        except CookieError:
            cookie = None
        if cookie is not None and hmac.compare_digest(cookie.value.encode(), self._mark.encode()):
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
