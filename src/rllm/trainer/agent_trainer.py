"""`AgentTrainer`: creates the engine, the backend and the loop of a run from its configuration."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from rllm._runtime.files import new_folder, replace_text
from rllm._runtime.process import on_ctrl_c
from rllm._runtime.threads import UnboundedExecutor
from rllm.agents.agent import BaseAgent
from rllm.backends.base import BACKENDS, TrainingBackend
from rllm.config.loading import from_layers, layers_of, locating_errors
from rllm.config.schema import SandboxSettings, refuse_changes
from rllm.config.sizes import check_sizes, fitted_to_tasks, with_learning_rate
from rllm.config.yaml_file import read_settings
from rllm.data.dataset import Dataset
from rllm.data.sampling import TaskSampler
from rllm.engine.episode_log import TaskFile, check_ids
from rllm.engine.event_loop import UnderWay, rarely_collected, run_anywhere
from rllm.engine.runner import RolloutRunner
from rllm.engine.scoring import Scoring
from rllm.environments.base.base_env import BaseEnv
from rllm.environments.named import SCHEMES, NamedEnvironment, open_env
from rllm.environments.textarena import PastPolicies
from rllm.errors import ConfigError, concerning, counted, shown
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.policy_server import upstream_of
from rllm.registry import resolve
from rllm.rewards.scoring import (
    AddedReward,
    AnyReward,
    check_reward,
    keep_verdicts,
    reward_function_of,
    scores_groups,
    weights_of,
    with_deadline,
    with_reward,
)
from rllm.store import absolute, open_store
from rllm.store.codec import readable_json
from rllm.tracking import TRACKERS
from rllm.tracking.about import Beginning, check_places, evaluations_of, in_use, keep_beginning, kept_run_id, seal
from rllm.tracking.base import Tracker, Trackers, checked_trackers
from rllm.trainer.async_loop import AsyncTrainingLoop
from rllm.trainer.batch_log import BatchLog
from rllm.trainer.checkpoint import Checkpoints, seed_generators
from rllm.trainer.config import ConfigSource
from rllm.trainer.loop import TrainingLoop
from rllm.trainer.opponents import OpponentPool, OpponentUpstream, check_opponents
from rllm.trainer.resume import StartingPoint, check_identity, identity_of, starting_point
from rllm.trainer.rollout_sources import RolloutContext, RolloutSource, rollout_source, source_in
from rllm.trainer.rollouts import check_rollouts, gateway_config, on_ray, running, uses_a_cluster
from rllm.trainer.run_health import RunHealth
from rllm.trainer.selection import ReplayBuffer
from rllm.trainer.settings import (
    check_evaluations,
    check_fit,
    check_model,
    check_roles,
    fitted_to_memory,
    make_algorithm,
)
from rllm.trainer.teacher import check_demonstrations, check_teacher, open_teacher, own_teacher
from rllm.types import TASK_ID_FIELDS, JSONMapping
from rllm.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

TaskSource: TypeAlias = Iterable[JSONMapping] | Callable[[], Iterable[JSONMapping]] | str | Path
TaskSources: TypeAlias = TaskSource | Sequence[Dataset | str | Path]

MODEL_NAME = "policy"
"""Name of the model in the gateway; agents may send any name."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a finished run."""

    run_dir: Path
    checkpoint: Path
    """The trained model, as a Hugging Face folder."""
    best: Path | None = None
    """The model where the metric `keep_best` was highest, if that is set."""
    num_steps: int
    evaluations: list[dict[str, float]]
    """Metrics of every evaluation of the run, each with its `step`; the untrained model's first, if `eval.at_start`."""


