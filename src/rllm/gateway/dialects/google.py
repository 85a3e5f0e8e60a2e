"""Google's `generateContent` and `streamGenerateContent`: requests to chat requests, answers to candidates.

The path has the model and the kind of answer: `/v1beta/models/MODEL:streamGenerateContent?alt=sse`. Names of
fields may be in camel case or in snake case, as in Google's own API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import parse_qs

import orjson

from rllm.gateway.dialects.base import (
    Dialect,
    arguments_object,
    arguments_text,
    assistant_message,
    check_chat,
    content_of,
    data_event,
    field,
    invalid,
    joined_parts,
    objects,
    present,
    reasoning_of,
    schema_format,
    tool_call,
    usage_of,
    wire_format,
)
from rllm.gateway.errors import CONTEXT_OVERFLOW, GatewayError
from rllm.inference.parameters import Table
from rllm.types import JSONMapping, JSONObject, Message, Trace, text_of

_FREE_FORM = frozenset(
    "args response parameters parametersJsonSchema responseSchema responseJsonSchema labels partMetadata".split()
)
"""Fields whose members are users' names, which stay as they are."""
_MODES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_ROLES = ("user", "model", "function", "tool")
"""Roles of contents; the last two are older names for the user's function responses."""
_FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


GOOGLE = Table("""
contents, systemInstruction | honoured | translated |
model, stream | honoured | translated | by the path; a stream needs `?alt=sse`
content[text], content[thought], content[functionCall], content[functionResponse] | honoured | translated |
content[inlineData], content[fileData] | =content[image_url] | passed on as image_url | other media as file
content[*] | refused | refused | belongs to a tool that a provider runs
tools, tools[].functionDeclarations | honoured | translated |
tools[].computerUse | refused | refused | declare functions
tools[].googleSearch, tools[].googleSearchRetrieval, tools[].googleMaps | named | named | a provider would run it
tools[].codeExecution, tools[].urlContext, tools[].fileSearch | named | named | a provider would run it
tools[].mcpServers | named | named | a provider would run it
toolConfig, toolConfig.functionCallingConfig | honoured | translated |
toolConfig.functionCallingConfig.mode[ANY] | =tool_choice[required] | translated |
toolConfig.functionCallingConfig.allowedFunctionNames | =tool_choice[function] | translated |
toolConfig.retrievalConfig, toolConfig.includeServerSideToolInvocations | named | named |
generationConfig | honoured | translated |
generationConfig.temperature | honoured | passed on as temperature |
generationConfig.topP | honoured | passed on as top_p |
generationConfig.topK | honoured | passed on as top_k |
generationConfig.maxOutputTokens | honoured | passed on as max_tokens |
generationConfig.stopSequences | honoured | passed on as stop |
generationConfig.seed | honoured | passed on as seed |
generationConfig.candidateCount | honoured | passed on as n |
generationConfig.responseLogprobs, generationConfig.logprobs | named | named | traces have them
generationConfig.presencePenalty | =presence_penalty | passed on as presence_penalty |
generationConfig.frequencyPenalty | =frequency_penalty | passed on as frequency_penalty |
generationConfig.responseMimeType | =response_format[json_object] | passed on as response_format | unless text/plain
generationConfig.responseSchema | =response_format[json_schema] | passed on as response_format |
generationConfig.responseJsonSchema | =response_format[json_schema] | passed on as response_format |
generationConfig.responseModalities | =modalities[audio] | passed on as modalities | unless text
generationConfig.thinkingConfig | named | named | thoughts are returned as they were sampled
generationConfig.mediaResolution, generationConfig.speechConfig, generationConfig.imageConfig | named | named |
generationConfig.audioTranscriptionConfig, generationConfig.enableEnhancedCivicAnswers | named | named |
generationConfig.continuationToken | refused | refused | send the whole conversation
cachedContent | refused | refused | send the whole conversation
safetySettings | named | named | answers are not filtered
labels, serviceTier, store | no effect | no effect |
""")

