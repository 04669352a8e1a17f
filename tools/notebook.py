"""Run a notebook's cells in one namespace, as its test does, and keep what they print in the file.

python tools/notebook.py docs/tutorial.ipynb
"""

import contextlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any], name: str = "notebook") -> list[str]:
    r"""What each code cell prints, in their order.

    >>> cell = {"cell_type": "code", "source": ["x = 2\n", "print(x + 1)"]}
    >>> run({"cells": [cell]})
    ['3\n']
    """
    module = types.ModuleType(name)
    before, sys.modules[name] = sys.modules.get(name), module
    printed = []
    try:
        for number, cell in enumerate(each for each in notebook["cells"] if each["cell_type"] == "code"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), module.__dict__)
            printed.append(out.getvalue())
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
    return printed


def with_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what its cells print."""
    printed = iter(run(notebook))
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = next(printed)
            stream = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
            cells.append({**cell, "outputs": [stream] if text else []})
        else:
            cells.append(cell)
    return {**notebook, "cells": cells}


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        notebook = with_outputs(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