class AgentTrainer:
    """Trainer of an agent's policy. The agent is given in one of three forms.

    * `agent_run_func`: any sync or async function; it is called as `f(**task)` for every task and returns its reward
      (or trajectories, see `rllm.engine.validation`). Its model calls are those sent to `OPENAI_BASE_URL`.
    * `agent_class` and `env_class`: a `BaseAgent`, stepped through a `BaseEnv`.
    * `workflow_class`: a `Workflow`.

    With `env`, the name of an environment, tasks and environment come from it, and the agent is optional.
    """

    def __init__(
        self,
        *,
        agent_run_func: Callable[..., object] | None = None,
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        agent_args: JSONMapping | None = None,
        env_args: JSONMapping | None = None,
        workflow_class: type[Workflow] | None = None,
        workflow_args: JSONMapping | None = None,
        source: RolloutSource | None = None,
        reward: AnyReward | None = None,
        env: str | NamedEnvironment | None = None,
        train_dataset: TaskSources | None = None,
        val_dataset: TaskSources | None = None,
        config: ConfigSource = None,
        backend: str | None = None,
        trackers: Sequence[Tracker] = (),
        resume: bool = False,
    ) -> None:
        """Check everything that can be checked before work starts.

        Args:
            agent_run_func: the agent, as a function.
            agent_class: or its class, created for every rollout as `agent_class(**agent_args)`.
            env_class: class of its environment, created as `env_class.from_dict({**task, **env_args})`.
            agent_args: arguments of the agent.
            env_args: arguments of the environment.
            workflow_class: or a workflow, created as `workflow_class(rollout_engine=..., **workflow_args)`.
            workflow_args: arguments of the workflow.
            source: or any other source of episodes.
            reward: reward function for the answers of `agent_run_func` (see `rllm.rewards.scoring.with_reward`), or for
                groups, which may score agents of any form. With `env`, it is added to that environment's reward.
            env: an environment, or its name, such as `reasoning-gym:leg_counting?size=500` (see
                `rllm.environments.open_env`). Its agent may be replaced by `agent_class`, or by an `agent_run_func`
                that takes the environment as `env`.
            train_dataset: tasks to train on, by default `env`'s tasks: rows, a function that returns rows, anything
                that `Dataset.load` reads (the path of a file, or the id of a Hugging Face dataset), or a list of
                datasets or paths.
            val_dataset: held-out tasks, in the same forms, or the name of an environment.
            config: a `TrainConfig`, a mapping (hydra's `DictConfig`, too), a YAML path, or a list of `key=value`.
            backend: the same as `config.backend`.
            trackers: trackers in addition to `config.trackers`.
            resume: resume from the newest checkpoint of `config.run_dir`.

        Raises:
            ConfigError: naming what is wrong, its value and the remedy.
        """
        layers = layers_of(config, [] if backend is None else [f"backend={backend}"])
        self.config = from_layers(layers)
        others = (train_dataset, env_class, workflow_class, source)
        named = None if env is None else _named(env, self.config.sandbox, *others)
        if named is None:
            refuse_changes(
                self.config.sandbox, "sandbox", type(self.config.sandbox).model_fields, "without tasks in sandboxes"
            )
        if named is None and train_dataset is None:
            raise ConfigError("train_dataset is missing: pass tasks, or the name of an environment as env")
        self.train_data = _dataset(train_dataset, "train_dataset") if named is None else named.tasks
        self.val_data = None if val_dataset is None else _dataset(val_dataset, "val_dataset")
        self.config = fitted_to_tasks(self.config, len(self.train_data))
        if named is not None:
            source = source_in(named, agent_run_func=agent_run_func, agent_class=agent_class, agent_args=agent_args)
            agent_run_func = agent_class = agent_args = None
        self.source = rollout_source(
            agent_run_func=_rewarded(agent_run_func, reward, self.config.reward.timeout_s),
            agent_class=agent_class,
            env_class=env_class,
            agent_args=agent_args,
            env_args=env_args,
            workflow_class=workflow_class,
            workflow_args=workflow_args,
            source=source,
        )
        self._reward = reward or self.source.reward
        if named is not None and reward is not None:
            self._reward = AddedReward(reward)
        self._resume = resume
        with locating_errors(layers):
            self._check_settings()
        run_dir = self.config.run_dir or new_folder(Path("runs"))
        self.run_dir = run_dir.absolute()  # An agent may change the folder (os.chdir) during the run.
        check_places(self.run_dir, self.config.store)
        if self.config.store is not None:
            self.config.store = absolute(self.config.store)  # Runs are read and resumed from other folders, too.
        self.trackers = checked_trackers(trackers)
        """Trackers in addition to `config.trackers`."""
        self.begun_as: Beginning = {}
        """Arguments that a command line needs to resume the run: see `tracking.about.beginning_of`."""
        self._checkpoints = Checkpoints(
            self.run_dir, keep=self.config.keep_checkpoints, keep_best=self.config.keep_best
        )
        self._identity = identity_of(self.config, self.algorithm, self.train_data, self.val_data)
        self._start = self._starting_point()
        with locating_errors(layers):
            self.sampler = self._sampler(self._start)
            self.sampler.tasks_of_step(self._start.steps_done)  # a user's function may fail
        self._settings = self.config.model_dump(mode="json")
        """Settings as the user chose them, without any that hold for this process alone, such as a port."""
        self._runner: RolloutRunner | None = None

    def _check_settings(self) -> None:
        check_fit(self.config, demonstrates=self.source.demonstrates)
        check_sizes(self.config, len(self.train_data))
        check_evaluations(self.config, has_val_data=self.val_data is not None)
        self._settle_reward()
        self.algorithm = make_algorithm(self.config)
        check_roles(self.config, self.algorithm)
        for name in self.config.trackers:
            resolve(name, TRACKERS, kind="trackers")
        for name, data in (("train_dataset", self.train_data), ("val_dataset", self.val_data)):
            if data is not None:
                with concerning(name):
                    if not self.source.demonstrates:
                        check_ids(data)
                    self.source.check(data)
        _warn_of_shared_tasks(self.train_data, self.val_data)
        check_model(self.config)
        resumed_rate = None
        if self._resume and self.config.run_dir and (path := self.config.run_dir / "config.yaml").is_file():
            resumed_rate = (read_settings(path)[0].get("optim") or {}).get("lr")
        self.config, self.rate_origin = with_learning_rate(
            self.config, demonstrates=self.source.demonstrates, resumed=resumed_rate
        )
        """Origin of `optim.lr`, if the user did not set it."""
        self.config = fitted_to_memory(self.config)
        check_teacher(self.config, self.algorithm)
        check_demonstrations(self.algorithm, self.train_data)
        check_rollouts(self.config, self.source)
        self._past = PastPolicies.of(chain(self.train_data, self.val_data or ()))
        check_opponents(self.config, self._past)
        self._backend: type[TrainingBackend] = resolve(self.config.backend, BACKENDS, kind="backend")
        self._backend.check(self.config)

    def _settle_reward(self) -> None:
        """Check the reward function, and use the weights that it gives its parts unless the configuration has some."""
        reward = self._reward
        if reward is None:
            refuse_changes(self.config.reward, "reward", ["timeout_s"], "without a reward function; leave it out")
            return
        check_reward(reward)
        if not scores_groups(reward) and self.source.reward is None:
            raise ConfigError(
                f"reward={shown(reward)} would have no effect: this agent's environment or workflow scores it; pass "
                "the function in env_args or workflow_args, or give a reward of groups"
            )
        if not self.config.reward.weights:
            self.config.reward.weights = dict(weights_of(reward))

    @property
    def under_way(self) -> UnderWay:
        """Rollouts in progress; for displays."""
        return UnderWay() if self._runner is None else self._runner.under_way

    @property
    def steps_done(self) -> int:
        """Training steps of earlier processes, from which a resumed run continues."""
        return self._start.steps_done

    @cached_property
    def cluster_plan(self) -> list[str]:
        """Plan of a run on an existing Ray cluster, line by line, after a check of every node; empty without one."""
        if not uses_a_cluster(self.config):
            return []
        from rllm.trainer.preflight import preflight

        return preflight(self.config)

    def train(self) -> TrainResult:
        """Run the training to its end. May be called while an event loop is running.

        Raises:
            ConfigError: if the run is complete, or was started before and `resume` is not set; or if a node of the Ray
                cluster cannot do its part.
            RolloutError: if every rollout of a step, or of the evaluation before the first step, failed; or if a
                rollout stopped the event loop.
            KeyboardInterrupt: on Ctrl-C; the last whole step is saved, and `resume=True` continues from it.
        """
        for line in self.cluster_plan:
            logger.debug("%s", line)
        try:
            return run_anywhere(self._train)
        except KeyboardInterrupt as stopped:
            if (latest := self._checkpoints.latest()) is not None:
                stopped.add_note(
                    f"The last complete step is saved ({latest}); resume=True with this run_dir continues from it."
                )
            raise stopped from None

    async def _train(self) -> TrainResult:
        asyncio.get_running_loop().set_default_executor(UnboundedExecutor())
        with ExitStack() as stack:
            stack.enter_context(in_use(self.run_dir))
            self._start = self._starting_point()  # an earlier call, or another process, may have trained there since
            if self._start.has_done(self.config.num_steps):
                decides = "num_steps" if self.config.num_epochs is None else "num_epochs"
                remedy = f"raise {decides} to continue it"
                if (schedule := self.config.optim.schedule) != "constant":  # then `num_steps` may not change
                    new_run = f"start a new run from its weights, with model.path={self._start.checkpoint}"
                    remedy = f"optim.schedule={schedule} ends there: {new_run} and another run_dir"
                raise ConfigError(
                    f"{decides}={getattr(self.config, decides)}: the run in {str(self.run_dir)!r} has done "
                    f"{counted(self._start.steps_done, 'step')}; {remedy}"
                )
            stack.enter_context(rarely_collected())
            with on_ctrl_c(signal.default_int_handler):  # nothing is lost yet, and models take minutes to load
                loop = self._loop(stack)
            self._start.restore_rng()
            await loop.run()
        latest = self._checkpoints.latest()
        assert latest is not None, "the loop saves when it ends"
        return TrainResult(
            run_dir=self.run_dir,
            checkpoint=latest,
            best=self._checkpoints.best() if self.config.keep_best is not None else None,
            num_steps=loop.steps_done,
            evaluations=evaluations_of(self.run_dir),
        )

    def _starting_point(self) -> StartingPoint:
        start = starting_point(self._checkpoints, self.run_dir, resume=self._resume)
        if start.checkpoint is not None:
            check_identity(start.state.get("identity", {}), self._identity, start.checkpoint)
        return start

    def _sampler(self, start: StartingPoint) -> TaskSampler:
        return TaskSampler(
            self.train_data,
            self.config.data,
            seed=self.config.seed,
            per_step=self.config.tasks_per_step,
            delay=self.config.rollout.max_staleness,
            records=start.state.get("success_rates"),
        )

    def _loop(self, stack: ExitStack) -> TrainingLoop:
        start = self._start
        seed_generators(self.config.seed)
        self.algorithm.restore(start.state.get("algorithm", {}))
        teacher = stack.enter_context(open_teacher(self.config, self.algorithm))
        stack.enter_context(on_ray(self.config))
        backend = self._loaded_backend(stack)
        # Only a state that can be resumed replaces the previous one.
        self._write_settings()
        store = open_store(self.config.store or str(self.run_dir / "traces.db"))
        stack.callback(store.close)
        if self.config.store is None:
            start.forget_sessions(store)
        upstream, opponents = upstream_of(backend.inference, MODEL_NAME), None
        if self._past is not None:
            opponents = OpponentPool(
                self._past,
                policy=backend.inference,
                checkpoints=self._checkpoints,
                config=self.config,
                steps_done=start.steps_done,
            )
            stack.callback(opponents.close)
            upstream = OpponentUpstream(opponents, MODEL_NAME)
        gateway = stack.enter_context(GatewayServer(store, upstream, gateway_config(self.config)))
        context = RolloutContext(inference=backend.inference, gateway=gateway, store=store, rollout=self.config.rollout)
        for function in (self._reward, *self.source.arguments):
            keep_verdicts(function, self.run_dir)
        scoring = Scoring.of(self._reward, self.config.reward, timeout_s=self.config.rollout.timeout_s)
        runner = self._runner = stack.enter_context(running(self.config, self.source, context, gateway, scoring))
        trackers = Trackers.start(self.config.trackers, self.run_dir, [*self.trackers, TaskFile(self.run_dir)])
        stack.callback(trackers.close)
        sampler = self._sampler(start)
        sampler.warn_of_missing_outcomes()
        replay = ReplayBuffer(self.config)
        replay.restore(start.state.get("replay", {}), store)
        return (AsyncTrainingLoop if self.config.rollout.max_staleness else TrainingLoop)(
            config=self.config,
            backend=backend,
            algorithm=self.algorithm,
            episode_metrics=self.source.episode_metrics(self.algorithm, backend, self.config.roles),
            health=RunHealth(start.state.get("health")),
            teacher=own_teacher(self.config, self.algorithm, backend) or teacher,
            opponents=opponents,
            batch_log=BatchLog(self.run_dir, steps_done=start.steps_done, keep=self.config.keep_batches),
            runner=runner,
            store=store,
            trackers=trackers,
            checkpoints=self._checkpoints,
            train_data=self.train_data,
            sampler=sampler,
            replay=replay,
            val_data=self.val_data,
            num_unattributed_calls=lambda: gateway.num_unattributed_calls,
            run_id=kept_run_id(self.run_dir),
            identity=self._identity,
            steps_done=start.steps_done,
            evaluated_at=start.evaluated_at,
            score=start.score(self.config.keep_best),
        )

    def _loaded_backend(self, stack: ExitStack) -> TrainingBackend:
        """Return the backend in its initial state, or as its checkpoint has it."""
        backend = self._backend.from_config(self.config.model_copy(update={"run_dir": self.run_dir}))
        stack.callback(backend.close)
        if self._start.checkpoint is not None:
            try:
                backend.load(self._start.checkpoint)
            except ConfigError as error:
                raise ConfigError(f"{error}; {self._checkpoints.way_back(self._start.checkpoint)}") from error
        return backend

    def _write_settings(self) -> None:
        self._start.forget_metrics(self.run_dir)
        replace_text(self.run_dir / "config.yaml", yaml.safe_dump(self._settings, sort_keys=False))
        if self.begun_as:
            keep_beginning(self.run_dir, self.begun_as)
        seal(self.run_dir)


