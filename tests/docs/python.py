"""Runs Python blocks of the documentation, small and offline."""

from __future__ import annotations

import ast
import builtins
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.docs.blocks import Block

PREAMBLES = Path(__file__).parent / "preambles"
# What a page says, and what is run: one replica alone, a folder, few steps.
_SMALLER = (
    (r"file:///shared/\w+", "{folder}/store"),
    (r"s3://(small-)?bucket/run1", "{folder}/store"),
    (r"s3://bucket/\{run_name\}", "{folder}/{{run_name}}"),
    (r"/disk/run1", "{folder}/own"),
    (r"\breplicas=\d+", "replicas=1"),
    (r"\b(base_horizon|sync_every)=\d+", r"\1=4"),
    (r"\bhorizon=\d+", "horizon=4"),
    (r"\bmax_steps=[\d_]+", "max_steps=8"),
    (r'\bmax_duration="\d+ba"', 'max_duration="8ba"'),
)


class _Ellipses(ast.NodeTransformer):
    """`f(..., x=1)` becomes `f(x=1, **others["f"])`."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        kept = [one for one in node.args if not (isinstance(one, ast.Constant) and one.value is ...)]
        if len(kept) < len(node.args):
            node.args = kept
            name = ast.Constant(ast.unparse(node.func).rpartition(".")[2])
            node.keywords.append(
                ast.keyword(arg=None, value=ast.Subscript(ast.Name("others", ast.Load()), name, ast.Load()))
            )
        return node


def run_block(block: Block, preamble: str, folder: Path) -> dict[str, Any]:
    """Run a block after its page's preamble; gives the names it leaves."""
    names: dict[str, Any] = {"__name__": "__docs__"}
    file = PREAMBLES / f"{preamble}.py"
    for text, where in ((smaller(file.read_text(), folder), str(file)), (smaller(block.text, folder), block.name)):
        tree = _Ellipses().visit(ast.parse(text, where))
        lacking = unknown_names(tree, names)
        assert not lacking, f"{where} uses names that nothing gives it: {sorted(lacking)}"
        exec(compile(ast.fix_missing_locations(tree), where, "exec"), names)
    return names


def smaller(text: str, folder: Path) -> str:
    for pattern, instead in _SMALLER:
        text = re.sub(pattern, lambda m, instead=instead: m.expand(instead.format(folder=folder)), text)
    return text


def unknown_names(tree: ast.AST, known: dict[str, Any]) -> set[str]:
    """Names that are read and neither bound in the tree, nor known, nor built in."""
    bound = {*known, *vars(builtins), "__name__"}
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return read - bound


def check_imports(text: str) -> int:
    """Every name that is imported from an installed package is there. Gives how many were looked up."""
    looked = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and find_spec(node.module.partition(".")[0]):
            module: ModuleType = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                looked += 1
    return looked
