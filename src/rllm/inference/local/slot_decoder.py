"""Batched decoding with slot caches, and with prefixes that are computed once: for models with plain full attention.

Sequences that are equal so far are one *row* of the batch until they part, as the samples of one prompt are at first. A
prompt's keys lie in a slot of their own while they are computed. Those of a long one stay there, as the *stem* of all rows
that begin with it; those of a short one are copied in front of the row's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rllm.inference.local.decoder import Added, cache_argument, last_logits_only
from rllm.inference.local.kv_cache import CacheShape, SlotCache
from rllm.inference.local.prefill import PASS_TOKENS, Intake, Run, even, in_batches, last_column
from rllm.inference.local.prefix_cache import BLOCK, Place, PrefixCache
from rllm.inference.local.short_forward import ShortForward
from rllm.inference.local.stems import ROWS, Group, StemAttention
from rllm.inference.local.widths import even_width

_WORTH_WAITING = 16
"""A prompt waits for a sibling's prefix to be computed if it then saves at least this many tokens."""
STEM_TOKENS = 256
"""Shorter prompts are copied to each row: reading them again costs less than an operation more."""
_STEP_ROWS = 4
"""On a CPU, products of a multiple of so many rows are computed in the same order whatever else is in the batch, and so is attention
(`widths.py`). So what is sampled follows from weights, prompt and seed, to the last bit; a single rounding of another kind would
choose another token about once in a million."""

_WITH_STEMS, _WITHOUT = (3, 3, 2), (1, 5, 2)
"""Eighths of the memory for prompts, rows and prefixes. Without stems prompts stay only while they are computed."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt whose states are held, up to its last token."""

    place: int
    """Its slot of the prompts."""
    tokens: tuple[int, ...]
    num_rows: int = 0
    """How many rows read it as their stem."""


@dataclass(eq=False, slots=True)
class _Row:
    """A row of the batch: one sequence, or several that are equal so far."""

    place: int
    """Its slot of the rows."""
    stem: _Prompt | None
    length: int
    """Number of tokens in its own slot."""
    num_sequences: int = 1

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.length + (len(self.stem.tokens) if self.stem else 0)


