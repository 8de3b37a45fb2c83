"""The trainer image's Dockerfile, as far as it can be judged without building it: lint, context, wheel, rules."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from composer_replication.recipe.credentials import looks_secret

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) in order, comments left out and continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in whole.splitlines() if line.strip()]
    return [(name.upper(), rest) for name, rest in found]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def defaults() -> dict[str, str]:
    return dict(rest.split("=", 1) for rest in of("ARG") if "=" in rest)


def copied() -> list[str]:
    """What is copied from the build's context, arguments filled in."""
    sources: list[str] = []
    for rest in of("COPY"):
        if not rest.startswith("--from"):
            sources += rest.split()[:-1]
    return [re.sub(r"\$\{(\w+)\}", lambda match: defaults()[match[1]], source) for source in sources]


def in_context(path: Path) -> bool:
    """Does .dockerignore let the file through? Its last matching rule decides."""
    name, through = path.relative_to(ROOT).as_posix(), True
    for rule in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split():
        pattern = rule.removeprefix("!")
        parts = name.split("/")
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        hit = (
            pattern.removeprefix("**/") in parts
            if pattern.startswith("**/")
            else any(fnmatch.fnmatchcase(head, pattern) for head in heads)
        )
        if hit:
            through = rule.startswith("!")
    return through


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    linter = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    if not os.path.exists(linter):
        if os.environ.get("CI"):
            pytest.fail("hadolint isn't there: pip install -e '.[dev]'")
        pytest.skip("hadolint isn't there")
    found = subprocess.run([linter, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.read_text() + "USER root\nRUN cd /tmp && sudo true\n")
    assert subprocess.run([linter, str(tmp_path / "Dockerfile")], capture_output=True).returncode == 1


def test_the_base_is_pinned_and_nobody_is_root() -> None:
    base = defaults()["BASE"]
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", base) and of("FROM") == ["${BASE} AS wheel", "${BASE}"]
    assert of("USER")[-1] == "${USER_ID}" and int(defaults()["USER_ID"]) > 0
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert "ENTRYPOINT" not in names and "ADD" not in names


def test_no_index_no_address_and_no_secret_is_written_in_it() -> None:
    text = DOCKERFILE.read_text()
    assert "://" not in text and not re.search(r"\bpypi\b", text, re.IGNORECASE)
    for rest in (*of("ARG"), *of("ENV")):
        for name in re.findall(r"(\w+)(?==|$)", rest):
            assert not looks_secret(name), name
    installing = [rest for rest in of("RUN") if "pip " in rest]
    assert len(installing) == 2
    assert all("--no-cache-dir" in rest and "type=secret,id=pip_conf" in rest for rest in installing)


def test_what_is_copied_is_there_and_comes_with_the_context() -> None:
    sources = copied()
    assert "composer_replication" in sources and "constraints-newest.txt" in sources
    for source in sources:
        path = ROOT / source
        assert path.exists(), source
        assert in_context(path / "__init__.py" if path.is_dir() else path), source
    for private in (".git/config", "runs/one/recipe.yaml", ".env", "composer_replication/__pycache__/x.pyc"):
        assert not in_context(ROOT / private), private


def test_the_wheel_of_what_is_copied_holds_the_package(tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling.build")
    context, wheels = tmp_path / "build", tmp_path / "wheels"
    for source in copied():
        for path in [ROOT / source, *(ROOT / source).rglob("*")]:
            if path.is_file() and in_context(path):
                target = context / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    wheels.mkdir()
    before = Path.cwd()
    os.chdir(context)
    try:
        name = hatchling.build_wheel(str(wheels))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(wheels / name) as wheel:
        held = set(wheel.namelist())
        metadata = wheel.read(next(one for one in held if one.endswith("/METADATA"))).decode()
    package = ROOT / "composer_replication"
    wanted = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py") if in_context(path)}
    assert wanted <= held and "composer_replication/diloco/serverless/jobs/container.py" in held
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    assert set(defaults()["EXTRAS"].split(",")) <= extras


def test_the_base_s_pytorch_is_kept_and_the_constraints_pin_the_rest(tmp_path: Path) -> None:
    (command,) = [rest for rest in of("RUN") if "constraints.txt" in rest and "pip" not in rest]
    (tmp_path / "constraints.in").write_text((ROOT / "constraints-newest.txt").read_text())
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    pinned = (ROOT / "constraints-newest.txt").read_text().splitlines()

    def constraints() -> list[str]:
        subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, check=True)
        return (tmp_path / "constraints.txt").read_text().splitlines()

    with_torch = constraints()
    assert with_torch[-1] == f"torch=={torch.__version__}"
    assert with_torch[:-1] == [line for line in pinned if not line.startswith("torch==")]
    python.write_text("#!/bin/sh\nexit 1\n")
    assert sorted(constraints()) == sorted(pinned)
