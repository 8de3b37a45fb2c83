"""What clients' exceptions mean, made with the clients' own classes; and that no credential gets out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.store.failures import describe, kind_of, redact

botocore = pytest.importorskip("botocore.exceptions")
s3fs_errors = pytest.importorskip("s3fs.errors")
gcs = pytest.importorskip("gcsfs.retry")
azure = pytest.importorskip("azure.core.exceptions")
aiohttp = pytest.importorskip("aiohttp")


def s3(code: str, status: int = 400) -> Exception:
    """As s3fs hands it on."""
    answer: Any = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return s3fs_errors.translate_boto_error(botocore.ClientError(answer, "PutObject"))


def blob(status: int, code: str) -> Exception:
    error = azure.HttpResponseError("made up", response=SimpleNamespace(status_code=status, reason="", headers={}))
    error.error_code = code
    return error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (s3("NoSuchKey", 404), "missing"),
        (s3("404", 404), "missing"),
        (s3("NoSuchBucket", 404), "bucket"),
        (s3("PreconditionFailed", 412), "exists"),
        (s3("ConditionalRequestConflict", 409), "conflict"),
        (s3("SlowDown", 503), "throttled"),
        (s3("TooManyRequests", 429), "throttled"),
        (s3("InternalError", 500), "server"),
        (s3("ExpiredToken"), "expired"),
        (s3("AccessDenied", 403), "forbidden"),
        (s3("SignatureDoesNotMatch", 403), "forbidden"),
        (s3("RequestTimeTooSkewed", 403), "clock"),
        (s3("InvalidRange", 416), "empty range"),
        (s3("SomethingNew", 503), "throttled"),
        (s3("SomethingElse", 400), "other"),
        (botocore.NoCredentialsError(), "credentials"),
        (botocore.EndpointConnectionError(endpoint_url="http://x"), "unreachable"),
        (botocore.ReadTimeoutError(endpoint_url="http://x"), "timeout"),
        (botocore.TokenRetrievalError(provider="sso", error_msg="x"), "expired"),
        (gcs.HttpError({"code": 429, "message": "slow"}), "throttled"),
        (gcs.HttpError({"code": 503, "message": "x"}), "throttled"),
        (gcs.HttpError({"code": 401, "message": "x"}), "forbidden"),
        (OSError("Forbidden: b/o\nno"), "forbidden"),
        (FileNotFoundError("b/o"), "missing"),
        (FileExistsError("b/o"), "exists"),
        (blob(404, "BlobNotFound"), "missing"),
        (blob(404, "ContainerNotFound"), "bucket"),
        (caused(FileNotFoundError("x"), blob(404, "ContainerNotFound")), "bucket"),
        (blob(409, "BlobAlreadyExists"), "exists"),
        (blob(503, "ServerBusy"), "throttled"),
        (blob(403, "AuthenticationFailed"), "forbidden"),
        (azure.ServiceRequestError("no route"), "unreachable"),
        (aiohttp.ClientPayloadError("cut"), "unreachable"),
        (aiohttp.ServerDisconnectedError(), "unreachable"),
        (asyncio.TimeoutError(), "timeout"),
        (ConnectionResetError(), "unreachable"),
        (ZeroDivisionError("ours"), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:40],
)
def test_kinds(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    "text",
    [
        "GET https://a.blob.core.windows.net/c/b?sv=2024&sig=SECRET%3D: 403",
        "proxy http://user:SECRET@proxy:3128 refused",
        "AccountName=me;AccountKey=SECRET==;EndpointSuffix=x",
        "aws_secret_access_key = SECRET",
        "X-Amz-Signature=SECRET&X-Amz-Date=1",
        '{"refresh_token": "SECRET"}',
        "given: SECRET",
    ],
)
def test_nothing_secret_is_told(text: str) -> None:
    assert "SECRET" not in redact(text, ["SECRET"] if text.startswith("given") else [])


def test_secrets_of_the_environment_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "tok-0123456789")
    error = ConnectionError("while sending tok-0123456789 to the store")
    text = describe(error, kind_of(error))
    assert "tok-0123456789" not in text and "while sending" in text and "can't be reached" in text
