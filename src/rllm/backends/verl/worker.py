"""Training process with policy, reference and critic on one device, each a `TrainingWorker` of verl's.

The code here runs in Ray actors. The driver calls a method of all of them at once (`cluster.WorkerGroup`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

import torch
import verl.utils.model
from omegaconf import DictConfig, open_dict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from rllm.algorithms.base import Algorithm
from rllm.backends.verl.rows import LONGEST, PolicyLoss, ValueLoss
from rllm.inference.local.loading import attention_of

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.engine import BaseEngine

Role: TypeAlias = Literal["policy", "reference", "critic"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Method = TypeVar("Method", bound=Callable[..., object])


class Decorator(Protocol):
    """Decorator that keeps a method's type."""

    def __call__(self, method: Method) -> Method: ...


on_all: Decorator = register(dispatch_mode=Dispatch.ONE_TO_ALL)
"""Call the method in all processes; the answers are a list."""


def in_shares(role: Role) -> Decorator:
    """Divide the rows among the role's data-parallel workers, and concatenate the answers."""
    decorate: Decorator = register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=role))
    return decorate


class TrainingProcess(Worker):  # type: ignore[misc]
    """Models of one Ray actor."""

    def __init__(self, configs: Mapping[Role, DictConfig], device: str) -> None:
        """Keep the settings; `configs` has verl's sections `model` and `part` (actor or critic) of each role."""
        super().__init__()
        self._configs = configs
        self._device = device
        self._parts: dict[str, TrainingWorker] = {}
        self._export: Iterator[tuple[str, Tensor]] | None = None

    @on_all
    def build(self) -> None:
        if self._device == "cpu" and not torch.distributed.is_initialized():
            # verl would request two backends for one device, which torch refuses.
            torch.distributed.init_process_group("gloo")
        verl.utils.model.load_valuehead_model = _load_value_model
        for role, config in self._configs.items():
            part = TrainingWorker(_worker_config(role, config))
            part.reset()
            _drop_nothing(part.engine.module)
            self.set_dispatch_collect(mesh_name=role, **part.get_dispatch_collect())
            self._parts[role] = part
        if "critic" in self._parts:
            with torch.no_grad():
                for weight in self._parts["critic"].engine.module.score.parameters():
                    weight.zero_()

    @in_shares("policy")
    def policy_outputs(self, data: TensorDict) -> TensorDict:
        return self._outputs("policy", data)

    @in_shares("reference")
    def reference_outputs(self, data: TensorDict) -> TensorDict:
        return self._outputs("reference", data)

    @in_shares("critic")
    def critic_outputs(self, data: TensorDict) -> TensorDict:
        return self._outputs("critic", data)

    def _outputs(self, role: Role, data: TensorDict) -> TensorDict:
        part = self._parts[role]
        _make_room(part, data)
        return part.infer_batch(data)

    @in_shares("policy")
    def update_policy(self, data: TensorDict) -> TensorDict:
        """Take one optimizer step on all rows, at the learning rate that comes with them."""
        return self._update("policy", data)

    @in_shares("critic")
    def update_critic(self, data: TensorDict) -> TensorDict:
        """Take one optimizer step of the critic on all rows."""
        return self._update("critic", data)

    def _update(self, role: Role, data: TensorDict) -> TensorDict:
        part, lr = self._parts[role], tensordict_utils.pop(data, "lr")
        for group in part.engine.optimizer.param_groups:
            group["lr"] = lr
        _make_room(part, data)
        return part.train_mini_batch(data)

    @on_all
    def learn_with(self, algorithm: Algorithm, verls_loss: bool) -> None:
        """Set the loss of the next updates; with `verls_loss` the policy loss that verl's configuration names."""
        config = self._configs["policy"].part if verls_loss else None
        config = omega_conf_to_dataclass(config) if config is not None else None
        self._parts["policy"].set_loss_fn(PolicyLoss(algorithm, config))
        if "critic" in self._parts:
            self._parts["critic"].set_loss_fn(ValueLoss(algorithm))

    @on_all
    def next_weights(self, max_bytes: int, dtype: str) -> tuple[dict[str, Tensor], bool]:
        """Return the policy's next weights by Hugging Face name, about `max_bytes`, and whether they were the last.

        Only the first process returns weights, but all take part: a weight is gathered from all that hold a shard of
        it.
        """
        if self._export is None:
            engine = self._parts["policy"].engine
            merged = _has_adapter(engine.module)
            self._export = _merged_weights(engine) if merged else iter(engine.get_per_tensor_param()[0])
        found: dict[str, Tensor] = {}
        size = 0
        for name, weight in self._export:
            size += weight.nbytes
            if self.rank == 0:
                found[name] = weight.detach().to("cpu", DTYPES[dtype], copy=True)
            if size >= max_bytes:
                return found, False
        self._export = None
        return found, True

    @on_all
    def save(self, folder: str, dtype: str) -> None:
        """Write the state that `load` needs below a checkpoint's folder, and the policy's adapter into it."""
        for role, part in self._parts.items():
            if role != "reference":
                part.save_checkpoint(str(state_folder(Path(folder), role)))
        module = self._parts["policy"].engine.module
        if _has_adapter(module):
            # All processes take part in each weight.
            weights = ((name, _whole(weight)) for name, weight in module.state_dict().items() if "lora_" in name)
            state = {name: weight.detach().to("cpu", DTYPES[dtype], copy=True) for name, weight in weights}
            if self.rank == 0:
                module.save_pretrained(folder, state_dict=state, save_embedding_layers=False)

    @on_all
    def load(self, folder: str) -> None:
        """Load weights, optimizers and random states from what `save` wrote."""
        for role, part in self._parts.items():
            if role != "reference":
                part.load_checkpoint(str(state_folder(Path(folder), role)))


