"""The command line: `fastpipe inspect`, `head`, `check`, `salvage`, `index`, `convert`, `bench` and others."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from fastpipe._fastpipe import __version__
from fastpipe._files._index_cache import user_cache_directory
from fastpipe._formats import AVRO
from fastpipe._text import clean, plural, shorten, size_text, table
from fastpipe.cli import _bench, _check, _convert, _formats, _index, _inspect, _ledger, _shuffle
from fastpipe.cli._inspect import FileSummary, batch_rows, rows_text
from fastpipe.cli._serve import add_command as add_serve
from fastpipe.errors import FastpipeError

_MOST_FILES = 40  # More lines would hide the sections above. --json prints all files.
_MOST_GROUPS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments. Defaults to the arguments of the process.

    Returns:
        The exit code: 0, or 1 if something couldn't be read, or 130 after Ctrl-C. Wrong usage exits with 2.
    """
    arguments = _parser().parse_args(_shuffle.completed(sys.argv[1:] if argv is None else argv))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # A terminal without UTF-8 must not cause an error.
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # For example, `| head`. Without this, Python prints another error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FastpipeError, ImportError, MemoryError, OSError) as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastpipe", description="Inspects, converts, indexes, benchmarks and serves data files."
    )
    parser.add_argument("--version", action="version", version=f"fastpipe {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    indexed = "Avro or TFRecord file, URL, directory (all of these files below it) or glob pattern"
    source = "Avro, Parquet, Arrow, CSV or TFRecord file, URL, directory or glob pattern"

    inspect = commands.add_parser(
        "inspect", help="show features, size and rows (for Avro, also schema, codec and compression)"
    )
    inspect.add_argument("files", nargs="+", metavar="FILE", help=source)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    _shuffle.add_options(inspect, _positive)
    inspect.set_defaults(run=_inspect_files)

    head = commands.add_parser("head", help="show the first rows")
    head.add_argument("file", metavar="FILE", help=source)
    head.add_argument("-n", type=_positive, default=5, metavar="N", help="number of rows (default: 5)")
    head.set_defaults(run=_head)

    index = commands.add_parser("index", help="create block indexes for index_cache= (Avro and TFRecord)")
    index.add_argument("files", nargs="+", metavar="FILE", help=indexed)
    index.add_argument(
        "--cache", type=_named, metavar="DIR", help="directory for the indexes (default: the user's cache directory)"
    )
    index.add_argument(
        "--checksums",
        action="store_true",
        help="read the files and also keep a checksum of each block, which readers verify (Avro)",
    )
    index.set_defaults(run=_index_files)

    convert = commands.add_parser(
        "convert", help="write the rows of files as Avro, Parquet, Arrow or TFRecord, optionally shuffled"
    )
    _convert.add_options(convert, _positive)
    convert.set_defaults(run=_convert.run)

    bench = commands.add_parser("bench", help="measure read throughput for several batch sizes and thread counts")
    bench.add_argument("files", nargs="+", metavar="FILE", help=source)
    _bench.add_options(bench, _positive)
    bench.set_defaults(run=_measure)

    _check.add_commands(commands)
    _ledger.add_command(commands)
    add_serve(commands)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; got {text!r}")
    return int(text)


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _complain(error: BaseException) -> None:
    message = " ".join(clean(str(error).replace("\n", " ")).split())
    print(f"fastpipe: {message or type(error).__name__}", file=sys.stderr)


def _width() -> int:
    return max(shutil.get_terminal_size((120, 24)).columns, 40)


def _head(arguments: argparse.Namespace) -> int:
    format_, files = _formats.found(arguments.file)
    # Later files are read only if the first one has too few rows.
    found = _inspect.infer_readable(files[:1], format_)
    if not found.features and found.error is not None:
        raise found.error
    width = _width()
    names = list(found.features)
    rows: list[list[str]] = []
    for path in files:
        missing = arguments.n - len(rows)
        if missing <= 0:
            break
        with format_.read([path], features=found.features, batch_size=missing, num_threads=1, prefetch=1) as reader:
            batch = next(iter(reader), None)
            rows += [] if batch is None else batch_rows(batch, reader.categories, width)
    print(rows_text(names, rows, width) if rows and names else f"no {format_.rows}")
    for name, reason in found.skipped.items():
        print(f"{name}: left out: {clean(reason)}", file=sys.stderr)
    return 0


def _index_files(arguments: argparse.Namespace) -> int:
    format_, files = _formats.indexed(arguments.files, checksums=arguments.checksums)
    kind = f"{format_.name} with checksums" if arguments.checksums else format_.name
    indexed = _index.build(files, arguments.cache or user_cache_directory(), kind)
    print(_index.table(indexed, _width()))
    # A directory that can't be written causes the same error for each file. Report it once.
    failed = {str(file.error): file.error for file in indexed if file.error is not None}
    for error in failed.values():
        _complain(error)
    return 1 if failed else 0


def _measure(arguments: argparse.Namespace) -> int:
    return _bench.run(arguments, _complain, _width())


def _inspect_files(arguments: argparse.Namespace) -> int:
    if arguments.shuffle is not None or _shuffle.given(arguments):
        return _shuffle.run(arguments, _complain, _width())
    format_, files = _formats.found(arguments.files)
    summaries = [_inspect.summarize(path, format_) for path in files]
    groups = _inspect.by_schema(summaries)
    # Only files with the same schema can be read together, and broken files would make it fail.
    alike = groups[0] if groups else [] if format_ is AVRO else summaries
    sound = [summary.path for summary in alike if summary.error is None]
    found = _inspect.infer_readable(sound, format_) if sound else None
    if arguments.json:
        print(json.dumps({"format": format_.name, **_as_json(summaries, len(groups) <= 1, found)}, indent=2))
    else:
        print("\n\n".join(_sections(summaries, groups, found)))
    broken = [summary.error for summary in summaries if summary.error is not None]
    for error in broken:
        _complain(error)
    return 1 if broken else 0


def _as_json(summaries: list[FileSummary], agree: bool, found: _inspect.Readable | None) -> dict[str, Any]:
    features: dict[str, dict[str, Any]] = {}
    for name, spec in found.features.items() if found else ():
        kind, shape, dtype, nulls, *_ = spec._lower()
        features[name] = {
            "kind": kind,
            "shape": [None if n < 0 else n for n in shape],
            "dtype": dtype,
            "on_null": nulls,
        }
        if spec.scale is not None:
            features[name]["scale"] = spec.scale
    return {
        "files": [summary.as_json() for summary in summaries],
        "totals": {
            "files": len(summaries),
            "size": sum(summary.size or 0 for summary in summaries),
            "blocks": sum(summary.blocks or 0 for summary in summaries),
            "records": sum(summary.records or 0 for summary in summaries),
        },
        "schemas_agree": agree,
        "features": features,
        "features_code": repr(found.features) if found and found.features else None,
        "features_error": str(found.error) if found and found.error else None,
        "features_left_out": found.skipped if found else {},
    }


def _sections(
    summaries: list[FileSummary], groups: list[list[FileSummary]], found: _inspect.Readable | None
) -> list[str]:
    width = _width()
    sections = [_file_section(summaries[0]) if len(summaries) == 1 else _files_section(summaries, width)]
    if sum(map(len, groups)) > 1:
        sections.append(_agreement(groups))
    if groups:
        title = "Schema" if len(groups) == 1 else f"Schema of {clean(groups[0][0].path)}"
        sections.append(f"{title}\n{_indent(_inspect.schema_table(groups[0][0].schema, width - 2))}")
    if found is not None:
        sections.append(_features_section(found))
    return sections


def _file_section(summary: FileSummary) -> str:
    lines: list[tuple[str, str]] = []
    if summary.size is not None:
        exactly = f" ({summary.size:,} bytes)" if summary.size > 999 else ""
        lines.append(("size", size_text(summary.size) + exactly))
    if summary.codec is not None:
        lines.append(("codec", clean(summary.codec)))
    if summary.blocks is not None:
        damage = " before the damage" if summary.records is None else ""
        lines.append((summary.format.units, f"{summary.blocks:,}{damage}"))
    if summary.records is not None:
        lines.append((summary.format.rows, f"{summary.records:,}"))
    if summary.bytes_per_record is not None:
        uncompressed = ""
        if summary.ratio is not None and summary.codec != "null":
            uncompressed = f", {size_text(summary.bytes_per_record * summary.ratio)} uncompressed"
        row = summary.format.rows.removesuffix("s")
        lines.append((f"a {row}", f"{size_text(summary.bytes_per_record)} in the file{uncompressed}"))
    if summary.ratio is not None and summary.codec != "null":
        lines.append(("compression", f"{summary.ratio:.3g} : 1 (sampled)"))
    for key, value in summary.metadata.items():
        text = clean(value[:200].decode("utf-8", "backslashreplace"))
        lines.append((clean(key), shorten(text, 80)))
    margin = max((len(name) for name, _ in lines), default=0)
    return "\n".join([clean(summary.path), *(f"  {name:<{margin}}  {text}" for name, text in lines)])


def _files_section(summaries: list[FileSummary], width: int) -> str:
    def row(name: str, size: int | None, blocks: int | None, records: int | None, *rest: str) -> list[str]:
        counts = ["?" if count is None else f"{count:,}" for count in (blocks, records)]
        return [clean(name), "?" if size is None else size_text(size), *counts, *rest]

    try:
        folder = os.path.commonpath([os.path.dirname(os.path.abspath(summary.path)) for summary in summaries])
    except ValueError:  # On Windows, if the files are on several drives.
        folder = ""
    rows = []
    for s in summaries[:_MOST_FILES]:
        ratio = "?" if s.ratio is None else "" if s.codec == "null" else f"{s.ratio:.3g} : 1"
        name = os.path.relpath(s.path, folder) if folder else s.path
        rows.append(row(name, s.size, s.blocks, s.records, s.codec or "?", ratio, s.state))
    if len(summaries) > _MOST_FILES:
        rows.append([f"... and {len(summaries) - _MOST_FILES:,} more", "", "", "", "", "", ""])
    size, blocks, records = (sum(getattr(s, name) or 0 for s in summaries) for name in ("size", "blocks", "records"))
    failed = sum(s.error is not None for s in summaries)
    rows.append(
        row(f"{plural(len(summaries), 'file')}", size, blocks, records, "", "", f"{failed} failed" if failed else "ok")
    )
    format_ = summaries[0].format
    header = ["file", "size", format_.units, format_.rows, "codec", "compression", "state"]
    if format_ is not AVRO:
        # Codecs of other formats aren't read, so these columns would be empty.
        header, rows = [*header[:4], header[6]], [[*cells[:4], cells[6]] for cells in rows]
    text = table(header, rows, width, right=(1, 2, 3, 5), keep_end=(0,))
    return f"{clean(os.path.join(folder, ''))}\n{text}" if folder else text


def _agreement(groups: list[list[FileSummary]]) -> str:
    if len(groups) == 1:
        return "All schemas agree."
    most = groups[0]
    lines = [f"The schemas differ. {plural(len(most), 'file')} like {clean(most[0].path)}. Differences:"]
    for group in groups[1 : _MOST_GROUPS + 1]:
        lines.append(f"  {plural(len(group), 'file')} like {clean(group[0].path)}")
        lines += [f"    {line}" for line in _inspect.schema_differences(most[0].schema, group[0].schema)]
    if len(groups) > _MOST_GROUPS + 1:
        lines.append(f"  and {len(groups) - _MOST_GROUPS - 1} more schemas")
    return "\n".join(lines)


def _features_section(found: _inspect.Readable) -> str:
    if not found.features:
        return f"Features\n  cannot be inferred:  {clean(str(found.error))}"
    lines = ["Features", _indent(repr(found.features))]
    for name, reason in found.skipped.items():
        lines.append(f"  left out: {clean(name)}: {clean(reason)}")
    return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