_OURS = GOOGLE.own_fields | {"generateContentRequest"}
_CONFIG = "generationConfig."
_SAMPLING = {
    key.removeprefix(_CONFIG): name
    for name, key in GOOGLE.own_names.items()
    if key.startswith(_CONFIG) and "[" not in name and name not in ("response_format", "modalities")
}
"""Members of `generationConfig` that are chat fields under another name; `_generation` translates the others."""


class GoogleDialect(Dialect):
    """Google's `/v1beta/models/MODEL:generateContent` and its relatives."""

    wire = wire_format("google")
    parameters = GOOGLE
    id_prefix = "gen_"
    needs = "'contents'"

    def parse(self, body: bytes, path: Mapping[str, str]) -> JSONObject:
        # A field that is not Google's, such as vLLM's, has the name that the chat request gives it.
        named = {
            _camel(name) if _camel(name) in _OURS else name: item for name, item in super().parse(body, path).items()
        }
        asked = {name: _in_camel_case(item) if name in _OURS - _FREE_FORM else item for name, item in named.items()}
        if path["template"] in self.wire.counts and asked.get("generateContentRequest") is not None:
            asked = field(asked, "generateContentRequest", dict, "")
        asked["model"] = path["model"]
        asked.pop("stream", None)
        if path["template"].endswith(":streamGenerateContent"):
            if parse_qs(path["query"]).get("alt") != ["sse"]:
                raise invalid("streams are server-sent events here: add ?alt=sse to the URL", "alt")
            asked["stream"] = True
        return asked

    def to_chat(self, asked: JSONObject, earlier: Mapping[str, Trace]) -> JSONObject:
        return to_chat(asked)

    def render(self, response: JSONObject, *, asked: JSONMapping) -> bytes:
        return orjson.dumps(from_chat(response, asked))

    def encoder(self, *, asked: JSONMapping) -> GoogleStreamEncoder:
        return GoogleStreamEncoder(asked)

    def render_count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": num_tokens})

    def render_error(self, error: GatewayError) -> bytes:
        return orjson.dumps(error_to_dict(error))

    def render_models(self, models: Sequence[JSONMapping]) -> bytes:
        return orjson.dumps({"models": [_model(model) for model in models]})

    def render_model(self, model: JSONMapping) -> bytes:
        return orjson.dumps(_model(model))


# --- requests ---------------------------------------------------------------------------------------------------------


def to_chat(asked: JSONMapping) -> JSONObject:
    """Return the chat request of a request; members that are not Google's are passed on.

    Raises:
        GatewayError: 400, if it is malformed, or asks for something that a chat completion cannot give.
    """
    if asked.get("cachedContent"):
        raise invalid("cachedContent: this server stores no contents: send the whole conversation", "cachedContent")
    chat = {name: value for name, value in asked.items() if name not in _OURS and value is not None}
    messages: list[Message] = []
    if instruction := field(asked, "systemInstruction", dict, "", {}):
        parts = objects(instruction.get("parts") or [], "systemInstruction.parts")
        messages.append({"role": "system", "content": content_of(parts, "systemInstruction.parts", _part)})
    messages += _messages(objects(asked.get("contents"), "contents"))
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid("'contents' is empty or ends with the model: end with the user's content", "contents")
    chat["messages"] = messages
    chat |= _generation(field(asked, "generationConfig", dict, "", {}))
    chat |= _tools(objects(asked.get("tools") or [], "tools"), field(asked, "toolConfig", dict, "", {}))
    check_chat(chat)
    return chat


def _messages(contents: list[JSONObject]) -> Iterable[Message]:
    """Yield the messages of the contents: each function response becomes a message."""
    unanswered: list[tuple[str, str]] = []  # Names and ids of calls.
    for position, content in enumerate(contents):
        where = f"contents[{position}].parts"
        parts = objects(content.get("parts") or [], where)
        role = content.get("role") or "user"
        if role not in _ROLES:
            place = f"contents[{position}].role"
            raise invalid(f"{place}={role!r:.80}: use 'user' or 'model'", place)
        if role == "model":
            message = _answer(parts, where)
            calls = message.get("tool_calls") or ()
            unanswered = [(call["function"]["name"], call["id"]) for call in calls]
            yield message
            continue
        placed = [(part, f"{where}[{index}]") for index, part in enumerate(parts)]
        for is_response, group in groupby(placed, key=lambda item: item[0].get("functionResponse") is not None):
            if is_response:
                yield from (_response(part["functionResponse"], place, unanswered) for part, place in group)
            else:
                yield {"role": "user", "content": joined_parts([_part(part, place) for part, place in group])}


