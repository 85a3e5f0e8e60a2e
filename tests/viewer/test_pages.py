"""Every page over HTTP, of a real training run."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rllm.store import open_store
from rllm.viewer import charts
from rllm.viewer.runs import Run

from .conftest import Client
from .run_folders import trace_of


@pytest.fixture
def client(look: Client) -> TestClient:
    return look()


def words(html: str) -> str:
    """Return the text of a page as a reader sees it."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def page(client: TestClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


def links(html: str, start: str) -> list[str]:
    return list(dict.fromkeys(unescape(link) for link in re.findall(r'href="([^"]*)"', html) if link.startswith(start)))


def test_every_link_leads_to_a_page(client: TestClient) -> None:
    seen: set[str] = set()
    pending = ["/"]
    while pending:
        path = pending.pop()
        html = page(client, path)
        assert "<script" not in html.replace('<script type="module" src="/static/viewer.js"></script>', "")
        found = [link.partition("#")[0] for link in links(html, "/")]
        for link in found:
            kind = re.sub(r"[0-9a-f]{32}|\d+|call=[^&]*|task=[^&]*", "?", link)
            if link and kind not in seen:
                seen.add(kind)
                pending.append(link)
    for kind in (
        "/run/real/step/?",
        "/run/real/group",
        "/run/real/episode/?",
        "/run/real/tokens/?",
        "/run/real/batch/?",
        "/run/real/time/?",
        "/run/real/drift/?",
    ):
        assert any(item.startswith(kind) for item in seen), kind


def test_run_page_shows_its_metrics(client: TestClient) -> None:
    html = page(client, "/run/real")
    for title in ("Reward", "Accuracy", "Entropy", "KL", "Answer length", "Drift", "Time", "Weight sync"):
        assert title in html
    assert 'href="/run/real/step/1"' in html
    assert "in sync" in html


def test_step_has_a_row_for_each_task_and_role(client: TestClient) -> None:
    html = page(client, "/run/real/step/1")
    shown = words(html)
    assert html.count("<tr>") == 2 * 2 + len(re.findall(r'<span class="quiet"></span>', html))
    assert "solver" in shown
    assert "judge" in shown
    assert "failed" in shown
    assert "zero variance" in shown, "every judge earned the same"
    assert len(links(html, "/run/real/episode/")) == 8


def test_group_is_shown_from_its_first_differing_token(client: TestClient) -> None:
    link = links(page(client, "/run/real/step/1"), "/run/real/group")[0]
    shown = words(page(client, link))
    assert re.search(r"\d+ tokens in common", shown)
    assert "row/" in shown
    assert "4 rollouts" in shown
    assert "Is How many" in words(page(client, f"{link.partition('&role')[0]}&role=judge"))


def test_rollouts_are_listed_with_their_questions(client: TestClient, run: Run) -> None:
    rollout = next(item for item in run.rollouts.of_step(1) if item.paths)
    html = page(client, f"/run/real/rollouts?step=1&task={rollout.task_id}")
    assert run.question_of(rollout)
    assert html.count(f'class="question" title="{run.question_of(rollout)}"') == 4


def test_episode_shows_its_task(client: TestClient, run: Run) -> None:
    rollout = run.rollouts.of_step(1)[0]
    fields = dict(
        re.findall(r'<dt>(.*?)</dt><dd dir="auto">(.*?)</dd>', page(client, f"/run/real/episode/{rollout.session_id}"))
    )
    assert fields["question"] == run.task_of(rollout)["question"]


def test_episode_shows_lanes_calls_and_rewards(client: TestClient, run: Run) -> None:
    whole = next(item for item in run.rollouts.of_step(1) if not item.error)
    shown = words(page(client, f"/run/real/episode/{whole.session_id}"))
    for word in ("solver", "judge", "Call 1", "Call 3", "How many", "Are you sure?", "continues call 1", "politeness"):
        assert word in shown, word
    assert "it counted &lt;b&gt;well&lt;/b&gt;" in page(client, f"/run/real/episode/{whole.session_id}")
    broken = next(item for item in run.rollouts.of_step(1) if item.error)
    shown = words(page(client, f"/run/real/episode/{broken.session_id}"))
    assert "the shelf fell down" in shown
    assert "not trained on: its rollout failed" in shown


def test_tokens_have_every_value(client: TestClient, run: Run) -> None:
    whole = next(item for item in run.rollouts.of_step(1) if item.paths and item.paths[0].advantage)
    output = client.get(f"/run/real/tokens/{whole.session_id}/data.json").json()
    assert len(output["ids"]) == len(output["columns"]["mask"])
    start, stop, _ = output["spans"][-1]
    for name in ("sampler", "trainer", "gap", "ratio", "entropy", "advantage", "version", "weight"):
        values = output["columns"][name][start:stop]
        assert None not in values, name
        assert output["columns"][name][0] is None, "the prompt has none"
    assert output["columns"]["gap"][start] == pytest.approx(0.0, abs=1e-4)
    assert output["clip"] == [0.8, 1.2]
    trace = next(item for item in run.calls(whole.session_id)[0] if item.id == output["spans"][-1][2])
    assert output["columns"]["sampler"][start:stop] == pytest.approx(trace.logprobs, rel=1e-4)
    assert output["bytes"][str(output["ids"][0])] == b"<|im_start|>".hex(" ")


