"""The environment protocol (`base_env.py`), and its two usual shapes (`multi_turn_env.py`)."""
