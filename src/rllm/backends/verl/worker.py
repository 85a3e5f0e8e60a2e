"""One process of the training: policy, reference and critic on one device, each a `TrainingWorker` of verl's.

Everything here runs in Ray actors. The driver calls a method of all of them at once (`group.py`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
import verl.utils.model
from omegaconf import DictConfig, open_dict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from rllm.algorithms.base import Algorithm
from rllm.backends.verl.losses import PolicyLoss, ValueLoss
from rllm.backends.verl.rows import LONGEST
from rllm.inference.local.loading import attention_of

Role: TypeAlias = Literal["policy", "reference", "critic"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Method = TypeVar("Method", bound=Callable[..., Any])


class Decorator(Protocol):
    """Leaves a method with its types."""

    def __call__(self, method: Method) -> Method: ...


on_all: Decorator = register(dispatch_mode=Dispatch.ONE_TO_ALL)
"""Called in all processes alike; the answers make a list."""


def in_shares(role: Role) -> Decorator:
    """Each data-parallel worker of the role gets its share of the rows, and the answers are put together again."""
    decorate: Decorator = register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=role))
    return decorate


class TrainingProcess(Worker):  # type: ignore[misc]
    """What a Ray actor holds."""

    def __init__(self, configs: Mapping[Role, DictConfig], device: str) -> None:
        """`configs` has what verl says of each role: `model`, and `part`, its section for an actor or a critic."""
        super().__init__()
        self._configs = configs
        self._device = device
        self._parts: dict[str, Any] = {}
        self._export: Iterator[tuple[str, Tensor]] | None = None

    @on_all
    def build(self) -> None:
        """Load the models."""
        if self._device == "cpu" and not torch.distributed.is_initialized():
            # verl would ask for two backends of one device, which torch refuses.
            torch.distributed.init_process_group("gloo")
        verl.utils.model.load_valuehead_model = _load_value_model
        for role, config in self._configs.items():
            part = TrainingWorker(_worker_config(role, config))
            part.reset()
            _drop_nothing(part.engine.module)
            self.set_dispatch_collect(mesh_name=role, **part.get_dispatch_collect())
            self._parts[role] = part
        if "critic" in self._parts:
            _zero_head(self._parts["critic"].engine.module)

    @in_shares("policy")
    def policy_outputs(self, data: Any) -> Any:
        """Log-probabilities of all tokens under the policy, and with its adapter off under the model without."""
        return self._outputs("policy", data)

    @in_shares("reference")
    def reference_outputs(self, data: Any) -> Any:
        """The same under the reference."""
        return self._outputs("reference", data)

    @in_shares("critic")
    def critic_outputs(self, data: Any) -> Any:
        """The critic's estimates at all tokens."""
        return self._outputs("critic", data)

    def _outputs(self, role: Role, data: Any) -> Any:
        part = self._parts[role]
        _make_room(part, data)
        return part.infer_batch(data)

    @in_shares("policy")
    def update_policy(self, data: Any) -> Any:
        """One optimiser step on all rows, at the learning rate that comes with them."""
        return self._update("policy", data)

    @in_shares("critic")
    def update_critic(self, data: Any) -> Any:
        """Likewise."""
        return self._update("critic", data)

    def _update(self, role: Role, data: Any) -> Any:
        part, lr = self._parts[role], tensordict_utils.pop(data, "lr")
        for group in part.engine.optimizer.param_groups:
            group["lr"] = lr
        _make_room(part, data)
        return part.train_mini_batch(data)

    @on_all
    def learn_with(self, algorithm: Algorithm, verls_loss: bool) -> None:
        """What the next updates minimise; with `verls_loss` the policy loss that verl's configuration names."""
        config = self._configs["policy"].part if verls_loss else None
        config = omega_conf_to_dataclass(config) if config is not None else None
        self._parts["policy"].set_loss_fn(PolicyLoss(algorithm, config))
        if "critic" in self._parts:
            self._parts["critic"].set_loss_fn(ValueLoss(algorithm))

    @on_all
    def next_weights(self, max_bytes: int, dtype: str) -> tuple[dict[str, Tensor], bool]:
        """From the first process the next of the policy's weights, by their Hugging Face names, at least `max_bytes` of them
        while there are; and whether these were the last. From the others no weights.

        All processes take part: a weight is gathered from all that hold a piece of it.
        """
        if self._export is None:
            self._export = self._weights()
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

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        engine = self._parts["policy"].engine
        if _has_adapter(engine.module):
            yield from _merged_weights(engine)
        else:
            yield from engine.get_per_tensor_param()[0]

    @on_all
    def save(self, folder: str, dtype: str) -> None:
        """Write what `load` needs below a checkpoint's folder, and the policy's adapter, if it has one, into it."""
        for role, part in self._parts.items():
            if role != "reference":
                part.save_checkpoint(str(state_folder(Path(folder), role)))
        module = self._parts["policy"].engine.module
        if _has_adapter(module):
            weights = _adapter_weights(module)
            state = {name: weight.detach().to("cpu", DTYPES[dtype], copy=True) for name, weight in weights}
            if self.rank == 0:
                module.save_pretrained(folder, state_dict=state, save_embedding_layers=False)

    @on_all
    def load(self, folder: str) -> None:
        """Go on from what `save` wrote: weights, optimisers, random states."""
        for role, part in self._parts.items():
            if role != "reference":
                part.load_checkpoint(str(state_folder(Path(folder), role)))