@pytest.mark.parametrize("overlay", ["mask", "sampler", "trainer", "gap", "ratio", "entropy", "advantage", "version"])
def test_every_overlay_colours_sampled_tokens(client: TestClient, run: Run, overlay: str) -> None:
    whole = next(item for item in run.rollouts.of_step(1) if item.paths and item.paths[0].advantage)
    html = page(client, f"/run/real/tokens/{whole.session_id}?overlay={overlay}")
    assert re.search(r'<i class="[a-z]', html)
    table = page(client, f"/run/real/tokens/{whole.session_id}?overlay={overlay}&view=table")
    assert words(table).count(" trained ") > 3


def test_batch_agrees_with_the_samples(client: TestClient) -> None:
    html = page(client, "/run/real/batch/1")
    assert "✕" not in html
    assert html.count("✓") > 10
    assert "Sampled, but not in the batch" in html


def test_timeline_has_a_lane_for_each_rollout(client: TestClient) -> None:
    html = page(client, "/run/real/time/1")
    assert len(links(html, "/run/real/episode/")) == 8
    assert html.count('class="t-model"') >= 8
    slowest = page(client, "/run/real/time/1?sort=slowest")
    assert links(slowest, "/run/real/episode/") != []


def test_drift_shows_both_sides_and_the_cause(client: TestClient) -> None:
    listed = page(client, "/run/real/drift")
    assert "edited" in words(listed)
    shown = words(page(client, links(listed, "/run/real/drift/")[0]))
    assert "the agent changed earlier messages" in shown
    assert "something else" in shown


def test_queue_of_the_embedded_sampler_is_shown(run: Run) -> None:
    traces, _ = run.calls(run.rollouts.of_step(1)[0].session_id)
    assert all(trace.timings["queue_s"] >= 0 for trace in traces)


def test_runs_are_compared_in_the_same_charts(look: Client, run_folder: Path, tmp_path: Path) -> None:
    from .run_folders import large_run

    other = large_run(tmp_path / "other", num_episodes=200)
    html = page(look(run_folder, other), "/run/real?with=other")
    assert "other: training" in html
    assert "real: training" in html


def test_line_of_a_single_point_is_drawn_as_a_point(look: Client, tmp_path: Path) -> None:
    from .run_folders import large_run

    run = large_run(tmp_path / "young", num_episodes=4)
    rows = [*({"step": step, "rollout/reward": 0.5} for step in range(200)), {"step": 200, "eval/reward": 0.25}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    html = page(look(run), "/run/young")
    assert html.count(" lone") == 1, "only the evaluation's single value is a point"
    (run / "metrics.jsonl").write_text('{"step": 1, "rollout/reward": 0.5}\n')
    assert page(look(run), "/run/young").count(" lone") == 1
    css = (Path(charts.__file__).parent / "static" / "viewer.css").read_text()
    assert ".point.lone" in css


@pytest.mark.parametrize(
    ("path", "status", "expected"),
    [
        ("/nowhere", 404, "no such page"),
        ("/run/nix", 404, "there is no run named 'nix'"),
        ("/run/real/step/77", 404, "there is no step 77"),
        ("/run/real/batch/77", 404, "this run has no batch of step 77"),
        ("/run/real/episode/nix", 404, "there is no session 'nix'"),
        ("/run/real/group?task=nix", 404, "there is no rollout of the task 'nix'"),
        ("/run/real/rollouts?reward=much", 400, "use a number, >0.5"),
        ("/run/real/rollouts?step=x", 400, "step='x'"),
        ("/run/real?from=-1", 400, "use a whole number"),
    ],
)
def test_missing_page_shows_a_message(client: TestClient, path: str, status: int, expected: str) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert expected in unescape(answer.text)


def test_evaluation_shows_rewards_instead_of_advantages(client: TestClient) -> None:
    trained, evaluated = page(client, "/run/real/step/1"), page(client, "/run/real/step/2?split=eval")
    assert "below each: its reward" in words(trained)
    assert "advantage" not in words(evaluated)
    cells = [words(cell) for cell in re.findall(r'<a class="cell judged.*?</a>', evaluated, re.DOTALL)]
    assert len(cells) == 2, "a solver and a judge"
    assert all(re.fullmatch(r"[01]( ✓)?( cut)?", cell) for cell in cells)


def test_empty_answer_is_shown_as_nothing(look: Client, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "traces.db")) as store:
        store.add([trace_of("mute", response={"role": "assistant", "content": ""})]).result(60)
    assert "assistant (empty)" in words(page(look(tmp_path / "traces.db"), "/run/traces/episode/mute"))


def test_path_of_a_model_keeps_its_leading_slash(client: TestClient) -> None:
    assert re.search(r'<bdi dir="ltr">/[^<]*</bdi>', page(client, "/")), "long paths are truncated at the left"
