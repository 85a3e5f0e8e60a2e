from __future__ import annotations

import asyncio
import copy
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import ReformerConfig, ReformerModelWithLMHead

from rllm.errors import ConfigError, InferenceError, PromptTooLongError
from rllm.inference import parameters
from rllm.inference.engine import InferenceEngine, ModelOutput, OutputDelta, ParameterError, offers
from rllm.inference.local import LocalEngine
from rllm.inference.local.decoders import DynamicDecoder, RecomputeDecoder
from rllm.inference.local.kv_cache import BLOCK
from rllm.inference.local.packed import multiplies_bfloat16
from rllm.inference.local.slot_decoder import SlotDecoder

from .conftest import TEMPLATE, build_model

USER = [{"role": "user", "content": "the user asks the assistant"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"q":  "a b", "n": 1.0}}\n</tool_call>'


def forward_logits(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Return [completion, vocabulary], from one plain forward pass."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


def assert_exact(model: Any, output: ModelOutput) -> None:
    """Check that the sampler's log-probabilities are those of a plain forward pass at temperature 1."""
    expected = forward_logits(model, output.prompt_ids, output.completion_ids).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(output.completion_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(output.logprobs), chosen, atol=1e-4, rtol=0)


def prompt_of(length: int, start: int = 5) -> list[int]:
    return [start + i % 200 for i in range(length)]


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
async def test_ragged_concurrent_logprobs_equal_a_plain_forward_pass(make_engine: Any, family: str) -> None:
    engine = make_engine(family, max_concurrent=5)
    prompts = [prompt_of(length) for length in (1, 2, 9, 17, 40, 40, 40, 41, 64, 100)]
    outputs = await asyncio.gather(
        *(engine.complete(prompt, max_tokens=8 + i, ignore_eos=True) for i, prompt in enumerate(prompts))
    )
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.prompt_ids == prompt
        assert len(output.completion_ids) == len(output.logprobs) == 8 + i
        assert output.finish_reason == "length"
        assert_exact(engine.model, output)


async def test_autocast_samples_nearly_the_same_distribution(make_engine: Any) -> None:
    engine = make_engine(autocast=True)
    assert isinstance(engine._scheduler._decoder, SlotDecoder)
    output = await engine.complete(prompt_of(40), max_tokens=20, ignore_eos=True)
    expected = forward_logits(engine.model, output.prompt_ids, output.completion_ids).log_softmax(-1)
    gaps = torch.tensor(output.logprobs) - expected.gather(1, torch.tensor(output.completion_ids)[:, None]).squeeze(1)
    assert gaps.abs().max() < 0.5
    assert (gaps.abs().max() > 1e-5) == multiplies_bfloat16(), "CPUs without bfloat16 products sample in float32"


async def test_samples_of_one_prompt_share_its_computation(make_engine: Any) -> None:
    engine = make_engine()
    prompt = prompt_of(50)
    outputs = await asyncio.gather(*(engine.complete(prompt, max_tokens=6) for _ in range(8)))
    cached = sorted(output.metrics["cached_prompt_tokens"] for output in outputs)
    assert cached[0] == 0
    assert set(cached[1:]) <= {48, 49}  # whole blocks, or all but the last token of a prompt computed at the same time
    assert len({tuple(output.completion_ids) for output in outputs}) > 1
    for output in outputs:
        assert_exact(engine.model, output)


async def test_later_turn_reuses_earlier_ones(make_engine: Any) -> None:
    engine = make_engine(max_concurrent=2)
    prompt = prompt_of(30)
    for _ in range(4):
        output = await engine.complete(prompt, max_tokens=20, ignore_eos=True)
        assert_exact(engine.model, output)
        known = len(prompt) + 20 - 1
        prompt = prompt + output.completion_ids + prompt_of(11, start=90)
        follower = await engine.complete(prompt, max_tokens=1)
        assert follower.metrics["cached_prompt_tokens"] == known // BLOCK * BLOCK
        assert_exact(engine.model, follower)


async def test_small_prefix_cache_evicts_and_stays_exact(make_engine: Any) -> None:
    tokens = 96  # a quarter of them are for prefixes
    engine = make_engine(cache_bytes=tokens * 2 * 2 * 2 * 8 * 4, max_concurrent=3)
    prompts = [prompt_of(40, start=start) for start in (5, 5, 60, 60, 5, 61)]
    outputs = await asyncio.gather(*(engine.complete(prompt, max_tokens=10) for prompt in prompts))
    for output in outputs:
        assert_exact(engine.model, output)


@pytest.mark.slow
async def test_little_memory_reduces_concurrency_and_keeps_the_answers(make_engine: Any) -> None:
    roomy, tight = make_engine(), make_engine(cache_bytes=800 * 2 * 2 * 2 * 8 * 4)
    prompts = [prompt_of(length) for length in (300, 20, 30, 90, 400, 90, 20, 300)]
    requests = [{"prompt_ids": prompt, "max_tokens": 20, "seed": i} for i, prompt in enumerate(prompts)]
    wanted = await asyncio.gather(*(roomy.complete(**request) for request in requests))
    for _ in range(2):  # the second time from cached prefixes
        outputs = await asyncio.gather(*(tight.complete(**request) for request in requests))
        assert [item.completion_ids for item in outputs] == [item.completion_ids for item in wanted]
        for output in outputs:
            assert_exact(tight.model, output)


@pytest.mark.slow
async def test_short_prompt_joins_a_long_sequence_in_little_memory(make_engine: Any) -> None:
    engine = make_engine(cache_bytes=800 * 2 * 2 * 2 * 8 * 4)
    stream = engine.stream_model_response((), prompt_token_ids=prompt_of(100), max_tokens=100, ignore_eos=True)
    await anext(stream)
    assert_exact(engine.model, await engine.complete(prompt_of(20), max_tokens=5, ignore_eos=True))
    assert_exact(engine.model, [item async for item in stream][-1])


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"temperature": 1.3, "top_k": 20, "top_p": 0.8}]
)
async def test_logprobs_are_those_of_the_sampled_distribution(make_engine: Any, params: dict[str, Any]) -> None:
    engine = make_engine()
    plain = engine.complete(prompt_of(7), max_tokens=5, ignore_eos=True)
    outputs = await asyncio.gather(
        plain, *(engine.complete(prompt_of(9 + i), max_tokens=12, ignore_eos=True, **params) for i in range(3))
    )
    assert_exact(engine.model, outputs[0])
    for output in outputs[1:]:
        assert output.logprobs_kind == "processed"
        logits = forward_logits(engine.model, output.prompt_ids, output.completion_ids)
        for row, token, logprob in zip(logits, output.completion_ids, output.logprobs, strict=True):
            assert logprob == pytest.approx(hand_renormalized(row, token, **params), abs=1e-4)


