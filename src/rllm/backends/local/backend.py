"""Training on this machine: one torch model that the sampler and the optimizer share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from rllm._runtime.process import resident_memory, return_memory
from rllm.algorithms.base import Algorithm, Sums
from rllm.algorithms.batch import Batch
from rllm.algorithms.echo import num_observed, with_observations
from rllm.algorithms.from_config import algorithm_of, check_critic
from rllm.backends.base import Role, StepResult, UpdatePlan, loading_checkpoint, non_finite_weight
from rllm.backends.local.critic import Critic
from rllm.backends.local.logprobs import body_of
from rllm.backends.local.optimizer import MasterAdamW, accumulate
from rllm.backends.local.policy import FrozenCopy, Policy, Trunk
from rllm.backends.lora import Adapter, LoraSettings
from rllm.backends.sampler import EmbeddedSampler, Sampler
from rllm.backends.server_launch import check_serving, open_server
from rllm.backends.update import Schedule, aligned
from rllm.config.schema import CriticConfig, OptimConfig, TrainConfig, refuse_changes
from rllm.errors import ConfigError
from rllm.inference.engine import InferenceEngine
from rllm.inference.local.loading import (
    ADAPTER_FILE,
    LoadedModel,
    check_source,
    check_tokenizer_in,
    choose_device,
    choose_dtype,
    is_finite,
    load_model,
    save_model,
    save_tokenizer,
    text_parts,
)
from rllm.inference.local.quantized import Quantization, bitsandbytes_for, quantize
from rllm.parser.tool_parser import DEFAULT_FORMAT, tool_parser
from rllm.parser.tool_prompt import TemplateChoice
from rllm.types import JSONObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

RECOVERY_FILE = "recovery.pt"
_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError, SafetensorError)
"""Errors of reading a file that is damaged, missing or of something else."""


class LocalBackend:
    """Policy, sampler and AdamW in one process, with a critic and a reference where they are needed.

    Publishing to the embedded sampler copies nothing: it decodes with the very tensors that the optimizer updates, so a
    publish is a new version number and an empty prefix cache. With `overlap` it has a copy of the trained weights and
    keeps sampling while they change; a vLLM server is sent the weights at each publish.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: OptimConfig,
        *,
        lora: LoraSettings | None = None,
        critic: CriticConfig | None = None,
        schedule: Schedule | None = None,
        load_original: Callable[[], LoadedModel] | None = None,
        reference_offload: bool = False,
        gradient_checkpointing: bool = False,
        quantize: Quantization | None = None,
        serve: Callable[[LoadedModel, Adapter | None], Sampler] | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> None:
        """Put the parts together and publish the weights as version 0.

        Args:
            loaded: the policy, which is changed in place.
            settings: settings of its updates.
            lora: adapter to train instead of all weights.
            critic: settings of the critic's updates.
            schedule: learning rates; `None` takes them from `settings`, without decay.
            load_original: loads the model that the run began with, for the reference; LoRA needs none.
            reference_offload: keep the reference in main memory between uses.
            gradient_checkpointing: see `ModelConfig`.
            quantize: number format of the weights below the adapter; the model is moved to `loaded.device` with it.
            serve: makes the sampler of the policy; `None` makes an `EmbeddedSampler`.
            seed: seed of the adapter and of the embedded sampler.
            **sampling: the embedded sampler's other settings.
        """
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.device = loaded.device
        self.settings, self.schedule = settings, schedule
        self.critic_settings = critic or CriticConfig()
        _freeze_beside_text(self.model)
        self.adapter = None if lora is None else Adapter(self.model, lora, seed=seed)
        if quantize is not None:
            _quantize(self.model, quantize, self.device)
        with nullcontext() if self.adapter is None else self.adapter.with_effect():
            trunk = Trunk.of(
                body_of(self.model),
                autocast=settings.autocast,
                recompute=gradient_checkpointing,
                max_tokens_kept=settings.micro_batch_tokens,
            )
            if serve is None:
                self._sampler: Sampler = EmbeddedSampler(loaded, seed=seed, autocast=settings.autocast, **sampling)
            else:
                self._sampler = serve(loaded, self.adapter)
        self.policy = Policy.of(self.model, trunk)
        self._pass_tokens = trunk.pass_tokens()
        self._memory: Counter[str] = Counter()
        """Bytes that the sampler held before the update, and bytes of activations."""
        self.optimizer = MasterAdamW(self.model, settings, schedule)
        self.reference = None
        if self.adapter is None and load_original is not None:
            self.reference = FrozenCopy(load_original, self.policy, offload=reference_offload)
        self._critic: Critic | None = None
        self._unpublished = ExitStack()
        """Keeps the sampler paused between an update and its publish."""
        self._sampler.sync_weights(0)

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        template = TemplateChoice.of(config.model)
        choose_device(config.model.device)
        tool_parser(config.model.tool_parser or DEFAULT_FORMAT)
        template.read()
        LoraSettings.from_config(config)
        check_critic(config)
        _check_few_bits(config)
        if config.model.lora_rank:
            why = "with an adapter (model.lora_rank), since the reference is the policy without it; leave it out"
            refuse_changes(config.model, "model", ("reference_offload",), why)
        elif config.model.reference_offload and not algorithm_of(config).needs_original:
            why = "without a reference; set algorithm.kl_coef, too"
            refuse_changes(config.model, "model", ("reference_offload",), why)
        check_serving(config)
        refuse_changes(
            config.verl, "verl", type(config.verl).model_fields, "without its workers; set backend=verl, too"
        )
        check_source(config.model.path, template=template, to_train=True)

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        cls.check(config)
        model = config.model
        with ExitStack() as on_failure:
            sampling = _sampling(config, on_failure)
            loaded = _load(config, device="cpu" if model.quantize else model.device)
            backend = cls(
                replace(loaded, device=choose_device(model.device)),
                config.optim,
                lora=LoraSettings.from_config(config),
                critic=config.critic,
                schedule=Schedule.of_policy(config),
                load_original=partial(_load, config, device=model.device),
                reference_offload=model.reference_offload,
                gradient_checkpointing=model.gradient_checkpointing,
                quantize=model.quantize,
                seed=config.seed,
                **sampling,
            )
            on_failure.pop_all()
        return backend

    @property
    def inference(self) -> InferenceEngine:
        return self._sampler.inference

    @property
    def weight_version(self) -> int:
        return self._sampler.weight_version

    @property
    def learning_rate(self) -> float:
        return self.optimizer.lr

    def score(self, batch: Batch) -> Tensor:
        with self._sampler.paused():
            return self.policy.score(batch, self.settings.micro_batch_tokens)

    def score_reference(self, batch: Batch) -> Tensor:
        """Score with a copy of the weights that the run began with, or without the adapter."""
        if self.adapter is not None:
            with self._sampler.paused(), self.adapter.off():
                return self.policy.score(batch, self.settings.micro_batch_tokens)
        if self.reference is None:
            raise ConfigError(
                "algorithm.kl_coef: this backend has no reference; make it with load_original= or lora=, or use "
                "algorithm.kl_coef=0"
            )
        with self._sampler.paused(), self.reference() as reference:
            return reference.score(batch, self.settings.micro_batch_tokens)

    def values(self, batch: Batch) -> Tensor:
        """Return [N] the critic's estimates; the first call creates the critic from the present policy."""
        with self._sampler.paused():
            return self.critic.values(batch)

    def energies(self, batch: Batch) -> Tensor:
        with self._sampler.paused():
            return self.policy.energies(batch, self.settings.micro_batch_tokens)

    @property
    def critic(self) -> Critic:
        """Critic, created when it is first used."""
        if self._critic is None:
            self._critic = Critic(self.policy, self.critic_settings, self.settings)
        return self._critic

    def begin_update(self, batch: Batch) -> UpdatePlan:
        """Pause sampling until `publish`, unless it has a copy of the weights."""
        self._memory = Counter(self._sampler.memory())
        self._unpublished.enter_context(self._sampler.paused(until_sync=True))
        return_memory()
        policy_waits = False
        if batch.returns is not None:
            self.critic.begin()
            policy_waits = self.critic.is_warming_up
        return UpdatePlan(
            num_forward_tokens=len(batch.tree.ids),
            num_minibatches=self.settings.num_minibatches,
            num_epochs=self.settings.num_epochs,
            policy_waits=policy_waits,
        )

    def step(self, role: Role, part: Batch, algorithm: Algorithm, *, scale: float) -> StepResult:
        if role == "critic":
            _, sums = self.critic.accumulate(part, algorithm, scale=scale)
            self._memory["critic"] = self.critic.memory()
            return StepResult(sums=sums, grad_norm=self.critic.step())
        entropies: list[Tensor] = []
        logprobs, sums = self.accumulate(part, algorithm, scale=scale, entropies=entropies)
        memory = self.memory()
        grad_norm = self.optimizer.step()
        memory["optimizer"] = self.optimizer.memory()["optimizer"]
        return StepResult(
            sums=sums, grad_norm=grad_norm, logprobs=logprobs, entropies=torch.cat(entropies), memory=memory
        )

    def memory(self) -> dict[str, int]:
        """Return the bytes in use by part; for activations and the sampler, as of the latest update."""
        weights = sum(weight.nbytes for weight in self.model.parameters())
        reference = 0 if self.reference is None else self.reference.nbytes
        return {"weights": weights, "reference": reference, **self.optimizer.memory(), **self._memory}

    def _held(self) -> int:
        """Return the bytes in use on the device, without the policy's gradients."""
        is_cuda = self.device.type == "cuda"
        held = torch.cuda.memory_allocated(self.device) if is_cuda else resident_memory()
        return held - self.optimizer.memory()["gradients"]

    def accumulate(
        self, batch: Batch, algorithm: Algorithm, *, scale: float = 1.0, entropies: list[Tensor] | None = None
    ) -> tuple[Tensor, Counter[str]]:
        """Add the gradient of a batch's loss to the policy; see `optimizer.accumulate`.

        The entropies of the batch's tokens are appended to `entropies`, in pieces.
        """
        before, most = self._held(), self.settings.micro_batch_tokens
        observed = num_observed(batch) if algorithm.observation_coef else 0
        if algorithm.observation_coef and not observed:
            _warn_of_no_observations()

        def loss_of(part: Batch) -> tuple[Tensor, Sums, Tensor]:
            if len(part.tree.ids) > most:  # the heap would grow with each pass, by what does not fit into its gaps
                return_memory()
            given, own = with_observations(part) if observed else (part, torch.ones(part.num_tokens).bool())
            own = own.to(self.device)
            found, spread = self.policy.logprobs(given, entropy_gradient=algorithm.entropy_coef != 0)
            logprobs, entropy = found[own], spread[own]
            loss, sums = algorithm.loss(logprobs, aligned(part, logprobs), entropy)
            if observed:  # their mean over the whole minibatch, however the algorithm's loss is averaged
                surprise = -found[~own].sum() / observed
                loss = loss + algorithm.observation_coef * surprise / scale
                sums["policy/observation_nll"] = surprise.detach() * batch.num_tokens
            if entropies is not None:
                entropies.append(entropy.detach().cpu())
            self._memory["activations"] = max(self._memory["activations"], self._held() - before)
            return loss, {**sums, "policy/entropy": entropy.detach().sum()}, logprobs

        return accumulate(batch, loss_of, self.optimizer, max_tokens=most, aim=self._pass_tokens, scale=scale)

    def publish(self) -> int:
        with self._unpublished:
            for name, weight in self.model.named_parameters():
                if weight.requires_grad and not is_finite(weight):
                    raise non_finite_weight(name)
            return_memory()
            self._sampler.sync_weights(self.weight_version + 1)
        return self.weight_version

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder (with LoRA one of peft), the critic, and the optimizer's state."""
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
        with loading_checkpoint(folder, *_UNREADABLE):
            state = torch.load(folder / RECOVERY_FILE, weights_only=True, map_location="cpu")
            version: int = state["weight_version"]
            check_tokenizer_in(folder, self.tokenizer)
            with self._sampler.paused():
                self._load_weights(folder)
                self.optimizer.load_state_dict(state["optimizer"])
                self._critic = None
                if state["has_critic"]:
                    self.critic.load(folder)
        self._sampler.sync_weights(version)

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


