"""Public Avro files, written by many hands: every value as fastavro reads it, or the error that is due."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
import oracle

CORPUS = Path(os.environ.get("FASTPIPE_CORPUS") or Path(__file__).parents[2] / "shared" / "corpus")
if not CORPUS.is_dir():
    pytest.skip(f"no public Avro files in {CORPUS} (FASTPIPE_CORPUS says where)", allow_module_level=True)

FILES = sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.avro") if path.is_file())
FILES += sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.avro/*") if path.is_file())
FILES += sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*.avro.gz"))

ARROW = "apache+arrow-testing/data/avro"
ARROW_RS = "apache+arrow-rs/arrow-avro/test/data"
AVRO_C = "apache+avro/lang/c/tests"

LOGICAL = "logical type {} is not inferred"
SEVERAL = "several types besides null"

# What can't be read as it is: the error, and words of its reason.
REFUSED: dict[str, tuple[type[fastpipe.FastpipeError], str]] = {
    # Damaged.
    f"{AVRO_C}/avro-1237-bad-union-discriminant.avro": (fastpipe.MalformedFileError, "expected a block's header"),
    f"{AVRO_C}/avro-1238-truncated.avro": (fastpipe.MalformedFileError, "cut short"),
    "apache+avro/lang/js/test/dat/person-10.no-codec.avro": (fastpipe.MalformedFileError, "expected a block's header"),
    f"{ARROW_RS}/bad-varint-bug.avro.gz": (fastpipe.MalformedFileError, "not an Avro container file"),
    # Unions of several types.
    "apache+avro/share/test/data/schemas/withUnion/data.avro": (fastpipe.UnsupportedError, SEVERAL),
    f"{ARROW_RS}/comprehensive_e2e.avro": (fastpipe.UnsupportedError, SEVERAL),
    f"{ARROW_RS}/union_fields.avro": (fastpipe.UnsupportedError, SEVERAL),
    # Logical types.
    f"{ARROW}/alltypes_dictionary.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-micros")),
    f"{ARROW}/alltypes_plain.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-micros")),
    f"{ARROW}/alltypes_plain.bzip2.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-micros")),
    f"{ARROW}/alltypes_plain.xz.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-micros")),
    f"{ARROW}/alltypes_plain.snappy.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-micros")),
    f"{ARROW}/alltypes_plain.zstandard.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-micros")),
    f"{ARROW}/duration_uuid.avro": (fastpipe.UnsupportedError, LOGICAL.format("duration")),
    f"{ARROW}/fixed256_decimal.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/fixed_length_decimal.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/fixed_length_decimal_legacy.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/fixed_length_decimal_legacy_32.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/int128_decimal.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/int256_decimal.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/int32_decimal.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/int64_decimal.avro": (fastpipe.UnsupportedError, LOGICAL.format("decimal")),
    f"{ARROW}/timestamp_logical_types.avro": (fastpipe.UnsupportedError, LOGICAL.format("timestamp-millis")),
    f"{ARROW_RS}/skippable_types.avro": (fastpipe.UnsupportedError, LOGICAL.format("date")),
}

# fastavro takes metadata for UTF-8; the Avro specification says bytes.
SYNC_IN_META = "apache+avro/share/test/data/syncInMeta.avro"
IN_PARTS = [
    name
    for name, (error, reason) in REFUSED.items()
    if error is fastpipe.UnsupportedError and (reason == SEVERAL or reason.startswith("logical"))
]


def load(path: Path) -> tuple[oracle.Type, list[Any]]:
    with path.open("rb") as file:
        reader = fastavro.reader(file)
        records = list(reader)
        return oracle.resolve(json.loads(reader.metadata["avro.schema"])), records


def compare(path: Path, root: oracle.Type, records: list[Any], batch_size: int, **options: Any) -> fastpipe.Reader:
    reader = fastpipe.read_avro(path, batch_size=batch_size, **options)
    oracle.check(reader, records, lambda name, record: oracle.follow(root, record, name))
    return reader


def test_the_table_names_files_of_the_folder() -> None:
    assert {*REFUSED, SYNC_IN_META} <= set(FILES)


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
@pytest.mark.parametrize("name", [name for name in FILES if name not in REFUSED and name != SYNC_IN_META])
def test_equal_to_fastavro(name: str, batch_size: int) -> None:
    root, records = load(CORPUS / name)
    reader = compare(CORPUS / name, root, records, batch_size)
    wanted = oracle.leaves(root)
    assert list(reader.features) == [leaf.name for leaf in wanted]
    assert [spec.dtype for spec in reader.features.values()] == [leaf.dtype for leaf in wanted]
    assert [spec.nulls == "mask" for spec in reader.features.values()] == [leaf.nullable for leaf in wanted]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, reason = REFUSED[name]
    with pytest.raises(error) as caught:
        list(fastpipe.read_avro(CORPUS / name, batch_size=10))
    assert type(caught.value) is error
    assert reason in caught.value.reason
    assert caught.value.path == str(CORPUS / name)


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.usefixtures("plain_values")
def test_the_other_columns_of_what_is_not_inferred(name: str, batch_size: int) -> None:
    root, records = load(CORPUS / name)
    wanted = oracle.leaves(root)
    readable = [leaf.name for leaf in wanted if not leaf.refusal]
    for leaf in wanted:
        if leaf.refusal:
            with pytest.raises(fastpipe.UnsupportedError, match=leaf.refusal) as caught:
                fastpipe.infer_features(CORPUS / name, columns=[leaf.name])
            assert caught.value.feature == leaf.name
    if readable:
        reader = compare(CORPUS / name, root, records, batch_size, columns=readable)
        assert list(reader.features) == readable
    plain = {leaf.name: leaf.spec() for leaf in wanted if leaf.type.logical}
    if plain:
        compare(CORPUS / name, root, records, batch_size, features=plain)


def test_every_value_of_the_linkedin_file() -> None:
    path = CORPUS / "linkedin+Avro2TF/FDS.avro"
    root, records = load(path)
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
    compare(path, oracle.resolve(schema), records, 1000)
    file = fastpipe.AvroFile(path)
    assert file.num_records == 6001
    assert file.metadata == metadata
    assert file.blocks["rows"].tolist() == [count for count, _ in blocks]


def test_a_union_branch_that_is_not_there(tmp_path: Path) -> None:
    # Without the line feed at the end of the file, which is damage of its own.
    data = (CORPUS / AVRO_C / "avro-1237-bad-union-discriminant.avro").read_bytes()
    path = tmp_path / "bad.avro"
    path.write_bytes(data.removesuffix(b"\n"))
    with pytest.raises(fastpipe.MalformedFileError, match="union") as caught:
        list(fastpipe.read_avro(path, batch_size=1))
    assert caught.value.feature == "value"
    assert (caught.value.block, caught.value.record) == (0, 1)


def test_a_file_without_its_line_feed(tmp_path: Path) -> None:
    folder = CORPUS / "apache+avro/lang/js/test/dat"
    path = tmp_path / "person.avro"
    path.write_bytes((folder / "person-10.no-codec.avro").read_bytes().removesuffix(b"\n"))
    root, records = load(path)
    assert len(records) == 10
    compare(path, root, records, 3)


def test_a_file_that_was_compressed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "unzipped.avro"
    path.write_bytes(gzip.decompress((CORPUS / ARROW_RS / "bad-varint-bug.avro.gz").read_bytes()))
    root, records = load(path)
    assert records
    compare(path, root, records, 3)


def test_times_and_decimals_can_be_made_of_what_underlies_them() -> None:
    path = CORPUS / ARROW / "alltypes_plain.avro"
    _, records = load(path)
    spec = fastpipe.DenseSpec((), "int64", nulls="fill")
    (batch,) = fastpipe.read_avro(path, features={"timestamp_col": spec}, batch_size=100)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    wanted = [(record["timestamp_col"] - epoch) // datetime.timedelta(microseconds=1) for record in records]
    assert batch["timestamp_col"].tolist() == wanted
    assert batch["timestamp_col"].view("datetime64[us]")[0] == np.datetime64(wanted[0], "us")

    path = CORPUS / ARROW / "int128_decimal.avro"
    _, records = load(path)
    (batch,) = fastpipe.read_avro(path, features={"value": fastpipe.DenseSpec((), "bytes")}, batch_size=100)
    found = [int.from_bytes(value, "big", signed=True) for value in batch["value"].to_list()]
    assert all(isinstance(record["value"], decimal.Decimal) for record in records)
    assert [decimal.Decimal(number).scaleb(-2) for number in found] == [record["value"] for record in records]