class SlotDecoder:
    """Batched decoding with slot caches, and with prefixes that are computed once."""

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        *,
        max_sequences: int,
        max_length: int,
        max_bytes: int,
        short_forward: ShortForward | None = None,
    ) -> None:
        self._model = model
        self._short_forward = short_forward
        self._device = shape.device
        heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", shape.num_heads)
        self._queries = heads // shape.num_heads
        has_stems = short_forward is not None and shape.device.type == "cpu"
        self.stem_tokens = STEM_TOKENS if has_stems else None
        """From how many tokens on a prompt is a stem; `None` where none is."""
        limits = {"max_slots": max_sequences, "max_columns": max_length}
        for_prompts, for_rows, for_prefixes = (
            max_bytes * share // 8 for share in (_WITH_STEMS if has_stems else _WITHOUT)
        )
        self._prompt_cache = SlotCache(shape, **limits, max_bytes=for_prompts)
        self._cache = SlotCache(shape, **limits, max_bytes=for_rows)
        self._prefixes = PrefixCache(shape, max_bytes=for_prefixes)
        self._options, self._cache_argument = last_logits_only(model), cache_argument(model)
        self._prompts: list[_Prompt] = []  # by place
        self._rows: list[_Row] = []  # by place
        self._sequences: list[_Row] = []
        self._stems: StemAttention | None = None
        self._is_new = True  # whether the batch has changed since its last step
        self._make_buffers()

    def _make_buffers(self) -> None:
        slots, columns = self._cache.num_slots, self._cache.num_columns
        self._positions = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._columns = torch.zeros((slots, 1), dtype=torch.long, device=self._device)
        # Added to the attention scores: 0 where a column holds a token.
        self._mask = torch.full((slots, 1, 1, columns), -torch.inf, dtype=self._cache.shape.dtype, device=self._device)
        self._mask_start = torch.arange(slots, device=self._device) * columns
        for row in self._rows:
            self._mark(row)

    def _mark(self, row: _Row) -> None:
        self._positions[row.place], self._columns[row.place] = row.position, row.length
        self._mask[row.place, ..., : row.length] = 0
        self._mask[row.place, ..., row.length :] = -torch.inf

    def fits(self, num_sequences: int, length: int) -> bool:
        return self._cache.fits(num_sequences, length)

    def add(self, prompts: Sequence[list[int]]) -> list[Added]:
        self._prefixes.begin_round()
        self._is_new = True
        known = {prompt.tokens: prompt for prompt in self._prompts}
        chosen: dict[tuple[int, ...], Intake] = {}
        members: dict[tuple[int, ...], list[int]] = {}
        longest = max(map(len, known), default=0)
        for index, ids in enumerate(prompts):
            tokens = tuple(ids[:-1])
            if tokens not in members:
                members[tokens] = []
                columns = max(longest, len(tokens))
                if tokens not in known and self._has_room(len(chosen), columns) and (item := self._choose(tokens)):
                    chosen[tokens], longest = item, columns
            members[tokens].append(index)
        known |= self._take_in(sorted(chosen.values(), key=lambda item: item.num_missing))
        self._reserve(len(self._sequences) + len(prompts), 1)
        added = []
        for tokens, indices in members.items():
            if tokens in known:
                self._sequences += [self._new_row(known[tokens], len(indices))] * len(indices)
                num_cached = chosen[tokens].num_cached if tokens in chosen else len(tokens)
                added += [Added(indices[0], num_cached), *(Added(index, len(tokens)) for index in indices[1:])]
        for prompt in reversed(known.values()):
            if prompt.num_rows == 0:
                self._drop_prompt(prompt)
        return added

    def _has_room(self, num_chosen: int, columns: int) -> bool:
        """Whether one more prompt can be computed beside those that are chosen; one alone always is."""
        return num_chosen == 0 or self._prompt_cache.fits(len(self._prompts) + num_chosen + 1, columns)

    def _choose(self, tokens: tuple[int, ...]) -> Intake | None:
        """How a prompt is taken in now; `None` if it should wait for a prefix that another one is about to compute."""
        path = self._prefixes.match(tokens)
        ready = [block for block in path if block.ready]
        if (len(path) - len(ready)) * BLOCK >= _WORTH_WAITING:
            return None
        made = self._prefixes.extend(tokens, path) if len(ready) == len(path) else []
        return Intake(tokens=tokens, path=ready, made=made)

    def _take_in(self, items: list[Intake]) -> dict[tuple[int, ...], _Prompt]:
        """Compute what is missing of prompts, which are in order of that."""
        first = len(self._prompts)
        batches = in_batches(Run(place, item.tokens, item.num_cached) for place, item in enumerate(items, start=first))
        widths = [self._read_width(last_column(batch), ROWS) for batch in batches]
        held, new = ([len(item.tokens) for item in those] for those in (self._prompts, items))
        columns = max([1, *held, *new, *widths])
        self._prompt_cache.reserve(first + len(items), columns, first)
        made = [_Prompt(place, item.tokens) for place, item in enumerate(items, start=first)]
        self._prompts += made
        known = [place for slot, item in enumerate(items, start=first) for place in Place.of(item.path, slot)]
        self._prefixes.load(known, self._prompt_cache.states)
        for batch, width in zip(batches, widths, strict=True):
            self._prefill(batch, width)
        computed = [
            place for slot, item in enumerate(items, start=first) for place in Place.of(item.made, slot, len(item.path))
        ]
        self._prefixes.store(computed, self._prompt_cache.states)
        return {prompt.tokens: prompt for prompt in made}

    def _new_row(self, prompt: _Prompt, num_sequences: int) -> _Row:
        length, place = len(prompt.tokens), len(self._rows)
        if self.stem_tokens is not None and length >= self.stem_tokens:
            row = _Row(place, prompt, 0, num_sequences)
            prompt.num_rows += 1
        else:
            row = _Row(place, None, length, num_sequences)
        self._append(row, self._prompt_cache, prompt.place)
        return row

    def _append(self, row: _Row, source: SlotCache, place: int) -> None:
        """Add a row, whose own states are copied from a slot."""
        self._reserve(len(self._rows) + 1, row.length + 1)
        self._rows.append(row)
        self._cache.states[:, :, row.place, :, : row.length] = source.states[:, :, place, :, : row.length]
        self._mark(row)

    def _reserve(self, slots: int, columns: int) -> None:
        columns = max([columns, *(row.length for row in self._rows)])
        if self._cache.reserve(slots, columns, len(self._rows)):
            self._is_new = True
            self._make_buffers()

    def _prefill(self, batch: list[Run], width: int) -> None:
        """Compute the states of the batch's tokens, in pieces where they are long, which read `width` columns."""
        longest = even(max(run.length for run in batch))
        piece = even(PASS_TOKENS // len(batch))
        starts = torch.tensor([[run.start] for run in batch], device=self._device)
        ends = torch.tensor([[len(run.tokens)] for run in batch], device=self._device)
        padded = torch.tensor(
            [[*run.tokens[run.start :], *[0] * (longest - run.length)] for run in batch],
            dtype=torch.long,
            device=self._device,
        )
        for offset in range(0, longest, piece):
            inputs = padded[:, offset : offset + piece]  # [N, T]
            columns = starts + torch.arange(offset, offset + inputs.shape[1], device=self._device)
            num_read = self._prompt_cache.aim(batch[0].place, len(batch), columns, width)
            visible = torch.arange(num_read, device=self._device) <= columns.unsqueeze(2)  # [N, T, read]
            mask = torch.zeros_like(visible, dtype=self._mask.dtype).masked_fill_(~visible, -torch.inf)
            # Padding is written behind the run, where later tokens overwrite it; its positions only have to exist.
            self._read_prompts(
                inputs, columns.minimum(ends - 1), mask.unsqueeze(1), most=max(len(run.tokens) for run in batch)
            )

    def _read_prompts(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, *, most: int) -> None:
        if self._short_forward is None:
            self._forward(self._prompt_cache, inputs, positions, mask)
        else:
            self._short_forward.prefill(inputs, positions, mask, self._prompt_cache, most)

    def _forward(
        self, cache: SlotCache, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=inputs,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._options,
        ).logits
        return logits

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        self._part(tokens)
        count, rows = len(self._rows), even(len(self._rows), _STEP_ROWS)
        width = self._read_width(max(row.length for row in self._rows) + 1, self._queries)
        self._reserve(rows, width)
        if self._is_new:
            self._look_at_batch()
        inputs = [0] * rows
        for row, token in zip(self._sequences, tokens, strict=True):
            inputs[row.place] = token
        positions, columns = self._positions[:rows], self._columns[:rows]
        positions[count:], columns[count:] = 0, 0  # of slots that are not in use
        self._mask.view(-1).index_fill_(0, self._mask_start[:rows] + columns[:, 0], 0)
        num_read = self._cache.aim(0, rows, columns, width)
        logits = self._logits(torch.tensor(inputs, device=self._device), positions, self._mask[:rows, ..., :num_read])
        positions += 1
        columns += 1
        for row in self._rows:
            row.length += 1
        return logits.index_select(0, self._places)

    def _logits(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._short_forward is None:
            return self._forward(self._cache, inputs.unsqueeze(1), positions.unsqueeze(1), mask)[:, -1]
        most = 1 + max(row.position for row in self._rows)
        return self._short_forward(inputs, positions, mask, self._cache, most, self._stems)

    def _part(self, tokens: Sequence[int]) -> None:
        """Give rows of their own to sequences that go on with another token than the first of their row."""
        if len(self._rows) == len(self._sequences):
            return
        first: dict[_Row, int] = {}
        others: dict[tuple[_Row, int], _Row] = {}
        for number, (row, token) in enumerate(zip(self._sequences, tokens, strict=True)):
            if first.setdefault(row, token) == token:
                continue
            row.num_sequences -= 1
            if (other := others.get((row, token))) is None:
                self._is_new = True
                other = others[row, token] = _Row(len(self._rows), row.stem, row.length, 0)
                self._append(other, self._cache, row.place)
                if row.stem:
                    row.stem.num_rows += 1
            other.num_sequences += 1
            self._sequences[number] = other

    def _look_at_batch(self) -> None:
        """Where each sequence's logits are, and which rows share a stem."""
        self._is_new = False
        self._places = torch.tensor([row.place for row in self._sequences], device=self._device)
        members: dict[_Prompt, list[int]] = {}
        for row in self._rows:
            if row.stem:
                members.setdefault(row.stem, []).append(row.place)
        states = self._prompt_cache.states
        groups = [Group(states[:, :, stem.place, :, : len(stem.tokens)], rows) for stem, rows in members.items()]
        self._stems = StemAttention(groups, self._queries) if groups else None

    def _read_width(self, columns: int, queries: int) -> int:
        """How many columns attention reads so that a row's result does not depend on the lengths of the others."""
        if self._device.type != "cpu":
            return columns
        return even_width(columns, queries=queries, head_dim=self._cache.shape.head_dim)

    def remove(self, ended: Mapping[int, Sequence[int]]) -> None:
        rows = {number: self._sequences[number] for number in ended}
        self._remember((row, ended[number][: row.position]) for number, row in rows.items())
        self._sequences = [row for number, row in enumerate(self._sequences) if number not in ended]
        self._is_new = True
        for row in rows.values():
            row.num_sequences -= 1
        self._drop_unused_rows()

    def _remember(self, ended: Iterable[tuple[_Row, Sequence[int]]]) -> None:
        """Keep the states of rows' tokens for later prompts that begin with them."""
        self._prefixes.begin_round()
        computed: list[Place] = []
        for row, known in ended:
            path = self._prefixes.match(known)
            made = self._prefixes.extend(known, path)
            if row.stem and made:
                start, length = len(path) * BLOCK, len(row.stem.tokens)
                stem = self._prompt_cache.states[:, :, row.stem.place, :, min(start, length) : length]
                own = self._cache.states[:, :, row.place, :, max(start - length, 0) : row.length]
                self._prefixes.store(Place.of(made, 0), torch.cat([stem, own], dim=3).unsqueeze(2))
            else:
                computed += Place.of(made, row.place, len(path))
        self._prefixes.store(computed, self._cache.states)

    def _drop_unused_rows(self) -> None:
        """Give up the rows without sequences; the last of the others take their places."""
        unused = [row for row in self._rows if row.num_sequences == 0]
        kept = [row for row in self._rows if row.num_sequences]
        free = (row.place for row in unused)
        for row in kept:
            if row.place >= len(kept):
                place = next(free)
                self._cache.move(row.place, place, row.length)
                row.place = place
                self._mark(row)
        self._rows = sorted(kept, key=lambda row: row.place)
        for row in unused:
            if row.stem:
                row.stem.num_rows -= 1
                if row.stem.num_rows == 0:
                    self._drop_prompt(row.stem)

    def _drop_prompt(self, prompt: _Prompt) -> None:
        last = self._prompts.pop()
        if last is not prompt:
            self._prompt_cache.move(last.place, prompt.place, len(last.tokens))
            self._prompts[prompt.place], last.place = last, prompt.place

    def clear(self) -> None:
        for held in (self._prompts, self._rows, self._sequences):
            held.clear()
        self._is_new = True
        self._prefixes.clear()
