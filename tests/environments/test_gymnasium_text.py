import numpy as np
import pytest
from gymnasium import spaces

from rllm.environments.gymnasium_env import (
    legal_actions,
    observation_to_text,
    parse_action,
    rendering_to_text,
    to_plain,
)

UNIT = spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2", 2),
        ("First I thought 0, but 1.", 1),
        ("go UP", 2),
        ("upward, then stay put", 1),  # the longest label, and whole words only
        ("Action: **stay**", 0),
        ("0.5 of 2", 2),  # a decimal number names no action
    ],
)
def test_last_integer_or_label_is_the_discrete_action(text: str, action: int):
    assert parse_action(text, spaces.Discrete(3), ["stay", "stay put", "up"]) == action


def test_discrete_space_may_start_below_zero():
    assert parse_action("-1", spaces.Discrete(3, start=-1)) == -1
    assert parse_action("left", spaces.Discrete(3, start=-1), ["left", "none", "right"]) == -1


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        ("steer [0.5, -1]", UNIT, [0.5, -1.0]),
        ("not [1, 1] but [0, 0]", UNIT, [0.0, 0.0]),
        ("[2, 0]", spaces.MultiDiscrete([3, 2]), [2, 0]),
        ("[1, 0, 1]", spaces.MultiBinary(3), [1, 0, 1]),
    ],
)
def test_arrays_are_json_lists(text: str, space: spaces.Space, action: list):
    parsed = parse_action(text, space)
    assert parsed.dtype == space.dtype
    assert parsed.tolist() == action


def test_objects_and_tuples_may_be_nested():
    space = spaces.Dict({"move": UNIT, "jump": spaces.Discrete(2), "say": spaces.Tuple([spaces.Discrete(9)])})
    action = parse_action('I do {"move": [0, 1], "jump": 1, "say": [8]}.', space)
    assert action["move"].tolist() == [0.0, 1.0]
    assert (action["jump"], action["say"]) == (1, (8,))


def test_text_space_takes_the_text():
    assert parse_action(" hello ", spaces.Text(10)) == "hello"


@pytest.mark.parametrize(
    ("text", "space", "reason"),
    [
        ("", spaces.Discrete(2), "names no action"),
        ("north-2-south v1.0", spaces.Discrete(2), "names no action"),
        ("5", spaces.Discrete(2), "5 is not among the legal actions"),
        ("9" * 30, spaces.Discrete(2), "names no action"),
        ("[2, 0]", UNIT, "not among the legal actions"),
        ("[NaN, 0]", UNIT, "not among the legal actions"),
        ("[0, 0, 0]", UNIT, "not among the legal actions"),
        ('["a", "b"]', UNIT, "does not hold numbers"),
        ("[[0], [0, 1]]", UNIT, "inhomogeneous"),
        ("[0.5, 0]", spaces.MultiDiscrete([3, 2]), "does not hold numbers of the type int64"),
        ("[257, 0]", spaces.MultiBinary(2), r"\[257, 0\] does not fit in int8"),
        ("[-1]", spaces.Box(0, 255, (1,), dtype=np.uint8), r"\[-1\] does not fit in uint8"),
        ("none", UNIT, "holds no JSON"),
        ("[" * 100_000, UNIT, "holds no JSON"),
        ('{"jump": 1, "fly": 1}', spaces.Dict({"jump": spaces.Discrete(2)}), "not among the legal actions"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_other_text_is_a_value_error(text: str, space: spaces.Space, reason: str):
    with pytest.raises(ValueError, match=reason):
        parse_action(text, space)


def test_legal_actions_are_described():
    assert legal_actions(spaces.Discrete(2, start=1)) == "1, 2"
    assert legal_actions(spaces.Discrete(2), ["left", "right"]) == "0 (left), 1 (right)"
    assert legal_actions(spaces.Discrete(500)) == "an integer from 0 to 499"
    assert legal_actions(UNIT) == "JSON of Box(-1.0, 1.0, (2,), float32)"


def test_numpy_values_become_plain_python():
    assert to_plain(np.array([[1, 2]])) == [[1, 2]]
    assert to_plain({1: np.int8(3), "s": {np.str_("x")}}) == {"1": 3, "s": ["x"]}
    assert to_plain(np.longdouble(1)) == "1.0"  # not a float of Python's
    assert to_plain(object) == "<class 'object'>"


def test_colours_of_a_rendering_become_brackets():
    assert rendering_to_text("\x1b[41mS\x1b[0mFF\n\x1b[1mbold") == "[S]FF\nbold"


def test_non_text_observation_is_unescaped_json():
    assert observation_to_text({"says": "何処?", "at": np.array([1, 2])}) == '{"says": "何処?", "at": [1, 2]}'
