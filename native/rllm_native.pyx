# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Token ids and log-probabilities, read from the JSON of answers straight into arrays: no Python object for each of them.

It is optional. What it returns `None` for, because anything about it is unusual, is read by the gateway's own Python, which gives
the same for all the rest, too: `tests/gateway/test_native.py` compares them. So it knows few forms, and refuses when in doubt.

It never reads a byte outside the `bytes` that it is given: every look ahead is bounded by `Cursor.end`. Strings and whatever else it
does not interpret are passed on as they came, to be parsed (and refused, if they are no JSON) by whoever called.
"""

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport isfinite, ldexp
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy

import array

cdef extern from "Python.h":
    ctypedef struct PyObject
    double PyOS_string_to_double(const char* text, char** end, PyObject* overflow) except? -1.0

INTERFACE = 1
"""Of the functions below: a gateway that knows another one does without them."""

cdef array.array _ids = array.array("I")
cdef array.array _floats = array.array("d")
cdef array.array _singles = array.array("f")
assert sizeof(unsigned int) == 4 and _ids.itemsize == 4

include "json.pxi"


# --- tokens --------------------------------------------------------------------------------------------------------------


cdef bint read_ids(Cursor* c, Buffer* ids) except -1:
    """An array of token ids."""
    cdef int more
    cdef uint32_t value
    if not take(c, b"["):
        return False
    if is_next(c, b"]"):
        c.at += 1
        return True
    while True:
        if not read_id(c, &value):
            return False
        append(ids, &value, sizeof(value))
        more = goes_on(c, b"]")
        if more != MORE:
            return more == OVER


cdef bint read_entry(Cursor* c, Buffer* numbers, double most) except -1:
    """One entry of `logprobs.content`: only its number is kept. Its text is not an id, which would have to be compared."""
    cdef int more
    cdef Span name
    cdef Span text
    cdef double value
    cdef bint found = False
    if not take(c, b"{"):
        return False
    while True:
        if not read_key(c, &name):
            return False
        if names(&name, b"logprob", 7):
            if found or not read_number(c, &value) or not isfinite(value) or value > most:
                return False
            append(numbers, &value, sizeof(value))
            found = True
        elif names(&name, b"token", 5) and is_next(c, b'"'):
            if not read_string(c, &text) or (text.size >= 9 and memcmp(text.start, b"token_id:", 9) == 0):
                return False
        elif not skip_value(c):
            return False
        more = goes_on(c, b"}")
        if more != MORE:
            return more == OVER and found


cdef bint read_content(Cursor* c, Buffer* numbers, double most) except -1:
    """The array `logprobs.content`."""
    cdef int more
    if not take(c, b"["):
        return False
    if is_next(c, b"]"):
        c.at += 1
        return True
    while True:
        if not read_entry(c, numbers, most):
            return False
        more = goes_on(c, b"]")
        if more != MORE:
            return more == OVER


cdef bint read_logprobs(Cursor* c, Buffer* numbers, double most) except -1:
    """An object `logprobs` that has a `content`, and beside it, as OpenAI's has, at most a `refusal` of null."""
    cdef int more
    cdef Span name
    cdef bint found = False
    if not take(c, b"{"):
        return False
    while True:
        if not read_key(c, &name):
            return False
        if names(&name, b"content", 7):
            if found or not read_content(c, numbers, most):
                return False
            found = True
        elif not (names(&name, b"refusal", 7) and read_null(c)):
            return False
        more = goes_on(c, b"}")
        if more != MORE:
            return more == OVER and found


# --- whole answers -------------------------------------------------------------------------------------------------------


cdef struct Cutting:
    # A text that is copied without the values that were read.
    Buffer rest
    const char* copied


cdef int cut(Cutting* cutting, const char* start, const char* behind) except -1:
    """Leave null in the place of a value."""
    append(&cutting.rest, cutting.copied, start - cutting.copied)
    append(&cutting.rest, b"null", 4)
    cutting.copied = behind
    return 0


cdef bint cut_choice(Cursor* c, Cutting* cutting, list found, double most) except -1:
    """A choice that has both `token_ids` and `logprobs`."""
    cdef int more
    cdef Buffer ids
    cdef Buffer numbers
    cdef Span name
    cdef const char* start
    cdef bint has_ids = False
    cdef bint has_numbers = False
    ids.data, ids.size, ids.room = NULL, 0, 0
    numbers.data, numbers.size, numbers.room = NULL, 0, 0
    try:
        if not take(c, b"{"):
            return False
        while True:
            if not read_key(c, &name):
                return False
            start = c.at
            if names(&name, b"token_ids", 9):
                if has_ids or not read_ids(c, &ids):
                    return False
                has_ids = True
                cut(cutting, start, c.at)
            elif names(&name, b"logprobs", 8):
                if has_numbers or not read_logprobs(c, &numbers, most):
                    return False
                has_numbers = True
                cut(cutting, start, c.at)
            elif not skip_value(c):
                return False
            more = goes_on(c, b"}")
            if more == BROKEN:
                return False
            if more == OVER:
                break
        if not (has_ids and has_numbers):
            return False
        found.append((to_array(&ids, _ids), to_array(&numbers, _floats)))
        return True
    finally:
        free(ids.data)
        free(numbers.data)


