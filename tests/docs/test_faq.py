"""The messages that docs/faq.md quotes are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Quoted there, and said by somebody else.
ELSEWHERE = {"You selected an invalid strategy name": "lightning.pytorch.trainer.connectors.accelerator_connector"}


def quoted(text: str) -> list[str]:
    """What the page quotes: spans of code with a space in them that aren't a command."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = [span.strip() for span in re.findall(r"`([^`\n]+)`", prose)]
    return sorted({span for span in spans if " " in span and not span.startswith(("composer-replication ", "-m "))})


def strings(path: Path) -> list[str]:
    """The string literals of a file, as they read when put together; a placeholder is a NUL."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def messages() -> str:
    files = sorted((ROOT / "composer_replication").rglob("*.py"))
    return "\n".join(text for file in files for text in strings(file))


def test_every_quoted_message_is_one_of_the_code(messages: str) -> None:
    quotes = quoted((ROOT / "docs" / "faq.md").read_text(encoding="utf-8"))
    assert len(quotes) > 40
    missing = [quote for quote in quotes if quote not in messages and quote not in ELSEWHERE]
    assert not missing, f"docs/faq.md quotes what the code doesn't say (any more): {missing}"


@pytest.mark.parametrize("quote", sorted(ELSEWHERE))
def test_what_others_say_is_what_they_say(quote: str) -> None:
    pytest.importorskip("lightning")
    from importlib.util import find_spec

    spec = find_spec(ELSEWHERE[quote])
    assert spec is not None and spec.origin is not None
    assert any(quote in text for text in strings(Path(spec.origin)))


def test_a_message_that_is_gone_is_noticed(messages: str) -> None:
    assert quoted("**`is held by the king`** and `replica=`") == ["is held by the king"]
    assert "is held by the king" not in messages
    assert quoted("```bash\nls `a b`\n```\n") == []
