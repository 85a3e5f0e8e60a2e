"""The events of a stream: those that only carry text become one."""


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
    cdef int more
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
        more = goes_on(c, b"}")
        if more == BROKEN:
            return False
        if more == OVER:
            break
    skip_space(c)
    return c.at == c.end and has_choices and event.id.size and event.object.size and event.model.size and event.created.size


cdef class Run:
    """Text chunks of one choice that follow each other, as they become one."""

    # All of it begins as zeros, so the buffers are empty.
    cdef Event first
    cdef Buffer head
    cdef Buffer ids
    cdef Buffer numbers

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
        text: whole events, each one line `data: ...` and an empty one, but that the empty line of the last may be missing. Lines
            end with LF only.
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
    cdef const char* start
    cdef Run scratch = Run()
    cdef bint is_text
    cdef list items = []
    lines.at = PyBytes_AS_STRING(text)
    lines.end = lines.at + PyBytes_GET_SIZE(text)
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
        # Whether an event belongs to the run is known at its end only.
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
