"""How each agent framework is told where its model is: for the error message where none of its calls arrive."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from pathlib import PurePath

_OPENAI = "reads OPENAI_BASE_URL when its client is made"

MODULES = {
    "llama_index": "LlamaIndex reads OPENAI_API_BASE, and not OPENAI_BASE_URL; or OpenAILike(api_base=...)",
    "dspy": "DSPy answers from its cache what was asked before: dspy.LM('openai/...', cache=False)",
    "crewai": "CrewAI: LLM(model='openai/...', base_url=...)",
    "google.adk": "Google ADK asks Google unless told otherwise: LiteLlm(model='openai/...')",
    "claude_agent_sdk": "the Claude Agent SDK starts a program: no ANTHROPIC_BASE_URL in ClaudeAgentOptions(env=...) or in settings.json",
    "agents.models.openai_provider": f"the OpenAI Agents SDK {_OPENAI}; else set_default_openai_client(...)",
    "agent_framework": f"Microsoft Agent Framework {_OPENAI}; else OpenAIChatClient(base_url=...)",
    "autogen_ext": f"AutoGen {_OPENAI}; else OpenAIChatCompletionClient(base_url=...)",
    "smolagents": "smolagents: OpenAIModel(api_base=...), or LiteLLMModel(model_id='openai/...')",
    "strands": "Strands asks Bedrock unless told otherwise: OpenAIModel(client_args={'base_url': ...})",
    "pydantic_ai": "pydantic-ai: OpenAIProvider(base_url=...), or a model named 'openai-chat:...'",
    "langchain_anthropic": "ChatAnthropic reads ANTHROPIC_BASE_URL; else ChatAnthropic(base_url=...)",
    "langchain_openai": "ChatOpenAI reads OPENAI_BASE_URL; else ChatOpenAI(base_url=...)",
    "litellm": "LiteLLM reads OPENAI_BASE_URL for openai/..., HOSTED_VLLM_API_BASE for hosted_vllm/..., ANTHROPIC_BASE_URL for "
    "anthropic/...; else api_base=...",
    "anthropic": "anthropic reads ANTHROPIC_BASE_URL (without /v1) when its client is made; else Anthropic(base_url=...)",
}
"""By the module that a program imports; those that stand on others come first."""

PROGRAMS = {
    "codex": "codex reads no variable for this: name the gateway in a [model_providers] entry of config.toml, in a folder that "
    "CODEX_HOME names",
    "opencode": "opencode reads OPENAI_BASE_URL for its provider openai; for others, provider.options.baseURL in opencode.json",
    "claude": "claude reads ANTHROPIC_BASE_URL, unless its settings.json has another, or CLAUDE_CODE_USE_BEDROCK or "
    "CLAUDE_CODE_USE_VERTEX is set",
    "qwen": "qwen reads OPENAI_BASE_URL where OPENAI_API_KEY is its way to log in (--auth-type openai)",
    "mini": "mini-swe-agent asks through LiteLLM: name the model openai/...",
}
"""By the name of a program's file."""


def is_known_program(program: str) -> bool:
    """Whether this is the name or path of an agent's program."""
    return PurePath(program).name in PROGRAMS


def hints_for(*, modules: Container[str] = sys.modules, programs: Sequence[str] = ()) -> list[str]:
    """How those of the frameworks find their model that have been imported, or are started as programs.

    Args:
        modules: names of imported modules.
        programs: names or paths of programs.
    """
    started = {PurePath(program).name for program in programs}
    return [hint for name, hint in PROGRAMS.items() if name in started] + [
        hint for name, hint in MODULES.items() if name in modules
    ]
