"""Every setting of a training run, with its meaning and default. An unknown key is an error, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from rllm.errors import ConfigError
from rllm.types import JSONObject


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, and assigned values are checked."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: object, info: ValidationInfo) -> object:
        """Refuse booleans for other settings: in Python `True` is 1, so `num_steps=true` would train for one step."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("boolean", "True and false are not valid values of this setting")
        return value


def refuse_changes(section: Section, prefix: str, names: Iterable[str], why: str) -> None:
    """Raise `ConfigError` for the first of these settings that is not at its default, with `why` it has no effect."""
    defaults = type(section)()
    for name in names:
        value = getattr(section, name)
        if value != getattr(defaults, name):
            raise ConfigError(f"{prefix}.{name}={value!r} would have no effect {why}")


class ModelConfig(Section):
    """The policy and how it is run."""

    path: str = ""
    """Folder or hub id of a Hugging Face causal language model with a chat template."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the forward passes; auto is bfloat16 on CUDA and float32 elsewhere."""
    device: str = "auto"
    """auto uses CUDA if there is one, else the CPU, also on a Mac; or a torch device such as cuda:1, or mps, which is
    untested."""
    max_length: PositiveInt | None = None
    """Tokens that a prompt and its answer may have together; None takes the model's own context length."""
    tool_parser: str | None = None
    """Format in which the model writes tool calls; None uses the one that the model's chat template prints, or else
    hermes.

    One of hermes (Qwen up to 3), qwen3_coder (also Qwen3.5), glm45, llama3_json, mistral, deepseek_r1, harmony,
    muse_glimmer, or a package.module:Class, which vLLM does not know.
    """
    chat_template: Path | None = None
    """Jinja file to use in place of the model's own chat template; it is kept in checkpoints and exports."""
    tool_prompt: Literal["hermes"] | None = None
    """Way to describe tools to a model whose chat template prints none: hermes describes them in the system message,
    writes calls as <tool_call>{...}</tool_call> into answers, and results as <tool_response> into a user's turn. It
    becomes part of the chat template, and is kept with it."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """Sampler of answers: embedded works in this process, on the trainer's own weights; vllm is a server that is
    given the weights after each update (see vllm)."""
    lora_rank: NonNegativeInt = 0
    """Rank of a LoRA adapter, which is then all that is trained; 0 trains all weights."""
    lora_alpha: PositiveFloat = 16.0
    """Scale of the adapter, divided by lora_rank."""
    lora_targets: Literal["all-linear"] | list[str] = "all-linear"
    """Ends of the names of the layers or weights that are adapted; all-linear takes all linear layers but the output
    head, and may stand in a list with the names of others: [all-linear, experts.gate_up_proj]."""
    quantize: Literal["nf4", "int8"] | None = None
    """Format to keep the frozen weights below an adapter in (QLoRA; Dettmers et al. 2023): nf4 takes 4.5 bits for each
    number and needs the package bitsandbytes, int8 takes a byte. Linear layers except the output head are quantized
    when they are loaded, and multiply in the model's own number format."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping them: much less memory, a third more work."""
    reference_offload: bool = False
    """Keep the reference model of kl_coef in main memory between uses."""


