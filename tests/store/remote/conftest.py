"""Each server is started once, by the first test that wants it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

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


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
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
def seaweedfs() -> Iterator[str]:
    need("seaweedfs")
    with servers.seaweedfs(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    need("moto")
    with servers.moto(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[str]:
    need("fake_gcs")
    with servers.fake_gcs(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azurite(_environment: None) -> Iterator[str]:
    need("azurite")
    with servers.azurite(BUCKET) as text, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        yield text


@pytest.fixture
def s3_uri(seaweedfs: str) -> str:
    """A prefix of its own on SeaweedFS."""
    return f"s3://{BUCKET}/test-{next(_number)}?endpoint_url={seaweedfs}"


@pytest.fixture(params=["seaweedfs", "moto", "fake_gcs", "azurite"])
def uri(request: pytest.FixtureRequest) -> str:
    """A prefix of its own on each of the servers."""
    where = request.getfixturevalue(request.param)
    prefix = f"test-{next(_number)}"
    if request.param == "azurite":
        return f"az://{BUCKET}/{prefix}"
    if request.param == "fake_gcs":
        return f"gs://{BUCKET}/{prefix}?endpoint_url={where}&auth=anon&project=test"
    return f"s3://{BUCKET}/{prefix}?endpoint_url={where}"
