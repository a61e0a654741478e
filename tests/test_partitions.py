"""Partition columns: values in the names of folders, as in `year=2026/part-0.avro`."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastpipe
import samples
import wire

SCHEMA = wire.record("R", id="long", name="string")
NULL = "__HIVE_DEFAULT_PARTITION__"


def write(path: Path, ids: range, schema: str = SCHEMA, block: int = 3) -> Path:
    """Writes a file of the given rows with `block` rows per block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = [ids[at : at + block] for at in range(0, len(ids), block)]
    encoded = [(len(some), b"".join(wire.long(i) + wire.text(f"n{i}") for i in some)) for some in blocks]
    path.write_bytes(wire.container(schema, encoded))
    return path


def values(column: Any) -> list[Any]:
    """Returns a column as a list, with None for null."""
    if isinstance(column, fastpipe.Masked):
        return [value if there else None for value, there in zip(values(column.values), column.valid, strict=True)]
    return column.to_list() if isinstance(column, fastpipe.Strings) else column.tolist()


def rows(reader: fastpipe.Reader) -> list[tuple[Any, ...]]:
    """Returns all rows of a pass."""
    found: list[tuple[Any, ...]] = []
    for batch in reader:
        found += zip(*(values(column) for column in batch.values()), strict=True)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "d/year=2025/city=a%2Fb/x.avro", range(7))
    write(tmp_path / f"d/year=2026/city={NULL}/x.avro", range(7, 12))
    write(tmp_path / "d/year=2026/city=/x.avro", range(12, 14))
    return tmp_path / "d"


EXPECTED = [(i, 2025, "a/b") for i in range(7)] + [(i, 2026, "") for i in range(12, 14)]
EXPECTED += [(i, 2026, None) for i in range(7, 12)]


def test_columns_of_folders_are_inferred_and_read(data: Path) -> None:
    features = fastpipe.infer_features(data)
    assert list(features) == ["id", "name", "year", "city"]
    assert features["year"] == fastpipe.DenseSpec((), "int64")
    assert features["city"] == fastpipe.DenseSpec((), "string", on_null="mask")
    whole = rows(fastpipe.read_avro(data, batch_size=4))
    assert [(i, year, city) for i, _, year, city in whole] == EXPECTED
    assert rows(fastpipe.read_avro(data, batch_size=4, features=features)) == whole
    assert list(fastpipe.infer_features(data, partitioning=None)) == ["id", "name"]
    assert rows(fastpipe.read_avro(data, batch_size=4, partitioning=None)) == [row[:2] for row in whole]


def test_columns_of_folders_can_be_selected(data: Path) -> None:
    for columns, at in ((["year", "id"], (1, 0)), (["city"], (2,)), (["id", "city", "year"], (0, 2, 1))):
        reader = fastpipe.read_avro(data, batch_size=3, columns=columns)
        assert list(reader.features) == columns
        assert rows(reader) == [tuple(row[i] for i in at) for row in EXPECTED]
    with pytest.raises(fastpipe.errors.SchemaError, match="no column 'month'"):
        fastpipe.read_avro(data, batch_size=3, columns=["month", "year"])
    with pytest.raises(fastpipe.errors.SchemaError, match="no column 'year'"):
        fastpipe.read_avro(data, batch_size=3, columns=["year"], partitioning=None)
    with pytest.raises(ValueError, match="partitioning must be 'hive' or None"):
        fastpipe.read_avro(data, batch_size=3, partitioning="dir")  # type: ignore[arg-type]


def test_specs_of_columns_of_folders(data: Path) -> None:
    specs = {
        "small": fastpipe.DenseSpec((), "int16", field="year"),
        "real": fastpipe.DenseSpec((), "float32", field="year"),
        "year": fastpipe.DenseSpec((), "int64", on_null="mask"),
        "raw": fastpipe.DenseSpec((), "bytes", field="city", on_null="fill", fill=b"?"),
        "id": fastpipe.DenseSpec((), "int64"),
    }
    found = rows(fastpipe.read_avro(data, batch_size=5, features=specs))
    assert found == [(y, y, y, b"?" if c is None else c.encode(), i) for i, y, c in EXPECTED]
    for spec, message in (
        (fastpipe.DenseSpec((), "int8", field="year"), "doesn't fit int8"),
        (fastpipe.DenseSpec((), "string", field="year"), "integers.*integer or floating"),
        (fastpipe.DenseSpec((2,), "int64", field="year"), "single integers"),
        (fastpipe.DenseSpec((), "int64", field="city"), "text.*string"),
        (fastpipe.DenseSpec((), "string", field="city"), "is null; .*mask"),
    ):
        with pytest.raises(fastpipe.errors.SchemaError, match=message) as error:
            fastpipe.read_avro(data, batch_size=5, features={"it": spec})
        assert error.value.feature == "it"


