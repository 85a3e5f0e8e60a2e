"""Inputs that a user names: agent and reward functions, tasks, and models in this process or on a server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlencode

from rllm.cli.options import as_typed
from rllm.data.benchmarks import BENCHMARKS, read_benchmark, read_benchmark_file
from rllm.data.dataset import PREPARED, Dataset, DatasetRegistry
from rllm.data.sources import READERS
from rllm.engine.signature import check_rows
from rllm.errors import ConfigError, InferenceError, concerning
from rllm.gateway.upstream import EngineUpstream, HTTPUpstream, Upstream, UpstreamKind
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.engine import InferenceEngine
from rllm.registry import did_you_mean, load_function

if TYPE_CHECKING:
    from rllm.inference.openai_engine import OpenAIEngine
    from rllm.trainer.config import TrainConfig


AgentFunction: TypeAlias = Callable[..., object]


def load_agent(agent: str, reward: str | None = None) -> AgentFunction:
    """Import an agent function, or make the agent of a benchmark; wrap it with a reward function if one is given."""
    if agent in BENCHMARKS:
        from rllm.agents.benchmark_agent import benchmark_agent

        return benchmark_agent(agent, None if reward is None else load_reward(reward, reload=False))
    function = load_function(agent)
    if reward is None:
        from rllm.engine.validation import check_promise

        check_promise(function, agent)
        return function
    from rllm.rewards.scoring import with_reward

    return with_reward(function, load_reward(reward, reload=False))


def load_reward(reward: str, *, reload: bool = True) -> AgentFunction:
    """Import a reward function, or make the judge of `judge:RUBRIC.yaml`."""
    scheme, _, rubric = reward.partition(":")
    if scheme == "judge" and "." in rubric:  # a file; without a suffix, a function of a module `judge`
        if not rubric.endswith((".yaml", ".yml")):
            raise ConfigError(f"--reward {reward}: a rubric is a file of type .yaml or .yml")
        from rllm.rewards.llm_judge import judge

        with concerning("--reward"):
            return judge(rubric)
    return load_function(reward, what="reward", reload=reload)


def agent_in_env(agent: str | None) -> dict[str, Any]:
    """Return the agent of a named environment, a function or a class, as an argument of `AgentTrainer`."""
    if agent is None:
        return {}
    found = load_function(agent, or_class=True)
    return {"agent_class" if isinstance(found, type) else "agent_run_func": found}


def tasks_in_sandboxes(tasks: str | None, env: str | None, agent: str | None, sandbox: str | None) -> str | None:
    """Return the environment `tasks:TASKS?...` of `TASKS --agent NAME --sandbox BACKEND`.

    `None` if neither option is given, and `TASKS` is not a folder of tasks either.

    Raises:
        ConfigError: if the tasks are missing, or there is another environment.
    """
    given = {name: value for name, value in (("agent", agent), ("sandbox", sandbox)) if value is not None}
    if not given:
        if env is not None or tasks is None or not Path(tasks).is_dir():
            return None
        from rllm.tasks.folder import has_tasks

        return f"tasks:{tasks}" if has_tasks(Path(tasks)) else None
    option = next(f"--{name} {value}" for name, value in given.items())
    if env is not None:
        parameters = urlencode(given, safe="/:@")
        raise ConfigError(f"{option} would have no effect with --env; write --env 'tasks:DIR?{parameters}'")
    if tasks is None:
        raise ConfigError(f"{option}: the tasks are missing: name a task folder, or a folder of them, before it")
    return f"tasks:{tasks}?{urlencode(given, safe='/:@')}"


def env_of_file(path: str | None) -> str | None:
    """Return `file:PATH` for a data file whose first row names an environment in its field `env`."""
    if path is None or not Path(path).expanduser().is_file() or Path(path).suffix.lower() not in READERS:
        return None
    return f"file:{path}" if "env" in Dataset.load(path)[0] else None


def settle_work(command: str, given: dict[str, Any]) -> str | None:
    """Complete the agent, env and data of a command, and return the benchmark, if the agent is one.

    A single data file may name environments, and a benchmark has data of its own.

    Raises:
        ConfigError: if the agent or its tasks are missing, or the tasks would have no effect.
    """
    files = given.get("data", ())
    if not {"agent", "env"} & given.keys() and len(files) == 1 and (found := env_of_file(files[0])) is not None:
        given["env"] = found
        del given["data"]
    if "env" in given:
        if unused := next((name for name in ("data", "split", "val_split") if name in given), None):
            option = f"--{unused.replace('_', '-')}"
            raise ConfigError(
                f"{option} would have no effect with --env {given['env']}, which has its own; leave it out"
            )
        return None
    if "agent" not in given:
        raise ConfigError(
            f"the agent is missing: rllm {command} FILE.py:function --data tasks.jsonl ..., or rllm {command} gsm8k "
            f"..., or rllm {command} --env NAME ..."
        )
    benchmark: str | None = None if ":" in given["agent"] else given["agent"]
    if benchmark is not None:
        if benchmark not in BENCHMARKS:
            meant = did_you_mean(benchmark, BENCHMARKS)
            raise ConfigError(
                f"agent={benchmark!r}: use FILE.py:function, package.module:function or the name of a benchmark"
                + (f"; {meant}" if meant else f" ({', '.join(BENCHMARKS)})")
            )
        given.setdefault("data", [benchmark])
    if "data" not in given:
        raise ConfigError(
            "--data is missing: name a .jsonl file with one task a line, a registered dataset, or a hub id"
        )
    return benchmark


_NAME = re.compile(r"[\w.+-]+")


def tasks_for(
    function: AgentFunction,
    source: str,
    split: str | None,
    *,
    option: str,
    benchmark: str | None = None,
    benchmark_split: str | None = None,
) -> Dataset:
    """Read tasks for an agent function; see `read_tasks`. A file for a benchmark's agent has rows of its dataset."""
    if benchmark is not None and Path(source).suffix.lower() in READERS:
        with concerning(option):
            _refuse_split_of_file(source, split, option)
            data = Dataset.of_tasks(read_benchmark_file(benchmark, source), name=benchmark)
    else:
        data = read_tasks(source, split, option=option, benchmark_split=benchmark_split)
    with concerning(option):
        check_rows(function, data)
    return data