class VLLMConfig(Section):
    """The server of model.engine=vllm: one that is started for the run, or one that runs already (`url`)."""

    command: str | None = None
    """Program that starts it, such as /opt/vllm/bin/vllm; None takes the one of this environment, or of the PATH."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server, on this machine only; 0 uses any free port."""
    devices: str | None = None
    """GPUs of the server, as in CUDA_VISIBLE_DEVICES; None shares the trainer's, and the two take turns."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of its weights; auto is the trainer's."""
    gpu_memory: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of each GPU's memory; None is 0.4 if vLLM frees it while the trainer works (`sleep`), else vLLM's own
    default."""
    reasoning_parser: str | None = None
    """vLLM's name of the format of reasoning, such as qwen3; None leaves reasoning in the answers' text."""
    args: list[str] = Field(default_factory=list)
    """More arguments for `vllm serve`, such as --tensor-parallel-size=2."""
    url: str | None = None
    """Server to join instead of starting one, including /v1; check it with `rllm doctor --base-url URL`.

    Its key, if it needs one, is OPENAI_API_KEY.
    """
    sleep: Literal["auto", "always", "never"] = "auto"
    """Free the server's GPU memory while the trainer works; auto does so if they share a GPU."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds that a start may take, and that calls wait for it."""
    max_restarts: NonNegativeInt = 2
    """Restarts of the server in a run, each with the weights that it had."""
    sync_dir: Path | None = None
    """Folder for passing weights, also visible to the server; None uses /dev/shm if there is room, else the run's
    folder."""
    largest_gap: PositiveFloat | None = None
    """Largest difference of its log-probabilities from the trainer's (root mean square over a probe); None is 0.001
    in float32, and 0.3 in other formats, whose kernels differ."""


class RolloutConfig(Section):
    """Rollouts of the training tasks."""

    runner: Literal["local", "ray"] = "local"
    """Place where agents run: local is this process; ray is processes on the nodes of a Ray cluster (see ray),
    which reach the policy through the gateway of this one."""
    group_size: PositiveInt = 8
    """Rollouts of each task in a training step."""
    temperature: PositiveFloat = 1.0
    """Temperature imposed on every model call of a training rollout; truncation (top_p, top_k, min_p) and penalties are
    off."""
    max_tokens: PositiveInt | None = None
    """Imposed bound on each answer; None leaves it to the agent."""
    max_concurrent: PositiveInt = 64
    """Rollouts under way at a time."""
    timeout_s: PositiveFloat = 600.0
    """A rollout that takes longer is recorded as failed."""
    num_retries: NonNegativeInt = 1
    """Retries after a failure of the inference server; an agent that raises is not retried."""
    resample_rounds: NonNegativeInt = 0
    """Rounds in which tasks whose rollouts all earned the same are replaced by others, until rewards differ in
    tasks_per_step of them (DAPO's dynamic sampling; Yu et al. 2025)."""
    max_staleness: NonNegativeInt = 0
    """Training steps that rollouts may run ahead of updates; 0 alternates.

    A token is trained at most this many publishes after the weights that sampled it. Above 0, algorithm.correction is
    truncate unless it is set.
    """
    max_steps: PositiveInt | None = None
    """Steps that an agent may take in its environment; None is 5. Functions and workflows end by themselves."""
    side_calls: bool = False
    """Train also on side calls, such as one for a title: calls without tools whose answers come back in no later
    message, by an agent's program that also makes calls with tools. They are counted as dropped otherwise. Calls that
    an agent names as its steps are trained on in any case."""


