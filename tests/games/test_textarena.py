"""Games of the real TextArena, played by scripted models through a real gateway."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.environments.named import names_of
from rllm.environments.textarena import Game, open_env, play
from rllm.errors import ConfigError, EnvError
from rllm.testing.gateway import scripted_gateway
from rllm.trainer.credit import credited_groups, groups_of, samples_of
from rllm.types import Episode, Message, TerminationReason

pytestmark = pytest.mark.games

Player = Callable[[Sequence[Message]], str]


def games(player: Player, name: str, **params: str) -> list[Episode]:
    """Return the games of an environment, with this player as the policy."""
    env = open_env(name, {"size": "2", **params})
    with scripted_gateway(player) as gateway:
        return [gateway.rollout(play, task) for task in env.tasks]


def first_free(messages: Sequence[Message]) -> str:
    """Return the first move that the last board lists."""
    return "[" + str(messages[-1]["content"]).rpartition("Available Moves: '[")[2][0] + "]"


def test_self_play_gives_each_seat_a_trajectory_with_its_reward() -> None:
    episode, _ = games(first_free, "TicTacToe-v0")
    # 0 takes 0 2 4 6 and 1 takes 1 3 5, so 0 has the diagonal 2 4 6.
    assert [(path.name, path.reward, len(path.steps)) for path in episode.trajectories] == [
        ("player_0", 1.0, 4),
        ("player_1", -1.0, 3),
    ]
    assert episode.metrics["game/turns"] == 7
    assert episode.termination_reason is TerminationReason.ENV_DONE
    assert all(path.is_cumulative() for path in episode.trajectories)
    first, second = (path.steps[0].chat_completions[0]["content"] for path in episode.trajectories)
    assert "You are Player 0" in first
    assert "You are Player 1" in second
    assert "[Player 0] [0]" in second


def test_seats_of_a_group_have_their_own_baselines() -> None:
    episodes = games(first_free, "TicTacToe-v0")
    for episode in episodes:
        episode.task_id = "same"
    groups = credited_groups(groups_of(samples_of(episodes, GRPO(), {})), {}, GRPO())
    assert {name: units[0].baseline for name, units in groups.items()} == {"same/player_0": 1.0, "same/player_1": -1.0}


def test_opponent_takes_the_other_seat_without_a_trajectory() -> None:
    episodes = games(first_free, "TicTacToe-v0", opponent="random", size="4")
    assert [[path.name for path in episode.trajectories] for episode in episodes] == [["player_0"], ["player_1"]] * 2
    assert all({"game/win", "game/draw"} <= episode.metrics.keys() for episode in episodes)
    again = games(first_free, "TicTacToe-v0", opponent="random", size="4")
    assert [episode.metrics for episode in again] == [episode.metrics for episode in episodes]


def test_fixed_model_at_a_url_is_called_without_capture() -> None:
    with scripted_gateway(first_free) as other:
        episode, _ = games(first_free, "TicTacToe-v0", opponent=f"{other.url}/v1", opponent_model="fixed")
    assert [(path.name, path.reward) for path in episode.trajectories] == [("player_0", 1.0)]
    assert episode.metrics["rollout/num_calls"] == 4


def test_unavailable_opponent_is_reported() -> None:
    with pytest.raises(EnvError, match=r"127\.0\.0\.1:9"):
        games(first_free, "TicTacToe-v0", opponent="http://127.0.0.1:9/v1", opponent_model="m", seat="0")


def test_invalid_moves_are_counted_and_penalized_by_the_rules() -> None:
    episode, _ = games(lambda messages: "hello", "TicTacToe-v0")
    loser, winner = episode.trajectories
    assert (loser.reward, loser.info["num_invalid_moves"]) == (-1.0, 2)
    assert (winner.reward, winner.trainable, winner.steps) == (1.0, False, []), "the winner never had a turn"
    assert episode.metrics["game/invalid_moves"] == 2


def test_unfinished_game_is_unscored() -> None:
    episode, _ = games(first_free, "TicTacToe-v0", max_turns="3")
    assert [path.final_reward() for path in episode.trajectories] == [None, None]
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert episode.metrics["game/unfinished"] == 1


def test_games_may_have_one_or_three_players() -> None:
    episode, _ = games(lambda messages: "[4]", "GuessTheNumber-v0")
    assert [path.name for path in episode.trajectories] == ["player_0"]
    episode, _ = games(lambda messages: "[4]", "ThreePlayerTicTacToe-v0")
    assert len(episode.trajectories) == 3


def test_options_reach_the_game_and_wrappers_keep_the_observation() -> None:
    env = open_env("Nim-v0", {"piles": "[1,2]", "size": "1"})
    assert env.tasks[0]["options"] == {"piles": [1, 2]}
    episode, _ = games(
        lambda messages: "[0 1]" if "pile 0: 1" in str(messages) else "[1 2]", "Nim-v0-train", piles="[1,2]"
    )
    assert [path.reward for path in episode.trajectories] == [-1.0, 1.0]
    assert all(len(step.chat_completions) == 2 for path in episode.trajectories for step in path.steps)


def test_games_use_their_own_random_numbers() -> None:
    def cards(seed: int, disturbed: bool) -> Any:
        random.seed(seed)
        one, other = (Game(game="KuhnPoker-v0-raw", options={}, num_players=2, seed=7) for _ in range(2))
        if disturbed:
            other.observe()
            other.move("[fold]")
        return one.observe(), random.random()

    assert cards(1, disturbed=True) == cards(1, disturbed=False)
    assert cards(1, disturbed=True)[0] == cards(2, disturbed=False)[0]


def test_games_are_listed_by_name() -> None:
    assert {"TicTacToe-v0", "TicTacToe-v0-train", "Nim-v0"} <= set(names_of("textarena"))


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("TicTacTo-v0", {}, "TicTacToe-v0"),
        ("TicTacToe-v0", {"players": "3"}, "number of players"),
        ("TicTacToe-v0", {"size": "many"}, "size"),
        ("TicTacToe-v0", {"opponent": "alphazero"}, "opponent"),
        ("TicTacToe-v0", {"opponent": "http://127.0.0.1:9/v1"}, "opponent_model"),
        ("TicTacToe-v0", {"seat": "1"}, "seat"),
        ("TicTacToe-v0", {"board": "4"}, "board"),
        ("Nim-v0", {"opponent": "random"}, "lists no moves"),
        ("GuessTheNumber-v0", {"opponent": "random"}, "one player"),
    ],
)
def test_unsuitable_games_and_options_are_rejected_by_name(name: str, params: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_env(name, params)
