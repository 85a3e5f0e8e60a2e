"""Batched decoding with slot caches and shared prefixes, for models with plain full attention.

Sequences that are equal so far are one *row* of the batch until they diverge, as the samples of one prompt do after
a few tokens. Prompts are computed in slots of their own, from the longest cached prefix on, and copied to their rows;
on a CPU, the states of a long prompt are kept and read once for all of its rows (`model_forward.PromptAttention`).

On a CPU, results of one row are the same bit for bit whatever else is in the batch: products of packed weights do
not depend on the number of rows (`packed.py`), and attention sums widths in a fixed order (`stable_width`).
So an answer follows from weights, prompt and seed; one rounding of another kind would choose another token about
once in a million.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from rllm.inference.local.kv_cache import BLOCK, BlockLocation, CacheShape, PrefixCache, PrefixNode, SlotCache
from rllm.inference.local.model_forward import DecodeGraphs, PromptAttention, cache_argument, last_logits_only
from rllm.inference.local.scheduler import Added

QUERY_STEP = 16
"""Attention of a multiple of this many queries is summed in one order on a CPU, whatever the multiple. Fewer are summed
in another order on some CPUs: below 8 from a head size of 96 on, below 12 from 256 on."""
LEAST_SHARED = 128
"""Tokens of the shortest prompt whose states are kept once for all rows; shorter ones are quickly read by each row."""
_ROW_STEP = 4
"""Rows of a decode step are padded to a multiple of this on a CPU, and of more on a GPU, for fewer graphs."""
_SUMMED_COLUMNS = 512
"""Columns that the CPU's attention kernel sums at a time."""
_COLUMN_STEP = 32
_WORTH_WAITING = 16
"""A prompt waits for a sibling's prefix if that saves at least this many tokens."""
_PASS_TOKENS, _PASS_TOKENS_OF_GPU = 1024, 8192
"""Tokens of one forward pass over prompts, padding included; few on a CPU, whose cache is small."""
_PASS_PADDING, _PASS_PADDING_OF_GPU = 64, 2048
"""Padding that costs less than another pass, which reads all weights."""
_PROMPT_SHARE, _ROW_SHARE, _PREFIX_SHARE = 1, 5, 2
"""Eighths of the memory for prompts being computed, rows, and cached prefixes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillItem:
    """A prompt whose states are computed now, up to its last token."""

    slot: int
    tokens: tuple[int, ...]
    known: list[PrefixNode]
    """Cached blocks that it begins with."""
    new: list[PrefixNode]
    """Blocks to store once they are computed."""

    @property
    def num_cached(self) -> int:
        """Tokens that are not computed again."""
        return len(self.known) * BLOCK

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_cached


@dataclass(eq=False, slots=True)
class _Row:
    """One sequence of the batch, or several that are equal so far."""

    slot: int
    length: int
    """Number of tokens whose states are cached."""
    num_sequences: int
    prompt: Tensor | None = None
    """States of its first tokens, [layer, key or value, head, token, dim]; its slot holds the other tokens' states."""

    @property
    def num_in_prompt(self) -> int:
        return 0 if self.prompt is None else int(self.prompt.shape[3])

    @property
    def num_columns(self) -> int:
        """Number of tokens whose states are in its slot."""
        return self.length - self.num_in_prompt


