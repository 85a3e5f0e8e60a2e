"""`terminus`: a simple terminal agent. The model answers with a shell command, and is shown its output."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rllm.errors import AgentError
from rllm.parser.decoding import split_without_prompt
from rllm.sandbox import ExecResult, Sandbox
from rllm.tasks.task import SandboxAgent
from rllm.types import JSONObject, Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DONE = "done"
"""Answer that ends the rollout."""
SYSTEM_PROMPT = """\
You work in a Linux shell. Answer with one command and nothing else; you are then shown its output. Every command starts
in the same folder, in a shell of its own. When the task is done, answer with the word done."""
TOOL_PROMPT = """\
You work in a Linux shell. Call the tool as often as you need; every command starts in the same folder, in a shell of
its own. When the task is done, answer without calling it."""
TOOL: JSONObject = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command with sh -c and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}

_client_of: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()
"""Connections are shared by the rollouts of an event loop."""


class Terminus(SandboxAgent):
    """Terminal agent in this process; only its commands run in the sandbox.

    A model without tools answers with the bare command, or with one in a block of three backticks; see `command_in`.
    """

    name = "terminus"

    def __init__(
        self, *, tools: bool = False, max_steps: int = 20, command_timeout_s: float = 60.0, max_output: int = 4000
    ) -> None:
        """Set its limits.

        Args:
            tools: let the model call the tool `shell` in its own format, instead of answering with a command.
            max_steps: commands in a rollout.
            command_timeout_s: seconds after which a command is killed.
            max_output: characters of each command's output that the model is shown.
        """
        self.tools = tools
        self.max_steps = max_steps
        self.command_timeout_s = command_timeout_s
        self.max_output = max_output

    async def run(
        self, instruction: str, sandbox: Sandbox, *, base_url: str, api_key: str, model: str, timeout_s: float
    ) -> None:
        """Work on a task until the model is done, has no commands left, or its context is full."""
        client = _client().with_options(base_url=base_url, api_key=api_key)
        request: JSONObject = {"model": model, "tools": [TOOL]} if self.tools else {"model": model}
        messages: list[Message] = [
            {"role": "system", "content": TOOL_PROMPT if self.tools else SYSTEM_PROMPT},
            {"role": "user", "content": instruction},
        ]
        for _ in range(self.max_steps):
            answer = await _answer(client, messages, request)
            if answer is None:
                return
            messages.append(answer.model_dump(exclude_none=True))
            replies: list[Message] = []
            if self.tools:
                for call in answer.tool_calls or ():
                    output = await self._tool_output(call.function, sandbox)
                    replies.append({"role": "tool", "tool_call_id": call.id, "content": output})
            elif (command := command_in(answer.content or "")) != DONE:
                replies.append({"role": "user", "content": await self._output(command, sandbox)})
            if not replies:
                return
            messages += replies

    async def _tool_output(self, function: Any, sandbox: Sandbox) -> str:
        import orjson

        try:
            command = orjson.loads(function.arguments)["command"]
        except (ValueError, KeyError, TypeError):
            command = None
        if function.name != "shell" or not isinstance(command, str):
            return 'Call the tool shell, with {"command": "..."}.'
        return await self._output(command, sandbox)

    async def _output(self, command: str, sandbox: Sandbox) -> str:
        command = command.replace("\0", "")  # as shells do; no argument can have it
        result = await sandbox.exec(command, timeout_s=self.command_timeout_s, max_output_bytes=4 * self.max_output)
        return shown_output(result, self.max_output, self.command_timeout_s)


def command_in(text: str) -> str:
    """Return the command in a model's answer: its first block of three backticks, or else all but the reasoning."""
    answer = split_without_prompt(text).answer.strip()
    if "```" not in answer:
        return answer
    block = answer.split("```")[1]
    first, newline, rest = block.partition("\n")
    is_language = newline and first.strip().isalpha()
    return (rest if is_language else block).strip()


def shown_output(result: ExecResult, max_output: int, timeout_s: float) -> str:
    """Return the text that shows a command to the model: output, cut in the middle, and exit code unless it is 0."""
    text = (result.stdout + result.stderr).rstrip()
    if len(text) > max_output:
        half = max_output // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    if result.timed_out:
        return f"{text}\n[killed after {timeout_s:g} seconds]".lstrip()
    if result.exit_code or not text:
        return f"{text}\n[exit code {result.exit_code}]".lstrip()
    return text


async def _answer(client: AsyncOpenAI, messages: Any, request: JSONObject) -> Any:
    """Return the model's next message; `None` if the conversation fills its context."""
    from openai import BadRequestError

    try:
        completion = await client.chat.completions.create(messages=messages, **request)
    except BadRequestError as error:
        if error.code == "context_length_exceeded":
            return None
        raise
    if not completion.choices:
        raise AgentError(f"the model server returned no answer: {completion!r}")
    return completion.choices[0].message


def _client() -> AsyncOpenAI:
    from openai import AsyncOpenAI

    loop = asyncio.get_running_loop()
    if loop not in _client_of:
        _client_of[loop] = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")
    return _client_of[loop]
