"""Letters from one to another: `a to d` is answered by `a b c d`. With the interface of verifiers below 0.4."""

import random
from string import ascii_lowercase

import verifiers as vf
from datasets import Dataset

ANSWERS = [" ".join(ascii_lowercase[stop - count : stop]) for stop in range(8, 27) for count in range(2, 7)]
random.Random(0).shuffle(ANSWERS)
NUM_HELD_OUT = 30


def load_environment(held_out=False):
    answers = ANSWERS[:NUM_HELD_OUT] if held_out else ANSWERS[NUM_HELD_OUT:]
    rows = Dataset.from_list([{"question": f"{answer[0]} to {answer[-1]}", "answer": answer} for answer in answers])

    def right(completion, answer, **_):
        return float(completion[-1]["content"] == answer)

    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))
