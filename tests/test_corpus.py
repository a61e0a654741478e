"""Public Avro files from many writers: every value matches the oracle, or the expected error is raised."""

from __future__ import annotations

import decimal
import gzip
import io
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import fastavro
import pyarrow.feather
import pytest

import fastpipe
import oracle
from arrow_of_avro import arrow_type, held, refused, stored, without_nullability
from fastpipe import cli

CORPUS = Path(os.environ.get("FASTPIPE_CORPUS") or Path(__file__).parents[2] / "shared" / "corpus")
if not CORPUS.is_dir():
    pytest.skip(f"no public Avro files in {CORPUS} (set FASTPIPE_CORPUS to their folder)", allow_module_level=True)

FILES = sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.avro") if path.is_file())
FILES += sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.avro/*") if path.is_file())
FILES += sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.avro.gz"))

ARROW = "apache+arrow-testing/data/avro"
ARROW_RS = "apache+arrow-rs/arrow-avro/test/data"
AVRO_C = "apache+avro/lang/c/tests"

# Files that can't be read, with the error and a part of its reason.
REFUSED: dict[str, tuple[type[fastpipe.FastpipeError], str]] = {
    # Damaged files.
    f"{AVRO_C}/avro-1237-bad-union-discriminant.avro": (
        fastpipe.errors.MalformedFileError,
        "expected a block's header",
    ),
    f"{AVRO_C}/avro-1238-truncated.avro": (fastpipe.errors.MalformedFileError, "cut short"),
    "apache+avro/lang/js/test/dat/person-10.no-codec.avro": (
        fastpipe.errors.MalformedFileError,
        "expected a block's header",
    ),
    f"{ARROW_RS}/bad-varint-bug.avro.gz": (fastpipe.errors.MalformedFileError, "not an Avro container file"),
}

# fastavro decodes metadata as UTF-8, but the Avro specification says bytes.
SYNC_IN_META = "apache+avro/share/test/data/syncInMeta.avro"
READ = [name for name in FILES if name not in REFUSED]


def compare(path: Path, root: oracle.Type, records: list[Any], batch_size: int, **options: Any) -> fastpipe.Reader:
    reader = fastpipe.read_avro(path, batch_size=batch_size, **options)
    oracle.check(reader, records, lambda name, record: oracle.follow(root, record, name))
    return reader


def plain(node: oracle.Type, value: Any, names: dict[str, oracle.Type]) -> Any:
    """Returns a value from the oracle as fastavro returns it, without union branches."""
    if node.kind == "recursive":
        return plain(names[node.name], value, names)
    if node.kind == "union":
        return plain(node.parts[value.index], value.value, names)
    if node.kind == "record":
        return {name: plain(part, value[name], names) for name, part in node.parts}
    if node.kind == "array":
        return [plain(node.parts[0], item, names) for item in value]
    if node.kind == "map":
        return {key: plain(node.parts[0], item, names) for key, item in value.items()}
    return value


def test_listed_files_exist() -> None:
    assert {*REFUSED, SYNC_IN_META} <= set(FILES)


@pytest.mark.parametrize("name", [name for name in READ if name != SYNC_IN_META])
@pytest.mark.usefixtures("plain_values")
def test_the_oracle_agrees_with_fastavro(name: str) -> None:
    """The other tests rely on the oracle. Files in which fastavro merges two values into one are excluded."""
    _, records = oracle.load(CORPUS / name)
    with (CORPUS / name).open("rb") as file:
        reader = fastavro.reader(file)
        expected = list(reader)
        names: dict[str, oracle.Type] = {}
        root = oracle.resolve(json.loads(reader.metadata["avro.schema"]), names)
    found = [plain(root, record, names) for record in records]
    assert oracle.difference(expected, found, name) is None


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
@pytest.mark.parametrize("name", READ)
def test_equal_to_the_oracle(name: str, batch_size: int) -> None:
    root, records = oracle.load(CORPUS / name)
    left_out = [leaf.name for leaf in oracle.leaves(root) if leaf.refusal]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = compare(CORPUS / name, root, records, batch_size)
    warned = [str(warning.message) for warning in caught if warning.category is fastpipe.errors.ColumnsLeftOutWarning]
    assert len(caught) == len(warned) == bool(left_out)
    assert re.findall(r"[:;] '(.*?)' \(", "".join(warned)) == left_out
    wanted = [leaf for leaf in oracle.leaves(root) if not leaf.refusal]
    assert list(reader.features) == [leaf.name for leaf in wanted]
    assert [spec.dtype for spec in reader.features.values()] == [leaf.dtype for leaf in wanted]
    assert [spec.scale for spec in reader.features.values()] == [leaf.scale for leaf in wanted]
    assert [spec.on_null == "mask" for spec in reader.features.values()] == [leaf.nullable for leaf in wanted]
    for leaf in wanted:
        if leaf.type.kind == "union" and not oracle.numbers(leaf.type):
            assert reader.categories[leaf.name] == oracle.branches(leaf.type)
    if left_out:
        with pytest.raises(fastpipe.errors.UnsupportedError, match=re.escape(left_out[0])):
            fastpipe.read_avro(CORPUS / name, batch_size=batch_size, on_unsupported="error")
        with pytest.raises(fastpipe.errors.UnsupportedError):
            fastpipe.infer_features(CORPUS / name, columns=left_out[:1])


@pytest.mark.parametrize("name", READ)
def test_stored_values(name: str) -> None:
    """Checks the stored values, with logical types disabled."""
    root, records = oracle.load(CORPUS / name)
    bare = oracle.without_logical_types(root)
    reader = compare(CORPUS / name, bare, records, 100, logical_types=False, on_unsupported="ignore")
    wanted = [leaf for leaf in oracle.leaves(bare) if not leaf.refusal]
    assert [spec.dtype for spec in reader.features.values()] == [leaf.dtype for leaf in wanted]


@pytest.mark.parametrize("name", READ)
def test_converted_to_avro(name: str, tmp_path: Path) -> None:
    """Every readable file can be written: unions, roots that aren't records, recursion, unusual names."""
    source, out = CORPUS / name, tmp_path / "out.avro"
    options = ["--from", "avro", "--codec", "deflate", "--block-bytes", "500"]
    assert cli.main(["convert", str(source), str(out), *options]) == 0
    assert fastpipe.avro.AvroFile(out).schema_json == fastpipe.avro.AvroFile(source).schema_json
    assert len(fastpipe.avro.AvroFile(out)) == len(fastpipe.avro.AvroFile(source))
    first, second = (b"".join(data for _, data in oracle.split(path.read_bytes())[1]) for path in (source, out))
    assert first == second


@pytest.mark.parametrize("name", READ)
def test_converted_to_arrow(name: str, tmp_path: Path) -> None:
    """Columns keep their types or are rejected."""
    source, out = str(CORPUS / name), str(tmp_path / "out.arrow")
    root, records = oracle.load(CORPUS / name)
    parts = dict(root.parts) if root.kind == "record" else {"value": root}
    keeps = [column for column, part in parts.items() if not refused(part)]
    if len(keeps) < len(parts):
        assert cli.main(["convert", source, out, "--from", "avro"]) == 1
    if not keeps:
        return
    assert cli.main(["convert", source, out, "--from", "avro", "--columns", ",".join(keeps)]) == 0
    table = pyarrow.feather.read_table(out)
    table.validate(full=True)
    for column in keeps:
        field = table.schema.field(column)
        assert without_nullability(field.type) == without_nullability(arrow_type(parts[column])), column
        values = [record[column] if root.kind == "record" else record for record in records]
        expected = [stored(parts[column], value) for value in values]
        assert repr(held(table[column].combine_chunks())) == repr(expected), column


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_files_are_rejected(name: str) -> None:
    error, reason = REFUSED[name]
    with pytest.raises(error) as caught:
        list(fastpipe.read_avro(CORPUS / name, batch_size=10))
    assert type(caught.value) is error
    assert reason in caught.value.reason
    assert caught.value.path == str(CORPUS / name)


def test_every_value_of_the_linkedin_file() -> None:
    path = CORPUS / "linkedin+Avro2TF/FDS.avro"
    root, records = oracle.load(path)
    assert len(records) == 300
    reader = compare(path, root, records, 7)
    assert list(reader.features) == [name for name, _ in root.parts]
    sparse = {name: spec for name, spec in reader.features.items() if isinstance(spec, fastpipe.SparseSpec)}
    assert {name: len(spec.shape) for name, spec in sparse.items()} == {
        "float1DSparseTensor": 1,
        "float2DSparseTensor": 2,
        "float4DSparseTensor": 4,
    }
    as_csr = {name: fastpipe.SparseSpec(spec.shape, spec.dtype, layout="csr") for name, spec in sparse.items()}
    compare(path, root, records, 7, features=as_csr)


def test_metadata_that_is_not_text() -> None:
    path = CORPUS / SYNC_IN_META
    metadata, blocks = oracle.split(path.read_bytes())
    schema = json.loads(metadata["avro.schema"])
    parsed = fastavro.parse_schema(schema)
    records = []
    for count, data in blocks:
        stream = io.BytesIO(data)
        records += [fastavro.schemaless_reader(stream, parsed) for _ in range(count)]
        assert stream.tell() == len(data)
    assert len(records) == 6001
    assert oracle.load(path)[1] == records
    file = fastpipe.avro.AvroFile(path)
    assert file.num_records == 6001
    assert file.metadata == metadata
    assert file.blocks["rows"].tolist() == [count for count, _ in blocks]


def test_an_invalid_union_branch(tmp_path: Path) -> None:
    # The newline at the end of the file is removed, because it is damage as well.
    data = (CORPUS / AVRO_C / "avro-1237-bad-union-discriminant.avro").read_bytes()
    path = tmp_path / "bad.avro"
    path.write_bytes(data.removesuffix(b"\n"))
    with pytest.raises(fastpipe.errors.MalformedFileError, match="union") as caught:
        list(fastpipe.read_avro(path, batch_size=1))
    assert caught.value.feature == "value"
    assert (caught.value.block, caught.value.record) == (0, 1)


def test_a_file_without_its_final_newline(tmp_path: Path) -> None:
    folder = CORPUS / "apache+avro/lang/js/test/dat"
    path = tmp_path / "person.avro"
    path.write_bytes((folder / "person-10.no-codec.avro").read_bytes().removesuffix(b"\n"))
    root, records = oracle.load(path)
    assert len(records) == 10
    compare(path, root, records, 3)


def test_a_file_compressed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "unzipped.avro"
    path.write_bytes(gzip.decompress((CORPUS / ARROW_RS / "bad-varint-bug.avro.gz").read_bytes()))
    root, records = oracle.load(path)
    assert records
    compare(path, root, records, 3)


def test_times_and_decimals_match_python() -> None:
    """The oracle and fastavro agree on times and decimals."""
    path = CORPUS / ARROW / "alltypes_plain.avro"
    with path.open("rb") as file:
        times = [record["timestamp_col"].replace(tzinfo=None) for record in fastavro.reader(file)]
    (batch,) = fastpipe.read_avro(path, columns=["timestamp_col"], batch_size=100)
    assert batch["timestamp_col"].to_list() == times
    spec = fastpipe.DenseSpec((), "int64", on_null="fill")
    (batch,) = fastpipe.read_avro(path, features={"timestamp_col": spec}, batch_size=100)
    assert batch["timestamp_col"].view("datetime64[us]").tolist() == times

    path = CORPUS / ARROW / "int128_decimal.avro"
    with path.open("rb") as file:
        decimals = [record["value"] for record in fastavro.reader(file)]
    assert all(isinstance(value, decimal.Decimal) for value in decimals)
    (batch,) = fastpipe.read_avro(path, batch_size=100)
    assert batch["value"].tolist() == [float(value) for value in decimals]
    (batch,) = fastpipe.read_avro(path, features={"value": fastpipe.DenseSpec((), "int64", scale=2)}, batch_size=100)
    assert [decimal.Decimal(number).scaleb(-2) for number in batch["value"].tolist()] == decimals
    (batch,) = fastpipe.read_avro(path, features={"value": fastpipe.DenseSpec((), "bytes")}, batch_size=100)
    found = [int.from_bytes(value, "big", signed=True) for value in batch["value"].to_list()]
    assert [decimal.Decimal(number).scaleb(-2) for number in found] == decimals
