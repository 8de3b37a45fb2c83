"""`export --recipe`: a folder that Transformers, and all that build on it, can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.cli import main
from composer_replication.cli.transformers_folder import write_folder
from composer_replication.diloco.export import SharedWeights
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe, recipe_from
from composer_replication.tasks.causal_lm import causal_lm
from composer_replication.tasks.llama import llama
from tests.cli.fleets import train
from tests.support.language_model import save_language_model

SIZES = {"width": 16, "layers": 1, "heads": 2, "hidden": 32, "vocabulary": 257, "context": 32}


def shared(model: torch.nn.Module, *, frozen: tuple[str, ...] = ()) -> SharedWeights:
    """As a fleet's store has them: trained parameters under the wrapper's name."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items() if name not in frozen}
    return SharedWeights(run="r", round=1, position=9, digest="d", tensors=tensors, tied={}, frozen=frozen)


def recipe(text: str) -> Recipe:
    return recipe_from(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_language_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_comes_back_as_it_was(folder: Path, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(5)
    model = llama(**SIZES, tied=tied)
    sizes = ", ".join(f"{name}: {value}" for name, value in {**SIZES, "tied": str(tied).lower()}.items())
    ours = recipe(
        f"model: {{name: llama, args: {{{sizes}}}}}\ndata: {{name: conversations, args: {{tokenizer: {folder}}}}}"
    )
    write_folder(shared(model), ours, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert found.config.use_cache
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected: Any = model.eval()(ids)
        assert torch.equal(found.eval()(ids).logits, expected.logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "user:\nHi\nassistant:\n"  # as it was trained
    with pytest.raises(ValueError, match="out is there already"):
        write_folder(shared(model), ours, tmp_path / "out")


def test_a_causal_lm_takes_its_config_and_none_of_its_weights(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(6)
    model = causal_lm(path=str(folder), pretrained=False)
    ours = recipe(f"model: {{name: causal_lm, args: {{path: {folder}}}}}\ndata: {{name: text_bytes}}")
    write_folder(shared(model), ours, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_another_model_s_weights_are_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    ours = recipe(f"model: {{name: causal_lm, args: {{path: {folder}}}}}\ndata: {{name: text_bytes}}")
    model = causal_lm(path=str(folder))
    with pytest.raises(ValueError, match=r"the run has no model.norm.weight \(and 0 more\): is this the run's recipe"):
        write_folder(shared(model, frozen=("model.norm.weight",)), ours, tmp_path / "out")
    with pytest.raises(ValueError, match=r"is \[257, 32\] in the run, \[257, 16\] in the recipe's model"):
        write_folder(shared(llama(**{**SIZES, "width": 32, "tied": True})), ours, tmp_path / "out")
    with pytest.raises(RecipeError, match="needs llama or causal_lm, not byte_gpt"):
        write_folder(shared(model), recipe("model: {name: byte_gpt}\ndata: {name: text_bytes}"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    train((tmp_path / "run").as_uri(), rounds=1)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model: {{name: causal_lm, args: {{path: {folder}}}}}\ndata: {{name: text_bytes}}")
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--recipe", str(file)]) == 2
    assert "is this the run's recipe" in capsys.readouterr().err
