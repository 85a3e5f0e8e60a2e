"""Earlier policies of a run as opponents: the run's gateway answers the model `opponent` with one of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from threading import Lock

from rllm._runtime.files import whole_folder
from rllm._runtime.threads import in_thread
from rllm.config.schema import TrainConfig
from rllm.environments.textarena import POOL_MODEL, START_MODEL, PastPolicies
from rllm.errors import ConfigError
from rllm.gateway.upstream.base import UpstreamCall
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.loading import save_model, save_tokenizer
from rllm.trainer.checkpoint import Checkpoints
from rllm.types import JSONMapping, JSONObject

_CACHE_BYTES = 1 << 30
"""Bound on the bytes of keys and values that one opponent's sampler keeps."""


class OpponentPool:
    """Snapshots of the policy in `run_dir/opponents`, and their samplers, loaded when they are first asked.

    Which one a rollout plays follows from its seed and the number of steps done, so a resumed run plays the same.
    """

    def __init__(
        self,
        past: PastPolicies,
        *,
        policy: InferenceEngine,
        checkpoints: Checkpoints,
        config: TrainConfig,
        steps_done: int,
    ) -> None:
        """Continue with the snapshots of a run after `steps_done` steps; raise `ConfigError` if one is missing."""
        self._past = past
        assert isinstance(policy, LocalEngine), "check_opponents refuses others"
        self.policy = policy
        self._checkpoints = checkpoints
        self._folder = checkpoints.run_dir / "opponents"
        self._config = config
        self._steps_done = steps_done
        self._loaded: dict[int, LocalEngine] = {}
        self._loading = Lock()
        for step in self.steps():
            if step and not self._path_of(step).is_dir():
                raise ConfigError(f"{str(self._path_of(step))!r} is missing: it is an opponent of the run; restore it")

    def steps(self, steps_done: int | None = None) -> list[int]:
        """Return the steps after which the opponents at a step (by default, now) were saved, oldest first."""
        done = self._steps_done if steps_done is None else steps_done
        every = range(0, done + 1, self._past.every) if self._past.every else [0]
        return [*every][-self._past.keep :]

    def after_step(self, steps_done: int) -> None:
        """Save a snapshot of the published policy if one is due, and delete those that no resumed run can need."""
        self._steps_done = steps_done
        if not self._past.every or steps_done % self._past.every:
            return
        target = self._path_of(steps_done)
        shutil.rmtree(target, ignore_errors=True)
        with whole_folder(target) as new:
            new.mkdir()
            save_model(self.policy.model, new)
            save_tokenizer(self.policy.tokenizer, new)
        latest = self._checkpoints.latest()
        resumed_at = 0 if latest is None else int(latest.name.partition("-")[2])
        needed = {self._path_of(step) for done in (resumed_at, steps_done) for step in self.steps(done)}
        for path in self._folder.iterdir():
            if path not in needed:
                shutil.rmtree(path, ignore_errors=True)
        with self._loading:
            for step in self._loaded.keys() - {0, *self.steps()}:
                self._loaded.pop(step).close()

    def drawn(self, seed: int) -> LocalEngine:
        """Return the opponent of a rollout with this seed."""
        return self.engine(random.Random(f"opponent {seed}").choice(self.steps()))

    def engine(self, step: int) -> LocalEngine:
        """Return the sampler of the policy after `step` steps; load it if needed."""
        with self._loading:
            if step in self._loaded:
                return self._loaded[step]
            engine = LocalEngine.load(
                self._config.model,
                str(self._path_of(step)) if step else None,
                max_concurrent=self._config.rollout.max_concurrent,
                cache_bytes=_CACHE_BYTES,
            )
            with engine.paused():
                engine.publish(step)
            self._loaded[step] = engine
            return engine

    def close(self) -> None:
        """Stop the samplers."""
        for engine in self._loaded.values():
            engine.close()

    def _path_of(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"


class OpponentUpstream(EngineUpstream):
    """Upstream that answers an opponent's model name with an earlier policy, and other names with the present one.

    The opponent is the first policy, or one that is drawn for the session.
    """

    def __init__(self, opponents: OpponentPool, model_name: str) -> None:
        super().__init__(opponents.policy, model_name)
        self._opponents = opponents

    def prepare(self, request: JSONMapping) -> JSONObject:
        prepared = super().prepare(request)
        model = request.get("model")
        return {**prepared, "model": model} if model in (POOL_MODEL, START_MODEL) else prepared

    async def complete(self, call: UpstreamCall) -> JSONObject:
        opponent = await self._opponent(call)
        return await (super().complete(call) if opponent is None else opponent.complete(call))

    async def stream(self, call: UpstreamCall) -> AsyncGenerator[list[JSONObject], None]:
        opponent = await self._opponent(call)
        async for chunks in super().stream(call) if opponent is None else opponent.stream(call):
            yield chunks

    async def _opponent(self, call: UpstreamCall) -> EngineUpstream | None:
        """Return the upstream of the opponent that a call is for; `None` if it is for the policy."""
        model = call.request["model"]
        if model == self.model_name:
            return None
        pool, seed = self._opponents, call.route.seed or 0
        load = partial(pool.engine, 0) if model == START_MODEL else partial(pool.drawn, seed)
        return EngineUpstream(await in_thread(load, name="rllm load opponent"), model)


def check_opponents(config: TrainConfig, past: PastPolicies | None) -> None:
    """Raise `ConfigError` if the run cannot offer the opponents that its agent asks for."""
    if past is None:
        return
    what = "an opponent that is an earlier policy (opponent=start or pool)"
    if config.backend != "local" or config.model.engine != "embedded":
        setting = "backend" if config.backend != "local" else "model.engine"
        value = config.backend if config.backend != "local" else config.model.engine
        raise ConfigError(f"{setting}={value!r}: {what} needs the embedded sampler; use an opponent at a URL")
    if past.every and config.model.lora_rank:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank}: opponent=pool saves whole weights; train them with "
            "model.lora_rank=0, or use opponent=start"
        )
