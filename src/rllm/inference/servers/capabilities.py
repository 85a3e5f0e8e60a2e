"""Probes of an OpenAI-compatible server: each capability that training needs is tried, never assumed from a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rllm.capture.tokens import tokens_of_choice
from rllm.errors import ConfigError, InferenceError, TokenMismatchError, counted
from rllm.inference.servers.control import VLLMControl, choose_handover, control_of

_NUM_TOKENS = 6
_MESSAGES = [{"role": "user", "content": "Count from one to ten."}]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
_UNTOUCHED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_LOW_TEMPERATURE = 0.5
_NEAR = 0.25
"""Allowed error of a measured ratio: servers round log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    ok: bool
    said: str
    """Observation."""
    needed: bool = True
    """Whether training is impossible without it."""
    fix: str = ""
    """Remedy in one line; empty where nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Findings about a server."""

    url: str
    model: str | None
    findings: list[Finding] = field(default_factory=list)

    @property
    def can_train(self) -> bool:
        """Return whether everything that training needs is available."""
        return all(finding.ok for finding in self.findings if finding.needed)

    @property
    def missing(self) -> list[Finding]:
        """Findings that rule training out."""
        return [finding for finding in self.findings if finding.needed and not finding.ok]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "can_train": self.can_train}


def probe(url: str, *, model: str | None = None, api_key: str | None = None, temperature: float = 1.0) -> Capabilities:
    """Probe a server with a few short calls.

    Args:
        url: address up to and including `/v1`.
        model: name to ask for; `None` takes the first that is served.
        api_key: the server's key, if it needs one.
        temperature: planned sampling temperature; raw log-probabilities suffice only at 1.

    Raises:
        ConfigError: if the URL is not a web address.
    """
    control = VLLMControl(url, api_key=api_key)
    try:
        control = control_of(url, api_key=api_key)
        served = control.models()
    except (InferenceError, KeyError, TypeError, AttributeError) as error:
        fix = "check that the server is running, that the address goes up to and including /v1, and the key"
        unreachable = Finding(name="models", ok=False, said=f"the list cannot be read: {error}", fix=fix)
        return Capabilities(url=control.base_url, model=model, findings=[unreachable])
    name = model or next(iter(served), None)
    known = name in served
    fix = "" if known else f"ask for one that it serves: --model {served[0] if served else 'NAME'}"
    findings = [Finding(name="models", ok=known, said=", ".join(served) or "none", fix=fix)]
    if name is not None and known:
        server = _Server(control, name)
        findings += [_answered(ask, server) for ask in (_tokens, _streamed, _token_prompts, _tools, _choices)]
        findings += [_answered(lambda asked: _kind(asked, temperature), server), _answered(_weights, server)]
    return Capabilities(url=control.base_url, model=name, findings=findings)


def check_trainable(url: str, *, model: str | None = None, api_key: str | None = None, temperature: float) -> None:
    """Refuse a server that cannot be trained with.

    Raises:
        ConfigError: naming each missing capability and its remedy.
    """
    found = probe(url, model=model, api_key=api_key, temperature=temperature)
    if not found.can_train:
        lines = "\n".join(f"  {finding.name}: {finding.said}; {finding.fix}" for finding in found.missing)
        raise ConfigError(f"vllm.url={url!r}: this server cannot be trained with:\n{lines}")


@dataclass(frozen=True)
class _Server:
    control: VLLMControl
    model: str

    def chat(self, **options: Any) -> dict[str, Any]:
        """Return a short chat completion."""
        body = {"model": self.model, "messages": _MESSAGES, "max_tokens": _NUM_TOKENS, **options}
        answer: dict[str, Any] = self.control.post("/v1/chat/completions", body)
        return answer


def _answered(ask: Callable[[_Server], Finding], server: _Server) -> Finding:
    """Return the finding; an error of the server becomes one, too."""
    try:
        return ask(server)
    except (InferenceError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        name = getattr(ask, "__name__", "").strip("_").replace("_", " ") or "answers"
        said = f"it failed ({type(error).__name__}: {error})"
        return Finding(name=name, ok=False, said=said, fix="see the server's log")


def _tokens(server: _Server) -> Finding:
    """Check ids and log-probabilities of an answer."""
    name, fix = "token ids", "use a server that returns token ids and log-probabilities, such as vLLM 0.10.2 or newer"
    try:
        answer = server.chat(logprobs=True, return_token_ids=True, **_UNTOUCHED)
    except InferenceError as error:
        return Finding(name=name, ok=False, said=f"it refuses the request: {error}", fix=fix)
    try:
        tokens = tokens_of_choice(answer, answer["choices"][0], 0)
    except TokenMismatchError as error:
        return Finding(name=name, ok=False, said=str(error), fix=fix)
    if tokens.problem:
        return Finding(name=name, ok=False, said=tokens.problem, fix=fix)
    return Finding(name=name, ok=True, said=f"{counted(len(tokens.response_ids), 'id')}, each with its log-probability")


def _streamed(server: _Server) -> Finding:
    """Check ids and log-probabilities of a streamed answer."""
    body = {"logprobs": True, "return_token_ids": True, "stream": True, **_UNTOUCHED}
    fix = "agents that stream cannot be trained with it: use a newer server, or turn streaming off in the agent"
    try:
        events = server.control.post("/v1/chat/completions", {**_request(server), **body})
    except InferenceError as error:
        return Finding(name="streamed ids", ok=False, said=str(error), needed=False, fix=fix)
    chunks = [
        json.loads(line[5:]) for line in str(events).split("\n") if line.startswith("data:") and "[DONE]" not in line
    ]
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or ()]
    num_ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
    num_logprobs = sum(len((choice.get("logprobs") or {}).get("content") or ()) for choice in choices)
    has_prompt = any(chunk.get("prompt_token_ids") for chunk in chunks)
    ok = num_ids > 0 and num_ids == num_logprobs and has_prompt
    prompt = "with" if has_prompt else "without"
    return Finding(
        name="streamed ids",
        ok=ok,
        said=f"{num_ids} ids and {num_logprobs} log-probabilities in {len(chunks)} chunks, {prompt} the prompt's",
        needed=False,
        fix="" if ok else fix,
    )


