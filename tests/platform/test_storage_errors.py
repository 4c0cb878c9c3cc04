"""A failing store is told in one line, with its root; a bug of ours is not."""

import errno
import os

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, ParamValidationError, ProfileNotFound

from lt2_platform.storage import Storage
from lt2_platform.storage_errors import complaint


def answered(code, kind=OSError):
    """What s3fs raises for an answer of the server."""
    error = kind(f"said {code}")
    error.__cause__ = ClientError({"Error": {"Code": code, "Message": "why"}}, "ListObjectsV2")
    return error


def of_disk(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (answered("NoSuchBucket", FileNotFoundError), "(there is no bucket b); create it, or choose another with"),
        (answered("InvalidAccessKeyId", PermissionError), "(InvalidAccessKeyId: why); check AWS_ACCESS_KEY_ID and AWS"),
        (answered("SlowDown"), "(SlowDown: why); choose another with --storage"),
        (
            ProfileNotFound(profile="x"),
            "(The config profile (x) could not be found); set AWS_PROFILE to an existing profile, or unset it",
        ),
        (NoCredentialsError(), "(Unable to locate credentials); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (ParamValidationError(report="a regex"), "('b' is not a valid bucket name); give s3://bucket/prefix"),
        (of_disk(errno.EROFS), "(Read-only file system); choose another with --storage or LT2_STORAGE"),
        (
            of_disk(errno.ENOSPC),
            "(no space is left in /scratch, where uploads are written first); free some, or set TMP",
        ),
    ],
)
def test_one_line_says_the_root_the_reason_and_what_to_do(monkeypatch, error, line):
    def fail(storage, full):
        raise error

    monkeypatch.setattr(Storage, "_writing", fail)
    monkeypatch.setattr("tempfile.tempdir", "/scratch")
    with pytest.raises(type(error)) as caught, Storage("s3://b/x").writer("a"):  # its type stays, who decide by it
        pass
    told = str(complaint(caught.value))
    assert told.startswith("storage root s3://b/x cannot be used (")
    assert line in told


def test_bugs_and_errors_from_elsewhere_are_no_complaint(tmp_path):
    assert complaint(OSError("of some other file")) is None
    assert complaint(ValueError("no")) is None
    with pytest.raises(FileNotFoundError) as caught:
        Storage(str(tmp_path)).read_bytes("not-there")
    assert complaint(caught.value) is None
