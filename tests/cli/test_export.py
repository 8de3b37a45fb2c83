"""`export`: the shared weights of a checkpoint as a file, or a reason why not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from composer_replication.cli import main
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.wire import dump, load
from composer_replication.store import LocalStore
from tests.cli.fleets import Model, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run of five rounds with checkpoints of rounds 0, 2 and 4, and its history."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder.as_uri(), rounds=5, checkpoint_every=2)


@pytest.fixture
def copy(run, tmp_path):
    """The same run to break."""
    import shutil

    shutil.copytree(run[0], tmp_path / "copy")
    return LocalStore(tmp_path / "copy")


def command(capsys, *arguments, code=0):
    assert main(["export", *map(str, arguments)]) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def newest(folder) -> int:
    return checkpoints.rounds(LocalStore(folder))[0]


def equal(found, history):
    shared = {
        name: value for name, value in history.items() if not name.startswith("base.") and value.is_floating_point()
    }
    assert found.keys() == shared.keys()
    for name, value in shared.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_the_newest_checkpoint_under_the_models_own_names(run, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    folder, history = run
    out = tmp_path / "model.safetensors"
    text = command(capsys, folder, "-o", out)
    at = newest(folder)
    equal(safetensors.load_file(out), history[at])
    assert f"round {at}" in text and "2 frozen" in text and "base.bias" in text and "head.weight" in text
    model = Model()
    missing = model.load_state_dict(safetensors.load_file(out), strict=False).missing_keys
    assert set(missing) <= {"norm.num_batches_tracked", "base.weight", "base.bias"}
    from safetensors import safe_open

    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert about["round"] == str(at) and about["steps"] == str(at) and len(about["digest"]) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_older_round_as_a_state_dict_in_float32(run, tmp_path, capsys):
    folder, history = run
    older = checkpoints.rounds(LocalStore(folder))[1]
    out = tmp_path / "model.pt"
    answer = json.loads(command(capsys, folder, "--round", older, "--float32", "--json", "-o", out))
    assert answer["round"] == older and answer["tied"] == {"head.weight": "embed.weight"}
    found = torch.load(out, weights_only=True)
    assert found["middle.weight"].dtype == torch.float32
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    equal({name: value.to(history[older][name].dtype) for name, value in found.items()}, history[older])


def test_names_of_files(run, tmp_path, capsys):
    folder, _ = run
    assert "must end in .safetensors, .pt or .pth" in command(capsys, folder, "-o", tmp_path / "m.bin", code=2)
    out = tmp_path / "m.pt"
    command(capsys, folder, "-o", out)
    before = out.read_bytes()
    assert "there already" in command(capsys, folder, "-o", out, code=2) and out.read_bytes() == before
    command(capsys, folder, "-o", out, "--overwrite")
    assert "no folder" in command(capsys, folder, "-o", tmp_path / "not" / "m.pt", code=2)


def test_what_is_not_there(run, tmp_path, capsys):
    folder, _ = run
    assert "no run in" in command(capsys, tmp_path, "-o", tmp_path / "m.pt", code=2)
    error = command(capsys, folder, "--round", 3, "-o", tmp_path / "m.pt", code=2)
    assert "no checkpoint of round 3, only of" in error
    error = command(capsys, folder, "--round", 0, "-o", tmp_path / "m.pt", code=2)
    assert "were collected" in error


def blobs(store: LocalStore, round: int) -> list[str]:
    return [key for key in store.list(keys.checkpoint(round)) if keys.is_blob(key)]


def test_a_damaged_chunk_is_refused_and_the_older_checkpoint_offered(copy, tmp_path, capsys):
    at = newest(copy.root)
    key = blobs(copy, at)[0]
    content = bytearray(copy.get(key))
    content[-1] ^= 1
    copy.put(key, bytes(content))
    error = command(capsys, copy.root, "-o", tmp_path / "m.pt", code=2)
    assert "is damaged, nothing was written" in error and "--round" in error
    assert not (tmp_path / "m.pt").exists()


def test_a_digest_that_does_not_hold_is_refused(copy, tmp_path, capsys):
    at = newest(copy.root)
    manifest = load(copy.get(keys.manifest(at)), "manifest")
    # Consistent chunks of another state under this state's digest: only the digest can tell.
    manifest["anchor"], manifest["momentum"] = manifest["momentum"], manifest["anchor"]
    manifest["digest"] = "0" * 32
    copy.put(keys.manifest(at), dump(manifest))
    assert main(["export", str(copy.root), "-o", str(tmp_path / "m.pt")]) == 2
    assert "nothing was written" in capsys.readouterr().err
    manifest["anchor"], manifest["momentum"] = manifest["momentum"], manifest["anchor"]
    copy.put(keys.manifest(at), dump(manifest))
    error = command(capsys, copy.root, "-o", tmp_path / "m.pt", code=2)
    assert "the fleet agreed on 00000000" in error and not (tmp_path / "m.pt").exists()


def test_a_missing_safetensors_is_named(run, tmp_path):
    code = (
        "import sys; sys.modules['safetensors'] = None; sys.modules['safetensors.torch'] = None\n"
        "from composer_replication.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "m.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(run[0]), "-o", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 2 and "composer-replication[safetensors]" in done.stderr and not out.exists()
