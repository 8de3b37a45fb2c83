"""A replica without a recipe whose model is one of Transformers': it trains on the text at DATA_URI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaSpec
from composer_replication.diloco.serverless.components import check_components
from composer_replication.diloco.serverless.exit_codes import Exit
from composer_replication.diloco.serverless.replica_entrypoint import _parser, _settings, main
from tests.support.language_model import save_language_model

DOCUMENTED = (
    *("--replica-id", "1", "--num-replicas", "2", "--rendezvous-uri", "file:///store"),
    *("--model-id", "Qwen/Qwen2.5-7B", "--sync-every", "500", "--outer-rounds", "100"),
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_URI", raising=False)


def recipe_of(*arguments: str) -> Any:
    return _settings(_parser().parse_args(arguments))[2]


def test_the_documented_command_is_a_causal_language_model_on_the_text_at_data_uri(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATA_URI", "s3://bucket/text")
    recipe = recipe_of(*DOCUMENTED)
    assert (recipe.model.name, recipe.data.name) == ("causal_lm", "text_lm")
    assert recipe.model.args == {"path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16"}
    assert recipe.data.args == {"tokenizer": "Qwen/Qwen2.5-7B", "uri": "s3://bucket/text"}
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("adamw", 4e-4)
    assert (recipe.training.steps, recipe.autoloco.base_horizon, recipe.autoloco.outer_lr) == (50_000, 500, 0.7)
    check_components(recipe)  # a launcher looks at the names, and doesn't fetch the model
    given = recipe_of(*DOCUMENTED, "--outer-lr", "0.5", '--inner-optimizer={"name": "sgd", "lr": 0.1}')
    assert (given.autoloco.outer_lr, given.optimizer.name, given.optimizer.lr) == (0.5, "sgd", 0.1)


def test_without_text_it_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DOCUMENTED) == Exit.SETTINGS
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Qwen/Qwen2.5-7B needs text to train on: set DATA_URI" in error
    assert recipe_of(*DOCUMENTED, "data.args.uri=/text").data.args["uri"] == "/text"


def test_a_password_in_data_uri_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATA_URI", "https://me:hidden-word@host/text")
    assert main(DOCUMENTED) == Exit.SETTINGS
    error = capsys.readouterr().err
    assert "data.args.uri" in error and "hidden-word" not in error


def test_names_that_are_not_a_hub_s_stay_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DOCUMENTED[:6]
    assert recipe_of(*plain).model.name == "byte_gpt" and recipe_of(*plain).data.name == "text_bytes"
    assert recipe_of(*plain, "--model-id=my_package.Model").model.class_ == "my_package.Model"
    assert recipe_of(*plain, "--model-id=my_package:Model").model.class_ == "my_package:Model"
    (tmp_path / "my.model").mkdir()
    (tmp_path / "my.model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    own = recipe_of(*plain, "--model-id=my.model", "data.args.uri=/text")
    assert (own.model.name, own.model.args["path"]) == ("causal_lm", "my.model")


def text_in(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"text": f"The {i}th line says that {i} and {i + 1} are {2 * i + 1}.\n"} for i in range(300)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.processes
@pytest.mark.slow
def test_two_replicas_end_with_identical_weights(tmp_path: Path) -> None:
    model = save_language_model(tmp_path / "model")
    text = text_in(tmp_path / "text")
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    executor = LocalProcessExecutor(output=tmp_path / "out", env=env)
    small = ("data.args.batch_size=4", "training.accelerator=cpu")
    specs = [
        ReplicaSpec(
            replica_id=i,
            num_replicas=2,
            rendezvous_uri=(tmp_path / "store").as_uri(),
            model_id=str(model),
            inner_optimizer={"name": "AdamW", "lr": 1e-2},
            sync_every=5,
            outer_rounds=4,
            extra_env={"DATA_URI": text.as_uri()},
            overrides=small,
        )
        for i in range(2)
    ]
    handles = executor.launch_replicas(specs)
    logs = ["\n".join(executor.stream_logs(handle)) for handle in handles]
    results = executor.collect(handles, timeout=200)
    assert [result.status for result in results] == ["completed"] * 2, logs
    assert results[0].metrics["digest"] == results[1].metrics["digest"]
    assert results[0].metrics["steps"] == 20 and results[0].metrics["rounds"] == 4
    finals = [torch.load(tmp_path / "out" / f"replica-{i}" / "final.ckpt", weights_only=True) for i in range(2)]
    first, second = (final["state_dict"] for final in finals)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert not any("may train on the same samples" in log or "first batch" in log for log in logs)
    # It has learnt: at first each of 257 tokens is as likely, which is 5.55 nats.
    assert results[0].metrics["validation_loss"] < 4.5
