"""The names that users of the rLLM framework import beside its OpenAI engine."""

from rllm.inference.engine import ModelOutput as ModelOutput
from rllm.inference.engine import RolloutEngine as RolloutEngine
from rllm.inference.openai_engine import OpenAIEngine as OpenAIEngine
