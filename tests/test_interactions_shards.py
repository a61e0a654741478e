"""Shards that are written and read again, all or some of them, with the same indices. Damaged shards are rejected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

import fastpipe
from fastpipe.errors import InteractionsError
from fastpipe.recsys import Interactions

FORMATS = ("avro", "arrow")


def make(kind: str = "int", times: bool = True) -> Interactions:
    """Returns 40 users, some of whom have no positives."""
    random = np.random.default_rng(3)
    users, items = random.integers(0, 37, 400), random.integers(0, 50, 400)
    name = {"int": lambda i: i * 3, "str": lambda i: f"ä{i:03}", "bytes": lambda i: b"%03d" % i}[kind]
    return Interactions.from_arrays(
        [name(i) for i in users.tolist()],
        [name(i) for i in items.tolist()],
        random.integers(0, 30, 400) if times else None,
        users=[name(i) for i in range(40)],
        items=[name(i) for i in range(55)],
    )


def same(found: Interactions, expected: Interactions) -> None:
    assert found.fingerprint() == expected.fingerprint()
    assert found.users.tolist() == expected.users.tolist()
    assert found.items.tolist() == expected.items.tolist()
    assert (found.first_user, found.num_users) == (0, 40)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["int", "str", "bytes"])
def test_all_shards_are_the_whole(tmp_path: Path, format: Any, kind: str) -> None:
    data = make(kind)
    paths = data.write_shards(tmp_path / "a" / "b", format=format, shard_positives=60)
    assert [Path(path).name for path in paths] == [f"shard-{i:05}.{format}" for i in range(len(paths))]
    found = Interactions.from_shards(tmp_path / "a" / "b")
    same(found, data)
    same(Interactions.from_shards(paths), data)
    for _ in range(2):
        (data, held_out), (found, found_out) = data.leave_one_out(), found.leave_one_out()
        same(found, data)
        assert all(np.array_equal(a, b) for a, b in zip(held_out, found_out, strict=True))


@pytest.mark.parametrize("kind", ["int", "str", "bytes"])
def test_avro_shards_are_written_without_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A foreign reader finds one record per user."""
    data = make(kind)
    with monkeypatch.context() as patched:
        for name in ("fastavro", "pyarrow"):
            patched.setitem(sys.modules, name, None)
        paths = data.write_shards(tmp_path, shard_positives=60)
        same(Interactions.from_shards(tmp_path), data)
    records: list[Any] = []
    for path in paths:
        with open(path, "rb") as file:
            records.extend(fastavro.reader(file))
    assert [record["user"] for record in records] == data.users.tolist()
    assert [item for record in records for item in record["items"]] == data.indices.tolist()
    assert [len(record["items"]) for record in records] == np.diff(data.indptr).tolist()
    assert all(sorted(record["sequence"]) == list(range(len(record["items"]))) for record in records)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("most", [1, 7, 60, 10_000])
def test_a_shard_holds_whole_users_up_to_its_size(tmp_path: Path, format: Any, most: int) -> None:
    data = make(times=False)
    counts = []
    user = positive = 0
    for path in data.write_shards(tmp_path, format=format, shard_positives=most):
        shard = Interactions.from_shards(path)
        users = np.arange(shard.first_user, shard.first_user + len(shard.users))
        assert users[0] == user
        assert shard.user_indices(data.users[users]).tolist() == users.tolist()
        here = slice(data.indptr[user], data.indptr[user + len(users)])
        assert shard.indices.tolist() == data.indices[here].tolist()
        assert (shard.indptr + positive).tolist() == data.indptr[user : user + len(users) + 1].tolist()
        assert shard.item_counts.tolist() == data.item_counts.tolist(), "popularity needs the counts of all shards"
        assert (shard.num_users, shard.num_items) == (40, 55)
        user, positive = user + len(users), positive + len(shard)
        counts.append(np.diff(shard.indptr))
    assert (user, positive) == (40, len(data))
    assert all(count.sum() >= most and count[:-1].sum() < most for count in counts[:-1])
    assert len(counts) == 1 or most < len(data)


def test_consecutive_shards(tmp_path: Path) -> None:
    data = make()
    paths = data.write_shards(tmp_path, shard_positives=50)
    some = Interactions.from_shards(paths[1:3])
    first, second = Interactions.from_shards(paths[1]), Interactions.from_shards(paths[2])
    assert some.users.tolist() == first.users.tolist() + second.users.tolist()
    assert len({part.fingerprint()["digest"] for part in (data, some, first, second)}) == 4
    with pytest.raises(InteractionsError, match="only some of the shards are read: call leave_one_out before"):
        some.leave_one_out()
    with pytest.raises(InteractionsError, match="only some of the shards are read: read and write all"):
        some.write_shards(tmp_path / "again")
    assert "of them here" in repr(some)


