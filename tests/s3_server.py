"""A server with S3's protocol on the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["Bucket", "serving_bucket"]

KEY, SECRET = "me", "HIDDEN-KEY"


class Bucket:
    """The bucket `data` of the server.

    Attributes:
        options: Storage options to reach it.
        environment: Variables of the environment to reach it.
    """

    def __init__(self, port: int) -> None:
        boto3 = pytest.importorskip("boto3")
        endpoint = f"http://127.0.0.1:{port}"
        self.options: dict[str, Any] = {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": endpoint,
        }
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )
        self.client.create_bucket(Bucket="data")

    def put(self, key: str, contents: bytes) -> None:
        """Writes an object."""
        self.client.put_object(Bucket="data", Key=key, Body=contents)


@contextmanager
def serving_bucket() -> Iterator[Bucket]:
    """Runs a server with a bucket until the context ends."""
    server = pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    try:
        yield Bucket(running.get_host_and_port()[1])
    finally:
        running.stop()