def _refuse_split_of_file(source: str, split: str | None, option: str) -> None:
    if split is not None and Path(source).expanduser().is_file():
        raise ConfigError(f"{split_option(option)} {split}: {source!r} is a file, which has no splits")


def split_option(option: str) -> str:
    """Return the option that names the split of the data given by an option."""
    return "--val-split" if option == "--val" else "--split"


def read_tasks(source: str, split: str | None, *, option: str, benchmark_split: str | None = None) -> Dataset:
    """Read the tasks of a registered dataset, a benchmark, or any source of `Dataset.load`.

    Args:
        source: file, registered name or hub id.
        split: split to use, if there are several.
        option: command-line option that gave the source, for error messages.
        benchmark_split: split of a benchmark to use if none is chosen.
    """
    _refuse_split_of_file(source, split, option)
    path = Path(source).expanduser()
    if path.exists() or path.suffix.lower() in READERS or not _NAME.fullmatch(source):
        with concerning(option):
            return Dataset.load(source, split=split)
    with concerning(option):
        splits = DatasetRegistry.get_dataset_splits(source)
    if source in BENCHMARKS:
        split = split or benchmark_split
    if not splits and source in BENCHMARKS and split is not None:
        splits = sorted(BENCHMARKS[source].splits)
        if split in splits:
            with concerning(option):
                return Dataset.of_tasks(read_benchmark(source, split), name=source, split=split)
    if not splits:
        made_by = f"; `python -m rllm.data.prepare {source}` registers it" if source in PREPARED else ""
        names = ", ".join(DatasetRegistry.get_dataset_names()) or "none"
        raise ConfigError(f"{option} {source}: it is neither a file nor registered{made_by}; registered: {names}")
    chosen = splits[0] if split is None and len(splits) == 1 else split
    data = DatasetRegistry.load_dataset(source, chosen) if chosen in splits else None
    if data is None:
        raise ConfigError(
            f"{split_option(option)} {split or 'is missing'}: dataset {source!r} has the splits {', '.join(splits)}"
        )
    return data


_CHECK_TIMEOUT_S = 10.0
_OF_TRAINING = ("lora_rank", "lora_alpha", "lora_targets", "quantize", "gradient_checkpointing", "reference_offload")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that exists, but is not loaded yet."""

    name: str
    identity: dict[str, str]
    """Facts that identify the model."""
    upstream: AbstractContextManager[Upstream]
    """Context that loads the model; entered only if it is needed."""
    new_server: Callable[[], OpenAIEngine] | None = None
    """Makes `server`."""

    @cached_property
    def server(self) -> OpenAIEngine | None:
        """Client of the model's server, for agents that call it without HTTP of their own."""
        return None if self.new_server is None else self.new_server()

    def engine_of(self, upstream: Upstream) -> InferenceEngine:
        """Return the engine behind the opened `upstream`."""
        if isinstance(upstream, EngineUpstream):
            return upstream.engine
        assert self.server is not None
        return self.server


def embedded(config: TrainConfig, max_concurrent: int) -> ModelSource:
    """Return the model of `config.model`, to run in this process."""
    from rllm.inference.local.loading import check_source
    from rllm.parser.tool_prompt import TemplateChoice

    check_source(config.model.path, template=TemplateChoice.of(config.model))
    return ModelSource(
        name=config.model.path, identity=_identity(config), upstream=_embedded_upstream(config, max_concurrent)
    )


def folder_of(model: str, checkpoint: str | None) -> str:
    """Return the folder of a run's checkpoint, the newest unless one is named; any other path or hub id as it is."""
    run = Path(model).expanduser()
    if (run / "checkpoints").is_dir():
        from rllm.trainer.export import chosen_checkpoint

        return str(chosen_checkpoint(run, checkpoint or "latest"))
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {model!r} is not the folder of a run; leave --checkpoint out")
    return model


