"""Training on this machine: one torch model that the sampler and the optimiser share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.losses import probability_ratio
from rllm.backends.adapter import Adapter, LoraSettings
from rllm.backends.base import UpdateResult
from rllm.backends.local.accumulate import accumulate
from rllm.backends.local.configure import check, critic_settings, lora_settings, optimizer_settings
from rllm.backends.local.critic import Critic, CriticSettings
from rllm.backends.local.head import body_of
from rllm.backends.local.optimizer import MasterAdamW, OptimizerSettings
from rllm.backends.local.policy import Policy
from rllm.backends.local.reference import FrozenCopy, Reference, WithoutAdapter
from rllm.backends.local.trunk import Trunk
from rllm.backends.sampling.sampler import EmbeddedSampler, Sampler
from rllm.backends.sampling.serving import open_server
from rllm.backends.updates import Progress, aligned, batch_metrics, check_batch, minibatches
from rllm.errors import ConfigError, WeightSyncError
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.loading import (
    ADAPTER_FILE,
    LoadedModel,
    check_tokenizer_in,
    load_model,
    save_model,
    save_tokenizer,
    text_parts,
)
from rllm.inference.local.weights import is_finite
from rllm.parser.tool_prompt import TemplateChoice

logger = logging.getLogger(__name__)

RECOVERY_FILE = "recovery.pt"
_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError, SafetensorError)
"""What reading a file that is damaged, missing or of something else may raise."""


class LocalBackend:
    """Policy, sampler and AdamW in one process; a critic and a reference, once they are asked for.

    Publishing to the embedded sampler copies nothing: it decodes with the very tensors that the optimiser updates, so a
    publish is a new version number and an empty prefix cache. With `overlap` it has a copy of what is trained instead, and
    goes on while that changes; and so does a server, which is given the weights.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: OptimizerSettings,
        *,
        lora: LoraSettings | None = None,
        critic: CriticSettings | None = None,
        load_original: Callable[[], LoadedModel] | None = None,
        reference_offload: bool = False,
        gradient_checkpointing: bool = False,
        serve: Callable[[LoadedModel, Adapter | None], Sampler] | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> None:
        """
        Args:
            loaded: the policy, which is changed in place.
            settings: of its updates.
            lora: of the adapter that is trained instead of all weights.
            critic: of the critic's updates.
            load_original: gives the model that the run began with, for the reference; LoRA needs none.
            reference_offload: whether the reference is kept in main memory between uses.
            gradient_checkpointing: see `ModelConfig`.
            serve: makes the sampler of the policy; `None` makes an `EmbeddedSampler`.
            seed: of the adapter, and of the embedded sampler.
            **sampling: the embedded sampler's other settings.
        """
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.device = loaded.device
        self.settings = settings
        self.critic_settings = critic or CriticSettings()
        _freeze_beside_text(self.model)
        self.adapter = None if lora is None else Adapter(self.model, lora, seed=seed)
        with nullcontext() if self.adapter is None else self.adapter.at_work():
            trunk = Trunk.of(body_of(self.model), autocast=settings.autocast, recompute=gradient_checkpointing)
            if serve is None:
                self._sampler: Sampler = EmbeddedSampler(loaded, seed=seed, autocast=settings.autocast, **sampling)
            else:
                self._sampler = serve(loaded, self.adapter)
        self.policy = Policy.of(self.model, trunk)
        self.optimizer = MasterAdamW(self.model, settings)
        self.reference = self._choose_reference(load_original, offload=reference_offload)
        self._critic: Critic | None = None
        self._unpublished = ExitStack()
        """Holds the sampler still between an update and its publish."""
        self._sampler.hand_over(0)

    @classmethod
    def check(cls, config: Any) -> None:
        """
        Raises:
            ConfigError: if a setting cannot be used, or would have no effect.
        """
        check(config)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The backend of a `TrainConfig`.

        Raises:
            ConfigError: if a setting cannot be used, or would have no effect.
            InferenceError: if the server of `model.engine=vllm` does not start.
            WeightSyncError: if it does not take the weights.
        """
        check(config)
        settings, lora, critic = optimizer_settings(config), lora_settings(config), critic_settings(config)
        model = config.model
        template = TemplateChoice.of(model)
        load = partial(load_model, model.path, dtype=model.dtype, device=model.device, template=template)
        with ExitStack() as on_failure:
            sampling = _sampling(config, on_failure)
            backend = cls(
                load(),
                settings,
                lora=lora,
                critic=critic,
                load_original=load,
                reference_offload=model.reference_offload,
                gradient_checkpointing=model.gradient_checkpointing,
                seed=config.seed,
                **sampling,
            )
            on_failure.pop_all()
        return backend

    def _choose_reference(self, load: Callable[[], LoadedModel] | None, *, offload: bool) -> Reference | None:
        if self.adapter is not None:
            return WithoutAdapter(self.adapter, self.policy)
        return None if load is None else FrozenCopy(load, self.policy, offload=offload)

    @property
    def inference(self) -> InferenceEngine:
        return self._sampler.inference

    @property
    def weight_version(self) -> int:
        return self._sampler.weight_version

    def score(self, batch: Batch) -> Tensor:
        """[N] log-probabilities under the current weights, without gradient."""
        with self._sampler.still():
            return self.policy.score(batch, self.settings.micro_batch_tokens)

    def score_reference(self, batch: Batch) -> Tensor:
        """[N] log-probabilities under the weights that the run began with.

        Raises:
            ConfigError: if the backend was not told where to load these from.
        """
        if self.reference is None:
            raise ConfigError(
                "algorithm.kl_coef: this backend has no reference; make it with load_original= or lora=, or use kl_coef=0"
            )
        with self._sampler.still(), self.reference() as reference:
            return reference.score(batch, self.settings.micro_batch_tokens)

    def values(self, batch: Batch) -> Tensor:
        """[N] the critic's estimates; the first call makes it, from the policy as it is."""
        with self._sampler.still():
            return self.critic.values(batch)

    @property
    def critic(self) -> Critic:
        """Made when it is first asked for."""
        if self._critic is None:
            self._critic = Critic(self.policy, self.critic_settings, self.settings)
        return self._critic

    def update(self, batch: Batch, algorithm: Algorithm) -> UpdateResult:
        """One optimiser step for each minibatch of each epoch. Without `overlap` sampling rests from here until `publish`,
        so that no answer is sampled from new weights under the old version.

        Raises:
            ConfigError: if the batch lacks what the algorithm needs.
        """
        check_batch(batch, algorithm)
        self._unpublished.enter_context(self._sampler.still())
        if len(batch) == 0:
            return UpdateResult()
        critic = None if batch.returns is None else self.critic
        if critic is not None:
            critic.begin()
        policy_waits = critic is not None and critic.is_warming_up
        if batch.old_logprobs is None and (policy_waits or self._updates_per_batch > 1):
            batch = replace(batch, old_logprobs=self.score(batch))
        learnt, judged = Progress(name="policy"), Progress(name="critic")
        passes: list[Tensor] = []
        entropies: list[Tensor] = []
        times = {"num_minibatches": self.settings.num_minibatches, "num_epochs": self.settings.num_epochs}
        for part, scale in minibatches(batch, algorithm.aggregation, **times):
            if critic is not None:
                _, sums = critic.accumulate(part, algorithm, scale=scale)
                judged.note(sums, critic.step())
            if not policy_waits:
                logprobs, sums = self.accumulate(part, algorithm, scale=scale, entropies=entropies)
                learnt.note(sums, self.optimizer.step())
                passes.append(logprobs)
        # Only a batch with a single update is not scored before: then that began with the policy as it was.
        before = passes[0] if batch.old_logprobs is None else batch.old_logprobs
        num_tokens = batch.num_tokens * self.settings.num_epochs
        metrics = {
            **learnt.metrics(num_tokens),
            **judged.metrics(num_tokens),
            **batch_metrics(batch, before, num_forward=len(batch.tree.ids)),
            "optim/lr": self.optimizer.lr,
            "optim/num_updates": float(len(learnt.norms)),
        }
        return UpdateResult(metrics=metrics, logprobs=before, **_looked_at(before, passes, entropies))

    def accumulate(
        self, batch: Batch, algorithm: Algorithm, *, scale: float = 1.0, entropies: list[Tensor] | None = None
    ) -> tuple[Tensor, Counter[str]]:
        """Add the gradient of a batch's loss to the policy; see `accumulate.accumulate`. `entropies` is given those of its
        tokens, in pieces."""

        def loss_of(part: Batch) -> tuple[Tensor, Sums, Tensor]:
            logprobs, entropy = self.policy.logprobs(part, entropy_gradient=algorithm.entropy_coef != 0)
            loss, sums = algorithm.loss(logprobs, aligned(part, logprobs), entropy)
            if entropies is not None:
                entropies.append(entropy.detach().cpu())
            return loss, {**sums, "policy/entropy": entropy.detach().sum()}, logprobs

        return accumulate(batch, loss_of, self.optimizer, max_tokens=self.settings.micro_batch_tokens, scale=scale)

    def publish(self) -> int:
        """Bump the version, and let sampling go on.

        Raises:
            WeightSyncError: if an update left weights that are not numbers.
        """
        with self._unpublished:
            for name, weight in self.model.named_parameters():
                if weight.requires_grad and not is_finite(weight):
                    raise WeightSyncError(
                        f"the update made {name} infinite or NaN, so it was not published: begin a new run with a "
                        "lower optim.lr or optim.max_grad_norm, from the weights of the last checkpoint (model.path)"
                    )
            self._sampler.hand_over(self.weight_version + 1)
        return self.weight_version

    def save(self, folder: Path) -> None:
        """An ordinary Hugging Face folder (with LoRA: of peft), `recovery.pt` with the optimiser's state, and the critic."""
        if self.adapter is None:
            save_model(self.model, folder)
        else:
            self.adapter.save(folder)
        save_tokenizer(self.tokenizer, folder)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "weight_version": self.weight_version,
            "has_critic": self._critic is not None,
        }
        torch.save(state, folder / RECOVERY_FILE)
        if self._critic is not None:
            self._critic.save(folder)

    def load(self, folder: Path) -> None:
        """Take up the weights, the optimiser's state and the critic from a folder that `save` wrote.

        Raises:
            ConfigError: if the folder is of another model, or incomplete.
        """
        try:
            state = torch.load(folder / RECOVERY_FILE, weights_only=True, map_location="cpu")
            version: int = state["weight_version"]
            check_tokenizer_in(folder, self.tokenizer)
            with self._sampler.still():
                self._load_weights(folder)
                self.optimizer.load_state_dict(state["optimizer"])
                self._critic = None
                if state["has_critic"]:
                    self.critic.load(folder)
        except _UNREADABLE as error:
            raise ConfigError(
                f"checkpoint={str(folder)!r} cannot be taken up: it is incomplete or of another model "
                f"({type(error).__name__}: {error})"
            ) from error
        self._sampler.hand_over(version)

    def _load_weights(self, folder: Path) -> None:
        if self.adapter is not None:
            self.adapter.load(folder)
            return
        if (folder / ADAPTER_FILE).exists():
            raise ValueError("it holds a LoRA adapter, and this model has none: set model.lora_rank as it was")
        saved = load_model(folder, dtype=str(self.model.dtype).removeprefix("torch."), device="cpu").model
        if type(saved) is not type(self.model):
            raise ValueError(f"it holds a {type(saved).__name__}, and this is a {type(self.model).__name__}")
        self.model.load_state_dict(saved.state_dict())

    def close(self) -> None:
        self._unpublished.close()
        self._sampler.close()

    @property
    def _updates_per_batch(self) -> int:
        return self.settings.num_minibatches * self.settings.num_epochs


