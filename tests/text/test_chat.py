from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.text.conftest import DEMO, save, word_level
from tokenflow.errors import InvalidRequest
from tokenflow.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "a"}]
# Every character that the templates below write.
TOKENS = ["<unk>", *(chr(c) for c in range(0x20, 0x7F)), "\n", "é"]


def model(directory: Path, template: Any, **config: Any) -> Path:
    """A model directory whose tokenizer spells characters and whose template is ``template``."""
    backend = word_level(TOKENS)
    backend.add_tokens(TOKENS[1:])
    return save(directory, backend, {"chat_template": template, **config})


def text(directory: Path, messages: Any = USER, **variables: Any) -> str:
    tokenizer = Tokenizer.load(directory)
    return tokenizer.decode(tokenizer.render(messages, variables), skip_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true) }}",
        "{% for m in messages %}\n  {% if loop.first %}\n  x\n  {% endif %}\n{% endfor %}",
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!",
        "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}{{ nothing }}",
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}",
        "{{ extra | default('none') }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
        "{{ dict(a=1)['a'] }}{{ messages[0].keys() | list }}",
    ],
)
@pytest.mark.parametrize("variables", [{}, {"extra": "x", "enable_thinking": False}])
def test_the_template_language_is_that_of_transformers(
    tmp_path: Path, template: str, variables: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "a é <b>", "name": None}]
    directory = model(tmp_path, template, bos_token="<", eos_token=">")
    theirs: Any = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    assert text(directory, messages, **variables) == expected != ""


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    directory = model(tmp_path, "config")
    assert text(directory) == "config"
    (directory / "chat_template.jinja").write_text("file")
    assert text(directory) == "file"


def test_tools_select_the_template_made_for_them(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    directory = model(tmp_path, named)
    assert text(directory) == "plain"
    assert text(directory, tools=[{"name": "f"}, {"name": "g"}]) == "2"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("from file")
    (directory / "chat_template.jinja").write_text("default file")
    assert text(directory, tools=[]) == "from file"
    assert text(directory) == "default file"


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no chat template.*give the prompt as text, or") as caught:
        text(model(tmp_path, None))
    assert caught.value.param == "messages"


def test_a_model_with_only_other_templates_lists_them(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": ""}, {"name": "tool_use", "template": ""}]
    with pytest.raises(InvalidRequest, match="has no default chat template, only rag, tool_use"):
        text(model(tmp_path, named))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "has no attribute 'missing'"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ raise_exception.__globals__.sys }}", "access to attribute '__globals__'"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% include 'x' %}", "no loader for this environment"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_fails_the_request(
    tmp_path: Path, template: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match="does not accept these messages") as caught:
        text(model(tmp_path, template))
    assert reason in str(caught.value)
    assert caught.value.param == "messages"


def test_a_template_that_takes_the_messages_alone_blames_the_variables(tmp_path: Path) -> None:
    picky = model(tmp_path, "{{ messages[0].content }}{% if depth %}{{ depth + 1 }}{% endif %}")
    with pytest.raises(InvalidRequest, match="does not accept these variables: TypeError") as caught:
        text(picky, depth="deep")
    assert caught.value.param == "template"
    needy = model(tmp_path, "{{ messages[0].content + depth }}")
    with pytest.raises(InvalidRequest, match="does not accept these messages: TypeError") as caught:
        text(needy, depth=1)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[], ["hello"], [{"content": "no role"}], [USER], {"role": "user"}])
def test_messages_that_are_no_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages must be a non-empty list of objects with a role"):
        Tokenizer.load(DEMO / "small").render(messages)


def test_templates_see_plain_data_only() -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    with pytest.raises(InvalidRequest, match=r"messages must be plain JSON data: .*not JSON serializable"):
        tokenizer.render([{"role": "user", "content": object()}])
    with pytest.raises(InvalidRequest, match="documents must be plain JSON data") as caught:
        tokenizer.render(USER, {"documents": [Path()]})
    assert caught.value.param == "template"


def test_a_conversation_is_not_changed_by_rendering() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a", "name": None}]
    Tokenizer.load(DEMO / "small").render(messages)
    assert messages == [{"role": "user", "content": "a", "name": None}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}go{% endif %}",
            "[a][ b ",
        ),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[a][b"),
    ],
)
def test_the_last_message_is_left_open_to_go_on_with(tmp_path: Path, template: str, expected: str) -> None:
    messages = [*USER, {"role": "assistant", "content": " b "}]
    assert text(model(tmp_path, template), messages, continue_final_message=True) == expected


def test_a_template_that_does_not_write_the_last_message_cannot_leave_it_open(tmp_path: Path) -> None:
    directory = model(tmp_path, "{{ messages[0].content }}")
    messages = [*USER, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidRequest, match="does not write the last message as it is"):
        text(directory, messages, continue_final_message=True)
