import pytest

from rllm.gateway.upstream.token_prompts import for_template

USER = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "a"}


def system(content, role="system"):
    return {"role": role, "content": content}


def test_messages_accepted_by_every_template_are_not_copied():
    messages = [system("a"), USER, system("b")]
    assert for_template(messages) is messages


@pytest.mark.parametrize(
    ("leading", "merged"),
    [
        ([system("a", "developer")], "a"),
        ([system("a"), system("b", "developer")], "a\n\nb"),
        ([system("a"), system(None), system("")], "a"),
        ([system([PART]), system("b")], [PART, {"type": "text", "text": "b"}]),
    ],
)
def test_leading_system_messages_are_merged(leading, merged):
    assert for_template([*leading, USER]) == [system(merged), USER]


def test_later_developer_message_keeps_its_position():
    assert for_template([USER, system("a", "developer")]) == [USER, system("a")]
    assert for_template([system("a", "developer")] * 2) == [system("a\n\na")]
