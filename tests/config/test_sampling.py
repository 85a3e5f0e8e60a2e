from __future__ import annotations

from hashlib import sha256

from rllm.config.sampling import CallSeeds, ImposedSampling, derived_seed, with_fixed_sampling

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_seed_depends_only_on_its_parts() -> None:
    digest = sha256(b'[0,"train","7@3.0.1",2]').hexdigest()
    assert derived_seed(0, "train", "7@3.0.1", 2) == int(digest, 16) >> (256 - 53)
    assert len({derived_seed(seed, "a", index) for seed in range(10) for index in range(10)}) == 100
    assert all(0 <= derived_seed(number) < 2**53 for number in range(100))


def test_equal_calls_have_different_seeds() -> None:
    seeds, disturbed = CallSeeds(), CallSeeds()
    first, second = seeds.next(5, HI, None), seeds.next(5, HI, None)
    assert first != second
    assert disturbed.next(5, HI, None) == first
    assert disturbed.next(5, HI, TOOLS) not in (first, second)
    assert disturbed.next(5, [*HI, *HI], None) not in (first, second)
    assert disturbed.next(5, HI, []) == second, "an empty list equals None"
    assert CallSeeds().next(6, HI, None) != first


def test_tool_call_ids_do_not_change_the_seed() -> None:
    def turn(call_id: str, name: str = "add") -> list[dict[str, object]]:
        calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}]
        return [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": call_id, "content": "3"}]

    assert CallSeeds().next(0, turn("call_1"), TOOLS) == CallSeeds().next(0, turn("call_2"), TOOLS)
    assert CallSeeds().next(0, turn("call_1"), TOOLS) != CallSeeds().next(0, turn("call_1", "sub"), TOOLS)


def test_seed_ignores_the_address_of_unserializable_objects() -> None:
    class Picture:
        pass

    asked = [[{"role": "user", "content": Picture(), "size": 2**70}] for _ in range(2)]
    del asked[0][0]["size"], asked[1][0]["size"]
    assert CallSeeds().next(0, asked[0], None) == CallSeeds().next(0, asked[1], None)
    assert CallSeeds().next(0, [{"role": "user", "content": "\ud800"}], None) >= 0


def test_parameters_are_replaced_under_either_name() -> None:
    asked = {"temperature": 0.1, "max_tokens": 9, "max_completion_tokens": 8}
    assert with_fixed_sampling(asked, {}) == asked
    assert with_fixed_sampling(asked, {"temperature": 1.0})["max_tokens"] == 9
    assert with_fixed_sampling(asked, {"max_tokens": 3}) == {"temperature": 0.1, "max_tokens": 3}


def test_shorter_answer_may_be_requested() -> None:
    assert with_fixed_sampling({"max_tokens": 2}, {"max_tokens": 3}) == {"max_tokens": 2}
    assert with_fixed_sampling({"max_tokens": 2}, {"max_completion_tokens": 3}) == {"max_completion_tokens": 2}


def test_each_call_of_a_session_has_its_own_seed() -> None:
    sampling, again = ImposedSampling({"seed": 5}), ImposedSampling({"seed": 5})
    seeds = [sampling.impose({"seed": 1}, HI, None)["seed"] for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert seeds == [again.impose({}, HI, None)["seed"] for _ in range(2)]
    assert ImposedSampling().impose({"seed": 1}, HI, None) == {"seed": 1}
