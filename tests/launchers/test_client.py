"""What back ends have in common in asking their services."""

from __future__ import annotations

import pytest

from composer_replication.diloco.serverless.backends.client import answer, stop_if_running
from composer_replication.diloco.serverless.executor import BackendUnavailable
from composer_replication.errors import ExecutorError
from composer_replication.store.clients import EXTRAS, extra_of


def refuse() -> None:
    raise ExecutorError("it has ended")


def test_an_error_comes_out_in_our_words_and_keeps_its_cause() -> None:
    assert answer(lambda: 3, lambda error: error) == 3
    cause = OSError("reset")

    def fail() -> None:
        raise cause

    with pytest.raises(ExecutorError, match="the service: reset") as caught:
        answer(fail, lambda error: ExecutorError(f"the service: {error}"))
    assert caught.value.__cause__ is cause


def test_an_error_in_our_words_is_left_as_it_is() -> None:
    with pytest.raises(ExecutorError, match="^it has ended$"):
        answer(refuse, lambda error: BackendUnavailable(f"the service: {error}"))


def test_stopping_a_job_that_has_ended_is_no_error() -> None:
    stopped: list[int] = []
    stop_if_running(lambda: stopped.append(1), lambda: pytest.fail("nothing was refused"))
    stop_if_running(refuse, lambda: False)
    with pytest.raises(ExecutorError, match="it has ended"):
        stop_if_running(refuse, lambda: True)
    assert stopped == [1]


def test_the_extra_of_each_family_of_stores() -> None:
    assert [extra_of(kind) for kind in (*EXTRAS, "hf")] == ["s3", "gcs", "azure", "hf"]
    assert extra_of("file") is extra_of("memory") is None