@cache
def _warn_of_no_observations() -> None:
    logger.warning(
        "algorithm.observation_coef has no effect on a batch without tokens between the policy's answers, such as the "
        "batch of an agent that calls the model once"
    )


def _check_few_bits(config: TrainConfig) -> None:
    """Raise `ConfigError` if 8-bit AdamW or quantized weights do not work with the model or on this machine."""
    kind, device = config.model.quantize, choose_device(config.model.device)
    if config.optim.name == "adamw8bit":
        bitsandbytes_for("optim.name='adamw8bit'", torch.device("cpu") if config.optim.offload else device)
    if kind is None:
        return
    if not config.model.lora_rank:
        raise ConfigError(
            f"model.quantize={kind!r}: quantized weights cannot be trained, only an adapter on them: set "
            "model.lora_rank=16, too, or leave model.quantize out"
        )
    if kind == "nf4":
        bitsandbytes_for("model.quantize='nf4'", device)


def _quantize(model: PreTrainedModel, kind: Quantization, device: torch.device) -> None:
    fraction = quantize(model, kind, device)
    model.to(device)
    logger.warning(
        "model.quantize=%s: %.0f %% of the model's weights are quantized; embeddings, the output head and weights that "
        "are not linear layers stay in %s",
        kind,
        100 * fraction,
        str(model.dtype).removeprefix("torch."),
    )


