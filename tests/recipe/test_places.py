"""Where a recipe's replicas run: executors, their options, fleets of several groups."""

from __future__ import annotations

import pytest

from composer_replication.diloco.serverless import ReplicaSpec
from composer_replication.diloco.serverless.backends.hf_jobs import HFJobsExecutor
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe, recipe_from, to_yaml
from composer_replication.recipe.backends import BACKENDS

BASE = """\
name: small
model: {name: byte_gpt}
data: {name: text_bytes}
store: {uri: s3://bucket/runs/small}
"""
GROUPS = """\
fleet:
  groups:
    - {executor: modal, count: 2, options: {gpu: A100-80GB}}
    - executor: hf_jobs
      options: {flavor: a100-large, secrets: [HF_TOKEN]}
"""


def read(more: str = "", overrides: tuple[str, ...] = ()) -> Recipe:
    return recipe_from(BASE + more, overrides, file="r.yaml")


def told(more: str = "", *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(more, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_string_is_the_executors_name(name: str) -> None:
    written, given = read(f"executor: {name}\n"), read(overrides=(f"executor={name}",))
    assert written == given and given.executor.name == name
    assert recipe_from(to_yaml(given)) == given


def test_an_executor_given_by_name_keeps_what_the_file_says_beside_it() -> None:
    recipe = read("executor: {name: modal, restarts: 7}\n", ("executor=hf_jobs", "executor.options.flavor=h200"))
    assert (recipe.executor.name, recipe.executor.restarts) == ("hf_jobs", 7)
    assert recipe.executor.options == {"flavor": "h200"}


def test_groups_say_how_many_replicas_there_are() -> None:
    recipe = read(GROUPS)
    assert recipe.fleet.replicas == 3 and [g.count for g in recipe.fleet.groups] == [2, 1]
    assert recipe.fleet.groups[0].options == {"gpu": "A100-80GB"}
    assert recipe_from(to_yaml(recipe)) == recipe
    assert read(GROUPS, ("fleet.replicas=3",)) == recipe  # said, and right
    assert read("fleet: {replicas: 7}\n", ("fleet.groups=[{executor: modal, count: 2}]",)).fleet.replicas == 2


def test_one_value_of_a_group_can_be_overridden() -> None:
    recipe = read(GROUPS, ("fleet.groups.1.count=2", "fleet.groups.0.options.region=us"))
    assert recipe.fleet.replicas == 4
    assert recipe.fleet.groups[0].options == {"gpu": "A100-80GB", "region": "us"}
    assert recipe.fleet.groups[1].options == {"flavor": "a100-large", "secrets": ["HF_TOKEN"]}


@pytest.mark.parametrize(
    ("more", "override", "words"),
    [
        ("fleet: {replicas: 4, groups: [{count: 2}, {count: 1}]}\n", "name=x", "r.yaml:5: fleet.replicas is 4"),
        (GROUPS, "fleet.replicas=5", "fleet.groups are 3 replicas together (2 + 1)"),
        ("fleet: {groups: [{executor: modl}]}\n", "name=x", "Did you mean 'modal'?"),
        ("fleet:\n  groups:\n  - {count: 0}\n", "name=x", "r.yaml:7: fleet.groups.0.count must be at least 1, not 0"),
        ("fleet: {groups: [{cuont: 2}]}\n", "name=x", "Did you mean 'count'?"),
        ("fleet: {groups: [modal]}\n", "name=x", "must be a mapping with executor, count, options"),
        ("fleet: {groups: modal}\n", "name=x", "fleet.groups must be a list"),
        ("fleet: {groups: [{count: two}]}\n", "name=x", "a whole number"),
        (GROUPS, "fleet.groups.2.count=1", "the recipe has groups 0 to 1"),
        ("", "executor=modall", "Did you mean 'modal'?"),
        ("", "executor.options.volumes=runs/{replica}", "the same for all replicas"),
    ],
)
def test_what_is_wrong_is_told(more: str, override: str, words: str) -> None:
    assert words in told(more, override)


@pytest.mark.parametrize(
    "override",
    [
        "executor.options.hf_token=hunter22",
        "executor.options.secrets=hunter22",
        "executor.options.secrets=[hunter/22==]",
        "executor.options.secrets={HF_TOKEN: hunter22}",
        "executor.options.env.API_KEY=hunter22",
        "executor.options.env={A: 'password=hunter22'}",
        "executor.options.endpoint=https://me:hunter22@host",
        "fleet.groups=[{options: {env: {AWS_SECRET_ACCESS_KEY: hunter22}}}]",
        "fleet.groups=[{options: {api_key: hunter22}}]",
    ],
)
def test_credentials_in_options_are_refused_and_not_shown(override: str) -> None:
    message = told("", override)
    assert "environment" in message and "hunter" not in message


def test_names_of_secrets_are_no_credentials() -> None:
    recipe = read("executor: {name: hf_jobs, options: {secrets: [HF_TOKEN, AWS_SECRET_ACCESS_KEY]}}\n")
    assert recipe.executor.options["secrets"] == ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY"]
    assert read("executor: {name: volcano, options: {secret_name: store-keys}}\n").executor.options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GITHUB_PAT", "hunter22"),
        ("MINIO_ACCESSKEY", "hunter22"),
        ("AZURE_STORAGE_CONNECTIONSTRING", "hunter22"),
        ("STORE", "AccountName=me;AccountKey=hunter22"),
        ("DATABASE", "postgres://me:hunter22@host/runs"),
        ("LINK", "https://host/text?X-Amz-Signature=hunter22"),
    ],
)
def test_a_variable_that_no_recipe_may_hold_is_a_secret_where_a_program_gives_it(name: str, value: str) -> None:
    message = told(f"executor: {{name: hf_jobs, env: {{{name}: '{value}'}}}}\n")
    assert "hunter" not in message
    job = HFJobsExecutor(image="i", env={name: value, "COLOUR": "red"}).job(ReplicaSpec(0, 1, "s3://bucket/run"))
    assert job.secrets == {name: value} and job.env == {"COLOUR": "red"}
