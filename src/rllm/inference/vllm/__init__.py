"""A vLLM server: how it is started, kept alive, asked about itself, and given new weights. None of it imports vLLM."""