def _rewarded(
    agent: Callable[..., object] | None, reward: AnyReward | None, timeout_s: float | None
) -> Callable[..., object] | None:
    """Return the agent function with its reward function, which gets a deadline."""
    if agent is None or not callable(agent):
        return agent
    if reward is not None and reward_function_of(agent) is not None:
        raise ConfigError(f"reward={shown(reward)}: agent_run_func has a reward function already; give one of the two")
    return with_deadline(agent if reward is None else with_reward(agent, reward), timeout_s)


def _named(env: str | NamedEnvironment, sandbox: SandboxSettings, *others: object) -> NamedEnvironment:
    names = ("train_dataset", "env_class", "workflow_class", "source")
    for name, value in zip(names, others, strict=True):
        if value is not None:
            raise ConfigError(f"{name} would have no effect with env={shown(env)}, which brings its own; leave one out")
    opened = open_env(env, sandbox=sandbox) if isinstance(env, str) else env
    opened.check_trainable()
    return opened


def _warn_of_shared_tasks(train_data: Dataset, val_data: Dataset | None) -> None:
    """Warn if held-out tasks are also trained on, comparing the content of rows, not ids, splits or generators."""
    if val_data is None:
        return
    trained = set(map(_content, train_data))
    num_shared = sum(_content(row) in trained for row in val_data)
    if num_shared:
        logger.warning(
            "%d of %s (val_dataset, --val) are also training tasks (train_dataset, --data), so evaluations measure "
            "memorization, too; remove them from one of the two, or choose seeds of --env and --val further apart",
            num_shared,
            counted(len(val_data), "held-out task"),
        )