def hand_renormalized(
    logits: torch.Tensor, token: int, *, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0
) -> float:
    ranked = sorted(enumerate((logits / temperature).softmax(-1).tolist()), key=lambda pair: -pair[1])
    ranked = ranked[:top_k] if top_k > 0 else ranked
    total, kept, mass = sum(p for _, p in ranked), {}, 0.0
    for index, probability in ranked:
        if mass >= top_p:
            break
        kept[index] = probability
        mass += probability / total
    assert token in kept
    return float(torch.tensor(kept[token] / sum(kept.values())).log())


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
async def test_greedy_decoding_equals_transformers_generate(make_engine: Any, family: str) -> None:
    engine = make_engine(family)
    prompts = [prompt_of(12), prompt_of(33, start=40)]
    outputs = await asyncio.gather(*(engine.complete(prompt, max_tokens=24, temperature=0) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        inputs = torch.tensor([prompt])
        expected = engine.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=24, eos_token_id=2
        )
        assert output.completion_ids == expected[0, len(prompt) :].tolist()
        assert output.logprobs_kind == "raw"
        assert_exact(engine.model, output)


async def test_seeded_answer_does_not_depend_on_the_batch(make_engine: Any) -> None:
    engine = make_engine()
    prompt = prompt_of(20)
    alone = await engine.complete(prompt, max_tokens=30, seed=7)
    others = [engine.complete(prompt_of(5 + i), max_tokens=40) for i in range(5)]
    among, *_ = await asyncio.gather(engine.complete(prompt, max_tokens=30, seed=7), *others)
    other_seed = await engine.complete(prompt, max_tokens=30, seed=8)
    negative_seed = await engine.complete(prompt, max_tokens=30, seed=-1)
    assert among.completion_ids == alone.completion_ids
    assert other_seed.completion_ids != alone.completion_ids != negative_seed.completion_ids
    assert alone.sampling["seed"] == 7


@pytest.mark.parametrize(
    ("autocast", "head_dim"),
    [(False, 8), pytest.param(True, 8, marks=pytest.mark.slow), pytest.param(False, 128, marks=pytest.mark.slow)],
)
async def test_cpu_answers_are_bitwise_independent_of_the_batch(
    make_engine: Any, autocast: bool, head_dim: int
) -> None:
    async def talk(engine: Any, number: int, length: int) -> list[tuple[list[int], list[float]]]:
        await asyncio.sleep(0.003 * (number % 4))  # some arrive when others are half done
        system = prompt_of(64, start=4) if length in (90, 310) else []  # two that share a prefix
        prompt, answer = [*system, *prompt_of(length - len(system), start=5 + lengths.index(length))], []
        for turn in range(2):
            output = await engine.complete(prompt, max_tokens=5, seed=10 * number + turn, ignore_eos=True)
            answer.append((output.completion_ids, output.logprobs))
            prompt = [*prompt, *output.completion_ids, 7, 8, 9]
        return answer

    lengths = (1, 5, 310, 90, 33, 33, 34, 130, 300, 300)
    options = {"autocast": autocast, "model_options": {"head_dim": head_dim}}
    engine = make_engine(**options)
    alone = [await talk(engine, number, length) for number, length in enumerate(lengths)]
    engine = make_engine(**options)
    among = await asyncio.gather(*(talk(engine, number, length) for number, length in enumerate(lengths)))
    assert among == alone


async def test_unseeded_request_can_be_repeated(make_engine: Any) -> None:
    engine = make_engine()
    first = await engine.complete(prompt_of(9), max_tokens=25)
    again = await engine.complete(prompt_of(9), **first.sampling)
    assert again.completion_ids == first.completion_ids


async def test_generation_config_does_not_change_the_policy(make_engine: Any, new_model: Any) -> None:
    plain = await make_engine().complete(prompt_of(9), max_tokens=25, seed=3)
    model = new_model()
    for name, value in {"temperature": 0.01, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0}.items():
        setattr(model.generation_config, name, value)
    output = await make_engine(model=model).complete(prompt_of(9), max_tokens=25, seed=3)
    assert output.completion_ids == plain.completion_ids


async def test_every_end_id_of_the_generation_config_ends_an_answer(make_engine: Any, new_model: Any) -> None:
    free = await make_engine().complete(prompt_of(9), max_tokens=30, temperature=0, ignore_eos=True)
    end = free.completion_ids[10]
    model = new_model()
    model.generation_config.eos_token_id = [2, end]
    output = await make_engine(model=model).complete(prompt_of(9), max_tokens=30, temperature=0)
    assert output.completion_ids == free.completion_ids[: free.completion_ids.index(end) + 1]
    assert output.finish_reason == "stop"


async def test_stop_token_ids_end_an_answer(make_engine: Any) -> None:
    engine = make_engine()
    free = await engine.complete(prompt_of(9), max_tokens=30, temperature=0, ignore_eos=True)
    end = free.completion_ids[5]
    output = await engine.complete(prompt_of(9), temperature=0, ignore_eos=True, stop_token_ids=[end])
    assert output.completion_ids == free.completion_ids[: free.completion_ids.index(end) + 1]
    assert output.finish_reason == "stop"


@pytest.mark.slow
async def test_short_request_joins_a_long_one_and_finishes_first(make_engine: Any) -> None:
    engine = make_engine(max_concurrent=2)
    finished: list[str] = []

    async def run(name: str, max_tokens: int) -> None:
        output = await engine.complete(prompt_of(10), max_tokens=max_tokens, ignore_eos=True)
        assert_exact(engine.model, output)
        finished.append(name)

    await asyncio.gather(run("long", 200), run("short", 5), run("queued", 5))
    assert finished == ["short", "queued", "long"]
    assert engine.stats()["decode_steps"] <= 200, "the others were decoded in the same batch"


async def test_many_requests_with_different_settings_share_few_slots(make_engine: Any) -> None:
    engine = make_engine(max_concurrent=3)
    outputs = await asyncio.gather(
        *(engine.complete(prompt_of(3 + i), max_tokens=2 + i % 5, temperature=i % 2, seed=i) for i in range(20))
    )
    for i, output in enumerate(outputs):
        assert output.prompt_ids == prompt_of(3 + i)
        assert_exact(engine.model, output)


@pytest.mark.parametrize(
    ("family", "options", "decoder"),
    [
        pytest.param("Mistral", {"sliding_window": 8}, DynamicDecoder, marks=pytest.mark.slow),
        ("Gemma3", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, DynamicDecoder),
        pytest.param(
            "RecurrentGemma", {"lru_width": 32, "num_hidden_layers": 3}, RecomputeDecoder, marks=pytest.mark.slow
        ),
        pytest.param(
            "GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}, SlotDecoder, marks=pytest.mark.slow
        ),
        ("Mixtral", {"num_local_experts": 4, "sliding_window": None}, SlotDecoder),
        pytest.param("Bert", {"is_decoder": True}, SlotDecoder, marks=pytest.mark.slow),
    ],
)
async def test_other_architectures_are_exact(
    make_engine: Any, family: str, options: dict[str, Any], decoder: type, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rllm"):
        engine = make_engine(family, model_options=options, max_concurrent=3)
    assert type(engine._scheduler._decoder) is decoder
    warnings = [record for record in caplog.records if record.name.startswith("rllm")]
    assert len(warnings) == (decoder is not SlotDecoder)
    outputs = await asyncio.gather(
        *(engine.complete(prompt_of(4 + 9 * i), max_tokens=14, ignore_eos=True) for i in range(4))
    )
    for output in outputs:
        assert_exact(engine.model, output)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Bert", {}),
        # Its fallback for missing kernels carries states from one chunk of tokens to earlier ones.
        pytest.param(
            "NemotronH",
            {
                "layers_block_type": ["mamba", "attention"],
                "chunk_size": 8,
                "mamba_num_heads": 4,
                "mamba_head_dim": 16,
                "n_groups": 1,
            },
            marks=pytest.mark.skipif(
                Version(transformers.__version__) >= Version("5.23"), reason="fixed in transformers 5.23"
            ),
        ),
    ],
)
def test_model_with_bidirectional_attention_is_rejected(make_engine: Any, family: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use a causal model"):
        make_engine(family, model_options=options)


def test_model_with_random_hashing_is_rejected(make_engine: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = ReformerConfig(
        vocab_size=len(tokenizer),
        is_decoder=True,
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=32,
        attn_layers=["lsh"],
        lsh_attn_chunk_length=16,
        num_buckets=8,
        axial_pos_shape=(8, 16),
        axial_pos_embds_dim=(16, 16),
    )
    with pytest.raises(ConfigError, match="use a causal model"):
        make_engine(model=ReformerModelWithLMHead(config).eval())


def test_model_that_needs_more_than_tokens_is_rejected(make_engine: Any) -> None:
    options = {"default_language": None, "languages": ["en", "de"], "is_decoder": True}
    with pytest.raises(ConfigError, match=r"XmodForCausalLM .*Input language unknown"):
        make_engine("Xmod", model_options=options)


async def test_publish_clears_prefixes_and_increments_the_version(make_engine: Any) -> None:
    engine = make_engine()
    before = await engine.complete(prompt_of(40), max_tokens=10, ignore_eos=True)
    with engine.paused():
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.1)
        engine.publish(3)
    after = await engine.complete(prompt_of(40), max_tokens=10, ignore_eos=True)
    assert (before.weight_version, after.weight_version, engine.weight_version) == (0, 3, 3)
    assert after.metrics["cached_prompt_tokens"] == 0
    assert_exact(engine.model, after)


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Mistral", marks=pytest.mark.slow)])
async def test_answer_continues_under_new_weights_and_records_where(make_engine: Any, family: str) -> None:
    engine = make_engine(family, max_concurrent=1)
    stream = engine.stream_model_response(USER, max_tokens=100, ignore_eos=True, stop=["a string that never comes"])
    waiting = asyncio.create_task(engine.complete(prompt_of(5), max_tokens=3, ignore_eos=True))
    states = [copy.deepcopy(engine.model.state_dict())]
    for version in (1, 2):
        steps = engine.stats()["decode_steps"]
        while engine.stats()["decode_steps"] < steps + 5:
            await anext(stream)
        with engine.paused():
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.mul_(1.05)
            engine.publish(version)
        states.append(copy.deepcopy(engine.model.state_dict()))
    *_, output = [item async for item in stream]
    assert isinstance(output, ModelOutput)
    assert (output.finish_reason, output.weight_version, len(output.logprobs)) == ("length", 0, 100)
    (first, one), (second, two) = output.weight_updates
    assert (one, two) == (1, 2)
    for state, tokens in zip(states, (slice(0, first), slice(first, second), slice(second, 100)), strict=True):
        engine.model.load_state_dict(state)
        expected = forward_logits(engine.model, output.prompt_ids, output.completion_ids).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(output.completion_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(output.logprobs)[tokens], chosen[tokens], atol=1e-4, rtol=0)
    waited = await waiting
    assert (waited.finish_reason, waited.weight_version, waited.weight_updates) == ("length", 2, [])
    assert engine.stats()["requests"] == 2


async def test_nothing_is_decoded_while_paused(make_engine: Any) -> None:
    engine = make_engine()
    stream = engine.stream_model_response(USER, max_tokens=300, ignore_eos=True)
    await anext(stream)
    with engine.paused():
        steps = engine.stats()["decode_steps"]
        with engine.paused():
            pass
        await asyncio.sleep(0.02)
        assert engine.stats()["decode_steps"] == steps
    assert (await anext(stream)).token_ids
    await stream.aclose()


async def test_streamed_and_unstreamed_answers_are_equal(make_engine: Any) -> None:
    engine = make_engine()
    assert offers(engine, "stream_model_response")
    whole = await engine.get_model_response(USER, max_tokens=60, seed=5, ignore_eos=True)
    items = [item async for item in engine.stream_model_response(USER, max_tokens=60, seed=5, ignore_eos=True)]
    deltas, last = items[:-1], items[-1]
    assert all(isinstance(delta, OutputDelta) for delta in deltas)
    assert isinstance(last, ModelOutput)
    assert "".join(delta.text for delta in deltas) == whole.content == last.content
    assert [token for delta in deltas for token in delta.token_ids] == whole.completion_ids == last.completion_ids
    assert [value for delta in deltas for value in delta.logprobs] == last.logprobs
    assert last.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_tool_calls_are_parsed_in_the_format_of_the_template(taught: Any) -> None:
    call = "<tool_call>\n<function=search>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "search", "parameters": schema}}]
    engine: InferenceEngine = taught(
        USER, f"So.\n\n{call}", tools, template=TEMPLATE + "{#- <function= <parameter= -#}"
    )
    output = await engine.get_model_response(USER, tools=tools, temperature=0, max_tokens=90)
    assert (output.content, output.finish_reason) == ("So.", "tool_calls")
    assert output.tool_calls[0]["function"] == {"name": "search", "arguments": '{"n": 5}'}


async def test_tool_calls_keep_the_arguments_as_written(taught: Any) -> None:
    engine: InferenceEngine = taught(USER, f"Let me see.\n{CALL}", TOOLS)
    output = await engine.get_model_response(USER, tools=TOOLS, temperature=0, max_tokens=90)
    assert output.finish_reason == "tool_calls"
    assert output.content == "Let me see."
    assert output.tool_calls[0]["function"] == {"name": "search", "arguments": '{"q":  "a b", "n": 1.0}'}
    assert output.text == f"Let me see.\n{CALL}"
    items = [item async for item in greedy_stream(engine, tools=TOOLS)]
    assert "".join(item.text for item in items[:-1]) == "Let me see."
    assert items[-1].tool_calls[0]["function"] == output.tool_calls[0]["function"]
    refused = await engine.get_model_response(USER, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=90)
    assert (refused.tool_calls, refused.finish_reason) == ([], "stop")
    assert refused.content == refused.text


def greedy_stream(engine: Any, **params: Any) -> Any:
    return engine.stream_model_response(USER, temperature=0, max_tokens=90, **params)


async def test_stop_string_ends_the_text_and_its_ids_are_kept(taught: Any, tokenizer: Any) -> None:
    engine = taught(USER, "one two three four")
    output = await engine.get_model_response(USER, temperature=0, max_tokens=40, stop=["zzz", "o th"])
    assert (output.text, output.finish_reason) == ("one tw", "stop")
    assert tokenizer.decode(output.completion_ids).startswith("one two th")
    assert_exact(engine.model, output)
    items = [item async for item in greedy_stream(engine, stop="o th")]
    assert "".join(item.text for item in items[:-1]) == "one tw"
    assert not any("o" in item.text for item in items[3:-1])


async def test_reasoning_is_split_from_the_answer(taught: Any) -> None:
    engine = taught(USER, "<think>\nhm, so\n</think>\n\nyes")
    output = await engine.get_model_response(USER, temperature=0, max_tokens=60)
    assert (output.reasoning, output.content) == ("hm, so", "yes")
    assert output.text == "<think>\nhm, so\n</think>\n\nyes"
    assert output.to_message() == {"role": "assistant", "content": "yes", "reasoning_content": "hm, so"}
    items = [item async for item in greedy_stream(engine)]
    assert "".join(item.text for item in items[:-1]) == "yes"


async def test_cancelled_requests_free_their_slots(make_engine: Any) -> None:
    engine = make_engine(max_concurrent=1)
    task = asyncio.create_task(engine.get_model_response(USER, max_tokens=480, ignore_eos=True))
    queued = asyncio.create_task(engine.get_model_response(USER, max_tokens=480, ignore_eos=True))
    await asyncio.sleep(0.01)
    task.cancel()
    queued.cancel()
    stream = engine.stream_model_response(USER, max_tokens=480, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    output = await engine.complete(prompt_of(6), max_tokens=4, ignore_eos=True)
    assert output.finish_reason == "length"
    assert engine.stats()["completion_tokens"] < 480
    assert engine.stats()["live"] == engine.stats()["waiting"] == 0


async def test_prompt_that_fills_the_context_is_rejected_with_numbers(make_engine: Any) -> None:
    engine = make_engine(max_length=32)
    with pytest.raises(PromptTooLongError, match=r"32 tokens, and model\.max_length=32"):
        await engine.complete(prompt_of(32))
    output = await engine.complete(prompt_of(30), max_tokens=100, ignore_eos=True)
    assert len(output.completion_ids) == 2
    assert output.sampling["max_tokens"] == 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"prompt_token_ids=\[\]: send at least one token"),
        ([5, 287], "287 is not a token of this model: use ids from 0 to 286"),
        ([5, -1], "-1 is not a token"),
        ([5, 2**70], "is not a token"),
        ([5, 1.5], "use a list of integers"),
        (["a"], "use a list of integers"),
    ],
)
async def test_invalid_prompt_is_rejected_without_affecting_other_calls(
    make_engine: Any, ids: Any, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(InferenceError, match=message) as refused:
        await engine.complete(ids)
    assert refused.value.status_code == 400
    assert (await engine.complete(np.array([5, 286]), max_tokens=2, ignore_eos=True)).prompt_ids == [5, 286]


async def test_unknown_token_id_is_rejected(new_model: Any, tokenizer: Any) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<image>"])
    engine = LocalEngine(new_model(), larger)
    with pytest.raises(InferenceError, match=r"'<image>', .* ids 0 to 286") as refused:
        await engine.get_model_response([{"role": "user", "content": "what is on <image>?"}])
    assert refused.value.status_code == 400
    assert (await engine.complete([5, 286], max_tokens=2, ignore_eos=True)).prompt_ids == [5, 286]
    engine.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_long_prompt_is_rendered_while_others_are_answered(
    make_engine: Any, monkeypatch: Any, is_streamed: bool
) -> None:
    engine = make_engine()
    rendering, go = threading.Event(), threading.Event()

    def encode(text: str, encode: Any = engine.tokenizer.encode, **options: Any) -> Any:
        if len(text) > 100_000:
            rendering.set()
            assert go.wait(10), "the event loop was blocked"
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    long = [{"role": "user", "content": "the user asks " * 8000}]
    asked = anext(engine.stream_model_response(long)) if is_streamed else engine.get_model_response(long)
    refused = asyncio.ensure_future(asked)
    await asyncio.to_thread(rendering.wait, 10)
    assert len((await engine.get_model_response(USER, max_tokens=2, ignore_eos=True)).completion_ids) == 2
    go.set()
    with pytest.raises(PromptTooLongError):
        await refused


async def test_answer_to_a_prompt_of_ids_is_plain_text(make_engine: Any, tokenizer: Any) -> None:
    engine = make_engine()
    thinking = tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    output = await engine.complete(thinking, max_tokens=20, ignore_eos=True, seed=1)
    assert (output.content, output.reasoning) == (output.text, "")
    assert output.text
    pieces = [item async for item in engine.stream_model_response((), prompt_token_ids=thinking, max_tokens=20, seed=1)]
    assert "".join(piece.text for piece in pieces[:-1]) == pieces[-1].text


async def test_crash_fails_waiting_and_later_requests(make_engine: Any) -> None:
    engine = make_engine(max_concurrent=1)
    engine.model.get_input_embeddings().weight.data = torch.zeros(1, 1)
    waiting = [engine.complete(prompt_of(5)), engine.complete(prompt_of(6))]
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, InferenceError)
        assert "index out of range" in str(result)
    with pytest.raises(InferenceError, match="index out of range") as caught:
        await engine.complete(prompt_of(5))
    assert caught.value.status_code == 503