cdef bint cut_choices(Cursor* c, Cutting* cutting, list found, double most) except -1:
    """An array of choices, one at least."""
    cdef int more
    if not take(c, b"["):
        return False
    while True:
        if not cut_choice(c, cutting, found, most):
            return False
        more = goes_on(c, b"]")
        if more != MORE:
            return more == OVER


cdef tuple cut_answer(const char* text, const char* end, list found, double most):
    """An object with `prompt_token_ids`, and where choices are to be found with these: it as JSON without tokens, and the prompt's
    ids; `None` if it is anything else."""
    cdef int more
    cdef Cursor cursor
    cdef Cursor* c = &cursor
    cdef Cutting cutting
    cdef Buffer ids
    cdef Span name
    cdef const char* start
    cdef bint has_ids = False
    cdef bint has_choices = False
    c.at = cutting.copied = text
    c.end = end
    cutting.rest.data, cutting.rest.size, cutting.rest.room = NULL, 0, 0
    ids.data, ids.size, ids.room = NULL, 0, 0
    try:
        if not take(c, b"{"):
            return None
        while True:
            if not read_key(c, &name):
                return None
            start = c.at
            if names(&name, b"prompt_token_ids", 16):
                if has_ids or not read_ids(c, &ids):
                    return None
                has_ids = True
                cut(&cutting, start, c.at)
            elif found is not None and names(&name, b"choices", 7):
                if has_choices or not cut_choices(c, &cutting, found, most):
                    return None
                has_choices = True
            elif not skip_value(c):
                return None
            more = goes_on(c, b"}")
            if more == BROKEN:
                return None
            if more == OVER:
                break
        if not has_ids or (found is not None and not has_choices):
            return None
        append(&cutting.rest, cutting.copied, end - cutting.copied)
        return PyBytes_FromStringAndSize(cutting.rest.data, cutting.rest.size), to_array(&ids, _ids)
    finally:
        free(cutting.rest.data)
        free(ids.data)


def scan_answer(bytes body not None, double most):
    """A chat completion as JSON without its tokens, and these.

    Args:
        body: a JSON object with `prompt_token_ids`, and with `token_ids` and `logprobs.content` in each of its choices.
        most: what a log-probability is at most.

    Returns:
        The object, in which null stands for what was taken out; the prompt's ids, `array("I")`; and of each choice its ids and
        its log-probabilities, `array("d")`. `None` if it is anything else.
    """
    cdef const char* text = PyBytes_AS_STRING(body)
    cdef list found = []
    cdef tuple rest = cut_answer(text, text + PyBytes_GET_SIZE(body), found, most)
    return None if rest is None else (*rest, found)


# --- the events of a stream ------------------------------------------------------------------------------------------------


cdef struct Event:
    # What an event says that only carries text.
    Span id
    Span object
    Span created
    Span model
    Span fingerprint
    Span content
    uint32_t index
    bint has_logprobs


cdef bint read_raw_string(Cursor* c, Span* outer) noexcept:
    """A string with its quotes."""
    cdef Span inner
    outer.start = c.at
    if not read_string(c, &inner):
        return False
    outer.size = c.at - outer.start
    return True


