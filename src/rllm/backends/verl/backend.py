"""Training on verl's Ray workers: policy, reference and critic sharded over processes, driven from here."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.backends.base import Role, StepResult, UpdatePlan, loading_checkpoint, non_finite_weight
from rllm.backends.lora import planned_coverage
from rllm.backends.sampler import EmbeddedSampler, Sampler
from rllm.backends.server_launch import open_server
from rllm.backends.update import Schedule
from rllm.backends.verl.cluster import WorkerGroup, wait_for_room
from rllm.backends.verl.rows import LOGPROBS, LONGEST, LOSS, MASK, ROWS, Rows, at_tokens, numbers
from rllm.backends.verl.settings import needs_critic, needs_reference, on_cpu, weights_dtype
from rllm.backends.verl.worker_config import check, demand_of, environment_of, without_adapter, worker_configs
from rllm.config.schema import TrainConfig
from rllm.engine.ray_cluster import joined
from rllm.errors import ConfigError, WeightSyncError, WorkerError
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.loading import (
    check_tokenizer_in,
    is_finite,
    load_model,
    load_tokenizer,
    save_model,
    save_tokenizer,
)
from rllm.parser.tool_prompt import TemplateChoice
from rllm.types import JSONObject

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RECOVERY_FILE = "recovery.json"
BUCKET_BYTES = 2**29
"""Bytes of weights sent to the sampler at a time."""


@dataclass(kw_only=True)
class Counts:
    """Counters that a resumed run continues from."""

    weight_version: int = 0
    updates: dict[str, int] = field(default_factory=lambda: {"policy": 0, "critic": 0})
    critic_batches: int = 0


class VerlBackend:
    """Driver of a group of workers, and the sampler that they publish to."""

    def __init__(
        self,
        config: TrainConfig,
        group: WorkerGroup,
        published: PublishedPolicy,
        tokenizer: PreTrainedTokenizerBase,
        opened: ExitStack,
    ) -> None:
        """Take over the parts; `close` closes what was `opened` for them."""
        self._config = config
        self._group, self._published, self._tokenizer, self._opened = group, published, tokenizer, opened
        self._dtype = weights_dtype(config)
        self._counts = Counts()
        self._algorithm: Algorithm | None = None
        self._schedules = {"policy": Schedule.of_policy(config), "critic": Schedule(lr=config.critic.lr)}

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        check(config)

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        check(config)
        if (found := planned_coverage(config)) is not None:
            logger.warning("%s", found)
        configs, demand, environment = worker_configs(config), demand_of(config), environment_of(config)
        os.environ.update(environment)  # verl runs in this process, too
        with ExitStack() as stack:
            cpus = max(demand.workers_per_node, os.cpu_count() or 1) if demand.resource == "CPU" else None
            stack.enter_context(joined(config.ray.address, ships=False, num_cpus=cpus))
            wait_for_room(demand)
            published = PublishedPolicy(config, dtype=weights_dtype(config), device="cpu" if on_cpu(config) else "auto")
            stack.callback(published.close)
            group = WorkerGroup(
                configs,
                demand,
                device="cpu" if on_cpu(config) else "cuda",
                environment=environment,
                timeout_s=config.verl.timeout_s,
            )
            stack.callback(group.close)
            tokenizer = load_tokenizer(config.model.path, template=TemplateChoice.of(config.model)).tokenizer
            return cls(config, group, published, tokenizer, stack.pop_all())

    @property
    def inference(self) -> InferenceEngine:
        return self._published.engine

    @property
    def weight_version(self) -> int:
        return self._counts.weight_version

    def score(self, batch: Batch) -> Tensor:
        return self._output("policy", batch, "log_probs")

    def score_reference(self, batch: Batch) -> Tensor:
        if self._config.model.lora_rank:
            return self._output("policy", batch, "log_probs", no_lora_adapter=True)
        if not needs_reference(self._config):
            raise ConfigError(
                "algorithm.kl_coef: the workers have no reference, because it was 0 when they were started"
            )
        return self._output("reference", batch, "log_probs")

    def values(self, batch: Batch) -> Tensor:
        if not needs_critic(self._config):
            raise ConfigError("algorithm.name: the workers were started without a critic; use ppo from the start")
        return self._output("critic", batch, "values")

    def _output(self, role: str, batch: Batch, name: str, **settings: object) -> Tensor:
        """Return [N] a model's output at the batch's tokens."""
        if not len(batch):
            return torch.zeros(0)
        self._published.rest()
        only_for_losses: JSONObject = dict.fromkeys(numbers(batch))
        rows = Rows.dealt(replace(batch, **only_for_losses), self._group.num_shards(role))
        output = self._group.ask(f"{role}_outputs", self._data(rows, compute_loss=False, **settings))
        columns = rows.columns()
        return rows.back(at_tokens(output[name], columns[MASK]).float())

    def _data(self, rows: Rows, **settings: object) -> TensorDict:
        """Return the rows as verl takes them, with its settings."""
        from verl.utils import tensordict_utils

        num_rows = len(rows.order)
        return tensordict_utils.get_tensordict(
            {**rows.columns(), "row": torch.arange(num_rows)},
            non_tensor_dict={
                "temperature": rows.batch.temperature,
                "calculate_entropy": False,
                LONGEST: int(rows.offsets.diff().max()),
                **settings,
            },
        )

    @property
    def learning_rate(self) -> float:
        return self._schedules["policy"].learning_rate(self._counts.updates["policy"])

    def energies(self, batch: Batch) -> Tensor:
        raise ConfigError("algorithm.name: verl's workers do not compute the energies of tokens; use backend=local")

    def begin_update(self, batch: Batch) -> UpdatePlan:
        """Let the sampler leave a shared device to the workers."""
        self._published.rest()
        optim, has_critic = self._config.optim, batch.returns is not None
        self._counts.critic_batches += has_critic
        return UpdatePlan(
            num_forward_tokens=sum(len(sequence.ids) - 1 for sequence in batch.sequences),
            num_minibatches=optim.num_minibatches,
            num_epochs=optim.num_epochs,
            policy_waits=has_critic and self._counts.critic_batches <= self._config.critic.warmup_steps,
        )

    def step(self, role: Role, part: Batch, algorithm: Algorithm, *, scale: float) -> StepResult:
        if algorithm != self._algorithm:
            self._group.ask("learn_with", algorithm, self._config.verl.policy_loss is not None)
            self._algorithm = algorithm
        part = replace(part, weights=part.weights * scale)
        self._counts.updates[role] += 1
        rows = Rows.dealt(part, self._group.num_shards(role))
        data = self._data(
            rows,
            calculate_entropy=role == "policy",
            lr=self._schedules[role].learning_rate(self._counts.updates[role]),
            mini_batch_size=len(rows.order),
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        found = dict(self._group.ask(f"update_{role}", data)["metrics"])
        sums = {
            name: sum(values)
            for name, values in found.items()
            if "/" in name and not name.startswith(("rllm/", "perf/"))
        }
        norm = float(found["grad_norm"][0])
        if not math.isfinite(norm):
            number = self._counts.updates[role]
            logger.warning("update %d of the %s is skipped: its gradient is not finite (norm %s)", number, role, norm)
        logprobs = rows.back(_in_order(found[ROWS], found[LOGPROBS], rows)) if role == "policy" else None
        return StepResult(sums=Counter({**sums, "loss": sum(found[LOSS])}), grad_norm=norm, logprobs=logprobs)

    def publish(self) -> int:
        self._published.publish(self._weights(), self.weight_version + 1)
        self._counts.weight_version += 1
        return self.weight_version

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights by name, from the workers, bucket by bucket."""
        is_last = False
        while not is_last:
            answers = self._group.ask("next_weights", BUCKET_BYTES, self._dtype)
            weights, is_last = answers[0]
            for name, weight in weights.items():
                if not is_finite(weight):
                    raise non_finite_weight(name)
                yield name, weight

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder (with LoRA one of peft), the workers' shards in `verl/`, and the counters.

        All workers must see the folder.
        """
        self._group.ask("save", str(folder.absolute()), self._dtype)
        if not self._config.model.lora_rank:
            self._published.save(self._weights(), folder)
        save_tokenizer(self._tokenizer, folder)
        (folder / RECOVERY_FILE).write_text(json.dumps(asdict(self._counts)))

    def load(self, folder: Path) -> None:
        with loading_checkpoint(folder, OSError, ValueError, TypeError, WorkerError):
            counts = Counts(**json.loads((folder / RECOVERY_FILE).read_text()))
            check_tokenizer_in(folder, self._tokenizer)
            self._group.ask("load", str(folder.absolute()))
        self._counts = counts
        self._published.publish(self._weights(), counts.weight_version)

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started here."""
        self._opened.close()