class DataConfig(Section):
    """Sampling of the training tasks. It depends on nothing but the seed, the step and earlier outcomes."""

    weights: list[PositiveFloat] | None = None
    """Fraction of a step's tasks from each of several datasets, in their order; None takes all tasks equally often."""
    sampling: str = "uniform"
    """Way to sample tasks: uniform takes each once in an epoch; difficulty takes tasks that always or never succeed
    less often; easy_first takes the easiest ones that are not solved yet; or a package.module:function of (tasks,
    rates, step), which returns a weight for each task.

    The success rate of a task is measured on its last rollouts in this run.
    """
    replay: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of the groups in a batch that earlier steps have learned from already; they are added to the
    groups of tasks_per_step new tasks. Above 0, algorithm.correction is truncate unless it is set, since older weights
    have sampled them."""
    replay_steps: PositiveInt = 4
    """Number of latest steps whose groups may be replayed."""


class RewardSettings(Section):
    """Reward functions."""

    timeout_s: PositiveFloat | None = None
    """A call that takes longer fails its rollout, or its group; None leaves it to rollout.timeout_s."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Factors on the named parts of rewards, which are added up: reward.weights.format=0.2; parts that are not named
    have 1. With algorithm.name=gdpo they weigh parts that were normalized separately."""


class SandboxSettings(Section):
    """Sandboxes of tasks (`--env tasks:DIR`, or `--agent NAME --sandbox BACKEND`)."""

    backend: str = "local"
    """Kind of sandboxes: local is bubblewrap; `rllm list sandboxes` has all. The same as --sandbox."""
    cpus: PositiveFloat | None = None
    """Cores of a sandbox; None leaves it to the task, as with the others."""
    memory_mb: PositiveInt | None = None
    """Mebibytes of memory."""
    disk_mb: PositiveInt | None = None
    """Mebibytes of files that it may write."""
    concurrency: PositiveInt = 32
    """Sandboxes in use at the same time, in each process (event loop) that makes rollouts; others wait."""
    warm: NonNegativeInt = 0
    """Sandboxes that are started before a rollout asks for one, for agents and as many for verifiers."""

    @property
    def parameters(self) -> dict[str, str]:
        """The settings that are set, as parameters of `tasks:DIR?...`."""
        values = self.model_dump(exclude_defaults=True)
        return {"sandbox" if name == "backend" else name: str(value) for name, value in values.items()}


class FilterConfig(Section):
    """Rollouts that are not trained on, in addition to those that failed or were not scored."""

    ended_by: list[
        Literal[
            "max_prompt_length_exceeded", "max_response_length_exceeded", "max_turns_exceeded", "unknown", "env_done"
        ]
    ] = Field(default_factory=list)
    """Reasons for which a rollout ended."""
    truncated: bool = False
    """Trajectories with an answer that was cut off at its maximum length."""


class RoleConfig(Section):
    """Settings of trajectories of one name, for episodes with several."""

    trainable: bool = True
    """Train on them."""
    weight: PositiveFloat = 1.0
    """Factor on their advantages."""


class EvalConfig(Section):
    """Evaluations on the held-out tasks."""

    every: NonNegativeInt = 10
    """Training steps between evaluations; 0 evaluates before the first and after the last step only."""
    at_start: bool = True
    """Evaluate the untrained policy, too."""
    num_rollouts: PositiveInt = 1
    """Rollouts of each held-out task."""
    temperature: float = Field(default=1.0, ge=0.0)
    """1 judges the policy that is trained; 0 judges its most likely answers."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Sample from the most likely tokens that have this probability together; None leaves it to the agent."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many of the most likely tokens, -1 from all; None leaves it to the agent."""

    @field_validator("top_k")
    @classmethod
    def _is_some_or_all(cls, value: int | None) -> int | None:
        """Refuse 0, which engines would refuse call by call."""
        if value == 0:
            raise PydanticCustomError("none", "Use -1 (all tokens) or at least 1")
        return value


class OptimConfig(Section):
    """Updates of the weights (AdamW; Loshchilov & Hutter 2019)."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """Optimizer; adamw8bit keeps the running means of all matrices except embeddings in 8 bits, by blocks (Dettmers et
    al. 2021), and needs the package bitsandbytes. It is slow on a CPU."""
    lr: PositiveFloat | None = None
    """Learning rate after the warm-up; None chooses it by model size, LoRA and kind of training
    (docs/models-by-size.md)."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine let it fall to zero by the last update of the
    run, if each step has something to learn."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the gradient's running mean."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the squared gradient's running mean."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    num_minibatches: PositiveInt = 1
    """Updates that each batch is divided into: a divisor of its episodes."""
    num_epochs: PositiveInt = 1
    """Passes over each batch."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens in one forward and backward pass; bounds the memory and never changes the result.

    A longer sequence is a pass of its own; the local backend runs its layers again, as with
    model.gradient_checkpointing.

    Unless it is set, it is lowered on a CPU until the activations fit into a quarter of main memory. Passes on a CPU
    also end earlier, when activations take about as much memory as the weights, if little has to be computed again for
    it: larger passes save little time.
    """
    autocast: bool = False
    """Run the trainer's matrix products in bfloat16 for weights of more bits; on a CPU that can multiply bfloat16, the
    embedded sampler's, too."""
    offload: bool = False
    """Keep AdamW's state in main memory, which saves a GPU two to three copies of the weights."""

    @property
    def rate(self) -> float:
        """`lr`, or the rate of a large model for a backend that is used without a trainer, which would choose it."""
        return 1e-6 if self.lr is None else self.lr


