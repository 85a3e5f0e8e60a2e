"""Probes of an OpenAI-compatible server: each capability that training needs is tried, never assumed from a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rllm.capture.tokens import tokens_of_choice
from rllm.errors import ConfigError, InferenceError, RLLMError, TokenMismatchError, counted
from rllm.inference.servers.control import VLLMControl, choose_handover, control_of
from rllm.types import JSONObject

_NUM_TOKENS = 6
_MESSAGES = [{"role": "user", "content": "Count from one to ten."}]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
_UNTOUCHED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_WITH_TOKENS = {"logprobs": True, "return_token_ids": True, **_UNTOUCHED}
_LOW_TEMPERATURE = 0.5
_NEAR = 0.25
"""Allowed error of a measured ratio: servers round log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    ok: bool
    detail: str
    needed: bool = True
    """True if training is impossible without it."""
    fix: str = ""
    """Remedy in one line; empty where nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Findings about a server, or about this machine."""

    url: str | None = None
    """Address of the server; `None` for this machine."""
    model: str | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if everything that training needs is available."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        """Findings that rule training out."""
        return [finding for finding in self.findings if finding.needed and not finding.ok]

    def to_dict(self) -> JSONObject:
        return {**asdict(self), "ok": self.ok}


def probe(url: str, *, model: str | None = None, api_key: str | None = None, temperature: float = 1.0) -> Checks:
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
        fix = "check that the server is running, that the address ends in /v1, and that the key is right"
        unreachable = Finding(name="models", ok=False, detail=f"the list cannot be read: {error}", fix=fix)
        return Checks(url=control.base_url, model=model, findings=[unreachable])
    name = model or next(iter(served), None)
    known = name in served
    fix = "" if known else f"ask for one that it serves: --model {served[0] if served else 'NAME'}"
    findings = [Finding(name="models", ok=known, detail=", ".join(served) or "none", fix=fix)]
    if name is not None and known:
        server = _Server(control, name)
        findings += [item.try_on(server, temperature) for item in _PROBES]
    return Checks(url=control.base_url, model=name, findings=findings)


def check_trainable(url: str, *, model: str | None = None, api_key: str | None = None, temperature: float) -> None:
    """Raise `ConfigError` naming what a server lacks for training, and the remedies."""
    found = probe(url, model=model, api_key=api_key, temperature=temperature)
    if not found.ok:
        lines = "\n".join(f"  {finding.name}: {finding.detail}; {finding.fix}" for finding in found.problems)
        raise ConfigError(f"vllm.url={url!r}: this server cannot be trained with:\n{lines}")


class _MissingError(RLLMError):
    """The server lacks the capability; the message is the observation."""


@dataclass(frozen=True)
class _Server:
    control: VLLMControl
    model: str

    def chat(self, **options: object) -> JSONObject:
        """Return a short chat completion."""
        answer: JSONObject = self.control.post("/v1/chat/completions", self.request(**options))
        return answer

    def request(self, **options: object) -> JSONObject:
        return {"model": self.model, "messages": _MESSAGES, "max_tokens": _NUM_TOKENS, **options}


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """One capability: `ask` returns the observation, or raises."""

    name: str
    ask: Callable[[_Server], str]
    needed: bool = False
    needed_unless_at_1: bool = False
    """True if training at another temperature than 1 needs it."""
    fix: str

    def try_on(self, server: _Server, temperature: float) -> Finding:
        needed = self.needed or (self.needed_unless_at_1 and temperature != 1.0)
        fix = self.fix
        try:
            return Finding(name=self.name, ok=True, detail=self.ask(server), needed=needed)
        except (InferenceError, TokenMismatchError, _MissingError) as error:
            detail = str(error)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            detail, fix = f"it failed ({type(error).__name__}: {error})", "see the server's log"
        return Finding(name=self.name, ok=False, detail=detail, needed=needed, fix=fix)


def _token_ids(server: _Server) -> str:
    answer = server.chat(**_WITH_TOKENS)
    tokens = tokens_of_choice(answer, answer["choices"][0], 0)
    if tokens.problem:
        raise _MissingError(tokens.problem)
    return f"{counted(len(tokens.response_ids), 'id')}, each with its log-probability"


def _streamed_ids(server: _Server) -> str:
    events = str(server.control.post("/v1/chat/completions", server.request(stream=True, **_WITH_TOKENS)))
    lines = (line for line in events.split("\n") if line.startswith("data:") and "[DONE]" not in line)
    chunks = [json.loads(line[5:]) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or ()]
    num_ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
    num_logprobs = sum(len((choice.get("logprobs") or {}).get("content") or ()) for choice in choices)
    has_prompt = any(chunk.get("prompt_token_ids") for chunk in chunks)
    prompt = "with" if has_prompt else "without"
    detail = f"{num_ids} ids and {num_logprobs} log-probabilities in {len(chunks)} chunks, {prompt} the prompt's"
    if not (num_ids == num_logprobs > 0 and has_prompt):
        raise _MissingError(detail)
    return detail


def _token_id_prompts(server: _Server) -> str:
    answer = server.chat(**_WITH_TOKENS)
    ids = tokens_of_choice(answer, answer["choices"][0], 0).prompt_ids
    body = {"model": server.model, "prompt": ids, "max_tokens": 1, "return_token_ids": True, "logprobs": 0}
    echoed = server.control.post("/v1/completions", body)["choices"][0].get("prompt_token_ids")
    if not ids or echoed != ids:
        raise _MissingError(f"the request had {ids[:5]}..., the answer {echoed!r:.60}")
    return f"{len(ids)} ids were taken as they are"


def _tools(server: _Server) -> str:
    server.chat(tools=[_TOOL], tool_choice="auto")
    return "accepted"


def _choices(server: _Server) -> str:
    number = len(server.chat(n=2)["choices"])
    detail = f"{counted(number, 'answer')} to n=2"
    if number != 2:
        raise _MissingError(detail)
    return detail


def _logprobs_kind(server: _Server) -> str:
    """Check that log-probabilities are those sampled from: at half the temperature, they differ twice as much."""

    def alternatives(temperature: float) -> dict[str, float]:
        options = {"logprobs": True, "top_logprobs": 5, **_UNTOUCHED, "temperature": temperature, "max_tokens": 1}
        content = server.chat(**options)["choices"][0]["logprobs"]["content"]
        # Some servers use an empty text for tokens that they cannot decode.
        return {entry["token"]: entry["logprob"] for entry in content[0]["top_logprobs"] if entry["token"]}

    warm, cold = alternatives(1.0), alternatives(_LOW_TEMPERATURE)
    common = sorted(warm.keys() & cold.keys(), key=lambda token: warm[token])
    if len(common) < 2 or (spread := warm[common[-1]] - warm[common[0]]) < 1e-3:
        raise _MissingError("not measurable")
    ratio = (cold[common[-1]] - cold[common[0]]) / spread
    seen = f"at temperature {_LOW_TEMPERATURE:g} they differ {ratio:.2f} times as much as at 1"
    if abs(ratio - 1 / _LOW_TEMPERATURE) < _NEAR:
        return f"processed: {seen}"
    raise _MissingError(f"{'raw' if abs(ratio - 1.0) < _NEAR else 'neither raw nor processed'}: {seen}")


def _new_weights(server: _Server) -> str:
    try:
        return f"by {choose_handover(server.control, lora=False).name}, while it runs"
    except ConfigError as error:
        raise _MissingError(str(error).partition(": ")[2].partition(":")[0]) from error


_PROBES = (
    _Probe(
        name="token ids",
        ask=_token_ids,
        needed=True,
        fix="use a server that returns token ids and log-probabilities, such as vLLM 0.10.2 or newer",
    ),
    _Probe(
        name="streamed ids",
        ask=_streamed_ids,
        fix="agents that stream cannot be trained with it: use a newer server, or turn streaming off in the agent",
    ),
    _Probe(
        name="token-id prompts",
        ask=_token_id_prompts,
        fix="later turns are rendered again and fork, which costs training data: use a server whose /v1/completions "
        "takes ids",
    ),
    _Probe(
        name="tools",
        ask=_tools,
        fix="agents with tools need them: start vLLM with --enable-auto-tool-choice --tool-call-parser hermes",
    ),
    _Probe(
        name="n > 1",
        ask=_choices,
        fix="agents that ask for several answers get one: let them make several calls",
    ),
    _Probe(
        name="kind of log-probabilities",
        ask=_logprobs_kind,
        needed_unless_at_1=True,
        fix="vLLM: --logprobs-mode processed_logprobs; else train at rollout.temperature=1",
    ),
    _Probe(
        name="new weights",
        ask=_new_weights,
        needed=True,
        fix="start it as `rllm doctor --base-url URL` shows, or leave out vllm.url, and rllm starts one",
    ),
)