@pytest.mark.parametrize("vocabulary", [300, 320])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_nan_weights_are_reported_and_not_sampled_from(
    make_engine: Any, vocabulary: int, temperature: int
) -> None:
    engine = make_engine(model=build_model("Qwen3", vocabulary))
    with engine.paused(), torch.no_grad():
        engine.model.model.norm.weight.fill_(torch.nan)
        engine.publish(7)
    with pytest.raises(InferenceError, match=r"weight version 7"):
        await engine.complete(prompt_of(4), temperature=temperature)


async def test_closed_engine_raises_an_error(make_engine: Any) -> None:
    engine = make_engine()
    stream = engine.stream_model_response(USER, max_tokens=400, ignore_eos=True)
    await anext(stream)
    engine.close()
    engine.close()
    with pytest.raises(InferenceError, match="closed"):
        [item async for item in stream]
    with pytest.raises(InferenceError, match="closed"):
        await engine.complete([5])
    with engine.paused():
        pass


async def test_invalid_requests_are_rejected_with_the_reason(make_engine: Any) -> None:
    engine = make_engine()
    with pytest.raises(InferenceError, match="role") as caught:
        await engine.get_model_response([{"content": "hi"}])
    assert caught.value.status_code == 400
    with pytest.raises(InferenceError, match="at least one token"):
        await engine.complete([])
    with pytest.raises(ConfigError, match="temperature"):
        await engine.get_model_response(USER, temperature=-1)


