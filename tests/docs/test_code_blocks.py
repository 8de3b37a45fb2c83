"""Every code block of the README and of docs/ is run, or held against what it is meant for, or says why not.

Python runs after its page's preamble, with one replica, a folder and few steps in place of what the page names. Command
lines go through the parsers that they are meant for, and through the programs themselves where that is quick and needs
no network. YAML is read as a recipe. A block that can't be run has `<!-- not run: reason -->` right above it.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from composer_replication.cli import main
from composer_replication.recipe import recipe_from
from tests.docs.blocks import ROOT, Block, all_blocks, blocks_of
from tests.docs.commands import Unknown, check_command, check_ours, check_syntax, command_lines
from tests.docs.python import check_imports, run_block, unknown_names

BLOCKS = all_blocks()
_COMMANDS = ("python ", "pip ", "make ", "composer-replication ")
_RUN = re.compile(r"composer-replication (schedule |policy |launch \S+ .*--dry-run)")


def of(*languages: str, marked: bool = False) -> list[pytest.param]:
    return [
        pytest.param(block, id=block.name)
        for block in BLOCKS
        if block.language in languages and bool(block.reason) == marked
    ]


def preamble_of(block: Block) -> str:
    if re.search(r"^(from|import) composer\b|composer_replication\.composer|\bTrainer\(\.\.\.", block.text, re.M):
        return "composer"
    return "loop" if block.page in ("docs/torchft.md", "docs/migration.md") else "lightning"


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    kinds = {"python", "bash", "sh", "console", "yaml", "json", "text", ""}
    odd = [block.name for block in BLOCKS if block.language not in kinds and not block.reason]
    assert not odd, f"no test knows what to do with these: {odd}"
    assert len(BLOCKS) > 60


@pytest.mark.parametrize("block", of("python"))
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preamble = preamble_of(block)
    for module in {"composer": ["composer"], "loop": ["lightning"]}.get(preamble, []):
        pytest.importorskip(module)
    if "torchft" in block.text or "ObjectStoreManager" in block.text:
        pytest.importorskip("torchft")
    monkeypatch.chdir(tmp_path)
    for name, value in {"REPLICA": "0", "REPLICAS": "1"}.items():
        monkeypatch.setenv(f"COMPOSER_REPLICATION_{name}", value)
    with warnings.catch_warnings():  # of the trainers, about small data
        warnings.simplefilter("ignore")
        run_block(block, preamble, tmp_path)


@pytest.mark.parametrize("block", of("python", marked=True))
def test_python_that_is_not_run_imports_what_there_is(block: Block) -> None:
    compile(block.text, block.name, "exec")
    check_imports(block.text)


@pytest.mark.parametrize("block", of("bash", "sh"))
def test_shell(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_syntax(block.text)
    monkeypatch.chdir(tmp_path)
    for line in command_lines(block.text):
        check_command(line)
        if _RUN.match(line) and (ROOT / shlex.split(line)[2]).is_file():
            monkeypatch.chdir(ROOT)
            assert main(shlex.split(line, comments=True)[1:]) == 0


@pytest.mark.parametrize("block", of(""))
def test_indented_commands(block: Block) -> None:
    for line in command_lines(block.text):
        if line.startswith(_COMMANDS):
            check_command(line)


@pytest.mark.parametrize("block", of("console"))
def test_console(block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown is what is printed; a line of dots stands for any number of lines."""
    monkeypatch.chdir(ROOT)
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.M):
        words = shlex.split(command)
        assert words[0] == "composer-replication", f"{block.name}: only our own command can be run here"
        assert main(words[1:]) == 0
        printed = capsys.readouterr().out
        pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines())
        assert re.fullmatch(pattern, printed), f"it prints\n{printed}"


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, or a part of one; or what llm-foundry builds `AutoLoCo` from."""
    monkeypatch.chdir(tmp_path)
    Path("signing.key").write_text("k" * 44)
    Path("signing.key").chmod(0o600)
    written = yaml.safe_load(block.text)
    if "algorithms" in written:
        assert "autoloco" in written["algorithms"]  # tests/composer/test_llm_foundry.py builds it
        return
    rest = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    whole = {key: rest[key] for key in ("model", "data") if key not in written} | written
    recipe_from(yaml.safe_dump(whole), file=block.name)


def test_json() -> None:
    """One value, or one on each line."""
    for block in (block for block in BLOCKS if block.language == "json" and not block.reason):
        for value in [block.text] if block.text.lstrip().startswith("{\n") else block.text.splitlines():
            json.loads(value)


@pytest.mark.parametrize("block", of("text"))
def test_text(block: Block) -> None:
    """What our commands print: each line begins with a word that they know."""
    code = "".join(file.read_text() for file in sorted((ROOT / "composer_replication" / "cli").glob("*.py")))
    for line in block.text.splitlines():
        assert line.split("  ")[0].strip() in code, f"{block.name}: nothing prints {line!r}"


def test_commands_in_the_text() -> None:
    """`composer-replication ...` in running text, where it is a whole command."""
    looked = 0
    for page in sorted({block.page for block in BLOCKS} | {"docs/security.md", "docs/method.md"}):
        prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.M | re.S)
        for span in re.findall(r"`composer-replication ([^`]+)`", prose):
            if not re.search(r"[…\[|]|\.\.\.|COMMAND|^\S+$|RUN", span):
                check_ours(shlex.split(span.replace("URI", "file:///x")))
                looked += 1
    assert looked > 15


# -- the tests' own


def test_a_wrong_command_is_noticed() -> None:
    with pytest.raises(SystemExit):
        check_command("composer-replication status --wacth file:///x")
    with pytest.raises(AssertionError, match="no module"):
        check_command("python -m composer_replication.nothing")
    with pytest.raises(AssertionError, match="no extra"):
        check_command("pip install 'composer-replication[lightnin]'")
    with pytest.raises(AssertionError, match="no target"):
        check_command("make quikstart")
    with pytest.raises(Unknown):
        check_command("rm -rf /")


def test_blocks_are_found_with_their_reasons() -> None:
    text = "a\n\n<!-- not run: it costs -->\n```python\nx = 1\n```\n\n    python a.py\n\n  ```yaml\n  a: 1\n  ```\n"
    found = blocks_of(text, "p.md")
    assert [(b.language, b.text, b.reason) for b in found] == [
        ("python", "x = 1\n", "it costs"),
        ("", "python a.py\n", ""),
        ("yaml", "a: 1\n", ""),
    ]


def test_a_name_from_nowhere_is_noticed() -> None:
    import ast

    assert unknown_names(ast.parse("def f(a):\n    return a + b\nprint(f(c))"), {"c": 1}) == {"b"}
    if find_spec("torch"):
        with pytest.raises(AssertionError, match="has no"):
            check_imports("from torch import nothing_of_that_name")
