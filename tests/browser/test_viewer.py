"""The viewer in a real browser. Pictures of its pages are left in `build/viewer`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from rllm.store import open_store
from rllm.viewer.export import export_report
from rllm.viewer.runs import Runs

from .conftest import Look

NewLook = Callable[..., Look]


def first(look: Look, path: str, selector: str) -> str:
    """Return the target of the first link of a page that matches the selector."""
    link: str = look.at(path).locator(selector).first.get_attribute("href")
    return link


@pytest.fixture(scope="session")
def paths(folders: dict[str, Path]) -> dict[str, str]:
    """Paths of a page of each kind, by name: of the demo, and of the run with two agents."""
    runs = Runs([str(folders["demo"]), str(folders["real"])])
    demo, real = (next(run for run in runs.all() if run.name == name) for name in ("shop", "real"))
    longest = max(demo.rollouts.of_step(2), key=lambda item: (item.num_calls, item.num_tokens))
    differing = next(item for item in demo.rollouts.of_step(1) if any(path.advantage for path in item.paths))
    best = max(demo.rollouts.of_step(1), key=lambda item: (item.paths[0].advantage or 0.0, item.num_tokens))
    drifted = next(item for item in real.rollouts.all() if item.drifts)
    failed = next(item for item in real.rollouts.all() if item.error)
    runs.close()
    return {
        "home": "/",
        "run": "/run/shop",
        "compare": "/run/shop?with=real",
        "step": "/run/shop/step/1",
        "held-out": "/run/shop/step/2?split=eval",
        "step-of-two-agents": "/run/real/step/1",
        "group": f"/run/shop/group?task={quote(differing.task_id, safe='')}&step=1",
        "episode": f"/run/shop/episode/{longest.session_id}",
        "episode-of-two-agents": f"/run/real/episode/{drifted.session_id}",
        "segments": "/run/segmented/episode/s",
        "failed": f"/run/real/episode/{failed.session_id}",
        "tokens": f"/run/shop/tokens/{differing.session_id}?overlay=ratio",
        "tokens-of-the-best": f"/run/shop/tokens/{best.session_id}?overlay=entropy",
        "tokens-as-table": f"/run/shop/tokens/{differing.session_id}?view=table",
        "drifts": "/run/real/drift",
        "drift": f"/run/real/drift/{drifted.session_id}",
        "batch": "/run/shop/batch/1",
        "time": "/run/shop/time/2",
        "rollouts": "/run/shop/rollouts?sort=longest",
        "search": "/run/shop/rollouts?text=price&reward=1",
        "not-there": "/run/shop/step/999",
    }


NAMES = (
    *("home", "run", "compare", "step", "held-out", "step-of-two-agents", "group", "episode", "episode-of-two-agents"),
    *("segments", "failed", "tokens", "tokens-as-table", "drifts", "drift", "batch", "time", "rollouts", "search"),
)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_shown_in_both_color_schemes(look: NewLook, paths: dict[str, str], name: str, dark: bool) -> None:
    one = look(dark=dark)
    page = one.at(paths[name])
    assert page.locator("h1").count() == 1
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
    one.picture(f"{name}{'-dark' if dark else ''}")


def test_missing_step_has_a_page(look: NewLook, paths: dict[str, str]) -> None:
    one = look()
    one.at(paths["not-there"], status=404)
    assert "there is no step 999" in one.page.inner_text("main")
    one.errors.clear()  # the browser reports the 404


@pytest.mark.parametrize("name", NAMES)
def test_nothing_overflows_a_narrow_window(look: NewLook, paths: dict[str, str], name: str) -> None:
    one = look(width=420)
    page = one.at(paths[name])
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    if name in ("run", "step", "tokens"):
        one.picture(f"{name}-narrow")


@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_readable_without_scripts(look: NewLook, paths: dict[str, str], name: str) -> None:
    plain, full = look(java_script_enabled=False), look()
    found = [one.at(paths[name]).inner_text("main") for one in (plain, full)]
    assert found[0].split() == found[1].split()


def test_segments_and_sub_agents_form_a_tree(look: NewLook) -> None:
    page = look().at("/run/segmented/episode/s")
    rows = page.locator(".segments li")
    assert [row.split(" · ")[-1] for row in rows.all_inner_texts()] == [
        "4 sampled tokens",
        "quotes a tool call of call 2",
        "2 sampled tokens",
        "quotes the answer of call 4",
    ]
    left = [rows.nth(number).bounding_box()["x"] for number in range(4)]
    assert left[0] == left[2] < left[1] == left[3], "segments that began from another one are indented"
    nodes = [page.locator(".graph .node").nth(number).bounding_box()["y"] for number in range(6)]
    assert nodes[0] == nodes[1] < nodes[2] < nodes[4] == nodes[5], "each segment has its own height"
    assert page.locator(".edge.quoting").count() == 2
    rows.nth(3).locator("a").first.click()
    assert page.url.endswith("#call-5")


def test_click_on_a_chart_opens_the_step(look: NewLook) -> None:
    page = look().at("/run/shop")
    box = page.locator("svg.plot").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 60)
    values = page.locator("figure").first.locator(".value").all_inner_texts()
    assert all(values)
    assert page.locator(".cursor[d^=M]").count() == page.locator("svg.plot").count(), "one cursor over all charts"
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 60)
    page.wait_for_url("**/run/shop/step/6*")


def test_range_of_steps_is_selected_by_dragging(look: NewLook) -> None:
    page = look().at("/run/shop")
    box = page.locator("svg.plot").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60)
    page.mouse.up()
    page.wait_for_url("**from=*")
    assert re.search(r"from=[23]&to=[45]", page.url)
    page.get_by_role("link", name="Show all").click()
    page.wait_for_url("**/run/shop")


def test_everything_is_reachable_by_keyboard(look: NewLook) -> None:
    page = look().at("/run/shop")
    chart = page.locator("svg.plot").first
    chart.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**/step/2")
    page.keyboard.press("]")
    page.wait_for_url("**/step/3")
    page.keyboard.press("[")
    page.wait_for_url("**/step/2")
    page.keyboard.press("j")
    assert "/group" in page.evaluate("document.activeElement.href")
    page.locator("[data-grid] td a").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    place = "[...document.activeElement.closest('tr').querySelectorAll('a')].indexOf(document.activeElement)"
    assert page.evaluate(f"[{place}, document.activeElement.closest('tr').rowIndex]") == [2, 1]
    page.keyboard.press("Enter")
    page.wait_for_url("**/episode/*")
    page.keyboard.press("u")
    page.wait_for_url("**/group*")
    page.keyboard.press("/")
    page.keyboard.type("figs")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts?text=figs")
    page.locator("h1").click()
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_focus_is_visible(look: NewLook) -> None:
    page = look().at("/run/shop/step/1")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_token_popup_shows_all_values(look: NewLook, paths: dict[str, str]) -> None:
    one = look()
    page = one.at(paths["tokens"])
    page.wait_for_selector("#tokens[data-ready]")
    token = page.locator("#tokens i[class]").last
    token.hover()
    found = page.locator(".inspect").inner_text()
    for name in ("id", "bytes", "sampler", "trainer", "ratio", "entropy", "advantage", "version", "clipped", "call"):
        assert re.search(rf"^{name}$", found, re.MULTILINE), name
    one.picture("token")
    place = int(page.locator(".inspect dd").first.inner_text())
    page.locator("#tokens").focus()
    page.keyboard.press("ArrowLeft")
    assert int(page.locator(".inspect dd").first.inner_text()) == place - 1
    page.keyboard.press("Home")
    assert page.locator(".inspect dd").nth(3).inner_text() == "prompt or inserted"
    page.keyboard.press("n")
    assert "sampled" in page.locator(".inspect dd").nth(3).inner_text()


def test_pictures_of_the_docs_can_be_taken(look: NewLook, paths: dict[str, str]) -> None:
    """`docs/viewer.md` has copies of these two."""
    one = look(width=1180, height=600)
    page = one.at(paths["run"])
    page.locator("svg.plot").nth(1).hover()
    one.picture("viewer-run")
    one = look(width=1180, height=560)
    page = one.at(paths["tokens-of-the-best"])
    page.wait_for_selector("#tokens[data-ready]")
    page.locator("#tokens i[class^=s]").first.hover()
    one.picture("viewer-tokens")


def test_overlay_keeps_the_scroll_position(look: NewLook, paths: dict[str, str]) -> None:
    page = look().at(paths["tokens"])
    page.wait_for_selector("#tokens[data-ready]")
    page.locator("#tokens").focus()
    page.keyboard.press("End")
    place = page.locator(".inspect dd").first.inner_text()
    page.keyboard.press("6")
    page.wait_for_selector("#tokens[data-overlay=entropy]")
    assert page.locator("[data-overlay=entropy][aria-current]").count() == 1
    assert page.locator(".inspect dd").first.inner_text() == place
    assert "overlay=entropy" in page.url
    assert page.locator("#tokens i[class^=s]").count() > 0
    page.reload()
    assert page.locator("[data-overlay=entropy][aria-current]").count() == 1, "the URL names the visible overlay"


def test_ten_thousand_episodes_can_be_opened(look: NewLook) -> None:
    one = look()
    began = time.perf_counter()
    page = one.at("/run/large/rollouts")
    opened = time.perf_counter() - began
    assert "10000 in all" in page.inner_text("h1")
    assert page.evaluate("document.querySelectorAll('*').length") < 2500
    began = time.perf_counter()
    page.get_by_role("link", name="more").click()
    page.wait_for_url("**offset=50")
    one.record("10,000 episodes", opened_s=round(opened, 3), next_page_s=round(time.perf_counter() - began, 3))
    page.fill("[data-search]", "no such words")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=no+such+words*")
    assert "there are more to search" in page.inner_text("main")
    one.picture("ten-thousand")


SCROLL = """async () => {
    const page = document.scrollingElement, frames = [];
    let last = performance.now();
    for (let number = 1; number <= 120; number++) {
        page.scrollTop = (page.scrollHeight - innerHeight) * number / 120;
        await new Promise(requestAnimationFrame);
        frames.push(performance.now() - last);
        last = performance.now();
    }
    frames.sort((one, other) => one - other);
    return {median_ms: frames[60], slowest_ms: frames[119]};
}"""
LAID_OUT = "[...document.querySelectorAll('.block')].filter(block => block.firstChild.checkVisibility({contentVisibilityAuto: true})).length"


def test_thirty_two_thousand_tokens_can_be_scrolled(look: NewLook) -> None:
    one = look()
    began = time.perf_counter()
    page = one.at("/run/long/tokens/long?overlay=sampler")
    opened = time.perf_counter() - began
    page.wait_for_selector("#tokens[data-ready]")
    assert page.locator("#tokens i").count() == 32_000
    blocks = page.locator(".block").count()
    assert page.evaluate(LAID_OUT) < blocks / 4, "blocks out of sight are not laid out"
    frames = page.evaluate(SCROLL)
    one.record("32,000 tokens", opened_s=round(opened, 3), **{name: round(value, 1) for name, value in frames.items()})
    page.locator("#tokens i").nth(31_990).click()
    assert page.locator(".inspect dd").first.inner_text() == "31990"
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    assert page.locator(".inspect dd").first.inner_text() == "200"
    assert page.locator("i.at").is_visible()
    one.picture("thirty-two-thousand")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "/step/1",
            "/rollouts",
            "/episode/bad",
            "/tokens/bad",
            "/tokens/bad?view=table",
            "/drift",
            "/drift/bad",
            "/time/1",
        ),
        *("/group?task={attack}", "/rollouts?text={attack}", "/episode/{attack}", "/tokens/bad?overlay={attack}"),
    ],
)
def test_attack_has_no_effect(look: NewLook, folders: dict[str, Path], path: str) -> None:
    name = folders["hostile"].name
    one = look()
    page = one.page
    page.goto(f"{one.address}/run/{quote(name)}{path.format(attack=quote(name))}")
    if page.locator("#tokens").count():
        page.wait_for_selector("#tokens[data-ready]")
        for token in page.locator("#tokens i").all():
            token.hover()
        page.keyboard.press("3")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("[window.hacked, document.querySelectorAll('img, main script').length]") == [None, 0]
    one.errors = [error for error in one.errors if "status of 40" not in error]
    one.picture(f"attack{re.sub(r'[^a-z]+', '-', path.replace('{attack}', ''))}")


GET_IN = """() => new Promise(refused => {
    document.addEventListener('securitypolicyviolation', () => refused(true), {once: true});
    const made = document.createElement('div'), script = document.createElement('script');
    made.innerHTML = '<b onclick="window.hacked = 1"></b>';
    script.textContent = 'window.hacked = 1';
    document.body.append(made, script);
    made.firstChild.click();
})"""
"""Resolves when the browser has blocked something."""


def test_injected_inline_script_does_not_run(look: NewLook) -> None:
    one = look()
    page = one.at("/run/shop")
    page.evaluate(GET_IN)
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in one.errors)
    one.errors.clear()


def test_page_of_a_running_run_is_updated(look: NewLook, folders: dict[str, Path]) -> None:
    one = look()
    with one.page.expect_response("**/pulse.json"):  # from then on the page has the earlier state
        page = one.at("/run/large")
    assert page.locator("a[href='/run/large/step/101']").count() == 0
    page.evaluate("window.sameDocument = true")
    with (folders["large"] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 101, "rollout/reward": 0.5, "timing/step_s": 1.0}) + "\n")
    page.wait_for_selector("table a[href='/run/large/step/101']")
    assert page.evaluate("window.sameDocument")


def test_report_is_self_contained(look: NewLook, folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("demo", "hostile"):
        path = tmp_path / f"{name}.html"
        export_report(str(folders[name]), path)
        one = look()
        one.page.goto(path.as_uri())
        assert one.requests == [path.as_uri()]
        assert one.page.evaluate("window.hacked") is None
        one.picture(f"report-{name}")


CONTRASTS = """() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const light = (colour) => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const found = {};
    const names = [...Array(11).keys()].map(n => `d${n - 5}`).concat([...Array(9).keys()].map(n => `s${n}`));
    for (const name of [...names, 'v0', 'v1', 'v2', 'v3', 'v4', 'v5', 'm1', 'm2', 'quiet', 'warn', 'bad', 'ok']) {
        const made = document.body.appendChild(document.createElement('b'));
        made.className = name;
        const style = getComputedStyle(made), back = style.backgroundColor;
        const pair = [light(style.color), light(back === 'rgba(0, 0, 0, 0)' ? getComputedStyle(document.body).backgroundColor : back)];
        found[name] = (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
    }
    return found;
}"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast_on_every_colour(look: NewLook, dark: bool) -> None:
    contrasts: dict[str, float] = look(dark=dark).at("/").evaluate(CONTRASTS)
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}, "WCAG 2.2, AA"


def test_colours_have_numbers(look: NewLook) -> None:
    page = look().at("/run/shop/step/1")
    for cell in page.locator("[data-grid] td a").all():
        assert re.match(r"[+-]?\d", cell.inner_text())


def test_viewer_writes_nothing(look: NewLook, folders: dict[str, Path], paths: dict[str, str]) -> None:
    with open_store(str(folders["demo"] / "traces.db"), read_only=True) as store:
        before = [info.id for info in store.sessions(limit=10_000)]
    files = sorted(path.name for path in folders["demo"].rglob("*") if not path.name.endswith(("-wal", "-shm")))
    one = look()
    for name in NAMES:
        one.at(paths[name])
    assert sorted(path.name for path in folders["demo"].rglob("*") if not path.name.endswith(("-wal", "-shm"))) == files
    with open_store(str(folders["demo"] / "traces.db"), read_only=True) as store:
        assert [info.id for info in store.sessions(limit=10_000)] == before
