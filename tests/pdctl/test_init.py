"""`pdctl init` writes what the examples hold, and never over a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.errors import PdctlError, UsageError
from pdctl.init import templates, write_template
from pdctl.topology import load

EXAMPLES = Path(__file__).parents[2] / "topologies"
PACKAGED = Path(__file__).parents[2] / "pdctl" / "templates"


def test_the_templates_are_the_examples() -> None:
    assert {p.name: p.read_text() for p in PACKAGED.iterdir()} == {
        p.name: p.read_text() for p in EXAMPLES.iterdir()
    }
    assert set(templates()) == {p.stem for p in EXAMPLES.iterdir()}


@pytest.mark.parametrize("template", templates())
def test_a_written_template_is_a_valid_topology_named_after_its_file(
    tmp_path: Path, template: str
) -> None:
    target = write_template(tmp_path / "My lab_2.yaml", template)
    assert load(target).topology.name == "my-lab-2"
    text = target.read_text()
    assert text.startswith("# ") and "topologies/" not in text and ".yaml" not in text


def test_into_a_folder(tmp_path: Path) -> None:
    target = write_template(tmp_path, "mixed")
    assert target == tmp_path / "mixed.yaml"
    assert load(target).topology.name == "mixed"


def test_a_name_without_letters_keeps_the_templates(tmp_path: Path) -> None:
    assert load(write_template(tmp_path / "___.yaml", "mixed")).topology.name == "mixed"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "t.yaml"
    target.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_template(target, "quickstart")
    assert target.read_text() == "mine"


def test_an_unknown_template_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_template(tmp_path / "t.yaml", "nope")
    assert "quickstart" in caught.value.hint
    assert not (tmp_path / "t.yaml").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PdctlError, match="cannot be written: No such file"):
        write_template(tmp_path / "no" / "t.yaml", "quickstart")