def _content(row: JSONMapping) -> bytes:
    own = {name: value for name, value in row.items() if name not in (*TASK_ID_FIELDS, "split", "generated_by")}
    extra = own.get("extra_info")
    if isinstance(extra, Mapping):  # which verl's scripts write, with the number of the row
        own["extra_info"] = {name: value for name, value in extra.items() if name not in ("index", "split")}
    return hashlib.sha256(readable_json(own, sort_keys=True)).digest()


def _dataset(source: TaskSources | None, name: str) -> Dataset:
    """Return the tasks of one source, or of several together."""
    if isinstance(source, list | tuple) and source and all(isinstance(each, Dataset | str | Path) for each in source):
        parts = [_single_dataset(each, name) for each in source]
        return Dataset.concatenate(parts) if len(parts) > 1 else parts[0]
    return _single_dataset(source, name)


def _single_dataset(source: Any, name: str) -> Dataset:
    if isinstance(source, Dataset):
        data = source
    elif isinstance(source, str) and source.partition(":")[0] in SCHEMES:
        data = open_env(source).tasks
    elif isinstance(source, str | Path) or callable(source):
        with concerning(name):
            data = Dataset.load(source)
    elif isinstance(source, Iterable):
        with concerning(name):
            data = Dataset(source)
    else:
        raise ConfigError(f"{name}={source!r}: use rows, a function that returns rows, or what Dataset.load reads")
    if not len(data):
        raise ConfigError(f"{name} is empty: give it at least one task")
    return data
