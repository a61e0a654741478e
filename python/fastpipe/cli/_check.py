"""`fastpipe check` reads all values of files to find damage. `fastpipe salvage` copies an Avro file's intact blocks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from fastpipe._files._in_memory_files import opened
from fastpipe._files._remote_files import expander
from fastpipe._formats import AVRO, SUFFIXES, TFRECORD, FileFormat
from fastpipe._reader.losses import Loss, Skip
from fastpipe._text import clean, plural
from fastpipe.avro._reading import AvroData
from fastpipe.avro._salvage import salvage
from fastpipe.cli._formats import found
from fastpipe.errors import FastpipeError, OutOfMemoryError, UnsupportedError, in_file

_ANY = Skip(max_units=2**31 - 1, max_fraction=1.0)
# Rows of a batch. The memory of a batch stays small if rows are large.
_ROWS = 256


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands `check` and `salvage`."""
    check = commands.add_parser("check", help="read all values of files, and list what is damaged")
    what = "Avro, Parquet, Arrow, CSV or TFRecord file, URL, directory or glob pattern"
    check.add_argument("files", nargs="+", metavar="FILE", help=what)
    check.add_argument("--json", action="store_true", help="print JSON")
    checksums = "compare each block with its checksum in this directory: see fastpipe index --checksums (Avro)"
    check.add_argument("--cache", metavar="DIR", help=checksums)
    check.set_defaults(run=_check)
    repair = commands.add_parser("salvage", help="copy the intact blocks of a damaged Avro file")
    repair.add_argument("source", metavar="IN", help="Avro file")
    repair.add_argument("target", metavar="OUT", help="new Avro file")
    repair.set_defaults(run=_salvage)


@dataclass
class Checked:
    """What was found in a file.

    Attributes:
        path: Path of the file.
        rows: Number of intact rows that were read.
        losses: Damaged units. For formats other than Avro and TFRecord, reading ends at the first one.
        error: The error that ended reading, if one did.
        has_checksums: Whether all blocks were compared with checksums. None if this wasn't requested.
    """

    path: str
    rows: int = 0
    losses: list[Loss] = field(default_factory=list)
    error: str | None = None
    has_checksums: bool | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.losses and self.error is None

    def lines(self, format_: FileFormat) -> list[str]:
        """Returns what to print: a line for the file, and one for each damage."""
        intact = plural(self.rows, format_.rows.removesuffix("s"))
        compared = {None: "", True: ", compared with checksums", False: ", but there are no checksums of this file"}
        state = "ok" if self.is_sound else "DAMAGED"
        found = [f"{clean(self.path)}: {state}, {intact} can be read{compared[self.has_checksums]}"]
        for loss in self.losses:
            lost = plural(loss.rows, format_.rows.removesuffix("s"))
            where = f"bytes {loss.start} to {loss.end}"
            if loss.block is not None:
                where = f"{format_.units.removesuffix('s')} {loss.block}, {where}"
            found.append(f"  {where}: {lost} lost: {clean(loss.reason)}")
        return found if self.error is None else [*found, f"  {clean(self.error)}"]


def checked(path: str, format_: FileFormat, tell: Callable[[int], object], cache: str | None = None) -> Checked:
    """Reads all values of a file. `tell` is called with the number of rows of each batch.

    If there is a cache, an Avro file's blocks are compared with the checksums in it.
    """
    result = Checked(path)
    options: dict[str, Any] = {"on_error": _ANY} if format_ in (AVRO, TFRECORD) else {}
    if cache is not None:
        options["index_cache"], result.has_checksums = cache, False
    try:
        with format_.read([path], batch_size=_ROWS, **options) as reader:
            if cache is not None:
                files = opened([path], SUFFIXES, expander(None))
                result.has_checksums = AvroData.inferring(files, None, cache).handle.has_checksums()
            try:
                for batch in reader:
                    rows = len(next(iter(batch.values())))
                    result.rows += rows
                    tell(rows)
            finally:
                result.losses = reader.losses
    except OutOfMemoryError:
        # The file may be intact.
        raise
    except FastpipeError as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


def _check(arguments: argparse.Namespace) -> int:
    from fastpipe._progress import progress_bar

    format_, files = found(arguments.files)
    if arguments.cache is not None and format_ is not AVRO:
        reason = f"--cache is only for Avro files: indexes of {format_.title} files have no checksums"
        raise in_file(UnsupportedError, files[0], reason)
    results = []
    try:
        bar = progress_bar(None, leave=False, disable=None)
    except ImportError:  # The progress bar is optional.
        bar = None
    for path in files:
        result = checked(path, format_, (lambda rows: None) if bar is None else bar.update, arguments.cache)
        results.append(result)
        if not arguments.json:
            print("\n".join(result.lines(format_)), flush=True)
    if bar is not None:
        bar.close()
    damaged = sum(not result.is_sound for result in results)
    unknown = sum(result.has_checksums is False for result in results)
    if arguments.json:
        each = [
            asdict(result) | {"losses": [loss._asdict() for loss in result.losses], "ok": result.is_sound}
            for result in results
        ]
        print(json.dumps({"format": format_.name, "files": each, "damaged": damaged}, indent=2))
    elif len(results) > 1:
        print(f"{plural(len(results), 'file')}, {damaged} damaged{f', {unknown} without checksums' if unknown else ''}")
    if unknown:
        print("fastpipe: create checksums of intact files with fastpipe index --checksums --cache DIR", file=sys.stderr)
    return 1 if damaged or unknown else 0


def _salvage(arguments: argparse.Namespace) -> int:
    kept = salvage(arguments.source, arguments.target)
    copied = plural(kept.blocks, "block"), plural(kept.rows, "record")
    print(f"{clean(arguments.target)}: {copied[0]} with {copied[1]}")
    for start, end, reason in kept.lost:
        print(f"  lost: bytes {start} to {end}: {clean(reason)}")
    return 0
