"""YAML text to plain data plus the line of every key and item, with all mistakes collected.

Refuses what YAML lets pass silently: duplicate keys, keys that are not text, tags, self-references.
Sequences become tuples. Knows nothing of topologies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_MAX_NODES = 20_000
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(slots=True)
class Document:
    """`lines` maps a path to the line (from 1) of its key or item; () is the document."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[tuple[int, Path, str, str]] = field(default_factory=list)
    """Line, path, what is wrong, what would be right."""

    def line(self, path: Path) -> int:
        """Line of the path, or of its nearest parent that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def dotted(path: Path) -> str:
    """('decode', 0, 'host') -> decode[0].host"""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def parse(text: str) -> Document:
    """Never raises for bad text: what is wrong is in `problems`, what could be read in `data`."""
    document = Document()
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            document.data = _Reader(document, loader.construct_object).read(node, (), ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        document.problems.append((mark.line + 1 if mark else 1, (), *_syntax(e)))
    except yaml.reader.ReaderError as e:
        what = f"holds a character that YAML does not allow: {_character(e.character)}"
        document.problems.append((text.count("\n", 0, e.position) + 1, (), what, ""))
    except RecursionError:
        document.problems.append((1, (), "is nested too deeply to be a topology", ""))
    return document


def _syntax(e: yaml.MarkedYAMLError) -> tuple[str, str]:
    problem = e.problem or "cannot be read"
    if "\\t" in problem:
        return "not valid YAML: a tab character", "indent with spaces"
    if isinstance(e, yaml.composer.ComposerError) and "another document" in problem:
        return "holds more than one document", "one topology per file: remove the `---`"
    if "mapping values are not allowed" in problem:
        return (
            f"not valid YAML: {problem}",
            "check the indentation, or quote a value holding `: `",
        )
    return f"not valid YAML: {problem}", "check the indentation and quotes near this line"


def _character(found: int | str | bytes) -> str:
    return repr(chr(found) if isinstance(found, int) else found)


class _Reader:
    """One pass over a node tree."""

    def __init__(self, document: Document, scalar: Callable[[yaml.Node], Any]) -> None:
        self._document = document
        self._scalar = scalar
        self._seen = 0

    def read(self, node: yaml.Node, path: Path, parents: tuple[int, ...]) -> Any:
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        self._seen += 1
        if self._seen > _MAX_NODES:  # aliases of aliases multiply
            if self._seen == _MAX_NODES + 1:
                self._problem(node, (), "is too large to be a topology", "")
            return None
        if id(node) in parents:
            self._problem(node, path, "refers to itself", "remove the alias")
            return None
        parents = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, parents)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.read(item, (*path, i), parents) for i, item in enumerate(node.value))
        return self._plain(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path, parents: tuple[int, ...]) -> Any:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            line = key_node.start_mark.line + 1
            if key in first_line:
                what = f"the key is there twice, first on line {first_line[key]}"
                self._problem(key_node, (*path, key), what, "keep one of them")
                continue
            first_line[key] = line
            self._document.lines[(*path, key)] = line
            result[key] = self.read(value_node, (*path, key), parents)
        for source in merged:
            self._merge(source, path, parents, result)
        return result

    def _merge(
        self, source: yaml.Node, path: Path, parents: tuple[int, ...], into: dict[str, Any]
    ) -> None:
        """`<<: *anchor`: keys that are not there already, the first source winning."""
        if not isinstance(source, yaml.MappingNode) or id(source) in parents:
            self._problem(source, (*path, "<<"), "can only merge a mapping", "name its anchor")
            return
        inner = _Reader(Document(), self._scalar)
        inner._seen = self._seen
        mapping = inner.read(source, path, parents)
        self._seen = inner._seen
        self._document.problems += inner._document.problems
        for key, value in mapping.items():
            if key in into:
                continue
            into[key] = value
            for inner_path, line in inner._document.lines.items():
                if inner_path[: len(path) + 1] == (*path, key):
                    self._document.lines.setdefault(inner_path, line)

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        value = self._plain(node, path) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str):
            return value
        shown = f"{node.value}" if isinstance(node, yaml.ScalarNode) else "this"
        self._problem(node, path, f"the key {shown} is not text", "put it in quotes")
        return None

    def _plain(self, node: yaml.Node, path: Path) -> Any:
        try:
            value = self._scalar(node)
        except (yaml.constructor.ConstructorError, ValueError):
            self._problem(node, path, f"cannot be read as {node.tag}", "remove the tag or quote it")
            return None
        if isinstance(value, str | int | float | None) and isinstance(value, Hashable):
            return value
        # Dates, binary and sets have no place in a topology: keep the text as it was written.
        return node.value if isinstance(node.value, str) else None

    def _problem(self, node: yaml.Node, path: Path, what: str, right: str) -> None:
        self._document.problems.append((node.start_mark.line + 1, path, what, right))
