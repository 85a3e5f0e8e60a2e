"""Demonstrations for supervised fine-tuning: `rows` turns conversations into tokens, `rejection` selects earlier rollouts."""