class SlotDecoder:
    """A `Decoder` with one slot of the cache for each row of the batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        shape: CacheShape,
        *,
        max_sequences: int,
        max_length: int,
        max_bytes: int,
        least_shared: int | None = None,
    ) -> None:
        """Lay out the cache.

        Args:
            model: model to run.
            shape: size of its states.
            max_sequences: sequences decoded at a time.
            max_length: tokens of a sequence.
            max_bytes: memory for keys and values.
            least_shared: tokens of the shortest prompt whose states are kept once, on a CPU, for models whose attention
                takes `above`; `None`: each row has its own.
        """
        self._model = model
        self.least_shared = least_shared
        self._device = shape.device
        on_cpu = shape.device.type == "cpu"
        self._pass_tokens = _PASS_TOKENS if on_cpu else _PASS_TOKENS_OF_GPU
        self._pass_padding = _PASS_PADDING if on_cpu else _PASS_PADDING_OF_GPU
        heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", shape.num_heads)
        self._queries_per_key = heads // shape.num_heads
        limits = {"max_slots": max_sequences, "max_columns": max_length}
        self._prompts = SlotCache(shape, **limits, max_bytes=max_bytes * _PROMPT_SHARE // 8)
        self._cache = SlotCache(shape, **limits, max_bytes=max_bytes * _ROW_SHARE // 8)
        self._prefixes = PrefixCache(shape, max_bytes=max_bytes * _PREFIX_SHARE // 8)
        self._options, self._cache_argument = last_logits_only(model), cache_argument(model)
        self._rows: list[_Row] = []  # by slot
        self._sequences: list[_Row] = []
        self._row_of_sequence: Tensor | None = None  # [sequences]; None: the batch has changed
        self._attention: PromptAttention | None = None  # None: no row has a shared prompt
        self._graphs = DecodeGraphs(self._device)
        self._make_buffers()

    def _make_buffers(self) -> None:
        slots, columns = self._cache.num_slots, self._cache.num_columns
        self._graphs.clear()
        self._inputs = torch.zeros((slots, 1), dtype=torch.long, device=self._device)
        self._columns = torch.zeros((slots, 1), dtype=torch.long, device=self._device)  # of the next token
        self._starts = torch.zeros_like(self._columns)  # position of column 0
        # Added to attention scores: 0 where a column holds a token.
        self._mask = torch.full((slots, 1, 1, columns), -torch.inf, dtype=self._cache.shape.dtype, device=self._device)
        self._mask_start = torch.arange(slots, device=self._device) * columns
        for row in self._rows:
            self._mark(row)

    def _mark(self, row: _Row) -> None:
        self._columns[row.slot] = row.num_columns
        self._starts[row.slot] = row.num_in_prompt
        self._mask[row.slot, ..., : row.num_columns] = 0
        self._mask[row.slot, ..., row.num_columns :] = -torch.inf

    def fits(self, num_sequences: int, length: int) -> bool:
        return self._cache.fits(num_sequences, length)

    def add(self, prompts: Sequence[list[int]]) -> list[Added]:
        self._prefixes.begin_round()
        self._row_of_sequence = None
        chosen: dict[tuple[int, ...], PrefillItem] = {}
        members: dict[tuple[int, ...], list[int]] = {}
        longest = 0
        for index, ids in enumerate(prompts):
            tokens = tuple(ids[:-1])
            if tokens not in members:
                members[tokens] = []
                columns = max(longest, len(tokens))
                # One prompt alone is always taken.
                has_room = not chosen or self._prompts.fits(len(chosen) + 1, columns)
                if has_room and (item := self._prefill_item(tokens)):
                    chosen[tokens], longest = item, columns
            members[tokens].append(index)
        items = sorted(chosen.values(), key=lambda item: item.num_missing)
        items = [replace(item, slot=slot) for slot, item in enumerate(items)]
        self._compute(items)
        self._reserve(len(self._sequences) + len(prompts), 1)
        computed = {item.tokens: item for item in items}
        added = []
        for tokens, indices in members.items():
            if (done := computed.get(tokens)) is not None:
                row = _Row(-1, len(tokens), len(indices), self._shared_states(done.slot, len(tokens)))
                self._append(row, self._prompts, done.slot, row.num_in_prompt)
                self._sequences += [row] * len(indices)
                added += [Added(indices[0], done.num_cached), *(Added(index, len(tokens)) for index in indices[1:])]
        return added

    def _prefill_item(self, tokens: tuple[int, ...]) -> PrefillItem | None:
        """Choose how to compute a prompt; `None` if it should wait for a prefix that another prompt computes now."""
        path = self._prefixes.match(tokens)
        ready = [block for block in path if block.ready]
        if (len(path) - len(ready)) * BLOCK >= _WORTH_WAITING:
            return None
        new = self._prefixes.extend(tokens, path) if len(ready) == len(path) else []
        return PrefillItem(slot=-1, tokens=tokens, known=ready, new=new)

    def _compute(self, items: list[PrefillItem]) -> None:
        """Compute the missing states of prompts, which are in order of their number, and cache the new blocks."""
        batches = prefill_batches(items, self._pass_tokens, self._pass_padding)
        # A batch is padded to one length, so it writes columns up to here.
        ends = [
            max(item.num_cached for item in batch) + round_up(max(item.num_missing for item in batch), QUERY_STEP)
            for batch in batches
        ]
        widths = [self._read_width(end, QUERY_STEP) for end in ends]
        self._prompts.reserve(len(items), max([1, *(len(item.tokens) for item in items), *widths]), 0)
        known = [location for item in items for location in BlockLocation.of(item.known, item.slot)]
        self._prefixes.load(known, self._prompts.states)
        for batch, width in zip(batches, widths, strict=True):
            self._prefill(batch, width)
        new = [spot for item in items for spot in BlockLocation.of(item.new, item.slot, len(item.known))]
        self._prefixes.store(new, self._prompts.states)

    def _shared_states(self, slot: int, length: int) -> Tensor | None:
        """Return a copy of the states of a prompt's whole blocks, from its slot; `None` if the prompt is short."""
        if self.least_shared is None or length < self.least_shared:
            return None
        return self._prompts.states[:, :, slot, :, : length - length % BLOCK].clone()

    def _append(self, row: _Row, source: SlotCache, slot: int, first: int) -> None:
        """Add a row, and copy its states from a slot, beginning at column `first`."""
        stop = row.num_columns
        self._reserve(len(self._rows) + 1, stop + 1)
        row.slot = len(self._rows)
        self._rows.append(row)
        self._cache.states[:, :, row.slot, :, :stop] = source.states[:, :, slot, :, first : first + stop]
        self._mark(row)

    def _reserve(self, slots: int, columns: int) -> None:
        columns = max([columns, *(row.num_columns for row in self._rows)])
        if self._cache.reserve(slots, columns, len(self._rows)):
            self._make_buffers()

    def _prefill(self, batch: list[PrefillItem], width: int) -> None:
        """Compute the batch's missing tokens, in pieces where they are many, reading `width` columns."""
        longest = round_up(max(item.num_missing for item in batch), QUERY_STEP)
        piece = round_up(self._pass_tokens // len(batch), QUERY_STEP)
        starts = torch.tensor([[item.num_cached] for item in batch], device=self._device)
        ends = torch.tensor([[len(item.tokens)] for item in batch], device=self._device)
        padded = torch.tensor(
            [[*item.tokens[item.num_cached :], *[0] * (longest - item.num_missing)] for item in batch],
            dtype=torch.long,
            device=self._device,
        )
        for offset in range(0, longest, piece):
            inputs = padded[:, offset : offset + piece]  # [N, T]
            columns = starts + torch.arange(offset, offset + inputs.shape[1], device=self._device)
            num_read = self._prompts.aim(batch[0].slot, len(batch), columns, width)
            visible = torch.arange(num_read, device=self._device) <= columns.unsqueeze(2)  # [N, T, read]
            mask = torch.zeros_like(visible, dtype=self._mask.dtype).masked_fill_(~visible, -torch.inf)
            # Padding is written after the prompt, where no one reads; its positions only have to exist.
            self._forward(self._prompts, inputs, columns.minimum(ends - 1), mask.unsqueeze(1))

    def _forward(
        self, cache: SlotCache, inputs: Tensor, positions: Tensor, mask: Tensor, above: PromptAttention | None = None
    ) -> Tensor:
        logits: Tensor = self._model(
            input_ids=inputs,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._options,
            **({} if above is None else {"above": above}),
        ).logits
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        self._split_rows(tokens)
        count, num_rows = len(self._rows), self._padded(len(self._rows))
        width = self._read_width(max(row.num_columns for row in self._rows) + 1, self._queries_per_key)
        self._reserve(num_rows, width)
        if self._row_of_sequence is None:
            self._row_of_sequence = torch.tensor([row.slot for row in self._sequences], device=self._device)
            prompts = [row.prompt for row in self._rows] + [None] * (num_rows - count)
            has_prompts = any(prompt is not None for prompt in prompts)
            self._attention = PromptAttention(prompts) if has_prompts else None
        inputs = [[0]] * num_rows
        for row, token in zip(self._sequences, tokens, strict=True):
            inputs[row.slot] = [token]
        columns, starts = self._columns[:num_rows], self._starts[:num_rows]
        columns[count:] = starts[count:] = 0  # slots that are not in use
        self._mask.view(-1).index_fill_(0, self._mask_start[:num_rows] + columns[:, 0], 0)
        self._inputs[:num_rows] = torch.tensor(inputs)
        num_read = self._cache.num_read(width)

        def forward() -> Tensor:
            self._cache.aim(0, num_rows, columns, width)
            mask = self._mask[:num_rows, ..., :num_read]
            return self._forward(self._cache, self._inputs[:num_rows], columns + starts, mask, self._attention)

        logits = self._graphs.run((num_rows, num_read), forward)[:, -1]
        columns += 1
        for row in self._rows:
            row.length += 1
        return logits.index_select(0, self._row_of_sequence)

    def _padded(self, num_rows: int) -> int:
        if self._device.type == "cpu":
            return round_up(num_rows, _ROW_STEP)
        return round_up(num_rows, 2 * _ROW_STEP if num_rows <= 16 * _ROW_STEP else 8 * _ROW_STEP)

    def _split_rows(self, tokens: Sequence[int]) -> None:
        """Give new rows to sequences that continue with another token than the first of their row."""
        if len(self._rows) == len(self._sequences):
            return
        first: dict[_Row, int] = {}
        others: dict[tuple[_Row, int], _Row] = {}
        for number, (row, token) in enumerate(zip(self._sequences, tokens, strict=True)):
            if first.setdefault(row, token) == token:
                continue
            row.num_sequences -= 1
            if (other := others.get((row, token))) is None:
                self._row_of_sequence = None
                other = others[row, token] = _Row(-1, row.length, 0, row.prompt)
                self._append(other, self._cache, row.slot, 0)
            other.num_sequences += 1
            self._sequences[number] = other

    def _read_width(self, columns: int, queries: int) -> int:
        if self._device.type != "cpu":
            return columns
        return stable_width(columns, queries=queries, head_dim=self._cache.shape.head_dim)

    def remove(self, ended: Mapping[int, Sequence[int]]) -> None:
        rows = {number: self._sequences[number] for number in ended}
        # Cache their states: later prompts may begin with their tokens.
        self._prefixes.begin_round()
        computed: list[BlockLocation] = []
        for number, row in rows.items():
            known = ended[number][: row.length]
            path = self._prefixes.match(known)
            first = len(path) - row.num_in_prompt // BLOCK  # new block of the slot
            if first >= 0:  # else its prompt was forgotten meanwhile, for lack of memory
                computed += BlockLocation.of(self._prefixes.extend(known, path), row.slot, first)
        self._prefixes.store(computed, self._cache.states)
        self._sequences = [row for number, row in enumerate(self._sequences) if number not in ended]
        self._row_of_sequence = None
        for row in rows.values():
            row.num_sequences -= 1
        # The last of the rows that still have sequences take the slots of those that have none.
        kept = [row for row in self._rows if row.num_sequences]
        free = (row.slot for row in self._rows if row.num_sequences == 0)
        for row in kept:
            if row.slot >= len(kept):
                slot = next(free)
                states = self._cache.states
                states[:, :, slot, :, : row.num_columns] = states[:, :, row.slot, :, : row.num_columns]
                row.slot = slot
                self._mark(row)
        self._rows = sorted(kept, key=lambda row: row.slot)

    def clear(self) -> None:
        self._rows.clear()
        self._sequences.clear()
        self._row_of_sequence = self._attention = None
        self._prefixes.clear()
        self._graphs.clear()
        if self._device.type == "cpu":  # a GPU's memory stays laid out
            for cache in (self._prompts, self._cache, self._prefixes):
                cache.release()
            self._make_buffers()

    @property
    def cache_bytes(self) -> int:
        apart = {id(row.prompt): row.prompt.nbytes for row in self._rows if row.prompt is not None}
        return self._prompts.nbytes + self._cache.nbytes + self._prefixes.nbytes + int(sum(apart.values()))


def prefill_batches(items: Iterable[PrefillItem], max_tokens: int, max_padding: int) -> list[list[PrefillItem]]:
    """Group prompts in neighbouring slots, with rising numbers of missing tokens, so that little padding is needed.

    Lengths are rounded up to `QUERY_STEP` in any case. A group has at most `max_tokens`, unless it is one prompt.
    """
    batches: list[list[PrefillItem]] = []
    num_needed = 0  # tokens of the last group without its padding
    for item in items:
        if item.num_missing == 0:
            continue
        length = round_up(item.num_missing, QUERY_STEP)
        padded, num_needed = length * (len(batches[-1]) + 1) if batches else 0, num_needed + length
        if not batches or padded > max_tokens or padded - num_needed > max_padding:
            batches.append([])
            num_needed = length
        batches[-1].append(item)
    return batches


def round_up(number: int, step: int) -> int:
    """Return the next multiple of `step`, which is at least `step`."""
    return max(-(-number // step), 1) * step


def stable_width(columns: int, *, queries: int, head_dim: int) -> int:
    """Return the least width of at least `columns` over which a CPU's attention is summed as over any greater one.

    The kernel sums `_SUMMED_COLUMNS` at a time. Fewer columns in the last block may be summed in parts that depend
    on their number, and on the CPU: 193 to 383 on some, 385 to 511 on others, 257 to 511 with AVX2. So the widths
    are tried.
    """
    blocks, rest = divmod(columns, _SUMMED_COLUMNS)
    widths = _stable_widths(queries, head_dim)
    return blocks * _SUMMED_COLUMNS + (next(width for width in widths if width >= rest) if rest else 0)


@cache
def _stable_widths(queries: int, head_dim: int) -> tuple[int, ...]:
    """Return, in ascending order, the widths with the same result as a whole block whose rest is masked."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(1, 1, length, head_dim, generator=generator)
        for length in (queries, _SUMMED_COLUMNS, _SUMMED_COLUMNS)
    )

    def attend(width: int, num_seen: int) -> Tensor:
        mask = torch.zeros(1, 1, 1, width)
        mask[..., num_seen:] = -torch.inf
        return scaled_dot_product_attention(query, keys[:, :, :width], values[:, :, :width], attn_mask=mask)

    # A difference shows if all columns are seen: columns of weight 0 change no sum.
    with torch.no_grad():
        widths = range(_COLUMN_STEP, _SUMMED_COLUMNS + 1, _COLUMN_STEP)
        return tuple(width for width in widths if attend(width, width).equal(attend(_SUMMED_COLUMNS, width)))
