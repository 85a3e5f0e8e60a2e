"""Documented fields of each dialect, and their effect with the embedded engine and with a server.

`docs/parameters.md` prints the tables. A fate of `=KEY` is that of the chat field that the field is translated to. A
field with the fate `=` is sent to the server unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rllm.inference.parameters import CHAT, NAMED, Row, Table, field_of

PASSED_ON = "passed on"
"""Fate of a field that is sent to a server unchanged; `passed on as NAME` names its chat field."""

COMPLETIONS = Table("""
prompt | honoured | translated | one text, which is a user's message, or its token ids
model | =model | =model |
max_tokens, n, seed, stop, stream, temperature, top_p | honoured | = |
logprobs | =top_logprobs | passed on as top_logprobs | up to 20
frequency_penalty | =frequency_penalty | = |
presence_penalty | =presence_penalty | = |
logit_bias | =logit_bias | = |
stream_options, stream_options.include_usage | honoured | = |
stream_options.include_obfuscation | no effect | no effect |
user | no effect | = |
echo | refused | refused | put the prompt before the answer yourself
best_of | refused | refused | ask for `n` answers and choose among them
suffix | refused | refused | put both texts into the prompt
""")

RESPONSES = Table("""
input, instructions, previous_response_id, stream | honoured | translated |
model | =model | =model |
input[message], input[reasoning], input[function_call], input[function_call_output] | honoured | translated |
input[custom_tool_call], input[custom_tool_call_output], input[item_reference] | honoured | translated |
input[additional_tools] | honoured | translated |
input[mcp_list_tools], input[configuration_update] | no effect | no effect |
input[*] | refused | refused | of tools that a provider runs, or that are no functions
content[input_text], content[output_text], content[refusal], content[summary_text] | honoured | translated |
content[input_image] | =content[image_url] | passed on as image_url |
content[input_file] | =content[file] | passed on as file |
max_output_tokens | honoured | passed on as max_tokens |
temperature, top_p | honoured | = |
top_logprobs | honoured | = | up to 20, in each `output_text`
include, include[message.output_text.logprobs] | honoured | translated |
include[reasoning.encrypted_content] | honoured | translated | reasoning is given in any case
include[*] | named | named | of tools that a provider runs, or of images
tools, tools[function], tools[namespace] | honoured | translated |
tools[custom] | honoured | translated | as a function of one text
tools[local_shell], tools[computer], tools[computer_use_preview] | refused | refused | give it as a function
tools[apply_patch] | refused | refused | give it as a function
tools[shell] | refused | refused | give it as a function; one in a provider's container is named
tools[*] | named | named | a provider would run it; the model does not see it
tools[].strict | =tools[].strict | passed on |
tools[].format, tools[].allowed_callers, tools[].output_schema, tools[].async | named | named |
tools[].defer_loading | named | named | the model sees the tool at once
tool_choice, tool_choice[auto], tool_choice[none], tool_choice[allowed_tools] | honoured | translated |
tool_choice[required], tool_choice[function], tool_choice[custom] | =tool_choice[required] | translated |
tool_choice[*] | refused | refused | of tools that a provider runs, or that are no functions
parallel_tool_calls | =parallel_tool_calls | = |
max_tool_calls | no effect | no effect | bounds tools that a provider runs
text, text.format[text] | honoured | translated |
text.format | =response_format[json_schema] | passed on as response_format |
text.format[json_object], text.format[json_schema] | =response_format[json_schema] | passed on as response_format |
text.verbosity | =verbosity | passed on as verbosity |
reasoning | honoured | translated |
reasoning.effort | =reasoning_effort | passed on as reasoning_effort |
reasoning.summary, reasoning.generate_summary | named | named | reasoning is given as it was sampled
reasoning.context, reasoning.mode | named | named |
stream_options, stream_options.include_obfuscation | no effect | no effect |
truncation, truncation[disabled] | honoured | honoured | a prompt that is too long is refused
truncation[auto], context_management, image, moderation, access_programs | named | named |
background, conversation, prompt | refused | refused | send the whole conversation, or `previous_response_id`, and wait
multi_agent | no effect | no effect | `multi_agent.enabled` is refused
prompt_cache_options | no effect | no effect | `prompt_cache_options.prewarm` is refused
metadata, user, safety_identifier, service_tier, client_metadata | no effect | no effect |
store | no effect | no effect | answers are stored in any case
prompt_cache_key, prompt_cache_retention | no effect | no effect | equal beginnings are cached anyway
""")

MESSAGES = Table("""
messages, system, stream | honoured | translated |
model | =model | =model |
max_tokens, temperature, top_p, top_k | honoured | = |
stop_sequences | honoured | passed on as stop |
content[text], content[thinking], content[tool_use], content[tool_result] | honoured | translated |
content[search_result] | honoured | translated | as text
content[redacted_thinking] | no effect | no effect | only its maker can read it
content[image] | =content[image_url] | passed on as image_url |
content[document] | =content[file] | passed on as file | as text, where it is one
content[*] | refused | refused | of tools that a provider runs
tools, tools[custom] | honoured | translated |
tools[bash], tools[browser_toolset], tools[computer] | refused | refused | give it with an input_schema
tools[computer_toolset], tools[memory], tools[text_editor] | refused | refused | give it with an input_schema
tools[*] | named | named | a provider would run it; the model does not see it
tools[].strict | =tools[].strict | passed on |
tools[].input_examples, tools[].allowed_callers | named | named |
tools[].defer_loading | named | named | the model sees the tool at once
tools[].eager_input_streaming | no effect | no effect |
tools[].cache_control | no effect | no effect | equal beginnings are cached anyway
tool_choice, tool_choice[auto], tool_choice[none] | honoured | translated |
tool_choice[any], tool_choice[tool] | =tool_choice[required] | translated |
tool_choice.name | honoured | translated |
tool_choice.disable_parallel_tool_use | =parallel_tool_calls | passed on as parallel_tool_calls |
thinking, thinking[adaptive] | honoured | honoured | the model thinks as it does
thinking[enabled], thinking[disabled], thinking[between_tools] | named | named | see `chat_template_kwargs`
thinking.budget_tokens | no effect | no effect | `thinking[enabled]` is named
thinking.display | named | named | thinking is given as it was sampled
output_config | honoured | translated |
output_config.effort | =reasoning_effort | passed on as reasoning_effort |
output_config.format, output_format | =response_format[json_schema] | passed on as response_format |
output_config.task_budget | named | named |
context_management, container, mcp_servers | named | named |
compaction, thread | refused | refused | send the whole conversation
metadata, service_tier, speed, inference_geo, diagnostics, betas | no effect | no effect |
cache_control | no effect | no effect | equal beginnings are cached anyway
user_profile_id, workspace_id, billing_policy, fallbacks, fallback_credit_token | no effect | no effect |
""")

GOOGLE = Table("""
contents, systemInstruction | honoured | translated |
model, stream | honoured | translated | by the path; a stream needs `?alt=sse`
content[text], content[thought], content[functionCall], content[functionResponse] | honoured | translated |
content[inlineData], content[fileData] | =content[image_url] | passed on as image_url | other media as file
content[*] | refused | refused | of tools that a provider runs
tools, tools[].functionDeclarations | honoured | translated |
tools[].computerUse | refused | refused | declare functions
tools[].googleSearch, tools[].googleSearchRetrieval, tools[].googleMaps | named | named | a provider would run it
tools[].codeExecution, tools[].urlContext, tools[].fileSearch | named | named | a provider would run it
tools[].mcpServers | named | named | a provider would run it
toolConfig, toolConfig.functionCallingConfig | honoured | translated |
toolConfig.functionCallingConfig.mode[ANY] | =tool_choice[required] | translated |
toolConfig.retrievalConfig, toolConfig.includeServerSideToolInvocations | named | named |
generationConfig | honoured | translated |
generationConfig.temperature | honoured | passed on as temperature |
generationConfig.topP | honoured | passed on as top_p |
generationConfig.topK | honoured | passed on as top_k |
generationConfig.maxOutputTokens | honoured | passed on as max_tokens |
generationConfig.stopSequences | honoured | passed on as stop |
generationConfig.seed | honoured | passed on as seed |
generationConfig.candidateCount | honoured | passed on as n |
generationConfig.responseLogprobs | honoured | passed on as logprobs | of all sampled tokens
generationConfig.logprobs | honoured | passed on as top_logprobs | up to 20, with `responseLogprobs`
generationConfig.presencePenalty | =presence_penalty | passed on as presence_penalty |
generationConfig.frequencyPenalty | =frequency_penalty | passed on as frequency_penalty |
generationConfig.responseMimeType | =response_format[json_object] | passed on as response_format | unless text/plain
generationConfig.responseSchema | =response_format[json_schema] | passed on as response_format |
generationConfig.responseJsonSchema | =response_format[json_schema] | passed on as response_format |
generationConfig.responseModalities | =modalities[audio] | passed on as modalities | unless text
generationConfig.thinkingConfig | named | named | thoughts are given as they were sampled
generationConfig.mediaResolution, generationConfig.speechConfig, generationConfig.imageConfig | named | named |
generationConfig.audioTranscriptionConfig, generationConfig.enableEnhancedCivicAnswers | named | named |
generationConfig.continuationToken | refused | refused | send the whole conversation
cachedContent | refused | refused | send the whole conversation
safetySettings | named | named | answers are not filtered
labels, serviceTier, store | no effect | no effect |
""")

TABLES: Mapping[str, Table] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "google": GOOGLE,
}


def rows(dialect: str) -> Iterator[Row]:
    """Yield the rows of a dialect, each with its fates on the embedded engine and on a server."""
    for row in TABLES[dialect].rows.values():
        if dialect == "chat":
            forwarded = "translated" if row.key == "tool_choice[allowed_tools]" else PASSED_ON
            yield Row(key=row.key, fates=(*row.fates, forwarded), remark=row.remark)
            continue
        embedded, forwarded = row.fates
        source = CHAT.rows[embedded[1:]] if embedded.startswith("=") else None
        forwarded = PASSED_ON if forwarded.startswith("=") else forwarded
        remark = row.remark or (source.remark if source else "")
        yield Row(key=row.key, fates=(source.fates[0] if source else embedded, forwarded), remark=remark)


def left_out(dialect: str, asked: Mapping[str, object]) -> list[str]:
    """Return the keys of the fields that a dialect ignores, whichever server answers."""
    if dialect == "chat":
        return []
    rows = TABLES[dialect].rows_in(asked)
    return [key for key, row in rows.items() if (row.fates[1] == NAMED if row else key != field_of(key))]