def _freeze_beside_text(model: Any) -> None:
    """Spare what text does not pass, such as layers for images, the optimiser's float32 copies: it has no gradients."""
    if (parts := text_parts(model)) is not None:
        trained = {id(weight) for part in parts for weight in part.parameters()}
        for weight in model.parameters():
            weight.requires_grad_(id(weight) in trained)


def _looked_at(before: Tensor, passes: list[Tensor], entropies: list[Tensor]) -> dict[str, Tensor]:
    """What `UpdateResult` says of single tokens, [N] each, if the policy was updated: each epoch came by all of them, in their
    order, so the first has the entropies of before, and the last the final ratios."""
    if not passes:
        return {}
    ratios = probability_ratio(torch.cat(passes)[-len(before) :], before)
    return {"entropies": torch.cat(entropies)[: len(before)], "ratios": ratios}


def _sampling(config: Any, on_failure: ExitStack) -> dict[str, Any]:
    """Where the policy is sampled from, as arguments of `LocalBackend`."""
    if config.model.engine == "vllm":
        served = open_server(config)
        on_failure.callback(served.close)
        return {"serve": served.sampler}
    return {
        "overlap": config.rollout.max_staleness > 0,
        "max_concurrent": config.rollout.max_concurrent,
        "max_length": config.model.max_length,
        "tool_parser": config.model.tool_parser,
    }
