"""Converts the paths that users pass to paths of local files."""

from __future__ import annotations

import os
import re

from fastpipe._arguments import shown
from fastpipe.errors import UnsupportedError, in_file

# A single letter is a Windows drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def local(
    item: str | os.PathLike[str], what: str = "source must be a path, a glob, a directory or a list of these"
) -> str:
    """Returns the path of a local file or folder. Accepts `file://` URLs and paths that begin with `~`.

    Args:
        item: The path.
        what: Beginning of the error message if the item isn't a path.

    Raises:
        TypeError: If the item isn't a path.
        UnsupportedError: If the item is a URL that doesn't name a local file.
    """
    refuse_contents(item)
    if not isinstance(item, str | os.PathLike):
        raise TypeError(f"{what}; got {shown(item)}")
    path = os.fsdecode(item)
    if os.path.lexists(path):
        return path
    if url := _URL.match(path):
        return _of_url(path, url[1])
    return os.path.expanduser(path)


def _of_url(url: str, scheme: str) -> str:
    if scheme.lower() == "file":
        # These modules import HTTP and TLS, which takes as long as importing all of fastpipe.
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        host, path = urlsplit(url)[1:3]
        if host in ("", "localhost"):
            return url2pathname(path)
    reason = (
        f"a {scheme}:// URL can't be read here: only read_avro, read_csv, read_tfrecord, AvroFile, sample_csv and "
        "fastpipe.cuda.fill read URLs, of s3://, gs://, az:// and https://. Copy other data to a local disk or mount "
        "it there, and pass the path"
    )
    raise in_file(UnsupportedError, url, reason)


def refuse_contents(source: object) -> None:
    """Raises a TypeError for open files and for contents of files."""
    if isinstance(source, bytes | bytearray | memoryview) or hasattr(source, "read"):
        kind = type(source).__name__
        raise TypeError(
            f"source must be a path; got {kind}. Only read_avro, read_csv, read_parquet, read_arrow, "
            "infer_features and AvroFile accept open files and bytes: write the data to a file"
        )
