"""The reference pages name everything that is public."""

import dataclasses
import re
from collections.abc import Callable

import pytest

import mesh_core
from mesh_core import extensions

pytestmark = pytest.mark.python

Page = Callable[[str], str]


def code_of(text: str) -> set[str]:
    """Every word inside backquotes."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}


def test_every_public_name_is_on_the_reference_page(page: Page) -> None:
    missing = set(mesh_core.__all__) - code_of(page("docs/reference/api.md"))
    assert not missing, f"docs/reference/api.md does not mention {sorted(missing)}"


def test_every_error_is_in_the_table_of_errors(page: Page) -> None:
    table = page("docs/reference/api.md").split("## Errors")[1].split("## ")[0]
    public = [getattr(mesh_core, name) for name in mesh_core.__all__]
    errors = {value.__name__ for value in public if isinstance(value, type) and issubclass(value, Exception)}
    assert len(errors) > 5
    missing = errors - code_of(table)
    assert not missing, f"the table of errors in docs/reference/api.md lacks {sorted(missing)}"


def test_every_field_of_a_failure_is_on_the_reference_page(page: Page) -> None:
    lines = page("docs/reference/api.md").splitlines()
    row = next(line for line in lines if line.startswith("| `MeshFailure`"))
    fields = {field.name for field in dataclasses.fields(mesh_core.MeshFailure)}
    missing = {name for name in fields if not name.startswith("_")} - code_of(row)
    assert not missing


def test_every_public_name_of_extensions_is_on_its_page(page: Page) -> None:
    missing = set(extensions.__all__) - code_of(page("docs/reference/extensions.md"))
    assert not missing


def test_every_setting_has_a_row_with_its_variable(page: Page) -> None:
    rows = [line for line in page("docs/reference/settings.md").splitlines() if line.startswith("| `")]
    for field in dataclasses.fields(mesh_core.Settings):
        row = next((line for line in rows if line.startswith(f"| `{field.name}` |")), None)
        assert row is not None, f"docs/reference/settings.md has no row for {field.name}"
        assert f"`MESH_{field.name.upper()}`" in row


def test_every_public_name_has_a_docstring() -> None:
    for name in mesh_core.__all__:
        value = getattr(mesh_core, name)
        if callable(value):
            assert (value.__doc__ or "").strip(), f"mesh_core.{name} has no docstring"


def test_the_reference_page_names_nothing_that_does_not_exist(page: Page) -> None:
    for line in page("docs/reference/api.md").splitlines():
        row = re.match(r"\| `(\w+)[^|]*\|", line)
        if row:
            assert row[1] in mesh_core.__all__, f"docs/reference/api.md: mesh_core has no {row[1]!r}"