cdef bint is_cut(Span* text) noexcept:
    """Whether it begins or ends within a character, of which another event could have the rest."""
    cdef size_t num_behind = 0
    cdef unsigned char byte
    if text.size == 0:
        return False
    if <unsigned char>text.start[0] & 0xC0 == 0x80:
        return True
    while num_behind < text.size:
        byte = <unsigned char>text.start[text.size - 1 - num_behind]
        num_behind += 1
        if byte & 0xC0 != 0x80:
            return num_behind < (1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True


cdef bint has_surrogate(Span* text) noexcept:
    """Whether half of a surrogate pair may be escaped in it, which two events could share."""
    cdef const char* at = text.start
    cdef const char* end = text.start + text.size
    while text.has_escapes and at < end:
        at = <const char*>memchr(at, b"\\", end - at)
        if at == NULL:
            return False
        if end - at >= 3 and at[1] == b"u" and (at[2] == b"d" or at[2] == b"D"):
            return True
        at += 2
    return False


cdef bint read_delta(Cursor* c, Event* event) noexcept:
    cdef int more
    cdef Span name
    cdef bint found = False
    if not take(c, b"{"):
        return False
    while True:
        if not read_key(c, &name):
            return False
        if names(&name, b"content", 7):
            if found or not read_string(c, &event.content) or has_surrogate(&event.content) or is_cut(&event.content):
                return False
            found = True
        elif not (
            (
                names(&name, b"role", 4) or names(&name, b"refusal", 7) or names(&name, b"reasoning", 9)
                or names(&name, b"reasoning_content", 17) or names(&name, b"tool_calls", 10)
            )
            and read_null(c)
        ):
            return False
        more = goes_on(c, b"}")
        if more != MORE:
            return more == OVER and found


cdef bint read_text_choice(Cursor* c, Event* event, Buffer* ids, Buffer* numbers, double most) except -1:
    cdef int more
    cdef Span name
    cdef bint has_index = False
    cdef bint has_delta = False
    cdef bint has_ids = False
    cdef bint has_logprobs = False
    if not take(c, b"{"):
        return False
    while True:
        if not read_key(c, &name):
            return False
        if names(&name, b"index", 5):
            if has_index or not read_id(c, &event.index):
                return False
            has_index = True
        elif names(&name, b"delta", 5):
            if has_delta or not read_delta(c, event):
                return False
            has_delta = True
        elif names(&name, b"token_ids", 9):
            if has_ids or not read_ids(c, ids):
                return False
            has_ids = True
        elif names(&name, b"logprobs", 8):
            if has_logprobs:
                return False
            has_logprobs = True
            event.has_logprobs = not read_null(c)
            if event.has_logprobs and not read_logprobs(c, numbers, most):
                return False
        elif not (
            (names(&name, b"finish_reason", 13) or names(&name, b"stop_reason", 11) or names(&name, b"matched_stop", 12))
            and read_null(c)
        ):
            return False
        more = goes_on(c, b"}")
        if more != MORE:
            return more == OVER and has_index and has_delta and has_ids


cdef bint read_event(Cursor* c, Event* event, Buffer* ids, Buffer* numbers, double most) except -1:
    """An event whose only choice says this much more text, these tokens."""
    cdef Span name
    cdef uint32_t unused
    cdef bint has_choices = False
    event.id.size = event.object.size = event.created.size = event.model.size = event.fingerprint.size = 0
    event.has_logprobs = False
    if not take(c, b"{"):
        return False
    while True:
        if not read_key(c, &name):
            return False
        if names(&name, b"id", 2):
            if event.id.size or not read_raw_string(c, &event.id):
                return False
        elif names(&name, b"object", 6):
            if event.object.size or not read_raw_string(c, &event.object):
                return False
        elif names(&name, b"model", 5):
            if event.model.size or not read_raw_string(c, &event.model):
                return False
        elif names(&name, b"created", 7):
            if event.created.size:
                return False
            event.created.start = c.at
            if not read_id(c, &unused):
                return False
            event.created.size = c.at - event.created.start
        elif names(&name, b"choices", 7):
            if has_choices or not take(c, b"[") or not read_text_choice(c, event, ids, numbers, most) or not take(c, b"]"):
                return False
            has_choices = True
        elif names(&name, b"system_fingerprint", 18):
            if not read_null(c) and (event.fingerprint.size or not read_raw_string(c, &event.fingerprint)):
                return False
        elif not (names(&name, b"usage", 5) and read_null(c)):
            return False
        skip_space(c)
        if is_next(c, b"}"):
            c.at += 1
            skip_space(c)
            break
        if not take(c, b","):
            return False
    return c.at == c.end and has_choices and event.id.size and event.object.size and event.model.size and event.created.size


cdef class Run:
    """Text chunks of one choice that follow each other, as they become one."""

    cdef Event first
    cdef Buffer head
    cdef Buffer ids
    cdef Buffer numbers

    def __cinit__(self):
        self.head.data, self.head.size, self.head.room = NULL, 0, 0
        self.ids.data, self.ids.size, self.ids.room = NULL, 0, 0
        self.numbers.data, self.numbers.size, self.numbers.room = NULL, 0, 0

    def __dealloc__(self):
        free(self.head.data)
        free(self.ids.data)
        free(self.numbers.data)

    cdef int member(self, const char* name, size_t size, Span* value) except -1:
        append(&self.head, name, size)
        append(&self.head, value.start, value.size)
        return 0

    cdef int begin(self, Event* event) except -1:
        self.first = event[0]
        self.member(b'{"id":', 6, &event.id)
        self.member(b',"object":', 10, &event.object)
        self.member(b',"created":', 11, &event.created)
        self.member(b',"model":', 9, &event.model)
        written = b',"choices":[{"index":%d,"delta":{"content":"' % event.index
        append(&self.head, PyBytes_AS_STRING(written), PyBytes_GET_SIZE(written))
        return 0

    cdef tuple end(self):
        cdef bytes rest = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        append(&self.head, PyBytes_AS_STRING(rest), PyBytes_GET_SIZE(rest))
        if self.first.fingerprint.size:
            self.member(b',"system_fingerprint":', 22, &self.first.fingerprint)
        append(&self.head, b"}", 1)
        return (
            PyBytes_FromStringAndSize(self.head.data, self.head.size),
            to_array(&self.ids, _ids),
            to_array(&self.numbers, _floats) if self.first.has_logprobs else None,
        )


def scan_events(bytes text not None, double most):
    """The events of a piece of a stream, in order.

    Args:
        text: whole events, each one line `data: ...` and an empty one, but that the empty line of the last may be missing.
        most: what a log-probability is at most.

    Returns:
        Events that only carry text of one choice, and follow each other, are a tuple: a chunk as JSON with all their text, in
        which null stands for the tokens; their ids, `array("I")`; their log-probabilities, `array("d")`, or `None`. One with the
        prompt's ids is a tuple: it as JSON, in which null stands for these, and these. Any other event is `bytes`, its payload.
        `None` if the text has other lines.
    """
    cdef Cursor lines
    cdef Cursor cursor
    cdef Event event
    cdef Run run = None
    cdef const char* line_end
    cdef size_t num_ids
    cdef size_t num_numbers
    cdef Run scratch = Run()
    cdef bint is_text
    cdef list items = []
    lines.at = PyBytes_AS_STRING(text)
    lines.end = lines.at + PyBytes_GET_SIZE(text)
    if memchr(lines.at, b"\r", lines.end - lines.at) != NULL:
        return None
    while lines.at < lines.end:
        if lines.end - lines.at < 6 or memcmp(lines.at, b"data: ", 6) != 0:
            return None
        cursor.at = lines.at + 6
        line_end = <const char*>memchr(cursor.at, b"\n", lines.end - cursor.at)
        cursor.end = lines.end if line_end == NULL else line_end
        if line_end == NULL:
            lines.at = lines.end
        elif lines.end - line_end >= 2 and line_end[1] == b"\n":
            lines.at = line_end + 2
        else:
            return None
        start = cursor.at
        # Into the run at once, and back out of it if the event turns out to be another's.
        scratch.ids.size = scratch.numbers.size = 0
        is_text = read_event(&cursor, &event, &scratch.ids, &scratch.numbers, most)
        if not is_text:
            if run is not None:
                items.append(run.end())
                run = None
            items.append(cut_answer(start, cursor.end, None, most) or PyBytes_FromStringAndSize(start, cursor.end - start))
            continue
        if run is not None and (event.index != run.first.index or event.has_logprobs != run.first.has_logprobs):
            items.append(run.end())
            run = None
        if run is None:
            run = Run()
            run.begin(&event)
        append(&run.head, event.content.start, event.content.size)
        append(&run.ids, scratch.ids.data, scratch.ids.size)
        append(&run.numbers, scratch.numbers.data, scratch.numbers.size)
    if run is not None:
        items.append(run.end())
    return items


# --- for the store -----------------------------------------------------------------------------------------------------------


def to_singles(array.array values not None):
    """Doubles as floats of 4 bytes each, in this machine's order; `None` if one of them does not survive that."""
    cdef Py_ssize_t place
    cdef Py_ssize_t count = len(values)
    cdef double* given
    cdef float single
    cdef array.array made
    if values.typecode != "d":
        raise TypeError(f"array of {values.typecode!r}: expected one of doubles")
    given = values.data.as_doubles
    made = array.clone(_singles, count, zero=False)
    for place in range(count):
        single = <float>given[place]
        if <double>single != given[place]:
            return None
        made.data.as_floats[place] = single
    return made.tobytes()


def to_narrow(bytes wide not None):
    """Numbers of 4 bytes each, little-endian, in 2, 3 or 4 bytes each, whichever holds the largest: how many, and the numbers."""
    cdef const unsigned char* given = <const unsigned char*>PyBytes_AS_STRING(wide)
    cdef Py_ssize_t count = PyBytes_GET_SIZE(wide) // 4
    cdef Py_ssize_t place
    cdef unsigned char third = 0
    cdef unsigned char fourth = 0
    cdef unsigned char* made
    cdef int width
    for place in range(count):
        third |= given[4 * place + 2]
        fourth |= given[4 * place + 3]
    width = 4 if fourth else 3 if third else 2
    if width == 4:
        return width, wide
    narrow = PyBytes_FromStringAndSize(NULL, width * count)
    made = <unsigned char*>PyBytes_AS_STRING(narrow)
    for place in range(count):
        made[0] = given[4 * place]
        made[1] = given[4 * place + 1]
        if width == 3:
            made[2] = given[4 * place + 2]
        made += width
    return width, narrow
