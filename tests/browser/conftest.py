"""A headless Chromium, the runs that it shows, and pages that report any error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rllm.cli.training import lead_to_gateway
from rllm.demo.tasks import demo_policy, shop_tasks
from rllm.gateway.server import ServerThread
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.viewer.app import create_app
from rllm.viewer.runs import Runs

from ..viewer.conftest import run_folder  # noqa: F401  # A fixture.
from ..viewer.run_folders import hostile_run, large_run, long_run, segmented_run

PICTURES = Path(__file__).parents[2] / "build/viewer"
_TIMEOUT_MS = 60_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small steps of the demo."""
    folder = tmp_path_factory.mktemp("demo") / "shop"
    config = load_config(
        [
            *("num_steps=6", "tasks_per_step=6", "rollout.group_size=6", "rollout.timeout_s=120", "optim.lr=3e-4"),
            *("optim.num_epochs=2", "optim.num_minibatches=2", "eval.every=2", f"run_dir={folder}", "trackers=[jsonl]"),
        ]
    )
    port = lead_to_gateway(config)
    from rllm.demo import agent  # creates its client on import, so it comes after the line above

    config.model.path = str(demo_policy(agent.SYSTEM, agent.TOOLS, lambda *_: None))
    trainer = AgentTrainer(
        agent_run_func=agent.shop_assistant,
        train_dataset=shop_tasks(200, seed=0),
        val_dataset=shop_tasks(20, seed=-1),
        config=config,
    )
    trainer.config.gateway.port = port
    trainer.train()
    return folder


@pytest.fixture(scope="session")
def folders(demo: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """Runs by name: `demo`, `real` (two agents), `large` (10,000 episodes), `long` (32,000 tokens), `hostile`,
    `segmented` (compacted, and with a sub-agent)."""
    made = tmp_path_factory.mktemp("made")
    return {
        "demo": demo,
        "real": run_folder,
        "large": large_run(made / "large", num_episodes=10_000),
        "long": long_run(made / "long", num_tokens=32_000),
        "hostile": hostile_run(made),
        "segmented": segmented_run(made / "segmented"),
    }


@pytest.fixture(scope="session")
def address(folders: dict[str, Path]) -> Iterator[str]:
    """URL of the viewer for all of them."""
    with ServerThread(create_app(Runs([str(folder) for folder in folders.values()]))) as server:
        yield server.url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    folder = Path(os.environ.get("RLLM_BROWSER", ".browser")).absolute()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
    if (folder / "fonts.conf").exists():
        environment["FONTCONFIG_FILE"] = str(folder / "fonts.conf")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(folder / "chromium"),
            args=["--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage"],
            env=environment,
            timeout=_TIMEOUT_MS,
        )
        yield browser
        browser.close()


@dataclass
class Look:
    """A page of the browser."""

    page: Any
    address: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def at(self, path: str, *, status: int = 200) -> Any:
        answer = self.page.goto(self.address + path)
        assert answer.status == status, path
        return self.page

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(PICTURES / f"{name}.png"))

    def record(self, name: str, **numbers: Any) -> None:
        """Store measured numbers next to the pictures; they are not asserted, since machines differ."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / "measured.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, name: numbers}, indent=2))


@pytest.fixture
def look(chromium: Any, address: str) -> Iterator[Callable[..., Look]]:
    """`look(dark=True)`: a new page. At the end no page may have requested another host, or have had an error."""
    made: list[tuple[Any, Look]] = []

    def make(*, dark: bool = False, width: int = 1360, height: int = 860, **options: Any) -> Look:
        scheme = "dark" if dark else "light"
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        context.set_default_timeout(_TIMEOUT_MS)
        found = Look(context.new_page(), address)
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("console", lambda line: found.errors.append(line.text) if line.type == "error" else None)
        made.append((context, found))
        return found

    yield make
    for context, found in made:
        context.close()
        strangers = {url for url in found.requests if urlsplit(url).netloc not in (urlsplit(address).netloc, "")}
        assert strangers == set()
        assert found.errors == []