@pytest.mark.parametrize("format", FORMATS)
def test_shards_that_do_not_belong_together(tmp_path: Path, format: Any) -> None:
    paths = make().write_shards(tmp_path / "a", format=format, shard_positives=50)
    others = make(times=False).write_shards(tmp_path / "b", format=format, shard_positives=50)
    for wrong in ([paths[0], paths[2]], [paths[1], paths[0]], [paths[0], paths[0]]):
        with pytest.raises(InteractionsError, match="doesn't follow shard"):
            Interactions.from_shards(wrong)
    with pytest.raises(InteractionsError, match="shard of different data"):
        Interactions.from_shards([paths[0], others[1]])
    Path(paths[-1]).unlink()
    with pytest.raises(InteractionsError, match=rf"has {len(paths) - 1} of {len(paths)} shards"):
        Interactions.from_shards(tmp_path / "a")
    assert len(Interactions.from_shards(paths[:-1])) > 0
    (tmp_path / "a" / f"items.{format}").unlink()
    with pytest.raises(fastpipe.errors.MissingFileError, match="the items of the shards aren't next to them"):
        Interactions.from_shards(paths[0])
    with pytest.raises(FileExistsError, match="name an empty folder"):
        make().write_shards(tmp_path / "b", format=format)
    with pytest.raises(fastpipe.errors.MissingFileError, match="the folder contains no shards"):
        Interactions.from_shards(tmp_path)
    with pytest.raises(fastpipe.errors.MissingFileError):
        Interactions.from_shards(others[-1].replace("shard-", "shard-9"))


def test_other_files_are_rejected(tmp_path: Path) -> None:
    make().write_shards(tmp_path)
    with pytest.raises(InteractionsError, match="it isn't a shard of interactions"):
        Interactions.from_shards(_foreign(tmp_path))
    (tmp_path / "bad.avro").write_bytes(b"nothing")
    with pytest.raises(fastpipe.errors.MalformedFileError):
        Interactions.from_shards(tmp_path / "bad.avro")
    make().write_shards(tmp_path / "arrow", format="arrow")
    (tmp_path / "arrow" / "bad.arrow").write_bytes(b"nothing")
    with pytest.raises(fastpipe.errors.MalformedFileError, match="isn't an Arrow file"):
        Interactions.from_shards(tmp_path / "arrow" / "bad.arrow")
    with pytest.raises(ValueError, match='format must be "avro" or "arrow"'):
        make().write_shards(tmp_path / "c", format="csv")  # type: ignore[arg-type]


def _foreign(folder: Path) -> Path:
    path = folder / "foreign.avro"
    with path.open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}, [{"x": 1}])
    return path


def rewritten(path: str, change: Any) -> None:
    """Changes an Arrow shard's columns and metadata."""
    with pa.memory_map(path) as file:
        table = pa.ipc.open_file(file).read_all()
    columns = {name: table[name].to_pylist() for name in table.column_names}
    said = json.loads(table.schema.metadata[b"fastpipe.interactions"])
    said["version"] = 1  # Shards of version 1 have no checksum.
    change(columns, said)
    changed = pa.table({name: pa.array(columns[name], table[name].type) for name in columns})
    changed = changed.replace_schema_metadata({"fastpipe.interactions": json.dumps(said)})
    Path(path).unlink()
    with open(path, "xb") as file, pa.ipc.new_file(file, changed.schema) as writer:
        writer.write_table(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda columns, said: columns["items"][1].reverse(), "don't ascend"),
        (lambda columns, said: columns["items"][1].__setitem__(0, columns["items"][1][1]), "don't ascend"),
        (lambda columns, said: columns["items"][1].__setitem__(-1, 55), "don't exist"),
        (lambda columns, said: columns["sequence"][1].__setitem__(0, columns["sequence"][1][1]), "aren't 0, 1, 2"),
        (lambda columns, said: columns["sequence"][1].pop(), "more or fewer positions"),
        (lambda columns, said: columns["user"].__setitem__(1, columns["user"][0]), "more than once"),
        (lambda columns, said: columns["user"].__setitem__(1, None), "some of their values are null"),
        (lambda columns, said: columns.pop("items"), "it doesn't have the columns"),
        (lambda columns, said: [column.pop() for column in columns.values()], "it is incomplete"),
        (lambda columns, said: said.update(num_items=54), "it has 55 items, but the shards refer to 54"),
        (lambda columns, said: said.update(num_users=-1), "the shard's metadata is corrupt"),
        (lambda columns, said: said.update(shards="1"), "the shard's metadata is corrupt"),
        (lambda columns, said: said.pop("num_users"), "the shard's metadata is corrupt"),
        (lambda columns, said: said.pop("version"), "the shard's metadata is corrupt"),
        (lambda columns, said: said.update(version=2), "its checksum"),
        (lambda columns, said: said.update(first_user=1), "doesn't begin after"),
        (lambda columns, said: said.update(first_positive=1), "doesn't begin after"),
        (lambda columns, said: said.update(version=3), "of a later fastpipe"),
    ],
)
def test_damaged_shards_are_rejected(tmp_path: Path, change: Any, message: str) -> None:
    (path,) = make().write_shards(tmp_path, format="arrow")
    rewritten(path, change)
    with pytest.raises(fastpipe.FastpipeError, match=message) as caught:
        Interactions.from_shards(tmp_path)
    assert isinstance(caught.value, ValueError)
    assert "some user" in message or "more than once" in message or str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_the_checksum_detects_a_changed_value(tmp_path: Path, format: Any) -> None:
    """The changed value is a valid user id, which only the checksum can detect."""
    (path,) = make("bytes").write_shards(tmp_path, format=format)
    whole = Path(path).read_bytes()
    assert whole.count(b"009") == 1
    Path(path).write_bytes(whole.replace(b"009", b"q09"))
    with pytest.raises(fastpipe.errors.MalformedFileError, match="its checksum") as caught:
        Interactions.from_shards(tmp_path)
    assert caught.value.path == path