def _load(config: TrainConfig, *, device: str) -> LoadedModel:
    """Return the model as it was before training."""
    model = config.model
    dtype = str(choose_dtype(model.dtype, choose_device(model.device))).removeprefix("torch.")
    return load_model(model.path, dtype=dtype, device=device, template=TemplateChoice.of(model), to_train=True)


def _freeze_beside_text(model: PreTrainedModel) -> None:
    """Freeze layers that text does not pass, such as those for images, so that they need no float32 copies."""
    if (parts := text_parts(model)) is not None:
        trained = {id(weight) for part in parts for weight in part.parameters()}
        for weight in model.parameters():
            weight.requires_grad_(id(weight) in trained)


def _sampling(config: TrainConfig, on_failure: ExitStack) -> JSONObject:
    """Return the arguments of `LocalBackend` for sampling; with `model.engine=vllm`, start or join the server."""
    if config.model.engine == "vllm":
        if config.model.quantize:

            def serve(loaded: LoadedModel, adapter: Adapter | None) -> Sampler:
                served = open_server(config, base=loaded)  # it starts with the quantized weights
                on_failure.callback(served.close)
                return served.sampler(loaded, adapter)

            return {"serve": serve}
        served = open_server(config)
        on_failure.callback(served.close)
        return {"serve": served.sampler}
    return {
        "overlap": config.rollout.max_staleness > 0,
        "max_concurrent": config.rollout.max_concurrent,
        "max_length": config.model.max_length,
        "tool_parser": config.model.tool_parser,
    }
