"""The documentation as a site: built with every warning an error, complete, and without the network.

`make docs` builds the same. Warnings are broken links and anchors, pages that the navigation lacks, names that the
reference can't find.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zlib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from filelock import FileLock

from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

# Packages whose `__all__` the reference shows.
PACKAGES = (
    "",
    "autoloco",
    "composer",
    "diloco",
    "diloco.round_record",
    "diloco.serverless",
    "diloco.thresholds",
    "errors",
    "lightning",
    "preview",
    "recipe",
    "simulation",
    "store",
)
# Other names of what is shown, which the page says.
ALIASES = {"K8sExecutor": "VolcanoExecutor", "MockManager": "ObjectStoreManager"}
# Plain values, without a docstring to show.
TABLES = {"POLICIES", "RECORD_VERSION"}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """(the site's folder, exit status, what was printed), built once for all processes of the test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "site.lock"):
        told = folder / "site.json"
        if not told.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=220)
            told.write_text(json.dumps([done.returncode, done.stdout + done.stderr]))
        return (folder / "site", *json.loads(told.read_text()))


@pytest.fixture(scope="session")
def site(built: tuple[Path, int, str]) -> Path:
    return built[0]  # also with warnings: they fail the one test that is about them


def test_it_is_built_without_a_warning(built: tuple[Path, int, str]) -> None:
    _, status, printed = built
    assert status == 0, printed


_TAG = re.compile(r"<(link|script|img|iframe|source)\b([^>]*)>|<style\b[^>]*>(.*?)</style>", re.S)
_ATTRIBUTE = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))")


def fetched_by(html: str) -> list[str]:
    """What a browser fetches by itself when it opens a page."""
    found: list[str] = []
    for tag, attributes, style in _TAG.findall(html):
        named = {name.lower(): "".join(values) for name, *values in _ATTRIBUTE.findall(attributes)}
        found += re.findall(r"url\(([^)]+)\)", style)
        if tag and not {"canonical", "prev", "next"} & {*named.get("rel", "").split()}:
            found += [named[key] for key in ("href", "src") if named.get(key)]
    return found


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        far = [
            one for one in fetched_by(page.read_text(encoding="utf-8")) if re.match(r"(https?:)?//", one.strip("'\""))
        ]
        assert not far, f"{page.relative_to(site)} fetches {far}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_a_page_that_fetches_is_noticed() -> None:
    html = '<link rel=stylesheet href="https://f/x.css"><script src="//c/x.js"></script><a href="https://ok/">x</a>'
    assert fetched_by(html) == ["https://f/x.css", "//c/x.js"]
    assert fetched_by("<style>@import url(https://f/y.css)</style>") == ["https://f/y.css"]


def test_links_to_files_of_the_repository_lead_to_their_pages(site: Path) -> None:
    page = (site / "torchft.html").read_text(encoding="utf-8")
    assert 'href="repository/examples/plain_loop.py.html"' in page
    listing = (site / "repository" / "examples" / "plain_loop.py.html").read_text(encoding="utf-8")
    assert "ObjectStoreCollective" in listing
    home = (site / "repository" / "index.html").read_text(encoding="utf-8")  # the README
    assert 'href="../lightning.html"' in home and 'src="../quickstart.png"' in home
    assert (site / "repository" / "docker" / "index.html").is_file()
    assert (site / "repository" / "composer_replication" / "autoloco" / "index.html").is_file()


def test_where_links_lead() -> None:
    spec = spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    text = "[a](../examples/plain_loop.py#x) [b](results) [c](results/quickstart.json) [d](https://x.y/z) [e](#f)\n"
    rewritten = hooks.rewrite(f"{text}```\n[a](../README.md)\n```\n![p](quickstart.png)", "stores.md", "docs/stores.md")
    assert rewritten.splitlines() == [
        "[a](repository/examples/plain_loop.py.md#x) [b](repository/docs/results/index.md) "
        "[c](results/quickstart.json) [d](https://x.y/z) [e](#f)",
        "```",
        "[a](../README.md)",  # code stays as it is
        "```",
        "![p](quickstart.png)",
    ]
    assert hooks.rewrite("[up](../../README.md)", "repository/docker/README.md", "docker/README.md") == (
        "[up](../../README.md)"  # leads out of the repository: left for MkDocs to complain about
    )
    assert (
        hooks.rewrite("[up](../README.md)", "repository/docker/README.md", "docker/README.md") == "[up](../README.md)"
    )


def test_links_hold_where_the_repository_is_browsed() -> None:
    """Every relative link of every page leads to a file, seen from where the page lies."""
    looked = 0
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docker/README.md")]
    for page in [*pages, *(ROOT / "docs").rglob("*.md"), *(ROOT / "spikes").rglob("*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                assert (page.parent / path).exists(), f"{page.relative_to(ROOT)}: {target}"
                looked += 1
    assert looked > 150


def test_arguments_that_share_an_entry_are_not_called_required(site: Path) -> None:
    rows = re.findall(
        r"<tr class=\"doc-section-item\">(.*?)</tr>",
        (site / "api" / "lightning.html").read_text(encoding="utf-8"),
        re.S,
    )
    shared = [row for row in rows if "<code>replica, replicas</code>" in row]
    assert shared and not any("required" in row for row in shared)


def public_names(package: str) -> list[str]:
    """`__all__`, without importing."""
    where = ROOT.joinpath("composer_replication", *filter(None, package.split(".")))
    file = where / "__init__.py" if where.is_dir() else where.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(site: Path, package: str) -> None:
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split(" ", 1)[0].rpartition(".")[2] for line in inventory.splitlines()}
    missing = [n for n in public_names(package) if ALIASES.get(n, n) not in shown and n not in TABLES]
    assert not missing, f"docs/api shows nothing of {missing}"
