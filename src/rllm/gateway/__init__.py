"""The only code that sees both HTTP and tokens: an OpenAI-compatible server that captures what passes through it."""
