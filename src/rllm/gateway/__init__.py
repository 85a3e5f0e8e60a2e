"""Gateway: an OpenAI-compatible server that captures every call that passes through it, exactly.

Read `core` first: it answers a call and stores its trace, without HTTP. Around it:

- the server: `server` (uvicorn in a thread or in the foreground), `app` (the ASGI application), `calls` (model calls),
  `call_dedup` (retries), `http_limits` (sizes, deadlines, disconnects), `admin` (all other routes), `metrics`,
  `config`, `errors`
- callers: `identity` (session and key of a request, and who is admitted), `sessions`
- `dialects`: the wire formats of clients, each in one module
- `upstream`: the servers and engines that answer

This is the only package that sees both HTTP and tokens.
"""
