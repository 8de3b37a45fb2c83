"""A causal language model of Transformers as a built-in model: what it is trained as, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.errors import RecipeError
from composer_replication.tasks.causal_lm import causal_lm
from tests.support.language_model import save_language_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_language_model(tmp_path_factory.mktemp("model"))


def test_it_is_the_folder_s_model_ready_to_train(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = causal_lm(path=str(folder))
    assert model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.arange(12).reshape(2, 6)
    output: Any = model(ids)
    asked = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids)
    assert torch.equal(output.logits, asked.logits)
    assert output.past_key_values is None  # no memory for what only generating needs


def test_in_another_dtype_with_less_memory_or_with_fresh_weights(folder: Path) -> None:
    model = causal_lm(path=str(folder), dtype="bfloat16", gradient_checkpointing=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert next(causal_lm(path=str(folder), dtype="auto").parameters()).dtype == torch.float32
    torch.manual_seed(3)
    fresh = causal_lm(path=str(folder), pretrained=False)
    torch.manual_seed(3)
    again = causal_lm(path=str(folder), pretrained=False)
    saved = causal_lm(path=str(folder))
    pairs = list(zip(fresh.parameters(), again.parameters(), saved.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and not all(torch.equal(a, c) for a, _, c in pairs)
    assert fresh.training


def test_both_trainers_wrappers_take_its_loss(folder: Path) -> None:
    pytest.importorskip("lightning")
    from composer_replication.tasks.language_module import LanguageModule

    model = causal_lm(path=str(folder))
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(1, 9)[None]}
    expected = torch.nn.functional.cross_entropy(model(batch["input_ids"]).logits[0], batch["labels"][0])
    module = LanguageModule(model, make_optimizer=lambda m: torch.optim.SGD(m.parameters()), make_scheduler=None)  # type: ignore[arg-type]
    assert torch.equal(module._loss(batch), expected)
    pytest.importorskip("composer")
    from composer_replication.tasks.composer_model import LanguageModel

    composer = LanguageModel(model)
    assert torch.equal(composer.loss(composer.forward(batch), batch), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "dtype must be one of float32, bfloat16, float16, auto, got 'float8'"),
        ({"path": "/nowhere/at/all"}, "the model '/nowhere/at/all' can't be loaded"),
        ({"path": "a b c"}, "the model 'a b c' can't be loaded .on the Hub a model is owner/name."),
    ],
)
def test_bad_settings_are_named(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_lm(**{"path": str(folder), **settings})


def test_a_folder_without_weights_or_with_another_kind_of_model(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ValueError, match="the model '.*bare' can't be loaded: .*safetensors"):
        causal_lm(path=str(bare))
    causal_lm(path=str(bare), pretrained=False)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "model_type": "vit", "architectures": []}))
    with pytest.raises(ValueError, match="the model '.*bare' can't be loaded"):
        causal_lm(path=str(bare), pretrained=False)


def test_a_hub_that_can_t_be_reached_is_the_store_s_failure(tmp_path: Path) -> None:
    """Worth another try later, unlike a name that nobody has."""
    pytest.importorskip("transformers")
    script = (
        "from composer_replication.tasks.causal_lm import causal_lm\n"
        "from composer_replication.errors import StoreError\n"
        "try: causal_lm(path='some/model')\n"
        "except StoreError as error: print(error)"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100)
    assert "the model some/model is neither in the cache nor can the Hub be reached" in ran.stdout, ran.stderr


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RecipeError, match=r"need transformers .*pip install 'composer-replication\[transformers\]'"):
        causal_lm(path="some/model")
