"""JSON by a cursor: each function moves it behind what it reads, and returns whether it was there."""

cdef extern from *:
    int __builtin_clzll(unsigned long long value) nogil
    ctypedef unsigned long long uint128_t "unsigned __int128"

cdef enum:
    ZERO = 48  # the character

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


cdef inline void clear(Buffer* buffer) noexcept:
    buffer.data, buffer.size, buffer.room = NULL, 0, 0


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


# --- what is read ------------------------------------------------------------------------------------------------------


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
    MORE = 1
    OVER = 0
    BROKEN = -1


cdef inline int goes_on(Cursor* c, char last) noexcept:
    """Behind a member of an array or an object: whether another one follows, or it is over, or it is neither."""
    skip_space(c)
    if is_next(c, last):
        c.at += 1
        return OVER
    return MORE if take(c, b",") else BROKEN


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
    cdef int more
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
            more = goes_on(c, last)
            if more != MORE:
                return more == OVER
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
    cdef bint negative
    return find_number(c, &unused, &negative)


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
