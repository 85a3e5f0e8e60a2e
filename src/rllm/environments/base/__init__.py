"""The environment protocol, and its two usual shapes."""