def settings_to_serve(command: str, pairs: Sequence[str], sections: Sequence[str]) -> TrainConfig:
    """Return the settings of a command that trains nothing.

    Raises:
        ConfigError: for one of another section, or of training.
    """
    from rllm.config.schema import refuse_changes
    from rllm.trainer.config import load_config

    for pair in pairs:
        if "=" in pair and not pair.startswith(tuple(sections)):
            names = ", ".join(name if name.endswith("=") else f"{name}NAME=" for name in sections)
            raise ConfigError(f"{pair} would have no effect; rllm {command} takes the settings {names}")
    config = load_config(pairs)
    given = {pair.partition("=")[0] for pair in pairs}
    of_training = [name for name in _OF_TRAINING if f"model.{name}" in given]
    refuse_changes(config.model, "model", of_training, "because nothing is trained here; leave it out")
    return config


def refuse_options_of_server(
    kind: UpstreamKind, tokenizer: str | None = None, chat_template: Path | None = None
) -> None:
    """Refuse options of a server if no server is given."""
    given = {
        "--upstream-kind": None if kind == "vllm" else kind,
        "--tokenizer": tokenizer,
        "--chat-template": chat_template,
    }
    if unused := next((f"{option} {value}" for option, value in given.items() if value is not None), None):
        raise ConfigError(f"{unused} would have no effect without --base-url: name the server, or leave it out")


def key_of_server() -> str | None:
    """Return the key of a model's server from the environment."""
    from rllm.sdk.variables import operators_keys

    return operators_keys().get("RLLM_UPSTREAM_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def token_prompts(tokenizer: str | None, chat_template: Path | None) -> TokenPrompts | None:
    """Load `--tokenizer` and `--chat-template` for a server."""
    if tokenizer is not None:
        return TokenPrompts.load(tokenizer, chat_template)
    if chat_template is not None:
        raise ConfigError(f"--chat-template {chat_template} would have no effect without --tokenizer: give both")
    return None


def served(
    base_url: str,
    model: str | None,
    api_key: str | None,
    kind: UpstreamKind,
    *,
    tokenizer: str | None = None,
    chat_template: Path | None = None,
) -> ModelSource:
    """Return the named model of a server, or its only one. The server must answer now.

    With its `tokenizer`, later turns continue from exactly the sampled tokens.
    """
    with as_typed(upstream="--base-url"):
        checked = HTTPUpstream(base_url, api_key=api_key, read_timeout_s=_CHECK_TIMEOUT_S)
    found = asyncio.run(_models(checked, model))
    if model is None and len(found) != 1:
        raise ConfigError(
            f"--model is missing: the server at {base_url} lists {', '.join(found) or 'none'}; choose one"
        )
    name = model or found[0]
    tokens = token_prompts(tokenizer, chat_template)
    upstream = HTTPUpstream(base_url, api_key=api_key, model=name, kind=kind, tokens=tokens)
    server = _client(name, base_url=base_url, api_key=api_key, kind=kind)
    return ModelSource(name=name, identity={"model": name}, upstream=nullcontext(upstream), new_server=server)


def no_model() -> ModelSource:
    """Return the source for agents that call no model; a call would fail, since nothing listens at its address."""
    nowhere = "http://127.0.0.1:1/v1"
    server = _client("none", base_url=nowhere, api_key=None)
    return ModelSource(name="no model", identity={}, upstream=nullcontext(HTTPUpstream(nowhere)), new_server=server)


def _client(name: str, **options: Any) -> Callable[[], OpenAIEngine]:
    def make() -> OpenAIEngine:
        from rllm.inference.openai_engine import OpenAIEngine  # which imports openai, for a second

        return OpenAIEngine(name, **options)

    return make


async def _models(server: HTTPUpstream, wanted: str | None) -> list[str]:
    try:
        return [str(item.get("id")) for item in await server.models()]
    except InferenceError as error:
        if wanted is not None and error.status_code in (404, 405):  # the server answers, but does not list its models
            return []
        raise
    finally:
        await server.close()


@contextmanager
def _embedded_upstream(config: TrainConfig, max_concurrent: int) -> Iterator[Upstream]:
    from rllm.cli.training import quiet_libraries
    from rllm.inference.local import LocalEngine

    quiet_libraries()
    engine = LocalEngine.load(config.model, max_concurrent=max_concurrent, seed=config.seed)
    with closing(engine):
        yield EngineUpstream(engine, "policy")


def _identity(config: TrainConfig) -> dict[str, str]:
    """Return facts that identify a model.

    These are its files, which may be replaced in its folder, and settings that change answers.
    """
    settings = config.model.model_dump(exclude_defaults=True, exclude={"path", "device"})
    settings |= config.gateway.model_dump(exclude_defaults=True, include={"exact_turns"})
    settings |= config.model_dump(exclude_defaults=True, include={"seed"})
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        return {"model": config.model.path, "model settings": str(settings)}
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return {"model": f"{folder.resolve()} (files {digest.hexdigest()[:16]})", "model settings": str(settings)}
