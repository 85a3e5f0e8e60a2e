"""Demonstrations for supervised fine-tuning: `rows` makes tokens of conversations, `rejection` selects rollouts."""