def state_folder(folder: Path, role: str) -> Path:
    """Return the folder of a role's shards, which only verl reads, in a checkpoint."""
    return folder / "verl" / role


def _worker_config(role: Role, config: DictConfig) -> TrainingWorkerConfig:
    """Return verl's dataclasses for a role, made on this node, since they read its disk."""
    # Flash-attn if this node has it, which needs no padding, else the local backend's choice.
    settings, chosen = config.model, config.model.override_config.get("attn_implementation")
    if chosen is None:
        about = AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
        chosen = "flash_attention_2" if importlib.util.find_spec("flash_attn") else attention_of(about)
        with open_dict(settings):
            settings.override_config.attn_implementation = chosen
    if chosen != "flash_attention_2":
        settings.use_remove_padding = False
    model, part = omega_conf_to_dataclass(settings), omega_conf_to_dataclass(config.part)
    engine = part.engine
    engine.use_dynamic_bsz = True
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = part.ppo_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model" if role == "critic" else "language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=part.optim,
        checkpoint_config=part.checkpoint,
    )


def _make_room(part: TrainingWorker, data: TensorDict) -> None:
    """Raise the bound on a pass to the longest row, which runs by itself; verl would refuse it.

    All workers use the longest row of all, because they must divide their rows in the same way.
    """
    split = getattr(part.engine, "ulysses_sequence_parallel_size", 1)
    length = math.ceil(tensordict_utils.pop(data, LONGEST) / split)
    most = max(part.engine_config.max_token_len_per_gpu, length)
    tensordict_utils.assign_non_tensor(data, max_token_len_per_gpu=most)


def _load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """Load a value model in place of verl's function, which always uses flash-attn."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def _drop_nothing(module: torch.nn.Module) -> None:
    """Turn dropout off, as on the local backend: otherwise the ratio to the sampler's probabilities would be random."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def _has_adapter(module: torch.nn.Module) -> bool:
    return hasattr(module, "peft_config")


def _whole(weight: Tensor) -> Tensor:
    whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole


def _merged_weights(engine: BaseEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model with its adapter merged, in the precision that they are trained in."""
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

    with merged_lora_context(engine.module, backup_adapters=True):
        for name, weight in normalize_peft_param_name(engine.module.state_dict()).items():
            yield name, _whole(weight)