def _token_prompts(server: _Server) -> Finding:
    """Check that prompts can be token ids, from which later turns continue."""
    answer = server.chat(logprobs=True, return_token_ids=True, **_UNTOUCHED)
    ids = tokens_of_choice(answer, answer["choices"][0], 0).prompt_ids
    fix = (
        "later turns are rendered again and fork, which costs training data: use a server with /v1/completions for ids"
    )
    try:
        body = {"model": server.model, "prompt": ids, "max_tokens": 1, "return_token_ids": True, "logprobs": 0}
        echoed = server.control.post("/v1/completions", body)["choices"][0].get("prompt_token_ids")
    except InferenceError as error:
        return Finding(name="token-id prompts", ok=False, said=str(error), needed=False, fix=fix)
    ok = bool(ids) and echoed == ids
    said = (
        f"{len(ids)} ids were taken as they are" if ok else f"the request had {ids[:5]}..., the answer {echoed!r:.60}"
    )
    return Finding(name="token-id prompts", ok=ok, said=said, needed=False, fix="" if ok else fix)


def _tools(server: _Server) -> Finding:
    """Check that tools can be offered."""
    try:
        server.chat(tools=[_TOOL], tool_choice="auto")
    except InferenceError as error:
        fix = (
            "agents with tools need them: vLLM takes --enable-auto-tool-choice --tool-call-parser hermes "
            "(or the model's)"
        )
        return Finding(name="tools", ok=False, said=str(error), needed=False, fix=fix)
    return Finding(name="tools", ok=True, said="accepted", needed=False)


def _choices(server: _Server) -> Finding:
    """Check that one call can have several answers."""
    number = len(server.chat(n=2)["choices"])
    fix = "" if number == 2 else "agents that ask for several answers get one: let them make several calls"
    return Finding(name="n > 1", ok=number == 2, said=f"{counted(number, 'answer')} to n=2", needed=False, fix=fix)


def _kind(server: _Server, temperature: float) -> Finding:
    """Check that log-probabilities are those sampled from: at half the temperature, they differ twice as much."""
    warm, cold = (_alternatives(server, each) for each in (1.0, _LOW_TEMPERATURE))
    common = sorted(warm.keys() & cold.keys(), key=lambda token: warm[token])
    name, fix = (
        "kind of log-probabilities",
        "vLLM: --logprobs-mode processed_logprobs; else train at rollout.temperature=1",
    )
    if len(common) < 2 or (spread := warm[common[-1]] - warm[common[0]]) < 1e-3:
        return Finding(name=name, ok=False, said="not measurable", needed=temperature != 1.0, fix=fix)
    ratio = (cold[common[-1]] - cold[common[0]]) / spread
    seen = f"at temperature {_LOW_TEMPERATURE:g} they differ {ratio:.2f} times as much as at 1"
    if abs(ratio - 1 / _LOW_TEMPERATURE) < _NEAR:
        return Finding(name=name, ok=True, said=f"processed: {seen}")
    kind = "raw" if abs(ratio - 1.0) < _NEAR else "neither raw nor processed"
    return Finding(name=name, ok=False, said=f"{kind}: {seen}", needed=temperature != 1.0, fix=fix)


def _weights(server: _Server) -> Finding:
    """Check that weights can be updated while the server runs."""
    try:
        handover = choose_handover(server.control, lora=False)
    except ConfigError as error:
        fix = "start it as `rllm doctor --base-url URL` shows, or leave out vllm.url, and rllm starts one"
        return Finding(name="new weights", ok=False, said=str(error).partition(": ")[2].partition(":")[0], fix=fix)
    return Finding(name="new weights", ok=True, said=f"by {handover.name}, while it runs")


def _request(server: _Server) -> dict[str, Any]:
    return {"model": server.model, "messages": _MESSAGES, "max_tokens": _NUM_TOKENS}


def _alternatives(server: _Server, temperature: float) -> dict[str, float]:
    """Return the likeliest first tokens of an answer, with their log-probabilities."""
    options = {"logprobs": True, "top_logprobs": 5, **_UNTOUCHED, "temperature": temperature, "max_tokens": 1}
    content: Sequence[Mapping[str, Any]] = server.chat(**options)["choices"][0]["logprobs"]["content"]
    # Some servers use an empty text for tokens that they cannot decode.
    return {entry["token"]: entry["logprob"] for entry in content[0]["top_logprobs"] if entry["token"]}