class CriticConfig(Section):
    """The model that judges tokens, for algorithms such as ppo."""

    lr: PositiveFloat = 1e-5
    """Learning rate, constant; other settings are taken from optim."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    warmup_steps: NonNegativeInt = 0
    """Training steps at the start in which the critic alone is updated."""


class SFTConfig(Section):
    """Demonstrations to learn from (`AgentSFTTrainer`, `rllm sft`)."""

    train_on: Literal["all", "last"] = "all"
    """Answers of a conversation that are learned."""
    tokenize_method: Literal["cumulative", "stepwise"] = "cumulative"
    """Way to turn messages into tokens: cumulative makes one text of a conversation, every answer as it was
    written; stepwise puts each answer after the prompt that an engine would send, which may leave out earlier
    reasoning. Rows with token ids keep them."""
    reward_threshold: float | None = None
    """Rejection sampling: only trajectories that earned at least this are learned from."""
    best_per_task: PositiveInt | None = None
    """Rejection sampling: only so many trajectories of each task, those that earned most."""


class TeacherConfig(Section):
    """Model that scores the policy's tokens, for algorithm.name=distill or algorithm.teacher_coef: `path` or `url`."""

    path: str | None = None
    """Folder or hub id of a model with the policy's vocabulary, to run in this process."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of its forward passes."""
    device: str = "auto"
    """Device of the teacher."""
    align: Literal["tokens", "text"] = "tokens"
    """Unit of comparison: tokens of a shared vocabulary, or pieces of text between common boundaries of two tokenizers.

    With text, the teacher sees the messages through its own chat template, without the tools of a request.
    """
    url: str | None = None
    """Server of such a model, including /v1, with prompt log-probabilities for prompts of token ids, as vLLM has.

    Its key, if it needs one, is OPENAI_API_KEY.
    """
    model: str | None = None
    """The model's name at the server; None takes the only one that it serves."""
    max_concurrent: PositiveInt = 16
    """Sequences that the server scores at a time."""
    timeout_s: PositiveFloat = 120.0
    """Seconds to wait for its answer to one of them."""
    num_retries: NonNegativeInt = 3
    """Retries if the server is busy or cannot be reached."""


class GatewaySettings(Section):
    """Gateway by which agents reach the policy."""

    host: str = "127.0.0.1"
    """Address to listen on: loopback if agents run on this machine.

    With rollout.runner=ray the default is the address by which Ray's nodes know this machine. Calls need a session's id
    or a key; see docs/gateway.md.
    """
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes any free port."""
    exact_turns: bool = True
    """Prompt later turns with the very tokens that were sampled before, reasoning included; false leaves it to the
    chat template to render the past again."""
    otel: bool = False
    """Trace rollouts, their agents, tools and calls with OpenTelemetry, and export to OTEL_EXPORTER_OTLP_ENDPOINT."""


class RayConfig(Section):
    """The cluster of rollout.runner=ray and backend=verl, and how rollouts are spread over it."""

    address: str | None = None
    """Cluster as host:port, or auto for the one on this machine; None uses RAY_ADDRESS, else starts one for the run.

    The workers of backend=verl are on the same cluster.
    """
    num_actors: PositiveInt | None = None
    """Processes that make rollouts; None starts one on each node that has a CPU."""
    concurrency: PositiveInt | None = None
    """Rollouts under way in each of them at a time; None divides rollout.max_concurrent evenly."""
    cpus_per_actor: float = Field(default=0.0, ge=0.0)
    """CPUs that Ray keeps for each of them; rollouts mostly wait for the model, so none are kept by default."""
    working_dir: Path | None = None
    """Folder that is copied to all nodes, as the current folder of their processes; None copies the current folder.
    Its .gitignore and .rayignore exclude files."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that a node may take to start such a process, and to report its resources."""


