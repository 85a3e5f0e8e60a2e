"""The embedded inference engine: chat messages in, exactly sampled tokens out, on the trainer's own weights."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from rllm.errors import ConfigError, InferenceError, PromptTooLongError
from rllm.inference.engine import ModelOutput, OutputDelta, SamplingParams
from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.packed import PackedModel, can_pack
from rllm.inference.local.scheduler import Request, Scheduler, clamp_max_tokens
from rllm.main_memory import total_memory
from rllm.parser.answer import Answer, AnswerReader, Shown
from rllm.parser.chat_template import ChatTemplate
from rllm.parser.continuation import Continuation
from rllm.parser.decoding import TextDecoder
from rllm.parser.tool_parser import tool_parser as find_tool_parser
from rllm.types import Message

logger = logging.getLogger(__name__)

_DEFAULT_CONTEXT = 4096
"""The context length of a model that does not state one."""
_CHECK_S = 10.0
"""How often a waiting request makes sure that the decode thread is alive."""
_PAUSE_TIMEOUT_S = 120.0
_UNSUPPORTED = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "response_format")


class LocalEngine:
    """Samples many answers at once on one decode thread, from any number of event loops.

    The model is shared with a trainer. It changes the weights between decode steps and says so:

        with engine.paused():
            optimizer.step()
            engine.publish(version)

    The engine keeps the model in evaluation mode. The model's own `generation_config` changes nothing but which ids
    end an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_concurrent: int = 64,
        max_length: int | None = None,
        tool_parser: str = "hermes",
        seed: int = 0,
        device: str | torch.device | None = None,
        cache_bytes: int | None = None,
        autocast: bool = False,
    ) -> None:
        """`max_length` bounds prompt and answer together (default: the model's context). `cache_bytes` bounds the keys
        and values kept (default: 40 % of free GPU memory, or a quarter of main memory). With `autocast` matrix products
        are done in bfloat16 where the weights are in float32, on a CPU."""
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent}: use at least 1")
        self.model = model.eval() if device is None else model.to(device).eval()
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self._continuation = Continuation(tokenizer, self.template)
        self.max_length = _checked_length(model, max_length)
        self.end_ids = _end_ids(model, tokenizer)
        self._tool_parser = find_tool_parser(tool_parser)
        self._seeds = random.Random(seed)
        self._text = TextDecoder(tokenizer, self.end_ids, self._tool_parser.markup)
        self._packed = PackedModel(self.model, autocast=autocast) if can_pack(self.model) else None
        decoder = choose_decoder(
            self._packed.module if self._packed else self.model,
            original=self.model,
            products=self._packed.products if self._packed else None,
            max_sequences=max_concurrent,
            max_length=self.max_length,
            max_bytes=cache_bytes or _default_cache_bytes(model.device),
        )
        self._scheduler = Scheduler(decoder, self._text, max_concurrent=max_concurrent)
        self._started_at = time.perf_counter()
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._pauses = 0
        self._parked = False
        self._stopped: str | None = None
        """Why no more requests are taken."""
        self._thread = threading.Thread(target=self._run, name="rllm-decode", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def weight_version(self) -> int:
        return self._scheduler.weight_version

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> ModelOutput:
        """See `InferenceEngine`. `prompt_token_ids` among the parameters replaces the rendered prompt, `ignore_eos`
        goes on to `max_tokens`, and `chat_template_kwargs` go to the template."""
        call = self._submit(messages, tools, params, streaming=False)
        try:
            await call.finished()
        finally:
            self._release(call.request)
        return self._output(call)

    async def stream_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> AsyncIterator[OutputDelta | ModelOutput]:
        """See `StreamingInferenceEngine`."""
        call = self._submit(messages, tools, params, streaming=True)
        request, seen = call.request, 0
        try:
            while not request.done:
                await call.news()
                ids, logprobs = request.completion_ids[seen:], request.logprobs[seen:]
                if ids and not request.done:
                    ids = ids[: len(logprobs)]
                    seen += len(ids)
                    yield _delta(call.reader.show(ids), ids, logprobs[: len(ids)])
        finally:
            self._release(request)
        output = self._output(call)
        rest = call.reader.rest(Shown(output.reasoning, output.content))
        yield _delta(rest, request.completion_ids[seen:], request.logprobs[seen:])
        yield output

    def continued_prompt(
        self,
        known_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        written_on: str = "",
    ) -> list[int]:
        """See `ContinuingEngine`."""
        return self._continuation.prompt_ids(
            known_ids, messages, num_known, tools, template_kwargs, written_on=written_on
        )

    async def complete(self, prompt_ids: Sequence[int], **params: Any) -> ModelOutput:
        """Sample one answer to a prompt that is given as token ids."""
        return await self.get_model_response((), **params, prompt_token_ids=prompt_ids)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the decode thread between two steps; may be nested."""
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._parked, timeout=_PAUSE_TIMEOUT_S):
                    raise InferenceError(f"the decode thread did not come to rest within {_PAUSE_TIMEOUT_S:.0f} s")
            except BaseException:
                self._pauses -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def publish(self, version: int) -> None:
        """The model's weights are now this version: answers in the making go on with them, cached prefixes go."""
        with self.paused():
            if self._packed:
                self._packed.update()
            self._scheduler.publish(version)

    def stats(self) -> dict[str, float]:
        """What has been done since the start."""
        counters = self._scheduler.counters
        busy = counters.prefill_s + counters.decode_s
        return {
            **asdict(counters),
            "tokens_per_s": counters.completion_tokens / busy if busy else 0.0,
            "uptime_s": time.perf_counter() - self._started_at,
            "live": self._scheduler.num_live,
            "waiting": self._scheduler.num_waiting + len(self._inbox),
            "weight_version": self.weight_version,
        }

    def close(self) -> None:
        """Stop decoding; requests in flight fail. Closing twice is allowed."""
        with self._changed:
            self._stopped = self._stopped or "the engine is closed"
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_PAUSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _submit(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        params: Mapping[str, Any],
        *,
        streaming: bool,
    ) -> _Call:
        _warn_unsupported(params)
        prompt_ids = self._prompt_ids(messages, tools, params)
        sampling = SamplingParams.from_request(params)
        max_tokens = clamp_max_tokens(prompt_ids, sampling.max_tokens, self.max_length)
        if max_tokens < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens, and the context of {self.max_length} must hold it and an "
                "answer: shorten the messages, or raise the engine's max_length if the model allows"
            )
        seed = self._seeds.getrandbits(53) if sampling.seed is None else sampling.seed
        news = _News()
        request = Request(
            prompt_ids=prompt_ids,
            sampling=replace(sampling, max_tokens=max_tokens, seed=seed),
            max_tokens=max_tokens,
            end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if params.get("ignore_eos") else self.end_ids),
            seed=seed % 2**64,
            wake=news.announce,
            streaming=streaming,
        )
        with self._changed:
            if self._stopped:
                raise InferenceError(self._stopped, status_code=503)
            self._inbox.append(request)
            self._changed.notify_all()
        calls_allowed = tools and params.get("tool_choice") != "none"
        parser = self._tool_parser if calls_allowed or self._tool_parser.reads_every_answer else None
        reader = AnswerReader(self._text, prompt_ids=prompt_ids, stop=sampling.stop, tool_parser=parser)
        return _Call(request, reader, news, self._thread)

    def _prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, params: Mapping[str, Any]
    ) -> list[int]:
        given = params.get("prompt_token_ids")
        if given is not None:
            ids = list(given)
            if not ids:
                raise InferenceError("prompt_token_ids=[]: send at least one token", status_code=400)
            return ids
        try:
            return self.template.render(messages, tools, template_kwargs=params.get("chat_template_kwargs"))
        except ConfigError as error:
            raise InferenceError(str(error), status_code=400) from error

    def _release(self, request: Request) -> None:
        """Give up a request that nobody waits for any more."""
        if not request.done:
            request.cancelled = True
            with self._changed:
                self._changed.notify_all()

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
            logprobs_kind="raw" if request.sampling.temperature == 0 else "processed",
            finish_reason=finish,
            weight_version=request.weight_version,
            weight_updates=request.weight_updates,
            template_hash=self.template.hash,
            sampling=request.sampling.to_dict(),
            metrics=request.metrics(),
        )

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self.model.training:
                    self.model.eval()
                with torch.no_grad():
                    self._scheduler.advance()
            self._stop(InferenceError("the engine was closed", status_code=503))
        except BaseException as error:
            logger.exception("the embedded sampler has failed")
            self._stop(error)

    def _wait_for_work(self) -> bool:
        """Rest until there is something to do; False when the engine is closed."""
        with self._changed:
            while not self._stopped:
                if not self._pauses:
                    self._scheduler.submit(self._inbox)
                    self._inbox.clear()
                    if self._scheduler.has_work:
                        self._parked = False
                        return True
                self._parked = True
                self._changed.notify_all()
                self._changed.wait()
            return False

    def _stop(self, cause: BaseException) -> None:
        """The last act of the decode thread: nobody may wait for it any longer."""
        with self._changed:
            self._stopped = self._stopped or f"the embedded sampler has failed: {type(cause).__name__}: {cause}"
            self._parked = True
            self._scheduler.submit(self._inbox)
            self._inbox.clear()
            self._changed.notify_all()
        error = InferenceError(self._stopped, status_code=503)
        error.__cause__ = cause
        self._scheduler.fail(error)


