"""Read tool calls with vLLM's parsers: `python parse_calls.py < cases.json > results.json`, in vLLM's environment.

Input: `[{"parser", "tokenizer", "tools", "texts"}]`, where `tokenizer` is a folder. Output: for each case a list with,
for each text, the list of its calls as `[name, arguments]`, or the error as a string.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"


def main() -> None:
    output, sys.stdout = sys.stdout, sys.stderr  # since libraries print to stdout
    logging.disable()
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    def read(case: dict[str, Any], text: str) -> Any:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "Look."}], tools=case["tools"], tool_choice="auto"
        )
        try:
            parser = ParserManager.get_parser(case["parser"], enable_auto_tools=True)(tokenizer, request.tools)
            _, _, calls = parser.parse(text, request, enable_auto_tools=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return [[call.name, json.loads(call.arguments)] for call in calls or ()]

    results = []
    for case in json.load(sys.stdin):
        tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
        results.append([read(case, text) for text in case["texts"]])
    json.dump(results, output)


if __name__ == "__main__":
    main()
