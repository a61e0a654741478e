"""The path of a local file, of what users give for one."""

from __future__ import annotations

import os
import re

from fastpipe._arguments import shown
from fastpipe.errors import UnsupportedError, in_file

# One letter is a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def local(item: str | os.PathLike[str], what: str = "source is a path, a glob, a directory or a list of these") -> str:
    """The path of a local file or folder, of which the user may have given a URL or one that begins with `~`.

    Args:
        item: the path.
        what: says what should be given, in the error for what is no path.

    Raises:
        TypeError: if it is no path.
        UnsupportedError: for a URL of anything but a local file.
    """
    refuse_contents(item)
    if not isinstance(item, str | os.PathLike):
        raise TypeError(f"{what}, not {shown(item)}")
    path = os.fsdecode(item)
    if os.path.lexists(path):
        return path
    if url := _URL.match(path):
        return _of_url(path, url[1])
    return os.path.expanduser(path)


def _of_url(url: str, scheme: str) -> str:
    if scheme.lower() == "file":
        # These import HTTP and TLS, which takes as long as all of fastpipe.
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        host, path = urlsplit(url)[1:3]
        if host in ("", "localhost"):
            return url2pathname(path)
    reason = (
        f"only local files are read, and this is a URL of {scheme}://; copy the data to a local disk, or mount them "
        "there, and give the path"
    )
    raise in_file(UnsupportedError, url, reason)


def refuse_contents(source: object) -> None:
    """Raises a TypeError for files that are open, and for what was read of them."""
    if isinstance(source, bytes | bytearray | memoryview) or hasattr(source, "read"):
        kind = type(source).__name__
        raise TypeError(
            f"source is a path, not {kind}: open files and bytes are taken by read_avro, read_csv, infer_features and "
            "AvroFile only; write them to a file"
        )