def test_a_field_of_the_file_wins(tmp_path: Path) -> None:
    write(tmp_path / "d/id=1000/day=1/x.avro", range(3))
    write(tmp_path / "d/id=1000/day=2/x.avro", range(3, 5), wire.record("R", id="long", other="string"))
    found = rows(fastpipe.read_avro(tmp_path / "d", batch_size=2, columns=["id", "day"]))
    assert found == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]


def test_a_partition_that_some_files_lack_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d/day=1/x.avro", range(3))
    write(tmp_path / "d/y.avro", range(3, 5))
    with pytest.raises(fastpipe.errors.SchemaError, match=r"folders day=.*partitioning=None ignores them"):
        fastpipe.read_avro(tmp_path / "d", batch_size=2)
    assert rows(fastpipe.read_avro(tmp_path / "d", batch_size=9, columns=["id"])) == [(i,) for i in range(5)]


@pytest.mark.parametrize("shuffle", samples.SHUFFLES)
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_each_row_has_the_values_of_its_file_in_every_order(tmp_path: Path, shuffle: Any, codec: str) -> None:
    expected = {}
    for number in range(40):
        ids = range(number * 9, number * 9 + number % 9)
        path = write(tmp_path / f"d/p={number}/q=t{number % 3}/x.avro", ids)
        if codec != "null":
            blocks = [(len(ids), b"".join(wire.long(i) + wire.text(f"n{i}") for i in ids))]
            path.write_bytes(wire.container(SCHEMA, blocks, codec))
        expected |= dict.fromkeys(ids, (number, f"t{number % 3}"))
    options = {"shuffle": shuffle, "batch_size": 7} | ({} if shuffle is False else {"shuffle_buffer": 35, "seed": 1})
    reader = fastpipe.read_avro(tmp_path / "d", columns=["id", "p", "q"], **options)
    for threads in (1, 3):
        found = rows(fastpipe.read_avro(tmp_path / "d", columns=["p", "id", "q"], num_threads=threads, **options))
        assert {i: (p, q) for p, i, q in found} == expected
        assert len(found) == len(expected)
    middle = len(reader) // 2
    batch = reader.batch_at(middle)
    assert [expected[i] for i in batch["id"].tolist()] == list(
        zip(batch["p"].tolist(), batch["q"].to_list(), strict=True)
    )
    again = pickle.loads(pickle.dumps(reader))
    assert rows(again) == rows(reader)
    assert isinstance(reader.explain(), str)


def test_values_of_folders_are_part_of_a_state(data: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4}
    old = fastpipe.read_avro(data, partitioning=None, **options).state_dict()
    assert "partitions" not in old["data"], "states of readers without partition columns are unchanged"
    reader = fastpipe.read_avro(data, **options)
    reader.load_state_dict(old)
    state = samples.through_json(reader.state_dict())
    fastpipe.read_avro(data, columns=["id"], **options).load_state_dict(state)
    fastpipe.read_avro(data, columns=["city"], **options).load_state_dict(state)
    (data / "year=2025").rename(data / "year=2024")
    fastpipe.read_avro(data, columns=["id", "city"], **options).load_state_dict(state)
    with pytest.raises(fastpipe.errors.StateError, match=r"folders year=.* have different values"):
        fastpipe.read_avro(data, columns=["year"], **options).load_state_dict(state)