async def test_longrope_limits_the_context(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4, **factors}
    options = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    engine = make_engine("Phi3", model_options=options)
    assert "Phi3ForCausalLM has a context of 32 tokens here, not 512" in caplog.text
    output = await engine.complete(list(range(3, 23)), max_tokens=100, ignore_eos=True)
    assert len(output.completion_ids) == 12
    with torch.no_grad():
        logits = engine.model(torch.tensor([output.prompt_ids + output.completion_ids]), use_cache=False).logits[0]
    expected = logits[19:-1].log_softmax(-1).gather(1, torch.tensor(output.completion_ids).unsqueeze(1))
    torch.testing.assert_close(torch.tensor(output.logprobs), expected.squeeze(1), atol=1e-4, rtol=0)
    with pytest.raises(
        ConfigError, match=r"model\.max_length=33: .* 32 tokens, not 512: beyond that, longrope .*; use 2 to 32"
    ):
        make_engine("Phi3", model_options=options, max_length=33)


async def test_unsupported_fields_are_logged_once_or_rejected(
    make_engine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "_logged", set())
    engine = make_engine()
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "min_tokens": 0,
        "logit_bias": {},
        "bad_words": [],
        "allowed_token_ids": None,
        "structured_outputs": None,
    }
    await engine.complete(prompt_of(4), max_tokens=1, **neutral, response_format={"type": "text"})
    for choice in ("auto", "none"):
        await engine.complete(prompt_of(4), max_tokens=1, tool_choice=choice)
    assert not caplog.records
    others = {"presence_penalty": 1.0, "min_tokens": 5, "bad_words": ["a"], "allowed_token_ids": [5]}
    others |= {"tool_choice": "required", "parallel_tool_calls": False}
    for _ in range(2):
        await engine.complete(prompt_of(4), max_tokens=1, **others)
    assert len(caplog.records) == len(others)
    for name in others:
        assert name in caplog.text
    for name, value in {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}.items():
        with pytest.raises(ParameterError) as refused:
            await engine.complete(prompt_of(4), max_tokens=1, **{name: value})
        assert refused.value.param.startswith(name)


def test_invalid_settings_are_rejected_at_once(make_engine: Any) -> None:
    with pytest.raises(ConfigError, match="max_concurrent=0"):
        make_engine(max_concurrent=0)
    with pytest.raises(ConfigError, match=r"model\.max_length=513: .* context of 512 tokens; use 2 to 512"):
        make_engine(max_length=513)
    with pytest.raises(ConfigError, match="tool_parser='nope'"):
        make_engine(tool_parser="nope")


def test_one_engine_serves_several_event_loops(make_engine: Any) -> None:
    engine = make_engine()
    for _ in range(2):
        output = asyncio.run(engine.complete(prompt_of(4), max_tokens=3, ignore_eos=True))
        assert len(output.completion_ids) == 3
