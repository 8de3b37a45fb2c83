"""The code blocks of the README and of docs/, with the reason of those that aren't run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[\w.+-]*)")
_REASON = re.compile(r"^<!-- not run: (?P<reason>.+?) -->$")


@dataclass(frozen=True)
class Block:
    page: str  # from the repository's root
    line: int  # of its first line of code
    language: str  # "" of an indented one
    text: str
    reason: str = ""  # why it isn't run; "": it is

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str, page: str) -> list[Block]:
    """Fenced blocks, and those that are indented by four spaces after an empty line."""
    lines = text.split("\n")
    found: list[Block] = []
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening:
            end = index + 1
            while not lines[end].strip().startswith(opening["fence"]):
                end += 1
            indent = len(opening["indent"])
            body = [line[indent:] for line in lines[index + 1 : end]]
            above = _REASON.match(lines[index - 1].strip()) if index else None
            reason = above["reason"] if above else ""
            found.append(Block(page, index + 2, opening["language"], "\n".join(body) + "\n", reason))
            index = end + 1
        elif lines[index].startswith("    ") and lines[index].strip() and (not index or not lines[index - 1].strip()):
            end = index
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = "\n".join(line[4:] for line in lines[index:end]).rstrip() + "\n"
            if not body.lstrip().startswith(("options:", "- ", "* ")):  # of an API page; a list's continuation
                found.append(Block(page, index + 1, "", body))
            index = end
        else:
            index += 1
    return found


def all_blocks() -> list[Block]:
    return [
        block for page in pages() for block in blocks_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    ]
