"""Command lines of the documentation, held against the parsers and files that they are meant for."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from composer_replication.cli import _parse
from composer_replication.recipe import load_recipe
from tests.docs.blocks import ROOT

_ASSIGNMENT = re.compile(r"^[A-Z][A-Z0-9_]*=")
_LAUNCHERS = ("composer", "torchrun", "srun")  # start `-m module`, after options of their own
_PLACEHOLDERS = ("recipe.yaml", "foo.yaml", "RECIPE", "runs/")


class Unknown(AssertionError):
    """A command that nothing here knows how to check."""


def command_lines(text: str) -> Iterator[str]:
    """Commands, one each; lines that end in a backslash joined, comments gone."""
    for line in text.replace("\\\n", " ").split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def check_command(line: str) -> None:
    """Raise if the command can't be meant: another option, module, file or target than there is."""
    words = shlex.split(line, comments=True)
    while words and (_ASSIGNMENT.match(words[0]) or words[0] == "export"):
        words.pop(0)
    match words:
        case []:
            return
        case ["(umask", *_] if "openssl rand" in line:  # the one command of others' that is run as it is
            subprocess.run(["bash", "-c", line], check=True, timeout=60)
        case ["composer-replication", *rest]:
            check_ours(rest)
        case ["make", *targets]:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
            assert {t for t in targets if "=" not in t} <= {*known}, f"make has no target {targets}"
        case ["pip" | ".venv/bin/pip", "install", *packages]:
            for extra in re.findall(r"(?:composer-replication|\.)\[([\w,]+)\]", " ".join(packages)):
                assert set(extra.split(",")) <= _extras(), f"there is no extra {extra}"
        case ["python", "-m", module, *rest]:
            _check_module(module, rest)
        case ["python", script, *rest]:
            file = ROOT / script
            assert file.is_file(), f"there is no {script}"
            known = file.read_text()
            for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
                assert f'"{option}"' in known, f"{script} has no option {option}"
        case [launcher, *rest] if launcher in _LAUNCHERS:
            assert "-m" in rest, f"{launcher} without -m"
            at = rest.index("-m")
            _check_module(rest[at + 1], rest[at + 2 :])
        case _:
            raise Unknown(f"no test knows how to check {line!r}: mark the block, or teach tests/docs/commands.py")


def check_ours(words: list[str]) -> None:
    """`composer-replication ...`: the real parser takes it, and the real loader the values it puts over a recipe."""
    args = _parse(words)
    if args.command in ("launch", "plan", "simulate"):
        path = ROOT / args.recipe
        if not path.is_file():
            assert str(args.recipe).startswith(_PLACEHOLDERS), f"there is no recipe {args.recipe}"
            path = ROOT / "recipes" / "quickstart.yaml"
        load_recipe(path, args.overrides)


def check_syntax(text: str) -> None:
    """Raise if a shell couldn't read it."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def _check_module(module: str, rest: list[str]) -> None:
    if module == "composer_replication.diloco.serverless.replica_entrypoint":
        from composer_replication.diloco.serverless.replica_entrypoint import _parser

        _parser().parse_args(rest)
    elif module == "composer_replication.run":
        own = (ROOT / "composer_replication" / "run.py").read_text()
        before = rest[: next(i for i, word in enumerate(rest) if word.endswith(".py"))]
        assert all(f'"{word}"' in own for word in before if word.startswith("--")), f"{module} has not {before}"
    else:
        assert _installed(module), f"there is no module {module}"


def _installed(module: str) -> bool:
    top = module.partition(".")[0]
    if not (ROOT / top).is_dir():
        return find_spec(top) is not None
    local = ROOT / Path(*module.split("."))
    return (local / "__main__.py").is_file() or local.with_suffix(".py").is_file()


def _extras() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return {*re.findall(r"^(\w+) = \[", section, flags=re.M)}