def _in_order(micro_batches: Sequence[Tensor], logprobs: Sequence[Tensor], rows: Rows) -> Tensor:
    """Return log-probabilities of micro-batches in the order of the rows."""
    sizes = rows.num_sampled()
    of_row: dict[int, Tensor] = {}
    for indices, values in zip(micro_batches, logprobs, strict=True):
        pieces = values.split([sizes[index] for index in indices.tolist()])
        of_row.update(zip(indices.tolist(), pieces, strict=True))
    return torch.cat([of_row[row] for row in range(len(rows.order))]).float()


class PublishedPolicy:
    """Policy of the last publish, as a model in this process that takes weights by name, and its sampler.

    An embedded engine decodes with this very model; a vLLM server is sent its weights and checked as on the local
    backend.
    """

    def __init__(self, config: TrainConfig, *, dtype: str, device: str) -> None:
        """Load the model on a torch device, or on `auto`, and start its sampler.

        Raises:
            ConfigError: if it cannot be loaded, or sampled from.
            InferenceError: if a server does not start.
        """
        with ExitStack() as stack:
            served = open_server(without_adapter(config)) if config.model.engine == "vllm" else None
            if served is not None:
                stack.callback(served.close)
            loaded = load_model(config.model.path, dtype=dtype, device=device, template=TemplateChoice.of(config.model))
            self._model = loaded.model.requires_grad_(False)
            if served is not None:
                self._sampler: Sampler = served.sampler(loaded, None)
            else:
                self._sampler = EmbeddedSampler(
                    loaded,
                    max_concurrent=config.rollout.max_concurrent,
                    max_length=config.model.max_length,
                    tool_parser=config.model.tool_parser,
                    seed=config.seed,
                    autocast=config.optim.autocast,
                )
            stack.callback(self._sampler.close)
            self._sampler.sync_weights(0)
            stack.pop_all()

    @property
    def engine(self) -> InferenceEngine:
        """Sampler of the published weights."""
        return self._sampler.inference

    def rest(self) -> None:
        """Leave the memory of a shared device to the workers until the next publish."""
        with self._sampler.paused():
            pass

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample from these weights, by Hugging Face names; raise `WeightSyncError` if some did not arrive."""
        own = self._model.state_dict()
        missing = set(own) - _tied(self._model)
        with self._sampler.paused():
            for name, weight in weights:
                if name not in own or own[name].shape != weight.shape:
                    raise WeightSyncError(
                        f"verl's workers sent {name} {tuple(weight.shape)}, and the policy has no such weight"
                    )
                with torch.no_grad():
                    own[name].copy_(weight)
                missing.discard(name)
            if missing:
                raise WeightSyncError(
                    f"verl's workers did not send {min(missing)}, so the sampler has some old weights"
                )
            self._sampler.sync_weights(version)

    def save(self, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        """Write these weights as a Hugging Face folder without a tokenizer."""
        state = {name: weight for name, weight in weights if name not in _tied(self._model)}
        save_model(self._model, folder, state_dict=state)

    def close(self) -> None:
        self._sampler.close()


def _tied(model: PreTrainedModel) -> set[str]:
    """Return names of weights that are others under a second name."""
    return set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
