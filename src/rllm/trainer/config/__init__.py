"""Import path of the configuration of a training run, and the package in which hydra finds `agent_ppo_trainer.yaml`."""

from rllm.compat.settings import register_resolvers
from rllm.config.loading import ConfigSource as ConfigSource
from rllm.config.loading import load_config as load_config
from rllm.config.schema import TrainConfig as TrainConfig

__all__ = ["TrainConfig", "load_config"]

register_resolvers()