def state_folder(folder: Path, role: str) -> Path:
    """Where a checkpoint keeps the pieces of a role that only verl reads."""
    return folder / "verl" / role


def _worker_config(role: Role, config: DictConfig) -> Any:
    """verl's dataclasses for a role; what they read from disk is that of this node."""
    _choose_attention(config.model)
    model, part = omega_conf_to_dataclass(config.model), omega_conf_to_dataclass(config.part)
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


def _make_room(part: Any, data: Any) -> None:
    """Let a row that is longer than a pass may be go by itself, as on the local backend; verl would refuse it. All workers are
    told of the same row, because they must divide theirs alike."""
    split = getattr(part.engine, "ulysses_sequence_parallel_size", 1)
    share = math.ceil(tensordict_utils.pop(data, LONGEST) / split)
    most = max(part.engine_config.max_token_len_per_gpu, share)
    tensordict_utils.assign_non_tensor(data, max_token_len_per_gpu=most)


def _choose_attention(model: DictConfig) -> None:
    """flash-attn where this node has it, which takes sequences without padding; else what the local backend would take."""
    chosen = model.override_config.get("attn_implementation")
    if chosen is None:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        chosen = "flash_attention_2" if importlib.util.find_spec("flash_attn") else attention_of(config)
        with open_dict(model):
            model.override_config.attn_implementation = chosen
    if chosen != "flash_attention_2":
        model.use_remove_padding = False


def _load_value_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """In verl's place, which asks for flash-attn whatever the configuration says."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def _drop_nothing(module: Any) -> None:
    """Compute in training what is computed in sampling, as on the local backend: a ratio of the two would be of other tokens
    left out by chance."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def _zero_head(module: Any) -> None:
    """Let a new critic estimate 0 for everything."""
    with torch.no_grad():
        for weight in module.score.parameters():
            weight.zero_()


def _has_adapter(module: Any) -> bool:
    return hasattr(module, "peft_config")


def _whole(weight: Tensor) -> Tensor:
    """A weight put together from the pieces of all processes."""
    whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole


def _merged_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with its adapter added to them, in the precision that they are trained in."""
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

    with merged_lora_context(engine.module, backup_adapters=True):
        for name, weight in normalize_peft_param_name(engine.module.state_dict()).items():
            yield name, _whole(weight)


def _adapter_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """An adapter's own weights, by the names that the model has for them."""
    for name, weight in module.state_dict().items():
        if "lora_" in name:
            yield name, _whole(weight)
