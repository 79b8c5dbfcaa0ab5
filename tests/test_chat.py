"""Chat templates: rendered as transformers renders them, in a sandbox, refused with one error."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from circuit.models.chat import render, template_of_folder
from circuit.models.errors import BadJson, ChatRefused
from tests.demo import demo

TALK = [
    {"role": "user", "content": 'Hi <b>&\n"you"'},
    {"role": "assistant", "content": "Hello 😀"},
    {"role": "user", "content": "Bye"},
]
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"


@pytest.mark.parametrize("template", ["demo", QWEN, MARKED])
@pytest.mark.parametrize("opened", [False, True])
def test_prompts_equal_transformers(template, opened):
    template = demo().config.chat_template if template == "demo" else template
    for extra in ({}, {"enable_thinking": False}):
        wanted, _ = render_jinja_template(
            [TALK], chat_template=template, add_generation_prompt=opened, **extra
        )
        assert render(template, TALK, add_generation_prompt=opened, **extra) == wanted[0]


def test_tools_are_written_as_json():
    tools = [{"type": "function", "function": {"name": "f", "description": "é <b>"}}]
    wanted, _ = render_jinja_template([TALK], tools=tools, chat_template=QWEN)
    assert render(QWEN, TALK, tools=tools, add_generation_prompt=False) == wanted[0]


def test_the_demo_chat_prompt():
    """The first message is preceded by the model's own system message unless one is given."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    prompt = demo().tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert prompt == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = demo().tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids.count(1) == 3 and ids.count(2) == 2 and demo().tokenizer.decode(ids) == prompt


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the checkpoint has none"),
        ("{% for %}", "cannot be rendered"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing + 'x' }}", "cannot be rendered"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_templates_that_are_refused(template, said):
    with pytest.raises(ChatRefused, match=said) as caught:
        render(template, TALK)
    assert "\n  hint: " in str(caught.value)


def test_templates_of_a_folder(tmp_path):
    assert template_of_folder(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert template_of_folder(tmp_path) == "one"
    settings.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "rag", "template": "r"},
                    {"name": "default", "template": "two"},
                ]
            }
        )
    )
    assert template_of_folder(tmp_path) == "two"
    for wrong in (3, ["one"], {"default": "one"}, [{"name": "default", "template": 3}]):
        settings.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(BadJson, match="its chat_template is neither text nor a list"):
            template_of_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("three")
    assert template_of_folder(tmp_path) == "three"
