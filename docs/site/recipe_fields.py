"""The fields of a recipe as tables in the site, by group, read off their ``_field(default, group, help)``."""

import ast
from typing import Any

import griffe


def field_table(fields: dict[str, str]) -> str:
    """Markdown of fields, given as name -> the source of its value.

    >>> print(field_table({"seed": '_field(0, "Run", "of everything that is drawn")'}).strip())
    **Run**
    <BLANKLINE>
    | field | default | meaning |
    | --- | --- | --- |
    | `seed` | `0` | of everything that is drawn |
    """
    groups: dict[str, list[str]] = {}
    for name, source in fields.items():
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call), source
        default, (group, text) = ast.unparse(call.args[0]), map(ast.literal_eval, call.args[1:3])
        meaning = text.replace("|", "\\|").replace("[", "(").replace("]", ")")
        groups.setdefault(group, []).append(f"| `{name}` | `{default}` | {meaning} |")
    head = ["| field | default | meaning |", "| --- | --- | --- |"]
    return "\n\n".join("\n".join([f"**{group}**", "", *head, *rows]) for group, rows in groups.items())


class RecipeFields(griffe.Extension):
    """Called by griffe when all members of a class are known."""

    def on_class_members(self, *, cls: Any, **kwargs: Any) -> None:
        if cls.path != "wellposed.train.recipe.Recipe":
            return
        fields = {name: str(member.value) for name, member in cls.attributes.items() if member.value}
        cls.docstring.value += "\n\n" + field_table(fields)
