"""The demo: a shop assistant that learns to look things up instead of guessing."""