def _answer(parts: list[JSONObject], where: str) -> Message:
    """Return the message of a model's content. Calls without an id get one made of their position."""
    texts: list[JSONObject] = []
    thoughts: list[str] = []
    calls: list[JSONObject] = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if part.get("functionCall") is not None:
            call = field(part, "functionCall", dict, place)
            arguments = arguments_text(field(call, "args", dict, f"{place}.functionCall", {}))
            call_id = call.get("id") or re.sub(r"\W+", "_", f"call_{place}").strip("_")
            calls.append(tool_call(call_id, field(call, "name", str, f"{place}.functionCall"), arguments))
        elif part.get("thought"):
            thoughts.append(field(part, "text", str, place, ""))
        elif part.get("text") != "" and part.keys() - {"thoughtSignature", "partMetadata"}:  # more than a signature
            texts.append(_part(part, place))
    return assistant_message(texts, thoughts, calls)


def _response(response: Any, where: str, unanswered: list[tuple[str, str]]) -> Message:
    """Return the message of a function response; without an id, it answers the first open call of its function."""
    place = f"{where}.functionResponse"
    name = field({"functionResponse": response}, "functionResponse", dict, where).get("name")
    call_id = response.get("id") or next((known for called, known in unanswered if called == name), None)
    if call_id is None:
        raise invalid(f"{place}.name={name!r:.80}: the model did not call this function: send its 'id'", place)
    unanswered[:] = [call for call in unanswered if call[1] != call_id]
    given = field(response, "response", dict, place, {})
    # Clients wrap a result that is not an object in one of these.
    result = next(iter(given.values())) if given.keys() in ({"result"}, {"output"}) else given
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _part(part: JSONMapping, where: str) -> JSONObject:
    if part.get("text") is not None:
        return {"type": "text", "text": field(part, "text", str, where)}
    if part.get("inlineData") is not None:
        blob = field(part, "inlineData", dict, where)
        media_type, data = (field(blob, name, str, f"{where}.inlineData") for name in ("mimeType", "data"))
        if media_type.startswith("audio/"):
            return {"type": "input_audio", "input_audio": {"data": data, "format": media_type.partition("/")[2]}}
        return _media(media_type, f"data:{media_type};base64,{data}", blob.get("displayName"))
    if part.get("fileData") is not None:
        file = field(part, "fileData", dict, where)
        url = field(file, "fileUri", str, f"{where}.fileData")
        return _media(file.get("mimeType") or "", url, file.get("displayName"))
    kinds = ", ".join(sorted(part.keys()))[:80] or "nothing"
    raise invalid(f"{where} has {kinds}: this part has no counterpart in a chat completion", where)


def _media(media_type: str, url: str, name: Any) -> JSONObject:
    if media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": name or "document", "file_data": url}}


def _generation(config: JSONMapping) -> JSONObject:
    """Return the chat fields of `generationConfig`."""
    if config.get("continuationToken"):
        place = "generationConfig.continuationToken"
        raise invalid(f"{place}: this server stores no answers: send the whole conversation", place)
    chat = {chat_name: config[name] for name, chat_name in _SAMPLING.items() if config.get(name) is not None}
    if isinstance(top_k := chat.get("top_k"), float) and top_k.is_integer():
        chat["top_k"] = int(top_k)  # Google's own type is a float.
    modalities = [str(item).lower() for item in field(config, "responseModalities", list, "generationConfig", [])]
    if modalities:
        chat["modalities"] = modalities
    json_schema = config.get("responseJsonSchema")
    schema = json_schema or _json_schema(field(config, "responseSchema", dict, "generationConfig", {}))
    match config.get("responseMimeType") or "text/plain":
        case "text/plain":
            pass
        case "application/json":
            chat["response_format"] = schema_format(schema) if schema else {"type": "json_object"}
        case other:
            place = "generationConfig.responseMimeType"
            raise invalid(f"{place}={other!r:.80}: use text/plain or application/json", place)
    return chat


