"""The viewer's pages over HTTP. Blocking reads run in threads, so that a slow store delays only its own pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from rllm.errors import ConfigError, RLLMError
from rllm.viewer import pages
from rllm.viewer.pages import NotFoundError, Page
from rllm.viewer.render import HERE, environment, render
from rllm.viewer.runs import Run, Runs
from rllm.viewer.security import Guard

OfRun = Callable[[Run, Mapping[str, Any], Mapping[str, str]], Any]


def create_app(runs: Runs, *, token: str | None = None) -> Guard:
    """Return the viewer as an ASGI application.

    Args:
        runs: runs to show.
        token: token that callers must present; `None` if only this machine can connect.

    Raises:
        MissingDependencyError: if Jinja is not installed.
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
        def made(request: Request) -> Any:
            return page(_run(runs, request), request.path_params, request.query_params)

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


def _run(runs: Runs, request: Request) -> Run:
    run = runs.get(request.path_params["run"])
    if run is None:
        raise NotFoundError(f"there is no run named {request.path_params['run']!r} here")
    return run


def _answering(page: Callable[[Request], Page | dict[str, Any]]) -> Callable[[Request], Any]:
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
    return _error_page(404, "there is no such page")


async def _failed(_: Request, error: Exception) -> Response:
    # The server also logs the error with its traceback.
    return _error_page(500, f"this page failed because of a bug in the viewer: {type(error).__name__}: {error}")


def _error_page(status: int, sentence: str) -> Response:
    return HTMLResponse(render("error.html", {"status": status, "sentence": sentence, "run": None}), status)
