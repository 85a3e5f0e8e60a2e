"""The configuration of a training run."""

from rllm.config.schema import TrainConfig as TrainConfig
from rllm.trainer.config.load import ConfigSource as ConfigSource
from rllm.trainer.config.load import load_config as load_config
from rllm.trainer.config.upstream import register_resolvers

register_resolvers()