def _tools(tools: list[JSONObject], config: JSONMapping) -> JSONObject:
    """Return `tools` and `tool_choice`; if only some functions are allowed, the model is shown only these."""
    functions: list[JSONObject] = []
    for position, tool in enumerate(tools):
        if tool.get("computerUse") is not None:
            # If it were dropped silently, its client would wait for a call that never comes.
            raise invalid("tools[].computerUse: only Google's models know what it does: declare functions", "tools")
        where = f"tools[{position}].functionDeclarations"
        functions += [_function(item, where) for item in objects(tool.get("functionDeclarations") or [], where)]
    calling = field(config, "functionCallingConfig", dict, "toolConfig", {})
    place = "toolConfig.functionCallingConfig"
    mode = field(calling, "mode", str, place, "AUTO") or "AUTO"
    if mode not in _MODES:
        raise invalid(f"{place}.mode={mode!r:.80}: use AUTO, ANY, VALIDATED or NONE", place)
    choice: Any = _MODES[mode]
    allowed = field(calling, "allowedFunctionNames", list, place, [])
    if allowed:
        functions = [function for function in functions if function["name"] in allowed]
        if not functions:
            raise invalid(f"{place}.allowedFunctionNames: none of them is declared: name some of 'tools'", place)
        if mode == "ANY" and len(functions) == 1:
            choice = {"type": "function", "function": {"name": functions[0]["name"]}}
    if not functions:
        return {"tool_choice": choice} if mode == "ANY" and not tools else {}
    shown = [{"type": "function", "function": function} for function in functions]
    return {"tools": shown, **({"tool_choice": choice} if config.get("functionCallingConfig") else {})}


def _function(declared: JSONMapping, where: str) -> JSONObject:
    function = {"name": field(declared, "name", str, where), **present(declared, "description")}
    parameters = field(declared, "parametersJsonSchema", dict, where, {})
    parameters = parameters or _json_schema(field(declared, "parameters", dict, where, {}))
    return {**function, "parameters": parameters or {"type": "object", "properties": {}}}


def _json_schema(schema: Any) -> Any:
    """Return Google's form of a schema as JSON Schema: types in lower case, bounds as numbers, `nullable` as a type."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    written: JSONObject = {}
    for given_name, value in schema.items():
        name = _camel(given_name)
        if name == "properties" and isinstance(value, dict):
            written[name] = {key: _json_schema(item) for key, item in value.items()}
        elif name in ("items", "anyOf", "additionalProperties"):
            written[name] = _json_schema(value)
        elif name == "type" and isinstance(value, str):
            written[name] = value.lower()
        elif re.fullmatch(r"(?:min|max)(?:Items|Length|Properties)", name) and str(value).isdecimal():
            written[name] = int(value)
        elif name not in ("nullable", "propertyOrdering") and value is not None:
            written[name] = value
    if schema.get("nullable") and "type" in written:
        written["type"] = [written["type"], "null"]
    return written


def _in_camel_case(value: Any) -> Any:
    """Return a request with the names of its fields in camel case; only Google's own, not users' names."""
    if isinstance(value, list):
        return [_in_camel_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {_camel(name): item for name, item in value.items()}
    return {name: item if name in _FREE_FORM else _in_camel_case(item) for name, item in named.items()}


def _camel(name: str) -> str:
    head, *rest = name.lstrip("_").split("_")
    return head + "".join(map(str.title, rest))


# --- answers ----------------------------------------------------------------------------------------------------------


def from_chat(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    """Return the answer of a chat completion, a candidate for each choice."""
    candidates = [_candidate(choice, _parts(choice.get("message") or {}), asked) for choice in response["choices"]]
    return {"candidates": candidates, **_head(response, asked), "usageMetadata": _usage(response)}


def _head(response: JSONMapping, asked: JSONMapping) -> JSONObject:
    return {"modelVersion": response.get("model") or asked.get("model") or "", "responseId": response.get("id")}


def _candidate(choice: JSONMapping, parts: list[JSONObject], asked: JSONMapping, *, ended: bool = True) -> JSONObject:
    candidate: JSONObject = {"content": {"role": "model", "parts": parts}, "index": choice.get("index") or 0}
    if ended:
        candidate["finishReason"] = _FINISH_REASONS.get(choice.get("finish_reason") or "stop", "OTHER")
    if asked.get("return_token_ids") and choice.get("token_ids") is not None:
        candidate["tokenIds"] = choice["token_ids"]
    return candidate


def _parts(message: JSONMapping) -> list[JSONObject]:
    parts: list[JSONObject] = []
    if thought := reasoning_of(message):
        parts.append({"text": thought, "thought": True})
    if text := text_of(message) or message.get("refusal"):
        parts.append({"text": text})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = arguments_object(function.get("arguments") or "")
        parts.append({"functionCall": {"id": call.get("id"), "name": function.get("name") or "", "args": arguments}})
    return parts or [{"text": ""}]


def _usage(response: JSONMapping) -> JSONObject:
    """Return the usage in Google's count, where thoughts are not part of the candidates."""
    usage = usage_of(response)
    counted = {
        "promptTokenCount": usage["prompt"],
        "candidatesTokenCount": usage["completion"] - usage["reasoning"],
        "totalTokenCount": usage["prompt"] + usage["completion"],
    }
    optional = {"cachedContentTokenCount": usage["cached"], "thoughtsTokenCount": usage["reasoning"]}
    return counted | {name: number for name, number in optional.items() if number}


