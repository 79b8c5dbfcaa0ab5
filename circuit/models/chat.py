"""Chat templates: found in a folder, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from circuit.models.errors import BadJson, ChatRefused
from circuit.models.safetensors_file import read_json


def template_of_folder(folder: Path) -> str | None:
    """The chat template of a checkpoint's folder:
    chat_template.jinja, else tokenizer_config.json.
    """
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text("utf-8")
    settings = folder / "tokenizer_config.json"
    found = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise BadJson(
            path=settings, why="its chat_template is neither text nor a list of named texts"
        )
    return found


def render(
    template: str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """The prompt that `template` makes of `messages`; `variables` are further names it may read.

    Raises ChatRefused when there is no template, when it is broken, or when it refuses the
    messages.
    """
    import jinja2

    if template is None:
        raise ChatRefused(why="the checkpoint has none")
    try:
        return _compiled(template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            **{"tools": None, "documents": None, **variables},
        )
    except jinja2.TemplateError as error:
        raise ChatRefused(why=str(error)) from error
    except (
        Exception
    ) as error:  # the template is a program of the checkpoint's and may fail in any way
        raise ChatRefused(why=f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str):
    """`template`, compiled where attributes of Python objects cannot be reached or changed."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads `{% generation %}`, which marks the assistant's words for training, as nothing."""

        tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None, **options: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template)
