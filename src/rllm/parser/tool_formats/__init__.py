"""Formats of tool calls by model family, one module each, built with `calls`."""
