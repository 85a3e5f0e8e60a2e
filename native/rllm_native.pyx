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

cdef enum:
    ZERO = 48  # the character

cdef extern from *:
    int __builtin_clzll(unsigned long long value) nogil
    ctypedef unsigned long long uint128_t "unsigned __int128"

cdef double[23] _TENS
cdef uint64_t[20] _WHOLE_TENS
cdef int _power
_TENS[0] = 1.0
_WHOLE_TENS[0] = 1
for _power in range(1, 20):
    _WHOLE_TENS[_power] = _WHOLE_TENS[_power - 1] * 10
for _power in range(1, 23):
    _TENS[_power] = _TENS[_power - 1] * 10.0  # each of them is exact


# --- what is read into -------------------------------------------------------------------------------------------------


cdef struct Buffer:
    char* data
    size_t size
    size_t room


cdef inline int append(Buffer* buffer, const void* data, size_t size) except -1:
    cdef size_t room
    cdef void* moved
    if size == 0:
        return 0
    if buffer.room - buffer.size < size:
        room = 2 * buffer.room + size + 256
        moved = realloc(buffer.data, room)
        if moved == NULL:
            raise MemoryError
        buffer.data, buffer.room = <char*>moved, room
    memcpy(buffer.data + buffer.size, data, size)
    buffer.size += size
    return 0


