"""Tasks to episodes: run an agent many times at once, and join what it earned with what it sampled."""
