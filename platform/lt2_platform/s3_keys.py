"""What S3 does with single keys, where fsspec's own way asks more or says less. `full` is `s3://bucket/key`."""

from __future__ import annotations

import errno
import random
import time
import uuid
from typing import Any

from botocore.exceptions import ClientError

from lt2_platform.storage_errors import http_status

S3 = "s3://"
DELETED_AT_ONCE = 1000  # keys that S3 takes in one request
CONFLICT_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds at most, before a write that met another is tried again
_CONFLICT, _PRECONDITION_FAILED = 409, 412
_WRITER = "lt2-writer"


def has_key(fs: Any, full: str) -> bool:
    bucket, key = full[len(S3) :].split("/", 1)
    try:
        fs.call_s3("head_object", Bucket=bucket, Key=key)
        return True
    except FileNotFoundError:
        return False


def put_if_absent(fs: Any, full: str, data: bytes) -> bool:
    """True for exactly one of any number of concurrent callers."""
    writer = uuid.uuid4().hex
    for pause in CONFLICT_PAUSES:
        try:
            return _put(fs, full, data, writer)
        except (OSError, ClientError) as error:
            if http_status(error) != _CONFLICT:
                raise
        time.sleep(random.uniform(0, pause))
    return _put(fs, full, data, writer)


def _put(fs: Any, full: str, data: bytes, writer: str) -> bool:
    bucket, key = full[len(S3) :].split("/", 1)
    try:
        fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*", Metadata={_WRITER: writer})
        return True
    except (OSError, ClientError) as error:
        status = http_status(error)
        there = isinstance(error, FileExistsError) or status in (_CONFLICT, _PRECONDITION_FAILED)
        # Some servers answer EINVAL for a lost race; EINVAL also means a malformed request, hence the look.
        if not there and not (getattr(error, "errno", None) == errno.EINVAL and fs.exists(full)):
            raise
        # The client sends a request again whose answer was lost, and then meets the object it made itself.
        try:
            return fs.call_s3("head_object", Bucket=bucket, Key=key).get("Metadata", {}).get(_WRITER) == writer
        except FileNotFoundError:
            if status == _CONFLICT:  # of writes at the same time S3 may take none
                raise error from error.__cause__
            return False  # another's, and gone already


def delete_keys(fs: Any, full: str) -> None:
    """Not `fs.rm`: it takes `*` and `[` in a key for a pattern, and says nothing of keys that S3 did not delete."""
    bucket, key = full[len(S3) :].split("/", 1)
    keys = [key, *(str(name).split("/", 1)[1] for name in fs.find(full))]
    for start in range(0, len(keys), DELETED_AT_ONCE):
        listed = [{"Key": each} for each in dict.fromkeys(keys[start : start + DELETED_AT_ONCE])]
        answer = fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": listed, "Quiet": True})
        for refused in answer.get("Errors", []):
            kind = PermissionError if refused.get("Code") == "AccessDenied" else OSError
            raise kind(f"{refused.get('Key')} was not deleted ({refused.get('Code')}: {refused.get('Message')})")
