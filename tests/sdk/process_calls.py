"""Agents of `test_processes.py`: how they call a model, and in which process; child processes import it by this name."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import httpx

from rllm.sdk import get_chat_client


def ask(text: str) -> str:
    """Ask with a plain client of httpx, which is lighter than one of openai."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    answer = httpx.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


def ask_raw(text: str) -> str:
    """Ask with a client that rllm does not patch."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def ask_openai(text: str) -> str:
    import openai

    with openai.OpenAI() as client:
        return ask_with(client, text)


def ask_ours(text: str) -> str:
    with get_chat_client() as client:
        return ask_with(client, text)


def ask_with(client: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)


async def ask_async(text: str) -> str:
    import openai

    async with openai.AsyncOpenAI() as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        return str(answer.choices[0].message.content)


def ask_async_openai(text: str) -> str:
    return asyncio.run(ask_async(text))


def ask_anthropic(text: str) -> str:
    import anthropic

    with anthropic.Anthropic() as client:
        message = client.messages.create(model="m", max_tokens=64, messages=[{"role": "user", "content": text}])
        return str(message.content[0].text)


def answer_to(function: Callable[[str], str], text: str, answers: Any) -> None:
    answers.put(function(text))


def in_process(function: Callable[[str], str], text: str, method: Any = "spawn") -> str:
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=answer_to, args=(function, text, answers))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return str(answers.get())


def in_pool(function: Callable[[str], str], text: str, method: Any) -> str:
    with multiprocessing.get_context(method).Pool(1) as pool:
        (answer,) = pool.map_async(function, [text]).get(60)
        return str(answer)


def in_executor(function: Callable[[str], str], text: str, method: Any) -> str:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(function, text).result(60)


def in_process_of_thread(function: Callable[[str], str], text: str, method: Any) -> str:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(in_process(function, text, method)))
    thread.start()
    thread.join(60)
    return answers[0]


def in_grandchild(function: Callable[[str], str], text: str, method: Any) -> str:
    return in_process(partial(in_process, function, method=method), text, method)


def in_fork(function: Callable[[str], str], text: str) -> str:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, function(text).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        answers = answer.read()
    os.waitpid(child, 0)
    return answers


CURL = r"""curl -s "$OPENAI_BASE_URL/chat/completions" -H 'content-type: application/json' \
    -d '{"model": "m", "messages": [{"role": "user", "content": "TEXT"}]}'"""


def in_curl(text: str) -> str:
    done = subprocess.run(["sh", "-c", CURL.replace("TEXT", text)], capture_output=True, check=True)
    return str(json.loads(done.stdout)["choices"][0]["message"]["content"])


async def in_async_curl(text: str) -> str:
    program = await asyncio.create_subprocess_exec("sh", "-c", CURL.replace("TEXT", text), stdout=subprocess.PIPE)
    printed, _ = await program.communicate()
    return str(json.loads(printed)["choices"][0]["message"]["content"])


def ask_by_each_client(text: str) -> str:
    (answer,) = {client(text) for client in (ask, ask_raw, ask_openai, ask_ours, ask_async_openai)}
    return answer


CLIENTS = 5
"""Calls of `ask_by_each_client`."""
METHODS = sorted(multiprocessing.get_all_start_methods())
WAYS: dict[str, Callable[[str], Any]] = {
    **{f"in_process by {method}": partial(in_process, ask_by_each_client, method=method) for method in METHODS},
    **{
        f"{way.__name__} by {method}": partial(way, ask, method=method)
        for way in (in_pool, in_executor, in_process_of_thread, in_grandchild)
        for method in METHODS
    },
    **{f"ask_anthropic by {method}": partial(in_process, ask_anthropic, method=method) for method in METHODS},
    "in_curl": in_curl,
    "in_async_curl": in_async_curl,
    **({"in_fork": partial(in_fork, ask), "in_fork raw": partial(in_fork, ask_raw)} if "fork" in METHODS else {}),
}


def work(jobs: Any, answers: Any) -> None:
    """Run a worker that lives longer than a rollout."""
    while (job := jobs.get()) is not None:
        function, text = job
        answers.put(function(text))
