"""Renders a model's own chat template (Jinja) into the prompt text, in a sandbox.

Owns the template dialect that model files use: trimmed blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now` and `{% generation %}` blocks. Knows no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from runtime.errors import ModelError, RequestError


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` blocks mark assistant text for training; here they are plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """A compiled template. Rendering is safe from any thread."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as e:
            raise ModelError(f"the model's chat template does not compile: {e}") from e
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text up to where the assistant answers. Raises RequestError when it is refused."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as e:
            raise RequestError(
                f"the model's chat template refuses these messages: {e}", param="messages"
            ) from e
