"""`doctor`, `gc` and `export` on real servers: what they find, and how they say that a store can't be used."""

from __future__ import annotations

import json

import pytest

from composer_replication.cli import main
from composer_replication.store import open_store
from tests.cli.fleets import train

pytestmark = pytest.mark.servers


def test_each_server_can_hold_a_run(uri, capsys):
    assert main(["doctor", uri, "--largest", "900k", "--parameters", "1.3B", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fit"], answer
    assert abs(answer["clock_offset_seconds"]) < 60 and answer["expected"]["seconds"] > 0
    assert open_store(uri).list("") == []


def test_a_bucket_that_is_not_there(moto, capsys):
    assert main(["doctor", f"s3://no-such-bucket/run?endpoint_url={moto}"]) == 2
    assert "the bucket, container or repository isn't there" in capsys.readouterr().err


def test_credentials_that_are_refused(s3_uri, capsys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert main(["doctor", s3_uri]) == 2
    error = capsys.readouterr().err
    assert "refuses these credentials" in error and "wrong" not in error


@pytest.mark.slow
def test_tidying_and_exporting_over_a_network(s3_uri, capsys, tmp_path):
    train(s3_uri, rounds=4, checkpoint_every=2)
    assert main(["gc", s3_uri, "--only-final", "--json", "--delete", "--list"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finished"] and answer["deleted"] and answer["bytes"] > 0
    assert not set(answer["keys"]) & set(open_store(s3_uri).list(""))
    assert main(["export", s3_uri, "-o", str(tmp_path / "m.pt")]) == 0
