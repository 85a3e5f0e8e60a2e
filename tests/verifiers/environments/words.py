"""An environment with the interface of verifiers below 0.4."""

import verifiers as vf
from datasets import Dataset

WORDS = ["red", "blue", "green"]


def load_environment(num_words=3):
    rows = Dataset.from_list([{"question": f"Say {word}.", "answer": word} for word in WORDS[:num_words]])

    def repeats(completion, answer, **_):
        if answer == "green":
            raise ValueError("no green")
        return float(answer in completion[-1]["content"])

    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[repeats]))