def _delta(shown: Shown, token_ids: list[int], logprobs: list[float]) -> OutputDelta:
    return OutputDelta(shown.content, token_ids, logprobs, shown.reasoning)


class _News:
    """Carries word of a request from the decode thread to the event loop that awaits it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._pending = False

    def announce(self, request: Request) -> None:
        if not self._pending:
            self._pending = True
            try:
                self._loop.call_soon_threadsafe(self._arrive)
            except RuntimeError:  # the loop is closed: nobody awaits the answer
                request.cancelled = True

    def _arrive(self) -> None:
        self._pending = False
        self._event.set()

    async def wait(self) -> bool:
        """Whether there is news; False after a while without."""
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class _Call:
    """A request, seen from the coroutine that made it."""

    def __init__(self, request: Request, reader: AnswerReader, news: _News, thread: threading.Thread) -> None:
        self.request = request
        self.reader = reader
        self._news = news
        self._thread = thread

    async def news(self) -> None:
        """Wait until the request has got further.

        Raises:
            InferenceError: if the decode thread is gone, which only a dying interpreter can bring about.
        """
        while not await self._news.wait():
            if not self._thread.is_alive() and not self.request.done:
                raise InferenceError("the decode thread is gone", status_code=503)

    async def finished(self) -> None:
        while not self.request.done:
            await self.news()


def _checked_length(model: Any, wanted: int | None) -> int:
    """The context length to use.

    Raises:
        ConfigError: if more is wanted than the model has positions for.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if wanted is None:
        return limit or _DEFAULT_CONTEXT
    if wanted < 2 or (limit is not None and wanted > limit):
        raise ConfigError(f"max_length={wanted}: use 2 to {limit or 'as many as memory allows'}")
    return wanted


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn, by the generation config, the model's config and the tokenizer."""
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.4)
    return total_memory() // 4


_warned: set[str] = set()


def _warn_unsupported(params: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if params.get(name) not in (None, 0, 0.0, 1.0, {}, {"type": "text"}) and name not in _warned:
            _warned.add(name)
            logger.warning("%s=%r has no effect: the embedded sampler does not have it", name, params[name])