def test_shards_of_earlier_versions_have_no_checksum(tmp_path: Path) -> None:
    (path,) = make().write_shards(tmp_path, format="arrow")
    for name in (path, str(tmp_path / "items.arrow")):
        rewritten(name, lambda columns, said: None)
    same(Interactions.from_shards(tmp_path), make())


# Runs in a separate process, because pyarrow crashed on some damaged files.
DAMAGING = r"""
import random, sys
from pathlib import Path
import fastpipe
from fastpipe.recsys import Interactions

folder, kind, format, runs, at_least = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
name = {"int": lambda i: i * 3, "str": lambda i: f"\u00e4{i:03}"}[kind]
choose = random.Random(7)
data = Interactions.from_arrays(
    [name(choose.randrange(20)) for _ in range(150)],
    [name(choose.randrange(30)) for _ in range(150)],
    [choose.randrange(30) for _ in range(150)],
)
data.write_shards(folder, format=format, shard_positives=80)
loaded = Interactions.from_shards(folder)
expected = loaded.fingerprint(), loaded.users.tolist(), loaded.items.tolist()
assert expected == (data.fingerprint(), data.users.tolist(), data.items.tolist())
files = sorted(folder.iterdir())
refused = 0
for run in range(runs):
    path = files[run % len(files)]
    whole = path.read_bytes()
    damaged = bytearray(whole)
    if run % 5 == 0:
        del damaged[choose.randrange(len(damaged)):]
    elif run % 5 == 1:
        at = choose.randrange(len(damaged) // 8) * 8
        damaged[at : at + 8] = choose.choice([b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\xff" * 7 + b"\x7f", bytes(8)])
    else:
        for _ in range(choose.choice([1, 1, 4])):
            damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
    path.write_bytes(damaged)
    try:
        found = Interactions.from_shards(folder)
    except fastpipe.FastpipeError:
        refused += 1
    else:
        assert (found.fingerprint(), found.users.tolist(), found.items.tolist()) == expected, (run, path)
    finally:
        path.write_bytes(whole)
assert refused >= at_least, refused
print("done")
"""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["int", "str"])
def test_damaged_files_load_correctly_or_are_rejected(tmp_path: Path, format: str, kind: str) -> None:
    runs = 400
    arguments = [str(tmp_path / "shards"), kind, format, str(runs), str(runs // 3)]
    ran = subprocess.run([sys.executable, "-c", DAMAGING, *arguments], capture_output=True, text=True, timeout=500)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr[-2000:]


@pytest.mark.parametrize("format", FORMATS)
def test_shards_that_cannot_be_read(tmp_path: Path, format: Any) -> None:
    (path,) = make().write_shards(tmp_path / "a", format=format)
    Path(path).unlink()
    Path(path).mkdir()
    with pytest.raises(fastpipe.FastpipeError) as caught:
        Interactions.from_shards([path])
    assert isinstance(caught.value, OSError)
    assert caught.value.errno


def test_columns_of_other_types_are_rejected(tmp_path: Path) -> None:
    """For example, integers that would overflow 32 bits."""
    (path,) = make(times=False).write_shards(tmp_path, format="arrow")
    with pa.OSFile(path) as file:
        table = pa.ipc.open_file(file).read_all()
    for name, type_ in (("items", pa.large_list(pa.int64())), ("items", pa.int64()), ("user", pa.float64())):
        at = table.schema.get_field_index(name)
        values = (
            [0.0] * len(table) if name == "user" else [[0]] * len(table) if "list" in str(type_) else [0] * len(table)
        )
        other = table.set_column(at, name, pa.array(values, type_))
        Path(path).unlink()
        with open(path, "xb") as file, pa.ipc.new_file(file, other.schema) as writer:
            writer.write_table(other)
        with pytest.raises(InteractionsError, match=f"the type of its column {name} is"):
            Interactions.from_shards(path)


def test_large_integers_need_arrow(tmp_path: Path) -> None:
    data = Interactions.from_arrays(np.array([1, 2**64 - 1], np.uint64), [1, 2])
    with pytest.raises(fastpipe.errors.UnsupportedError, match="below 2\\^63"):
        data.write_shards(tmp_path / "a")
    data.write_shards(tmp_path / "b", format="arrow")
    assert Interactions.from_shards(tmp_path / "b").users.tolist() == [1, 2**64 - 1]