def test_sparse_columns_beside_columns_of_folders(tmp_path: Path) -> None:
    for day in range(3):
        (tmp_path / f"d/day={day}").mkdir(parents=True)
        blocks = [(2, b"".join(samples.encoded(i, 0) for i in range(2 * day, 2 * day + 2)))]
        (tmp_path / f"d/day={day}/x.avro").write_bytes(wire.container(samples.SCHEMA, blocks))
    specs = {**samples.FEATURES, "day": fastpipe.DenseSpec((), "int64")}
    reader = fastpipe.read_avro(tmp_path / "d", batch_size=4, features=specs)
    for number, batch in enumerate(reader):
        ids = list(range(6))[4 * number : 4 * number + 4]
        samples.check(batch, ids)
        assert batch["day"].tolist() == [i // 2 for i in ids]
    # Arrow conversion reads sparse columns in another layout, which is compiled separately.
    assert pa.table(reader)["day"].to_pylist() == [0, 0, 1, 1, 2, 2]


def test_the_schema_of_files_without_records_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.avro").write_bytes(wire.container(wire.record("Other", x="double"), []))
    (folder / "b.avro").write_bytes(wire.container('"string"', [(0, b"")]))
    write(folder / "c.avro", range(5))
    (folder / "d.avro").write_bytes(wire.container(wire.record("Other", id="string"), []))
    assert list(fastpipe.infer_features(folder)) == ["id", "name"]
    for shuffle in samples.SHUFFLES:
        found = rows(fastpipe.read_avro(folder, batch_size=2, shuffle=shuffle, columns=["id"]))
        assert sorted(found) == [(i,) for i in range(5)]
    alone = fastpipe.read_avro([folder / "a.avro", folder / "d.avro"], batch_size=2)
    assert (list(alone.features), rows(alone)) == (["x"], [])


def test_empty_files_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "d/b.avro", range(5))
    for name in ("a.avro", "c.avro"):
        (tmp_path / "d" / name).touch()
    for source in (tmp_path / "d", tmp_path / "d/*.avro"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fastpipe"):
            assert fastpipe.read_avro(source, batch_size=2).num_rows == 5
        assert [record.message for record in caplog.records] == [
            f"skipped 2 files of zero bytes, the first of which is {tmp_path / 'd/a.avro'}"
        ]
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"a\.avro"):
        fastpipe.read_avro(tmp_path / "d/a.avro", batch_size=2)
    (tmp_path / "d/b.avro").unlink()
    with pytest.raises(fastpipe.errors.MissingFileError, match=r"all 2 files that were found are empty .zero bytes"):
        fastpipe.read_avro(tmp_path / "d", batch_size=2)


KEYS = st.sampled_from(["k", "year", "a b", "x%y"])
TEXTS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["007", "", "1.5", "ä", "a/b", "a=b", "100%", "-0"]),
    st.none(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(KEYS, min_size=1, max_size=2, unique=True),
    files=st.lists(st.tuples(TEXTS, TEXTS, st.integers(0, 4)), min_size=1, max_size=6),
)
def test_avro_and_parquet_read_the_same_partitions(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], files: list[tuple[str | None, str | None, int]]
) -> None:
    import urllib.parse

    folder = tmp_path_factory.mktemp("layout")
    quoted = [[NULL if text is None else urllib.parse.quote(text, safe="") for text in file[:2]] for file in files]
    start = 0
    for number, (texts, (*_, count)) in enumerate(zip(quoted, files, strict=True)):
        parts = [f"{urllib.parse.quote(key)}={text}" for key, text in zip(keys, texts, strict=False)]
        ids = range(start, start + count)
        write(folder.joinpath("avro", *parts, f"{number}.avro"), ids)
        path = folder.joinpath("parquet", *parts, f"{number}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})
        pa.parquet.write_table(table.cast(pa.schema({"id": pa.int64(), "name": pa.string()})), path)
        start += count
    avro = fastpipe.read_avro(folder / "avro", batch_size=3)
    parquet = fastpipe.read_parquet(folder / "parquet", batch_size=3)
    assert avro.num_rows == parquet.num_rows == start
    assert {name: avro.features[name] for name in keys} == {name: parquet.features[name] for name in keys}
    by_id = lambda reader: sorted(rows(reader), key=lambda row: row[0])  # noqa: E731
    assert by_id(avro) == by_id(parquet)
    # The reference is what pyarrow discovers when it reads all Hive values as strings.
    schema = pa.schema([pa.field(key, pa.string()) for key in keys])
    hive = pa.dataset.HivePartitioning(schema, segment_encoding="uri")
    whole = pa.dataset.dataset(folder / "parquet", format="parquet", partitioning=hive).to_table().sort_by("id")
    for key in keys:
        at = list(avro.features).index(key)
        assert [None if row[at] is None else str(row[at]) for row in by_id(avro)] == whole[key].to_pylist()