class VerlConfig(Section):
    """verl's workers on Ray, for backend=verl."""

    workers_per_node: PositiveInt = 1
    """Processes on each node that hold the model in pieces: each has a GPU, or with model.device=cpu a core."""
    num_nodes: PositiveInt = 1
    """Nodes to train on."""
    policy_loss: str | None = None
    """A policy loss of verl's own, by its name there, such as vanilla or gspo, in the place of the algorithm's."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds that the workers may take for one call: loading the model, one update, a checkpoint."""
    overrides: JSONObject = Field(default_factory=dict)
    """verl's own keys for its workers, as in its ppo_trainer.yaml:
    verl.overrides.actor_rollout_ref.actor.fsdp_config...

    A key that contradicts a setting of rllm is refused.
    """


class TrainConfig(Section):
    """A training run."""

    run_dir: Path | None = None
    """Folder of everything that the run writes; None makes runs/<time>."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Decides the order of tasks and the sampling."""
    num_steps: PositiveInt = 100
    """Training steps; `num_epochs` decides them if it is set."""
    num_epochs: PositiveInt | None = None
    """Passes over the training tasks, in as many steps as they take."""
    tasks_per_step: PositiveInt = 16
    """Tasks in a training step, each rolled out group_size times; no more than there are, unless it is set."""
    save_every: NonNegativeInt = 20
    """Training steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: PositiveInt = 2
    """Number of the newest checkpoints that are kept."""
    keep_best: str | None = None
    """Metric of evaluations, such as eval/accuracy, whose best checkpoint is kept too; -eval/loss keeps the lowest."""
    keep_batches: NonNegativeInt | None = None
    """Number of the newest batches kept in run_dir/batches for rllm view; None keeps all, 0 writes none."""
    backend: str = "local"
    """Holder of the weights: local is this process, verl its workers on Ray, or a package.module:Class."""
    store: str | None = None
    """Path or URL of the store of traces; None makes traces.db in run_dir."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    vllm: VLLMConfig = Field(default_factory=VLLMConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    filters: FilterConfig = Field(default_factory=FilterConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algorithm: JSONObject = Field(default_factory=lambda: {"name": "grpo"})
    """`name` and the algorithm's own settings."""
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    """Settings by the name of trajectories, such as roles.judge.weight=0.5; other names have the defaults."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    sft: SFTConfig = Field(default_factory=SFTConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    ray: RayConfig = Field(default_factory=RayConfig)
    verl: VerlConfig = Field(default_factory=VerlConfig)
    trackers: list[str] = Field(default_factory=lambda: ["jsonl", "console"])
    """Destinations of metrics and sample conversations: console, tensorboard, wandb, mlflow, trackio, or a
    package.module:Class; jsonl, the run's metrics.jsonl, is always among them."""
    log_samples: NonNegativeInt = 2
    """Sample conversations of each step for trackers, from the least to the best rewarded; 0 disables them.

    The console prints them for the first evaluation, the first step and every tenth.
    """
    project: str = "rllm"
    """Name that trackers file the run under; the run itself is named by its folder."""

    @field_validator("run_dir", mode="before")
    @classmethod
    def _names_a_folder(cls, value: object) -> object:
        """Refuse an empty path, which would be the current folder."""
        if value == "":
            raise PydanticCustomError("empty", "Use a folder, or leave it out for runs/<time>")
        return value
