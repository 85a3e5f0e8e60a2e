"""Agents that call until they are killed: `python program_agents.py URL NAME`."""

import asyncio
import re
import sys

import httpx

NUM_AGENTS = 8


def print_line(*words):
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


async def agent(client, session_id):
    """Call, streamed and not, without end, and print each call whose answer was read to the end."""
    for turn in range(1_000_000):
        question = f"{session_id}/{turn}"
        body = {"messages": [{"role": "user", "content": question}], "stream": bool(turn % 2)}
        try:
            answer = await client.post(f"/sessions/{session_id}/v1/chat/completions", json=body)
        except httpx.TransportError:
            await asyncio.sleep(0.05)
            continue
        if answer.status_code == 200 and (answer.text.endswith("data: [DONE]\n\n") or not body["stream"]):
            print_line(session_id, re.search(r'"id":"([^"]+)"', answer.text).group(1), question)


async def agents(url, name):
    print_line("ready")
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
        await asyncio.gather(*(agent(client, f"{name}-{number}") for number in range(NUM_AGENTS)))


if __name__ == "__main__":
    asyncio.run(agents(*sys.argv[1:]))
