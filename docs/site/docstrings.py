"""The docstrings' few Sphinx forms in the site: roles become links, formulas become MathML.

MathML is drawn by the browser itself, so no script is needed.
"""

import html
import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

_DIRECTIVE = re.compile(r"^( *)\.\. (math|code-block)::(.*)\n((?:\1 +.*\n|\s*\n)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)>>> (?:.*\n(?!\s*\n))*.*\n", re.MULTILINE)
_ROLE = re.compile(r":(math|func|class|meth|mod|data|attr):`([^`]+)`", re.DOTALL)


def plain_markdown(text: str, path: str) -> str:
    """The docstring of the object at ``path`` without Sphinx's forms.

    >>> plain_markdown("See :func:`~wellposed.diagnose`.", "wellposed.linalg.dct")
    'See <autoref optional identifier="wellposed.diagnose"><code>diagnose</code></autoref>.'
    """

    def directive(match: re.Match[str]) -> str:
        indent, kind, argument, body = match.groups()
        inner = textwrap.dedent(body).strip("\n")
        lines = [_formula(inner)] if kind == "math" else [f"```{argument.strip()}", *inner.split("\n"), "```"]
        return "".join(f"{indent}{line}\n" for line in ["", *lines, ""])

    def role(match: re.Match[str]) -> str:
        kind, target = match.groups()
        if kind == "math":
            return convert(target)
        name = target.lstrip("~")
        shown = name.rpartition(".")[2] if target.startswith("~") else name
        identifier = name if "." in name else f"{path.rpartition('.')[0]}.{name}"
        # Optional: what the site does not document is shown as a name, without a link.
        return f'<autoref optional identifier="{identifier}"><code>{html.escape(shown)}</code></autoref>'

    def example(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}{match[1]}```\n"

    marked = _DIRECTIVE.sub(directive, _EXAMPLE.sub(example, text + "\n"))
    return _ROLE.sub(role, marked).removesuffix("\n")


def _formula(latex: str) -> str:
    if "&" in latex:
        latex = rf"\begin{{align}}{latex}\end{{align}}"
    return f"<div>{convert(latex, display='block')}</div>"


class PlainDocstrings(griffe.Extension):
    """Called by griffe for every object that it finds."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if not obj.is_alias and obj.docstring:
            obj.docstring.value = plain_markdown(obj.docstring.value, obj.path)
