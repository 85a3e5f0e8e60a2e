import httpx
import pytest

from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.openapi import openapi
from rllm.gateway.upstream import EngineUpstream, UpstreamPool
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine

ROUTES = [
    (path, method) for path, item in openapi(needs_key=False, has_upstreams=True)["paths"].items() for method in item
]


@pytest.mark.parametrize(("path", "method"), ROUTES)
async def test_every_route_that_is_described_is_there(path, method):
    upstream = (
        UpstreamPool(["http://127.0.0.1:9"]) if "upstreams" in path else EngineUpstream(ScriptedEngine(["hello"]), "m")
    )
    app = create_app(MemoryTraceStore(), upstream)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        url = path.format(session_id="s", model="m", model_id="m", response_id="resp_1", replica_id=1)
        answer = await client.request(method, url)
        assert answer.status_code not in (405, 500)
        if answer.status_code == 404:  # What it names, not the route.
            assert answer.json()["error"]["code"] in ("session_not_found", "response_not_found")


async def test_the_description_is_served_and_says_whether_a_key_is_needed():
    for key in (None, "secret"):
        config = GatewayConfig(api_key=key)
        app = create_app(MemoryTraceStore(), EngineUpstream(ScriptedEngine(["hello"]), "m"), config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            described = (await client.get("/openapi.json")).json()
        assert described["openapi"] == "3.1.0"
        assert ("security" in described) is (key is not None)


def test_an_upstream_that_is_added_is_answered_as_described(serve):
    served = serve(upstream="pool", config=GatewayConfig(api_key="k", shutdown_timeout_s=1.0))
    key = {"authorization": "Bearer k"}
    added = served.http.post("/upstreams", json={"url": "http://127.0.0.1:9"}, headers=key)
    described = served.http.get("/openapi.json").json()["paths"]["/upstreams"]["post"]["responses"]
    assert described.keys() == {str(added.status_code), "default"}
