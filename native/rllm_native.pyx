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
    clear(&ids)
    clear(&numbers)
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
    clear(&cutting.rest)
    clear(&ids)
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


include "events.pxi"


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
