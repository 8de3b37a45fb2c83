"""Recipes: what they may say, and what a mistake in one gets told. Nothing is started here."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.autoloco.policies import AutoLoCoPolicy, FixedPolicy, LinearPolicy, QSRPolicy
from composer_replication.errors import RecipeError
from composer_replication.recipe import (
    AutoLoCoSection,
    claim_folder,
    controller_config,
    load_recipe,
    outer_config,
    policy_of,
    recipe_from,
    to_yaml,
)

RECIPES = Path(__file__).parent.parent.parent / "recipes"
BASE = """\
name: small
model: {name: byte_gpt, args: {width: 16}}
data:
  name: text_bytes
training:
  steps: 500
scheduler: {warmup_steps: 20}
autoloco:
  base_horizon: 20
"""


def told(overrides=(), text=BASE) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe_from(text, overrides, file="r.yaml")
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_defaults_are_filled_in_and_overrides_win():
    recipe = recipe_from(BASE, ["fleet.replicas=3", "autoloco.outer_lr=0.5", "model.args.heads=2"])
    assert (recipe.name, recipe.trainer, recipe.codec) == ("small", "lightning", "float32")
    assert recipe.training.steps == 500 and recipe.fleet.replicas == 3 and recipe.autoloco.outer_lr == 0.5
    assert recipe.model.args == {"width": 16, "heads": 2}
    assert recipe.folder == "runs/small"


def test_a_recipe_written_out_reads_back_equal():
    overrides = ["optimizer.args.betas=[0.9,0.95]", "executor.env.GREETING=hello ${name}", "autoloco.max_scale=null"]
    recipe = recipe_from(BASE, overrides)
    assert recipe.executor.env == {"GREETING": "hello small"}
    assert recipe_from(to_yaml(recipe)) == recipe
    literal = dataclasses.replace(recipe, name="costs ${5}")
    assert recipe_from(to_yaml(literal)) == literal


def test_an_own_class_is_written_and_read_as_class():
    text = "model: {class: my.Model}\ndata: {class: 'my:Data'}"
    recipe = recipe_from(text)
    assert recipe.model.class_ == "my.Model" and "class: my.Model" in to_yaml(recipe)
    assert recipe_from(to_yaml(recipe)) == recipe


def test_interpolation_refers_to_other_keys():
    assert recipe_from(BASE, ["output=/tmp/${name}-${fleet.replicas}"]).output == "/tmp/small-2"
    assert "nope" in told(["output=${nope}"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.stepz=3", ["training.stepz", "command line", "'steps'"]),
        ("steps=3", ["'training.steps'"]),
        ("scheduler.lr=3", ["'optimizer.lr'"]),
        ("fleet.replica=3", ["'replicas'"]),
        ("wibble=3", ["wibble", "may hold", "autoloco"]),
        ("training.steps=fifty", ["training.steps", "a whole number", "'fifty'"]),
        ("training.steps=1.5", ["training.steps", "a whole number", "'1.5'"]),
        ("optimizer.lr=fast", ["optimizer.lr", "a number"]),
        ("optimizer.lr=nan", ["optimizer.lr", "positive"]),
        ("autoloco.normalize=perhaps", ["autoloco.normalize", "true or false"]),
        ("training.steps=null", ["training.steps"]),
        ("training.steps=0", ["training.steps", "at least 1"]),
        ("training=3", ["training", "mapping"]),
        ("training.steps", ["training.steps", "key=value"]),
        ("=3", ["key=value"]),
        ("autoloco.policy=autolco", ["autoloco.policy", "'autoloco'"]),
        ("autoloco.max_horizon=3", ["autoloco.max_horizon", "base_horizon"]),
        ("autoloco.growth_cap=0.5", ["autoloco.growth_cap", "0.5"]),
        ("autoloco.outer_momentum=2", ["autoloco.outer_momentum"]),
        ("autoloco.outer_lr=0", ["autoloco.outer_lr"]),
        ("codec=int9", ["codec", "'int8'"]),
        ("trainer=composr", ["trainer", "lightning", "'composer'"]),
        ("executor.name=modl", ["executor.name", "'modal'"]),
        ("fleet.min_replicas=3", ["fleet.min_replicas", "fleet.replicas (2)"]),
        ("fleet.checkpoint_every_rounds=20", ["fleet.checkpoint_every_rounds=20", "divides 10", "such as 20"]),
        ("fleet.timeout_seconds=0", ["fleet.timeout_seconds"]),
        ("fleet.start_timeout_seconds=0", ["fleet.start_timeout_seconds", "positive"]),
        ("scheduler.warmup_steps=501", ["scheduler.warmup_steps", "training.steps (500)"]),
        ("model.class=a.b", ["model", "not both"]),
        ("model.name=null", ["model", "neither"]),
        ("model.args.hf_token=abc", ["model.args.hf_token", "environment"]),
        ("executor.env.AWS_SECRET_ACCESS_KEY=abc", ["AWS_SECRET_ACCESS_KEY", "environment"]),
        ("data.args.api_key=abc", ["data.args.api_key", "environment"]),
        ("store.uri=s3://me:pass@bucket/run", ["store.uri", "password"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(override, words):
    message = told([override])
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_secrets_are_not_repeated_in_messages():
    assert "hunter2" not in told(["model.args.password=hunter2"])
    assert "hunter2" not in told(["store.uri=s3://me:hunter2@bucket/run"])
    for link in ("az://c/run?sv=1&sig=hunter2", "https://h/x?X-Amz-Signature=hunter2", "s3://b/r?token=hunter2"):
        message = told([f"store.uri={link}"])
        assert "store.uri" in message and "environment" in message and "hunter2" not in message
    assert recipe_from(BASE, ["data.args.url=https://host/x?page=2&sort=name"]).data.args["url"].endswith("name")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: {steps: 5, warm: 3}", ["r.yaml:1", "training.warm"]),
        (BASE + "codek: int8\n", ["r.yaml:10: codek", "'codec'"]),
        ("training:\n", ["r.yaml:1: training", "empty"]),
        ("a: [", ["r.yaml", "YAML"]),
        ("- 1", ["r.yaml", "mapping"]),
        ("a: 1\na: 2", ["r.yaml", "a"]),
        ("", ["model", "neither"]),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_line(text, words):
    message = told(text=text)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "variable",
    [
        "GITHUB_PAT=hunter2",
        "DB_PASS=hunter2",
        "MY_TOKEN=hunter2",
        "SIGNING_KEY=hunter2",
        "PGPASSWORD=hunter2",
        "GHTOKEN=hunter2",
        "HF_TOKEN=hunter2",
        "CONN=Server=x;Password=hunter2",
        "CONN=DefaultEndpointsProtocol=https;AccountKey=hunter2",
        "HTTPS_PROXY=http://me:hunter2@proxy:3128",
        "HTTPS_PROXY=http://me:hunter/2@proxy:3128",
    ],
)
def test_a_credential_for_the_replicas_belongs_into_the_launcher_s_environment(variable):
    message = told([f"executor.env.{variable}"])
    assert f"executor.env.{variable.partition('=')[0]}" in message and "environment" in message
    assert "hunter" not in message
    if "://" not in variable:
        assert "environment of the launcher" in message
    assert "hunter" not in told(text=BASE + f"executor: {{env: {{{variable.replace('=', ': ', 1)}}}}}\n")


def test_a_store_that_holds_a_password_is_refused_and_not_shown():
    for uri in ("AKIA:hunter2@bucket", "AKIA:hun/ter2@bucket", "s3://AKIA:hun/ter2@bucket/run"):
        message = told([f"store.uri={uri}"])
        assert "store.uri" in message and "environment" in message
        assert "hun" not in message and "AKIA" not in message


def test_variables_and_places_that_hold_no_credential_are_fine():
    plain = {"PYTHONPATH": "/a", "TOKENIZERS_PARALLELISM": "0", "PATH": "/b", "NCCL_DEBUG": "INFO", "X": "a=b;c=d"}
    recipe = recipe_from(BASE, [f"executor.env.{name}={value}" for name, value in plain.items()])
    assert recipe.executor.env == plain
    for uri in ("/data/a:b@c/run", "s3://bucket/a:b@c", "local/run"):
        assert recipe_from(BASE, [f"store.uri={uri}"]).store.uri == uri


def test_names_that_only_look_like_credentials_are_fine():
    recipe = recipe_from(BASE, ["model.args.pad_token=x", "data.args.max_tokens=5", "data.args.tokenizer=t"])
    assert recipe.model.args["pad_token"] == "x"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecipeError, match="nothere.yaml"):
        load_recipe(tmp_path / "nothere.yaml")


def test_every_setting_of_the_controller_and_the_outer_step_has_a_key_with_the_same_default():
    section = {f.name: f.default for f in dataclasses.fields(AutoLoCoSection)}
    for f in dataclasses.fields(AutoLoCoConfig):
        if f.name not in ("base_horizon", "warmup_steps"):  # one has none, the other is the scheduler's
            assert section[f.name] == f.default, f.name
    for f in dataclasses.fields(OuterConfig):
        if f.name != "kind":  # the policy's own
            key = {"lr": "outer_lr", "momentum": "outer_momentum"}.get(f.name, f.name)
            assert section[key] == f.default, f.name


def test_policies_come_out_as_named():
    recipe = recipe_from(BASE)
    assert controller_config(recipe).warmup_steps == 20  # the scheduler's, unless said otherwise
    assert controller_config(recipe_from(BASE, ["autoloco.warmup_steps=0"])).warmup_steps == 0
    assert isinstance(policy_of(recipe), AutoLoCoPolicy) and outer_config(recipe).momentum == 0.7
    fixed = recipe_from(BASE, ["autoloco.policy=fixed"])
    assert policy_of(fixed) == FixedPolicy(horizon=20) and outer_config(fixed).momentum == 0.9
    linear = recipe_from(BASE, ["autoloco.policy=linear", "autoloco.increment=7"])
    assert policy_of(linear) == LinearPolicy(increment=7) and outer_config(linear).kind == "average"
    qsr = recipe_from(BASE, ["autoloco.policy=qsr", "optimizer.lr=0.5"])
    assert policy_of(qsr) == QSRPolicy(base_horizon=20, warmup_steps=20, peak_lr=0.5)
    assert policy_of(recipe_from(BASE, ["autoloco.policy=qsr", "autoloco.alpha=2"])).coefficient == 2.0


def test_each_launch_gets_a_folder_of_its_own(tmp_path):
    recipe = recipe_from(BASE, [f"output={tmp_path}/run"])
    claimed = []
    threads = [threading.Thread(target=lambda: claimed.append(claim_folder(recipe))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Path(c.output).name for c in claimed) == ["run", *(f"run-{n}" for n in range(2, 9))]
    for one in claimed:
        assert Path(one.output).is_dir() and one.store.uri == Path(one.output, "store").as_uri()
    explicit = claim_folder(recipe_from(BASE, [f"output={tmp_path}/run", "store.uri=file:///shared/x"]))
    assert explicit.store.uri == "file:///shared/x"


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_shipped_recipes_are_fine(name):
    recipe = load_recipe(RECIPES / name)
    assert recipe.name == Path(name).stem
    assert recipe_from(to_yaml(recipe)) == recipe
    if "quickstart" in name or name == "diloco.yaml":
        load_recipe(RECIPES / name, ["training.steps=120"])  # the short form of the README and of CI


def test_the_quickstart_under_composer_is_the_same_but_for_the_trainer():
    one, other = (load_recipe(RECIPES / f"{name}.yaml") for name in ("quickstart", "composer-quickstart"))
    assert (one.trainer, other.trainer) == ("lightning", "composer")
    assert dataclasses.replace(other, name=one.name, output=one.output, trainer=one.trainer) == one


def test_the_two_quickstart_recipes_differ_in_the_policy_only():
    adaptive, fixed = (load_recipe(RECIPES / f"{name}.yaml") for name in ("quickstart", "diloco"))
    assert (adaptive.autoloco.policy, fixed.autoloco.policy) == ("autoloco", "fixed")
    same = dataclasses.replace(
        fixed,
        name=adaptive.name,
        output=adaptive.output,
        autoloco=dataclasses.replace(fixed.autoloco, policy="autoloco"),
    )
    assert same == adaptive


@pytest.mark.parametrize("value", ["*.txt", "@x", "[1, 2", "{a", "a: b: c", "!x.txt", "%x"])
def test_an_override_that_is_no_yaml_says_how_to_write_text(value):
    with pytest.raises(RecipeError, match="^data.args.pattern: the value isn't valid YAML; text .* quotes") as told:
        recipe_from(BASE, [f"data.args.pattern={value}"])
    assert value not in str(told.value), "it may be a password"
    assert recipe_from(BASE, [f"data.args.pattern='{value}'"]).data.args["pattern"] == value
