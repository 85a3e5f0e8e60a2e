"""Demo: a shop assistant that learns to look things up instead of guessing; or a pretrained model that learns to add.

`agent` has both agents as their authors would write them, `tasks` their tasks, example conversations and a tiny model.
"""