cdef array.array to_array(Buffer* buffer, array.array kind):
    cdef array.array made = array.clone(kind, <Py_ssize_t>(buffer.size // <size_t>kind.itemsize), zero=False)
    if buffer.size:
        memcpy(made.data.as_chars, buffer.data, buffer.size)
    return made


# --- JSON: each function moves the cursor behind what it reads, and returns whether it was there ---------------------------


cdef struct Cursor:
    const char* at
    const char* end


cdef struct Span:
    const char* start
    size_t size
    bint has_escapes  # of strings only


cdef inline void skip_space(Cursor* c) noexcept:
    while c.at < c.end and c.at[0] <= b" " and (
        c.at[0] == b" " or c.at[0] == b"\n" or c.at[0] == b"\t" or c.at[0] == b"\r"
    ):
        c.at += 1


cdef inline bint take(Cursor* c, char expected) noexcept:
    """One character of the structure, with the space around it."""
    skip_space(c)
    if c.at == c.end or c.at[0] != expected:
        return False
    c.at += 1
    skip_space(c)
    return True


cdef inline bint is_next(Cursor* c, char expected) noexcept:
    return c.at < c.end and c.at[0] == expected


cdef enum:
    ONES = 0x0101010101010101
    QUOTES = 0x2222222222222222
    BACKSLASHES = 0x5C5C5C5C5C5C5C5C
    SPACES = 0x2020202020202020


cdef inline uint64_t has_zero(uint64_t word) noexcept:
    """Whether one of its 8 bytes is 0."""
    return (word - <uint64_t>ONES) & ~word & (<uint64_t>ONES << 7)


cdef const char* behind_escape(const char* at, const char* end) noexcept:
    """Behind a backslash and what it escapes; `NULL` if that is nothing that JSON knows."""
    cdef int place
    if end - at < 2 or memchr(b'"\\/bfnrtu', at[1], 9) == NULL:
        return NULL
    if at[1] != b"u":
        return at + 2
    if end - at < 6:
        return NULL
    for place in range(2, 6):
        if not (b"0" <= at[place] <= b"9" or b"a" <= at[place] <= b"f" or b"A" <= at[place] <= b"F"):
            return NULL
    return at + 6


cdef inline bint read_string(Cursor* c, Span* inner) noexcept:
    """A string; what stands between its quotes. Control characters may not."""
    cdef const char* at = c.at + 1
    cdef uint64_t word
    if not is_next(c, b'"'):
        return False
    inner.start = at
    inner.has_escapes = False
    while c.end - at >= 8:  # eight at a time, as long as none of them ends it, or is a backslash or a control character
        memcpy(&word, at, 8)
        if (
            has_zero(word ^ <uint64_t>QUOTES) | has_zero(word ^ <uint64_t>BACKSLASHES)
            | ((word - <uint64_t>SPACES) & ~word & (<uint64_t>ONES << 7))
        ):
            break
        at += 8
    while at < c.end and at[0] != b'"':
        if <unsigned char>at[0] < 0x20:
            return False
        if at[0] == b"\\":
            inner.has_escapes = True
            at = behind_escape(at, c.end)
            if at == NULL:
                return False
        else:
            at += 1
    if at == c.end:
        return False
    inner.size = at - inner.start
    c.at = at + 1
    return True


cdef inline bint read_key(Cursor* c, Span* name) noexcept:
    """A key and its colon; one with escapes could be any key, and is refused."""
    return read_string(c, name) and not name.has_escapes and take(c, b":")


cdef enum:
    DEEPEST = 32  # levels of what is skipped; what is nested deeper is refused


cdef bint skip_value(Cursor* c, int levels = DEEPEST) noexcept:
    """Any value, if it is one, but that its strings need be neither UTF-8 nor whole pairs of surrogates."""
    cdef Span unused
    cdef char last
    if c.at == c.end or levels == 0:
        return False
    if c.at[0] == b'"':
        return read_string(c, &unused)
    if c.at[0] == b"{" or c.at[0] == b"[":
        last = b"}" if c.at[0] == b"{" else b"]"
        c.at += 1
        skip_space(c)
        if is_next(c, last):
            c.at += 1
            return True
        while True:
            if last == b"}" and not (read_string(c, &unused) and take(c, b":")):
                return False
            if not skip_value(c, levels - 1):
                return False
            skip_space(c)
            if is_next(c, last):
                c.at += 1
                return True
            if not take(c, b","):
                return False
    if c.at[0] == b"t":
        return read_word(c, b"true", 4)
    if c.at[0] == b"f":
        return read_word(c, b"false", 5)
    if c.at[0] == b"n":
        return read_word(c, b"null", 4)
    return skip_number(c)


cdef inline bint read_word(Cursor* c, const char* word, Py_ssize_t size) noexcept:
    if c.end - c.at < size or memcmp(c.at, word, size) != 0:
        return False
    c.at += size
    return True


cdef inline bint read_null(Cursor* c) noexcept:
    return read_word(c, b"null", 4)


cdef bint skip_number(Cursor* c) noexcept:
    cdef Decimal unused
    cdef bint has_exponent
    return find_number(c, &unused, &has_exponent)


cdef inline bint names(Span* name, const char* expected, size_t size) noexcept:
    return name.size == size and memcmp(name.start, expected, size) == 0


cdef inline bint ends_number(const char* at, const char* end) noexcept:
    """Whether here may end what is neither a string nor an array or an object, within one of these two."""
    return at < end and (
        at[0] == b"," or at[0] == b"}" or at[0] == b"]" or at[0] == b" " or at[0] == b"\n" or at[0] == b"\t" or at[0] == b"\r"
    )


cdef inline bint is_digit(const char* at, const char* end) noexcept:
    return at < end and b"0" <= at[0] <= b"9"


cdef inline bint read_id(Cursor* c, uint32_t* value) noexcept:
    """A whole number from 0 to 4294967295."""
    cdef uint64_t number = 0
    cdef const char* at = c.at
    while is_digit(at, c.end):
        number = 10 * number + <uint64_t>(at[0] - ZERO)
        at += 1
        if number >> 32:
            return False
    if at == c.at or (c.at[0] == b"0" and at - c.at > 1) or not ends_number(at, c.end):
        return False
    c.at = at
    value[0] = <uint32_t>number
    return True


cdef struct Decimal:
    uint64_t mantissa
    int num_digits  # from the first that is not 0; those beyond 19 are not in the mantissa
    int exponent


cdef inline const char* read_digits(const char* at, const char* end, Decimal* number, int each) noexcept:
    """Digits, and how each that is read changes the exponent."""
    while is_digit(at, end):
        if number.num_digits < 19:
            number.mantissa = 10 * number.mantissa + <uint64_t>(at[0] - ZERO)
            number.exponent += each
        if number.mantissa:
            number.num_digits += 1
        at += 1
    return at


cdef bint find_number(Cursor* c, Decimal* number, bint* negative) noexcept:
    """A number by its digits."""
    cdef const char* at = c.at
    cdef const char* digits
    cdef int written = 0
    cdef bint down
    negative[0] = at < c.end and at[0] == b"-"
    number.mantissa, number.num_digits, number.exponent = 0, 0, 0
    at += negative[0]
    digits = at
    at = read_digits(at, c.end, number, 0)
    if at == digits or (digits[0] == b"0" and at - digits > 1):
        return False
    if at < c.end and at[0] == b".":
        digits = at + 1
        at = read_digits(digits, c.end, number, -1)
        if at == digits:
            return False
    if at < c.end and (at[0] == b"e" or at[0] == b"E"):
        at += 1
        down = at < c.end and at[0] == b"-"
        at += down or (at < c.end and at[0] == b"+")
        digits = at
        while is_digit(at, c.end):
            if written < 10000:
                written = 10 * written + (at[0] - ZERO)
            at += 1
        if at == digits:
            return False
        number.exponent += -written if down else written
        if written >= 10000:
            number.num_digits = 20  # as if digits were missing: the exponent is not whole either
    if not ends_number(at, c.end):
        return False
    c.at = at
    return True


cdef bint read_number(Cursor* c, double* value) except -1:
    """A number as the nearest double.

    Where digits and power of ten are exact as doubles, one multiplication or division rounds once (Clinger 1990). Floats of 4 bytes,
    which most servers have, are longer when they are printed as doubles: these are quotients of whole numbers. CPython reads the
    rest; it needs the byte behind the text to be there, as it is in `bytes`.
    """
    cdef const char* start = c.at
    cdef Decimal number
    cdef bint negative
    cdef char* end = NULL
    if not find_number(c, &number, &negative):
        return False
    if negative and number.mantissa == 0 and number.exponent == 0:
        return False  # -0 is a whole number, and these have no sign of zero
    if number.num_digits <= 19 and number.mantissa <= (<uint64_t>1 << 53) and -22 <= number.exponent <= 22:
        value[0] = <double>number.mantissa
        if number.exponent < 0:
            value[0] /= _TENS[-number.exponent]
        else:
            value[0] *= _TENS[number.exponent]
    elif number.num_digits <= 19 and -19 <= number.exponent < 0:
        value[0] = quotient(number.mantissa, _WHOLE_TENS[-number.exponent])
    else:
        value[0] = PyOS_string_to_double(start, &end, NULL)
        return end == c.at
    if negative:
        value[0] = -value[0]
    return True


cdef double quotient(uint64_t numerator, uint64_t divisor) noexcept:
    """The double nearest to the quotient, for a numerator above 2^53.

    As a whole number of 54 bits at least, one more says whether there is a rest; so the conversion, which rounds to the nearest and
    ties to even, is the only rounding.
    """
    cdef uint128_t widened = <uint128_t>numerator << 64
    cdef uint128_t whole = widened // divisor
    cdef int power = -64
    cdef bint rest = widened != whole * divisor
    cdef uint64_t above = <uint64_t>(whole >> 63)
    cdef int num_spare
    if above:
        num_spare = 64 - __builtin_clzll(above)
        rest = rest or (<uint64_t>whole & ((<uint64_t>1 << num_spare) - 1)) != 0
        whole >>= num_spare
        power += num_spare
    return ldexp(<double>(<uint64_t>whole << 1 | rest), power - 1)


# --- tokens --------------------------------------------------------------------------------------------------------------


cdef bint read_ids(Cursor* c, Buffer* ids) except -1:
    """An array of token ids."""
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
        skip_space(c)
        if is_next(c, b"]"):
            c.at += 1
            return True
        if not take(c, b","):
            return False


cdef bint read_entry(Cursor* c, Buffer* numbers, double most) except -1:
    """One entry of `logprobs.content`: only its number is kept. Its text is not an id, which would have to be compared."""
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
        skip_space(c)
        if is_next(c, b"}"):
            c.at += 1
            return found
        if not take(c, b","):
            return False


cdef bint read_content(Cursor* c, Buffer* numbers, double most) except -1:
    """The array `logprobs.content`."""
    if not take(c, b"["):
        return False
    if is_next(c, b"]"):
        c.at += 1
        return True
    while True:
        if not read_entry(c, numbers, most):
            return False
        skip_space(c)
        if is_next(c, b"]"):
            c.at += 1
            return True
        if not take(c, b","):
            return False


cdef bint read_logprobs(Cursor* c, Buffer* numbers, double most) except -1:
    """An object `logprobs` that has a `content`, and beside it, as OpenAI's has, at most a `refusal` of null."""
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
        skip_space(c)
        if is_next(c, b"}"):
            c.at += 1
            return found
        if not take(c, b","):
            return False


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
            skip_space(c)
            if is_next(c, b"}"):
                c.at += 1
                break
            if not take(c, b","):
                return False
        if not (has_ids and has_numbers):
            return False
        found.append((to_array(&ids, _ids), to_array(&numbers, _floats)))
        return True
    finally:
        free(ids.data)
        free(numbers.data)


def scan_answer(bytes body not None, double most):
    """A chat completion as JSON without its tokens, and these.

    Args:
        body: a JSON object with `prompt_token_ids`, and with `token_ids` and `logprobs.content` in each of its choices.
        most: what a log-probability is at most.

    Returns:
        The object, in which null stands for what was taken out; the prompt's ids, `array("I")`; and of each choice its ids and
        its log-probabilities, `array("d")`. `None` if it is anything else.
    """
    cdef Cursor cursor
    cdef Cursor* c = &cursor
    cdef Cutting cutting
    cdef Buffer ids
    cdef Span name
    cdef const char* start
    cdef bint has_ids = False
    cdef bint has_choices = False
    cdef list found = []
    c.at = PyBytes_AS_STRING(body)
    c.end = c.at + PyBytes_GET_SIZE(body)
    cutting.copied = c.at
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
            elif names(&name, b"choices", 7):
                if has_choices or not take(c, b"["):
                    return None
                has_choices = True
                while True:
                    if not cut_choice(c, &cutting, found, most):
                        return None
                    skip_space(c)
                    if is_next(c, b"]"):
                        c.at += 1
                        break
                    if not take(c, b","):
                        return None
            elif not skip_value(c):
                return None
            skip_space(c)
            if is_next(c, b"}"):
                c.at += 1
                break
            if not take(c, b","):
                return None
        if not (has_ids and has_choices):
            return None
        append(&cutting.rest, cutting.copied, c.end - cutting.copied)
        rest = PyBytes_FromStringAndSize(cutting.rest.data, cutting.rest.size)
        return rest, to_array(&ids, _ids), found
    finally:
        free(cutting.rest.data)
        free(ids.data)


cdef tuple cut_prompt(const char* text, const char* end):
    """An object that has `prompt_token_ids` as JSON with null in their place, and these; `None` if it is anything else."""
    cdef Cursor cursor
    cdef Cursor* c = &cursor
    cdef Cutting cutting
    cdef Buffer ids
    cdef Span name
    cdef const char* start
    cdef bint found = False
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
                if found or not read_ids(c, &ids):
                    return None
                found = True
                cut(&cutting, start, c.at)
            elif not skip_value(c):
                return None
            skip_space(c)
            if is_next(c, b"}"):
                break
            if not take(c, b","):
                return None
        if not found:
            return None
        append(&cutting.rest, cutting.copied, end - cutting.copied)
        return PyBytes_FromStringAndSize(cutting.rest.data, cutting.rest.size), to_array(&ids, _ids)
    finally:
        free(cutting.rest.data)
        free(ids.data)


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
        skip_space(c)
        if is_next(c, b"}"):
            c.at += 1
            return found
        if not take(c, b","):
            return False


cdef bint read_text_choice(Cursor* c, Event* event, Buffer* ids, Buffer* numbers, double most) except -1:
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
        skip_space(c)
        if is_next(c, b"}"):
            c.at += 1
            return has_index and has_delta and has_ids
        if not take(c, b","):
            return False


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
            items.append(cut_prompt(start, cursor.end) or PyBytes_FromStringAndSize(start, cursor.end - start))
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
