"""The same tasks as a taskset of verifiers.v1."""

import verifiers.v1 as vf

WORDS = ["red", "blue", "green"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def repeats(self, trace: vf.Trace) -> float:
        if self.data.word == "green":
            raise ValueError("no green")
        return float(self.data.word in trace.last_reply)


class WordConfig(vf.TasksetConfig):
    num_words: int = 3


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        for word in WORDS[: self.config.num_words]:
            yield WordTask(WordData(prompt=f"Say {word}.", word=word), self.config.task)


__all__ = ["WordTaskset"]
