"""Imports point down, the core stays light, and the public names are what they claim to be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "composer_replication"

# A module may import from its own layer and from the layers named; the longest matching prefix decides.
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "drafts": (),
    "readable": (),
    "autoloco": ("errors",),
    "store": ("errors",),
    "preview": ("autoloco", "errors"),
    "isolate": ("errors",),
    "collective": ("errors", "autoloco", "store"),
    "diloco.outer_step": ("errors", "collective"),
    "diloco": ("drafts", "errors", "autoloco", "store", "collective", "diloco.outer_step"),
    "tasks": ("errors", "store", "isolate", "adapter"),
    "recipe": ("errors", "autoloco", "store", "collective", "diloco", "isolate", "preview"),
    "adapter": ("drafts", "errors", "autoloco", "store", "collective", "diloco", "isolate", "preview"),
    "lightning": ("adapter", "errors", "autoloco", "store", "collective", "diloco", "isolate", "preview"),
    "composer": ("adapter", "drafts", "errors", "autoloco", "store", "collective", "diloco", "isolate", "preview"),
    "run": ("isolate",),
    "lightning_zero_edit": ("isolate", "lightning"),
    "diloco.serverless": (
        *("errors", "autoloco", "store", "collective", "diloco", "isolate", "preview", "recipe", "tasks", "lightning"),
        *("composer", "adapter", "drafts"),
    ),
    "simulation": (
        *("errors", "autoloco", "store", "collective", "diloco", "preview", "recipe", "tasks", "adapter"),
        *("isolate", "diloco.serverless"),
    ),
    "report": ("errors", "autoloco", "collective", "diloco", "readable"),
    "cli": ("*",),
    "": ("*",),  # the package's own __init__ resolves names lazily
}


def layer_of(module: str) -> str:
    return max((name for name in LAYERS if module == name or module.startswith(f"{name}.") or not name), key=len)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_every_module_has_a_layer() -> None:
    unplaced = [module for module in modules() if module and layer_of(module) == ""]
    assert unplaced == []


@pytest.mark.parametrize("module", [m for m in modules() if m])
def test_imports_point_down(module: str) -> None:
    allowed = LAYERS[layer_of(module)]
    if allowed == ("*",):
        return
    known = modules()
    for name in imports_of(modules()[module]):
        inside = name.removeprefix("composer_replication.")
        if inside == name or inside not in known:
            continue
        target = layer_of(inside)
        assert target == layer_of(module) or target in allowed, f"{module} ({layer_of(module)}) imports {inside}"


def test_the_controller_uses_the_standard_library_only() -> None:
    for module, path in modules().items():
        if layer_of(module) in ("autoloco", "errors", "isolate"):
            for name in imports_of(path):
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or top == "composer_replication", f"{module} imports {name}"


def test_the_core_loads_no_trainer_and_no_client() -> None:
    code = (
        "import sys, composer_replication, composer_replication.diloco.loop\n"
        "import composer_replication.collective.in_process, composer_replication.collective.object_store\n"
        "heavy = {'lightning', 'pytorch_lightning', 'composer', 'modal', 'boto3', 'fsspec', 'omegaconf', 'rich',"
        " 'matplotlib', 'huggingface_hub', 'plotly', 'transformers', 'datasets', 'wandb', 'mlflow', 'tensorboard'}\n"
        # fsspec and others come with torch itself in some versions: what counts is what we add to it.
        "mine = set(sys.modules)\n"
        "print(sorted(heavy & mine))"
    )
    bare = "import sys, torch, torch.distributed; print(sorted(sys.modules))"
    ours = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    torch_own = subprocess.run([sys.executable, "-c", bare], check=True, capture_output=True, text=True)
    added = set(ast.literal_eval(ours.stdout)) - set(ast.literal_eval(torch_own.stdout))
    assert added == set()


def test_nothing_unpickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("eval", "exec", "pickle.load", "pickle.loads"), f"{path}: {name}"
                if name == "torch.load":
                    safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                    assert safe, f"{path}: torch.load without weights_only=True"


def test_public_names_are_there_and_sorted() -> None:
    import composer_replication as package

    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) == set(package._HOME)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="AutoLoco"):
        package.AutoLoco  # noqa: B018


def test_importing_the_package_loads_nothing_of_torch() -> None:
    code = "import sys, composer_replication; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
