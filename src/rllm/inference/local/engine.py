"""The embedded inference engine: chat messages in, exact sampled tokens out, on the trainer's own weights."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rllm._runtime.process import total_memory
from rllm.config.schema import ModelConfig
from rllm.errors import ConfigError, InferenceError, PromptTooLongError
from rllm.inference.engine import ModelOutput, OutputDelta, SamplingParams
from rllm.inference.local.decode_thread import DecodeThread, Wakeup
from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.loading import (
    check_length,
    check_token_ids,
    context_length,
    end_ids,
    load_model,
    longrope_note,
    warn_of_ends,
)
from rllm.inference.local.packed import PackedModel, can_pack
from rllm.inference.local.scheduler import Request, Scheduler
from rllm.inference.parameters import CHAT, check_request, ignored, log_ignored
from rllm.parser.answer import Answer, AnswerReader, VisibleText
from rllm.parser.chat_template import ChatTemplate, is_long
from rllm.parser.continuation import Continuation
from rllm.parser.decoding import TextDecoder, TokenBytes
from rllm.parser.tool_parser import chosen_format, log_unread_calls, parser_of_answer
from rllm.parser.tool_parser import tool_parser as find_tool_parser
from rllm.parser.tool_prompt import TemplateChoice
from rllm.types import JSONMapping, Message

logger = logging.getLogger(__name__)

_DEFAULT_CONTEXT = 4096
"""Context length of a model that does not state one."""


class _Call(NamedTuple):
    request: Request
    reader: AnswerReader
    wakeup: Wakeup


class LocalEngine:
    """Samples many answers at once on one decode thread, from any number of event loops.

    The model is shared with a trainer, which changes the weights between decode steps and publishes them:

        with engine.paused():
            optimizer.step()
            engine.publish(version)

    The engine keeps the model in evaluation mode. Of the model's `generation_config`, only the ids that end an
    answer count.
    """

    @classmethod
    def load(cls, settings: ModelConfig, path: str | None = None, **options: Any) -> Self:
        """Return an engine for the model of a configuration's `model` section, or for the one at `path`."""
        template = TemplateChoice.of(settings)
        loaded = load_model(path or settings.path, dtype=settings.dtype, device=settings.device, template=template)
        shared = {"max_length": settings.max_length, "tool_parser": settings.tool_parser, "device": loaded.device}
        return cls(loaded.model, loaded.tokenizer, **shared, **options)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent: int = 64,
        max_length: int | None = None,
        tool_parser: str | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        cache_bytes: int | None = None,
        autocast: bool = False,
    ) -> None:
        """Start the decode thread.

        Args:
            model: a `transformers` causal language model.
            tokenizer: its tokenizer.
            max_concurrent: answers decoded at a time.
            max_length: bound on prompt and answer together (default: the model's context).
            tool_parser: format of tool calls (default: the one that the chat template prints, else hermes).
            seed: seed of requests without one.
            device: device to move the model to.
            cache_bytes: bound on the keys and values kept (default: 40 % of free GPU memory, or a quarter of the
                main memory that this process may use).
            autocast: multiply in bfloat16 where the weights are in float32, on a CPU that can.
        """
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent}: use at least 1")
        self.model = model.eval() if device is None else model.to(device).eval()
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self._num_tokens: int = model.get_input_embeddings().num_embeddings
        check_token_ids(tokenizer, self.template, self._num_tokens)
        if len(tokenizer) > self._num_tokens:  # as in Gemma 3 1B, whose tokenizer has an image token
            logger.warning(
                "the tokenizer has %d tokens, and the model %d: prompts with one of the others, such as %r, are "
                "refused; if tasks need them, use the tokenizer that the model was trained with",
                len(tokenizer),
                self._num_tokens,
                tokenizer.convert_ids_to_tokens(self._num_tokens),
            )
        self.lost = self.template.lost
        self.continued_prompt = Continuation(tokenizer, self.template).prompt_ids
        self.max_length = _checked_length(model, max_length)
        warn_of_ends(model, tokenizer, self.template)
        self.end_ids = end_ids(model, tokenizer, self.template)
        self._tool_parser = find_tool_parser(chosen_format(tool_parser, self.template.text))
        log_unread_calls(self.template, self._tool_parser)
        self._seeds = random.Random(seed)
        self._bytes = TokenBytes(tokenizer)
        self._text = TextDecoder(tokenizer, self.end_ids, self._tool_parser.markup)
        self._packed = PackedModel(self.model, autocast=autocast) if can_pack(self.model) else None
        if cache_bytes is None:
            on_gpu = model.device.type == "cuda"
            cache_bytes = int(torch.cuda.mem_get_info(model.device)[0] * 0.4) if on_gpu else total_memory() // 4
        decoder = choose_decoder(
            self._packed.module if self._packed else self.model,
            original=self.model,
            products=self._packed.products if self._packed else None,
            max_sequences=max_concurrent,
            max_length=self.max_length,
            max_bytes=cache_bytes,
        )
        self._scheduler = Scheduler(decoder, self._text, max_concurrent=max_concurrent)
        self._thread = DecodeThread(self._scheduler, self.model)
        atexit.register(self.close)

    @property
    def weight_version(self) -> int:
        return self._scheduler.weight_version

    check_request = staticmethod(check_request)
    ignored = staticmethod(ignored)

    def token_bytes(self, token_id: int) -> bytes:
        """See `FullEngine`."""
        return self._bytes.of(token_id)

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> ModelOutput:
        """See `InferenceEngine`.

        The parameter `prompt_token_ids` replaces the rendered prompt, `ignore_eos` continues to `max_tokens`, and
        `chat_template_kwargs` go to the template. Without messages, which needs `prompt_token_ids`, the answer is
        plain text: it is not searched for reasoning or tool calls.
        """
        prompt_ids = await self._prompt_ids(messages, tools, params)
        call = self._submit(prompt_ids, tools, params, plain=not messages, streaming=False)
        try:
            while not call.request.done:
                await call.wakeup.wait()
        finally:
            self._thread.release(call.request)
        return self._output(call)

    async def stream_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> AsyncIterator[OutputDelta | ModelOutput]:
        """See `FullEngine`."""
        prompt_ids = await self._prompt_ids(messages, tools, params)
        call = self._submit(prompt_ids, tools, params, plain=not messages, streaming=True)
        request, seen = call.request, 0
        try:
            while not request.done:
                await call.wakeup.wait()
                ids, logprobs = request.completion_ids[seen:], request.logprobs[seen:]
                if ids and not request.done:
                    ids = ids[: len(logprobs)]
                    delta = _delta(call.reader.show(ids), request, seen, seen + len(ids))
                    yield delta if seen else replace(delta, prompt_ids=request.prompt_ids)
                    seen += len(ids)
        finally:
            self._thread.release(request)
        output = self._output(call)
        rest = call.reader.rest(VisibleText(output.reasoning, output.content))
        yield _delta(rest, request, seen, len(request.completion_ids))
        yield output

    async def complete(self, prompt_ids: Sequence[int], **params: Any) -> ModelOutput:
        """Sample one answer to a prompt of token ids."""
        return await self.get_model_response((), **params, prompt_token_ids=prompt_ids)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the decode thread between two steps; may be nested."""
        with self._thread.paused():
            yield

    def publish(self, version: int) -> None:
        """Use the model's changed weights as this version; drop cached prefixes, continue answers in progress."""
        with self.paused():
            self.drop_states()
            self._scheduler.publish(version)

    def drop_states(self) -> None:
        """Free everything computed from the weights, because they are about to change; call it while paused."""
        self._scheduler.drop_states()
        if self._packed:
            self._packed.drop()

    def memory(self) -> dict[str, int]:
        """Return the bytes of packed weights and of keys and values."""
        packed = 0 if self._packed is None else self._packed.nbytes
        return {"sampler_weights": packed, "kv_cache": self._scheduler.cache_bytes}

    def stats(self) -> dict[str, int]:
        """Return the work done since the start, and the numbers of live and waiting requests."""
        waiting = self._scheduler.num_waiting + self._thread.num_unseen
        return {**asdict(self._scheduler.counters), "live": self._scheduler.num_live, "waiting": waiting}

    def close(self) -> None:
        """Stop decoding; requests in flight fail. Closing twice is allowed."""
        self._thread.close()
        atexit.unregister(self.close)

    def _submit(
        self,
        prompt_ids: Sequence[int],
        tools: Sequence[JSONMapping] | None,
        params: JSONMapping,
        *,
        plain: bool,
        streaming: bool,
    ) -> _Call:
        self.check_request(params)
        log_ignored(key for key in self.ignored(params) if key in CHAT.rows)
        sampling = SamplingParams.from_request(params)
        room = self.max_length - len(prompt_ids)
        if room < 1:
            limit = context_length(self.model.config)
            longer = f"raise model.max_length{'' if limit is None else f' (the model takes {limit})'}"
            if limit is not None and limit <= self.max_length:
                longer = f"use a model with a context of more than {limit} tokens"
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens, and model.max_length={self.max_length} bounds prompt and "
                f"answer together: shorten the messages, or {longer}",
                num_tokens=len(prompt_ids),
            )
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = self._seeds.getrandbits(53) if sampling.seed is None else sampling.seed
        wakeup = Wakeup()
        request = Request(
            prompt=prompt_ids,
            sampling=replace(sampling, max_tokens=max_tokens, seed=seed),
            max_tokens=max_tokens,
            end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if params.get("ignore_eos") else self.end_ids),
            seed=seed % 2**64,
            wake=wakeup.notify,
            streaming=streaming,
            num_top=params.get("top_logprobs") or 0,
        )
        self._thread.submit(request)
        parser = parser_of_answer(self._tool_parser, tools, params.get("tool_choice"))
        reader = AnswerReader(self._text, prompt_ids=prompt_ids, stop=sampling.stop, tool_parser=parser, plain=plain)
        return _Call(request, reader, wakeup)

    async def _prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None, params: JSONMapping
    ) -> Sequence[int]:
        given = params.get("prompt_token_ids")
        if given is not None:
            return self._checked_ids(given)
        render = partial(self.template.render, messages, tools, template_kwargs=params.get("chat_template_kwargs"))
        try:
            ids = await asyncio.to_thread(render) if is_long(messages) else render()
        except ConfigError as error:
            raise InferenceError(str(error), status_code=400) from error
        if max(ids, default=0) >= self._num_tokens:
            raise InferenceError(
                f"the messages contain {self.tokenizer.decode([max(ids)])!r}, id {max(ids)} of the tokenizer, but the "
                f"model has ids 0 to {self._num_tokens - 1} only: remove it",
                status_code=400,
            )
        return ids

    def _checked_ids(self, given: Sequence[int]) -> array[int]:
        # A wrong id would end the sampler and all answers in progress.
        try:
            packed = array("I", given)  # an array, and numpy, take microseconds where lists take milliseconds
        except TypeError as error:
            raise InferenceError(f"prompt_token_ids: {error}: use a list of integers", status_code=400) from error
        except OverflowError:
            wrong = next(value for value in given if not 0 <= value < 2**32)
        else:
            if not packed:
                raise InferenceError("prompt_token_ids=[]: send at least one token", status_code=400)
            wrong = int(np.frombuffer(packed, np.uint32).max())
            if wrong < self._num_tokens:
                return packed
        raise InferenceError(
            f"prompt_token_ids: {wrong} is not a token of this model: use ids from 0 to {self._num_tokens - 1}",
            status_code=400,
        )

    def _output(self, call: _Call) -> ModelOutput:
        request = call.request
        if request.error is not None:
            raise InferenceError(str(request.error), status_code=503) from request.error
        answer: Answer = call.reader.read(request.completion_ids)
        finish = "tool_calls" if answer.tool_calls and request.finish_reason == "stop" else request.finish_reason
        return ModelOutput(
            text=answer.text,
            content=answer.content,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            prompt_ids=request.prompt_ids,
            completion_ids=request.completion_ids,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            logprobs_kind="raw" if request.sampling.temperature == 0 else "processed",
            finish_reason=finish,
            stop_string=answer.stop_string,
            weight_version=request.weight_version,
            weight_updates=request.weight_updates,
            template_hash=self.template.hash,
            sampling=request.sampling.to_dict(),
            metrics=request.metrics(),
        )


def _delta(shown: VisibleText, request: Request, start: int, end: int) -> OutputDelta:
    return OutputDelta(
        shown.content,
        request.completion_ids[start:end],
        request.logprobs[start:end],
        shown.reasoning,
        top_logprobs=request.top_logprobs[start:end],
    )


def _checked_length(model: PreTrainedModel, wanted: int | None) -> int:
    """Return the bound on prompt and answer; raise `ConfigError` if the model has fewer positions."""
    if wanted is not None:
        check_length(model.config, wanted)
        return wanted
    limit = context_length(model.config)
    if why := longrope_note(model.config):
        logger.warning("%s has a context of %d tokens here%s", type(model).__name__, limit, why)
    return limit or _DEFAULT_CONTEXT