class GoogleStreamEncoder:
    """Encoder that sends texts and thoughts as they come; function calls, finish reasons and usage at the end.

    Clients act on a function call as soon as they have it, and an answer is not acknowledged before its trace is
    durable.
    """

    # Google's own client takes a comment for the beginning of an error, and ignores an empty line.
    keep_alive = b"\n"

    def __init__(self, asked: JSONMapping) -> None:
        self._asked = asked

    def feed(self, chunks: list[JSONObject]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            candidates: list[JSONObject] = []
            for choice in chunk.get("choices") or ():
                delta = {name: value for name, value in (choice.get("delta") or {}).items() if name != "tool_calls"}
                parts = _parts(delta)
                candidate = _candidate(choice, parts, self._asked, ended=False)
                if parts != [{"text": ""}] or "tokenIds" in candidate:
                    candidates.append(candidate)
            if candidates:
                events.append(data_event({"candidates": candidates, **_head(chunk, self._asked)}))
        return b"".join(events)

    def finish(self, response: JSONMapping) -> bytes:
        candidates = []
        for choice in response["choices"]:
            calls = {"tool_calls": (choice.get("message") or {}).get("tool_calls")}
            bare = {name: choice.get(name) for name in ("index", "finish_reason")}
            candidates.append(_candidate(bare, _parts(calls), self._asked))
        usage = {"usageMetadata": _usage(response)}
        return data_event({"candidates": candidates, **_head(response, self._asked), **usage})

    def fail(self, error: GatewayError) -> bytes:
        return data_event(error_to_dict(error))


def error_to_dict(error: GatewayError) -> JSONObject:
    """Return an error in Google's form, with the gateway's code as the reason in its details."""
    message = str(error)
    if error.code == CONTEXT_OVERFLOW:
        message = f"The input token count exceeds the maximum number of tokens allowed: {message}"
    default = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    shown = {"code": error.status, "message": message, "status": _STATUSES.get(error.status, default)}
    if error.code is not None:
        reason = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": str(error.code), "domain": "rllm"}
        shown["details"] = [reason]
    return {"error": shown}


def _model(model: JSONMapping) -> JSONObject:
    model_id = model.get("id")
    shown = {
        "name": f"models/{model_id}",
        "displayName": model_id,
        "version": "1",
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    length = model.get("max_model_len")
    return {**shown, "inputTokenLimit": length} if isinstance(length, int) else shown
