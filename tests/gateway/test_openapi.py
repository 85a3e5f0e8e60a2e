import httpx
import pytest

from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.openapi import openapi
from rllm.gateway.upstream import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine

ROUTES = [(path, method) for path, item in openapi(needs_key=False)["paths"].items() for method in item]


@pytest.mark.parametrize(("path", "method"), ROUTES)
async def test_every_route_that_is_described_is_there(path, method):
    app = create_app(MemoryTraceStore(), EngineUpstream(ScriptedEngine(["hello"]), "m"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        url = path.format(session_id="s", model_id="m")
        answer = await client.request(method, url)
        assert answer.status_code not in (405, 500)
        if answer.status_code == 404:  # The session, not the route.
            assert answer.json()["error"]["code"] == "session_not_found"


async def test_the_description_is_served_and_says_whether_a_key_is_needed():
    for key in (None, "secret"):
        config = GatewayConfig(api_key=key)
        app = create_app(MemoryTraceStore(), EngineUpstream(ScriptedEngine(["hello"]), "m"), config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            described = (await client.get("/openapi.json")).json()
        assert described["openapi"] == "3.1.0"
        assert ("security" in described) is (key is not None)
