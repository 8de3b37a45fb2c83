"""One replica of a recipe in this process, under each trainer: the same result, files, log and refusals."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer_replication.cli.view import RunReader
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.recipe import recipe_from
from composer_replication.store import open_store
from composer_replication.tasks.byte_gpt import ByteGPT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the trainers' advice on workers, batches and loaders

RECIPE = """\
name: small
model: {name: byte_gpt, args: {width: 16, layers: 1, heads: 2, context: 16}}
data: {name: text_bytes, args: {context: 16, batch_size: 4, max_bytes: 20000, validation_bytes: 800}}
scheduler: {warmup_steps: 4}
training: {steps: 20, log_every: 10, accelerator: cpu}
autoloco: {policy: fixed, base_horizon: 8}
fleet: {replicas: 1}
"""


@pytest.fixture(params=["lightning", "composer"])
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} isn't installed")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning leaves them behind
        monkeypatch.setenv(name, "1")
    return request.param


def train(trainer: str, folder: Path, *overrides: str, text: str = RECIPE) -> dict[str, Any]:
    module = import_module(f"composer_replication.diloco.serverless.{trainer}_replica")
    recipe = recipe_from(text, [f"trainer={trainer}", *overrides])
    folder.mkdir(exist_ok=True)
    return module.train(recipe, Identity(replica=0, replicas=1), (folder / "store").as_uri(), folder)


def test_both_trainers_give_the_same_weights_bit_for_bit_and_the_same_files(trainer: str, tmp_path: Path) -> None:
    result = train(trainer, tmp_path)
    assert (result["status"], result["rounds"], result["steps"]) == ("completed", 3, 20)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    final = torch.load(tmp_path / "final.ckpt", weights_only=True)["state_dict"]
    assert all(torch.isfinite(tensor).all() for tensor in final.values())
    other = train("lightning", tmp_path / "lightning")
    assert other["digest"] == result["digest"]
    # Lightning averages the batches' losses in another order.
    assert other["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-5)
    theirs = torch.load(tmp_path / "lightning" / "final.ckpt", weights_only=True)["state_dict"]
    assert final.keys() == theirs.keys() and all(torch.equal(final[name], theirs[name]) for name in final)


def test_the_log_tells_of_steps_and_rounds(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(trainer, tmp_path, "training.gradient_clip=1.0", "training.accumulate=2", "training.validate_every=8")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == "starts from the beginning"
    told = [line.split(",")[0].split("  loss")[0] for line in lines if line.startswith(("step", "round"))]
    assert told == ["round 0: 8 steps", "step 10", "round 1: 8 steps", "step 20", "round 2: 4 steps"]


def test_started_again_after_its_end_it_says_how_it_ended(
    trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(trainer, tmp_path)
    capsys.readouterr()
    again = train(trainer, tmp_path)
    said = capsys.readouterr().out
    assert "goes on from" in said and "round" not in said.replace("round-", "")
    assert (again["status"], again["digest"]) == ("completed", first["digest"])
    assert again["validation_loss"] == pytest.approx(first["validation_loss"], rel=1e-6)


def test_the_last_file_can_be_loaded_by_a_composer_trainer(tmp_path: Path) -> None:
    pytest.importorskip("composer")
    from composer import Trainer

    from composer_replication.tasks.composer_model import LanguageModel

    train("composer", tmp_path)
    model = LanguageModel(ByteGPT(width=16, layers=1, heads=2, context=16))
    path = str(tmp_path / "final.ckpt")
    Trainer(model=model, load_path=path, load_weights_only=True, load_progress_bar=False, device="cpu").close()
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_a_failure_is_on_record_with_its_reason(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(ByteGPT, "forward", broken)
    with pytest.raises(RuntimeError, match="no such layer"):
        train(trainer, tmp_path)
    reader = RunReader(open_store(str(tmp_path / "store")))
    reader.refresh()
    (row,) = reader.view("").rows
    assert row.state == "failed"


# -- a recipe's own classes, and what is refused before the first step ------------------------------------------------


class OwnLoader(DataLoader[Any]):
    """Makes its dataset itself: it can't be taken apart and put together again."""

    def __init__(self) -> None:
        super().__init__(TensorDataset(torch.zeros(8, 2)), batch_size=2)


def whole_batches() -> Any:
    """An iterable that gives ready batches."""
    return [{"input_ids": torch.zeros(4, 16, dtype=torch.int64), "labels": torch.zeros(4, 16, dtype=torch.int64)}] * 40


def with_data(function: str) -> str:
    data = RECIPE.split("\n")[2]
    return RECIPE.replace(data, f"data: {{class: tests.serverless.test_replicas.{function}}}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.class=torch.nn.Identity", "model.class: torch.nn.Identity gives a Identity, which is no "),
        ("training.trainer_args.precision=fp32", "training.trainer_args.precision: set by other keys"),
        ("training.precision=17-true", "training: .*17-true"),
        ("training.accelerator=abacus", "training.*abacus"),
    ],
)
def test_recipes_that_cannot_be_trained(trainer: str, tmp_path: Path, override: str, message: str) -> None:
    overrides = [override, "model.name=null"] if "model.class" in override else [override]
    text = RECIPE.replace(", args: {width: 16, layers: 1, heads: 2, context: 16}", "") if overrides[1:] else RECIPE
    with pytest.raises(RecipeError, match=message):
        train(trainer, tmp_path, *overrides, text=text)
    assert not (tmp_path / "store").exists()


def test_data_of_one_s_own_under_composer(tmp_path: Path) -> None:
    pytest.importorskip("composer")
    whole = "training.trainer_args.device_train_microbatch_size=4"
    assert train("composer", tmp_path, whole, text=with_data("whole_batches"))["steps"] == 20
    with pytest.raises(RecipeError, match="training.accumulate: these data come in batches that can't be made larger"):
        train("composer", tmp_path, "training.accumulate=2", text=with_data("whole_batches"))
    with pytest.raises(RecipeError, match="OwnLoader of its own making.*replica_sampler in it"):
        train("composer", tmp_path, text=with_data("OwnLoader"))
