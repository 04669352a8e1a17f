"""The fenced blocks of the README and the docs, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(r"(?:<!-- (?P<mark>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_COMMANDS = ("wellposed", "torchrun", "accelerate", "srun", "python", "make", "pip")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``mark`` is the HTML comment right before it."""

    page: Path
    number: int
    language: str
    text: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}-{self.number}"

    @property
    def needs(self) -> str | None:
        kind, _, package = self.mark.partition(":")
        return package.strip() if kind == "needs" else None

    @property
    def python(self) -> str | None:
        """The Python of the block; that of a diff is the script after it."""
        if self.language == "diff":
            kept = (line[1:] for line in self.text.splitlines() if not line.startswith("-"))
            return "\n".join(kept) + "\n"
        return self.text if self.language == "python" else None

    @property
    def runs(self) -> bool:
        return self.mark == "run"


def blocks(page: Path) -> list[Block]:
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [
        Block(page, number, match["language"], match["text"], (match["mark"] or "").strip())
        for number, match in enumerate(found)
    ]


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[list[str]]:
    """The command lines of a block as words; [optional parts] are taken, output and comments are not."""
    if block.language not in ("", "bash", "sh", "console"):
        return []
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    starts = tuple(f"{command} " for command in _COMMANDS)
    found = [re.sub(r"(?<=\s)\[|\](?=\s|$)", "", line) for line in lines if f"{line} ".startswith(starts)]
    return [shlex.split(line, comments=True) for line in found]


def wellposed_words(words: list[str]) -> list[str] | None:
    """What goes to the wellposed command, None if the line calls another one."""
    if words[0] == "wellposed":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "wellposed":
        return words[words.index("-m") + 2 :]
    return None
