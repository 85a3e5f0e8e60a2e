"""Bridges to software that needs more than a base URL, each in a module that is imported only by name: `litellm`."""
