"""Fixtures: stores on real servers. Each server is started once, by the first test that wants it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from tests.support import servers

BUCKET = "rounds"
_number = itertools.count()


def need(server: str) -> None:
    """Skip where a server can't be started; in CI, where all must be there, fail."""
    reason = servers.missing_for(server)
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def store_environment() -> Iterator[None]:
    """Credentials of the suite, and none of the machine's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks Google before the first request
        yield


@pytest.fixture(scope="session")
def seaweedfs(store_environment: None) -> Iterator[str]:
    need("seaweedfs")
    with servers.seaweedfs(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto(store_environment: None) -> Iterator[str]:
    need("moto")
    with servers.moto(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def fake_gcs(store_environment: None) -> Iterator[str]:
    need("fake_gcs")
    with servers.fake_gcs(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azurite(store_environment: None) -> Iterator[str]:
    need("azurite")
    with servers.azurite(BUCKET) as text, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        yield text


@pytest.fixture
def s3_credentials() -> dict[str, str]:
    """For processes that were forked before they were in the environment."""
    return {
        "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture
def s3_uri(seaweedfs: str) -> str:
    """A prefix of its own on SeaweedFS."""
    return f"s3://{BUCKET}/test-{next(_number)}?endpoint_url={seaweedfs}"


@pytest.fixture
def uri_on(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """A prefix of its own on a server that is named."""
    return lambda server: _uri_on(server, request.getfixturevalue(server))


@pytest.fixture(params=["seaweedfs", "moto", "fake_gcs", "azurite"])
def uri(request: pytest.FixtureRequest, uri_on: Callable[[str], str]) -> str:
    """A prefix of its own on each of the servers."""
    return uri_on(request.param)


def _uri_on(server: str, where: str) -> str:
    prefix = f"test-{next(_number)}"
    if server == "azurite":
        return f"az://{BUCKET}/{prefix}"
    if server == "fake_gcs":
        return f"gs://{BUCKET}/{prefix}?endpoint_url={where}&auth=anon&project=test"
    return f"s3://{BUCKET}/{prefix}?endpoint_url={where}"
