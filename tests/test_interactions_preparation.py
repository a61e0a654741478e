"""Preparing interactions: encoding ids, dropping duplicates, minimum counts, holding out, and invalid input."""

from __future__ import annotations

import gzip
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

import fastpipe
import interaction_oracle
from fastpipe.errors import InteractionsError
from fastpipe.recsys import Interactions
from fastpipe.recsys._ids import IdEncoder

NAN = float("nan")


def histories(data: Interactions) -> dict[Any, set[Any]]:
    """Returns the items of each user, by their ids."""
    items = np.split(data.items[data.indices], data.indptr[1:-1])
    return {user: set(seen.tolist()) for user, seen in zip(data.users.tolist(), items, strict=True)}


def check_form(data: Interactions) -> None:
    """Checks the documented form of the compressed sparse rows."""
    assert (data.indptr.dtype, data.indices.dtype) == (np.int64, np.uint32)
    assert data.indptr[0] == 0
    assert data.indptr[-1] == data.num_positives == len(data) == len(data.indices)
    for start, stop in zip(data.indptr[:-1], data.indptr[1:], strict=True):
        assert (np.diff(data.indices[start:stop].astype(int)) > 0).all()
    assert data.item_counts.tolist() == np.bincount(data.indices, minlength=data.num_items).tolist()


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=60)


def model(
    rows: list[tuple[int, int, int]], duplicates: str, least_user: int, least_item: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Returns the remaining (time, input index, item) of each user in order of time.

    The implementation is deliberately simple.
    """
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    for number, (user, item, time) in sorted(enumerate(rows), key=lambda row: (row[1][2], row[0])):
        if duplicates == "last" or (user, item) not in kept:
            kept[user, item] = time, number
    while True:
        users, items = Counter(user for user, _ in kept), Counter(item for _, item in kept)
        left = {pair: at for pair, at in kept.items() if users[pair[0]] >= least_user and items[pair[1]] >= least_item}
        if left == kept:
            break
        kept = left
    found: dict[int, list[tuple[int, int, int]]] = {}
    for (user, item), (time, number) in kept.items():
        found.setdefault(user, []).append((time, number, item))
    return {user: sorted(events) for user, events in found.items()}


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@hypothesis.given(rows, st.sampled_from(["first", "last"]), st.integers(0, 4), st.integers(0, 4))
def test_it_matches_the_model(
    rows: list[tuple[int, int, int]], duplicates: Any, least_user: int, least_item: int
) -> None:
    users, items, times = zip(*rows, strict=True)
    expected = model(rows, duplicates, least_user, least_item)
    left = {item for events in expected.values() for _, _, item in events}
    options = {"duplicates": duplicates, "min_per_user": least_user, "min_per_item": least_item}
    if len(expected) < 2 or len(left) < 2:
        with pytest.raises(InteractionsError, match=r"only one|no interactions remain"):
            Interactions.from_arrays(users, items, times, **options)
        return
    data = Interactions.from_arrays(users, items, times, **options)
    check_form(data)
    assert data.users.tolist() == sorted(expected)
    assert data.items.tolist() == sorted(left)
    assert histories(data) == {user: {item for _, _, item in events} for user, events in expected.items()}
    # Repeatedly removes the latest item of each user who has at least two.
    for _ in range(3):
        held = {user: events.pop()[2] for user, events in expected.items() if len(events) > 1}
        data, held_out = data.leave_one_out()
        check_form(data)
        assert dict(zip(data.users[held_out.users].tolist(), data.items[held_out.items].tolist(), strict=True)) == held
        assert len(held_out.users) == len(held)
        assert histories(data) == {user: {item for _, _, item in events} for user, events in expected.items()}


def test_without_times_the_input_decides_and_nothing_is_held_out() -> None:
    data = Interactions.from_arrays([1, 0, 1, 1], [5, 5, 7, 5])
    assert histories(data) == {0: {5}, 1: {5, 7}}
    with pytest.raises(InteractionsError, match="needs timestamps"):
        data.leave_one_out()


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.array(n, np.uint8),
        lambda n: np.array(n, np.int64) * 10**15,
        lambda n: np.array(n, np.uint64) + np.uint64(2**64 - 100),
        lambda n: [i + 2**63 - 3 for i in n],
        lambda n: [f"id {i:03}" for i in n],
        lambda n: [f"id {i:03}".encode() for i in n],
        lambda n: np.array([f"id {i:03}" for i in n]),
        lambda n: np.array([b"%03d" % i for i in n]),
        lambda n: np.array([f"ä {i:03}" for i in n], object),
        lambda n: np.array(n, object),
        lambda n: [np.int16(i) for i in n],
        lambda n: [np.str_(i + 100) for i in n],
        lambda n: pa.array([f"{i:03}" for i in n]),
        lambda n: np.array([f"{i:03}" for i in n], np.dtypes.StringDType() if np.__version__ >= "2" else object),
    ],
)
def test_ids_of_any_type_can_be_inverted(make: Any) -> None:
    numbers = [7, 3, 7, 90, 12, 3]
    ids = make(numbers)
    plain = ids.tolist() if hasattr(ids, "tolist") else [getattr(i, "item", lambda i=i: i)() for i in ids]
    data = Interactions.from_arrays(ids, np.arange(6) % 5)
    assert data.users.tolist() == sorted(set(plain))
    assert data.user_indices(ids).tolist() == [1, 0, 1, 3, 2, 0]
    assert data.users[data.user_indices(ids)].tolist() == plain
    assert pickle.loads(pickle.dumps(data)).user_indices(ids).tolist() == [1, 0, 1, 3, 2, 0]
    with pytest.raises(InteractionsError, match="is not one of the 4 known users"):
        data.user_indices(make([3, 4]))
    assert data.item_indices([]).tolist() == []
    assert data.item_indices([4, 0]).tolist() == [4, 0]


def test_listed_ids_keep_their_order() -> None:
    train = Interactions.from_arrays(["b", "a", "b"], [1, 2, 3], users=["z", "b", "a"], items=[3, 9, 2, 1])
    assert train.users.tolist() == ["z", "b", "a"]
    assert train.indptr.tolist() == [0, 0, 2, 3]
    assert train.indices.tolist() == [0, 3, 2]
    assert train.item_counts.tolist() == [1, 0, 1, 1]
    test = Interactions.from_arrays(["z"], [9], users=train.users, items=train.items)
    assert (test.user_indices(["a"]), test.indices) == (train.user_indices(["a"]), [1])
    filtered = Interactions.from_arrays(
        ["b", "a", "b"], [1, 2, 3], users=["z", "b", "a"], items=[3, 9, 2, 1], min_per_user=2
    )
    assert (filtered.num_users, filtered.num_items, filtered.indptr.tolist()) == (3, 4, [0, 0, 2, 2])
    for kind, ids in (("user", ["b", "c"]), ("item", [1, 4])):
        listed = {"users": ["a", "b"], "items": [1, 2, 3]}
        rows = {"user": ["a", "b"], "item": [1, 2]} | {kind: ids}
        with pytest.raises(InteractionsError, match=f"the {kind} .* is not one of the"):
            Interactions.from_arrays(rows["user"], rows["item"], **listed)
    with pytest.raises(InteractionsError, match="the item 2 is listed more than once"):
        Interactions.from_arrays([1, 2], [1, 2], items=[2, 1, 2])


@pytest.mark.parametrize(
    ("users", "items", "times", "message"),
    [
        ([], [], None, "there are no interactions"),
        ([1, 2], [1, 2, 3], None, "counts must be equal: there are 2 user ids, 3 item ids"),
        ([1, 2], [1, 2], [1], "2 user ids, 2 item ids, 1 timestamps"),
        ([1, 1], [1, 2], None, "only one user"),
        ([1, 2], [1, 1], None, "only one item"),
        ([1, -2], [1, 2], None, "user ids must be at least 0, or strings; got -2"),
        (np.array([1, -2]), [1, 2], None, "user ids must be at least 0, or strings; got -2"),
        ([1, 2], np.array([1.0, NAN]), None, "got NaN at index 1: drop interactions without an id"),
        ([1, 2], [1, NAN], None, "got nan: drop interactions without an id"),
        ([1, None], [1, 2], None, "got None: drop interactions without an id"),
        ([1, 2], np.array([1.0, 2.0]), None, "got float64: convert them"),
        ([1, 2], [1.5, 2], None, "item ids must be integers or strings; got 1.5"),
        ([1, 2], [True, 2], None, "got True"),
        ([1, 2], np.array([True, False]), None, "got bool"),
        ([1, "2"], [1, 2], None, "some user ids are of type int and some of type str"),
        (["1", b"2"], [1, 2], None, "some user ids are of type bytes and some of type str"),
        ([1, 2**64], [1, 2], None, "exceeds 64 bits"),
        ([[1, 2]], [1, 2], None, "one list|integers or strings"),
        (np.ones((2, 2), int), [1, 2], None, r"one dimension; got shape \(2, 2\)"),
        ("ab", [1, 2], None, "an array or a list; got str"),
        ({1, 2}, [1, 2], None, "an array or a list; got set"),
        (None, [1, 2], None, "an array or a list; got NoneType"),
        (np.ma.masked_equal([1, 2], 2), [1, 2], None, "some user ids are masked"),
        ([1, 2], [1, 2], [1.0, NAN], "the timestamp at index 1 is missing"),
        ([1, 2], [1, 2], np.array(["2020-01-01", "NaT"], "datetime64[s]"), "the timestamp at index 1 is missing"),
        ([1, 2], [1, 2], ["a", "b"], "timestamps must be numbers or datetime64"),
        ([1, 2], [1, 2], [[1, 2]], r"got shape \(1, 2\)"),
        ([1, 2], [1, 2], np.ma.masked_equal([1, 2], 2), "some timestamps are masked"),
    ],
)
def test_bad_input_is_rejected(users: Any, items: Any, times: Any, message: str) -> None:
    with pytest.raises(InteractionsError, match=message):
        Interactions.from_arrays(users, items, times)


def test_bad_options_are_rejected() -> None:
    with pytest.raises(ValueError, match='duplicates must be "first" or "last"'):
        Interactions.from_arrays([1, 2], [1, 2], duplicates="any")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_per_user must be between"):
        Interactions.from_arrays([1, 2], [1, 2], min_per_user=-1)
    with pytest.raises(InteractionsError, match="no interactions remain"):
        Interactions.from_arrays([1, 2], [1, 2], min_per_user=2)


def test_arrays_are_read_only() -> None:
    data = Interactions.from_arrays([1, 2], [1, 2])
    for array in (data.indptr, data.indices, data.users, data.items):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


# --- Comparison with the naive implementation ---


def check_against_the_naive_way(users: Any, items: Any, times: Any, **options: Any) -> None:
    found = Interactions.from_arrays(users, items, times, **options)
    naive = interaction_oracle.prepare(users, items, times, **({"duplicates": "first"} | options))
    sequence = found._csr.sequence
    assert found.users.tolist() == naive.users.tolist()
    assert found.items.tolist() == naive.items.tolist()
    assert np.array_equal(found.indptr, naive.indptr)
    assert np.array_equal(found.indices, naive.indices)
    assert (sequence is None) == (naive.sequence is None)
    assert sequence is None or np.array_equal(sequence, naive.sequence)
    dtypes = found.indptr.dtype, found.indices.dtype, None if sequence is None else sequence.dtype
    assert dtypes == (np.int64, np.uint32, None if sequence is None else np.uint32)


# One thread prepares a few thousand rows, several threads prepare more.
COUNTS = [2000, 150_000]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("duplicates", ["first", "last"])
@pytest.mark.parametrize("spread", [1, 7919, 2**40 + 15], ids=["dense", "wide", "sparse"])
@pytest.mark.parametrize("time", [None, "int64", "float32", "datetime64[s]"])
def test_it_matches_the_naive_implementation(count: int, duplicates: str, spread: int, time: str | None) -> None:
    random = np.random.default_rng(count + spread)
    users = (random.random(count) ** 3 * count / 30).astype(np.int64) * spread
    items = (random.random(count) ** 2 * count / 50).astype(np.int64) * spread
    # Many times are equal.
    times = None if time is None else random.integers(-50, 50, count).astype(time)
    check_against_the_naive_way(users, items, times, duplicates=duplicates)
    check_against_the_naive_way(users, items, times, duplicates=duplicates, min_per_user=3, min_per_item=3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, ">i2", np.int32, np.uint32, ">i8", np.uint64])
def test_ids_and_times_of_any_type(dtype: Any) -> None:
    random = np.random.default_rng(2)
    users, items, times = (random.integers(0, 100, 3000).astype(dtype) for _ in range(3))
    check_against_the_naive_way(users, items, times)
    check_against_the_naive_way(users[::-2], items[::-2], times[::-2])
    check_against_the_naive_way(np.stack([users, items], 1)[:, 0], items, times)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4", np.float64, np.longdouble])
def test_times_of_any_float(dtype: Any) -> None:
    random = np.random.default_rng(3)
    users, items = random.integers(0, 30, 3000), random.integers(0, 40, 3000)
    values = [-np.inf, -1e3, -0.5, -0.0, 0.0, 0.5, 7e2, np.inf]
    check_against_the_naive_way(users, items, random.choice(values, 3000).astype(dtype))


def test_ids_at_the_limits_of_64_bits() -> None:
    users = np.array([2**64 - 1, 0, 2**63, 2**64 - 1, 2**63 - 1], np.uint64)
    check_against_the_naive_way(users, np.array([1, 2, 3, 1, 5]), np.array([5, 4, 3, 2, 1]))
    mixed = [np.array([1, 2**63], np.uint64), np.array([1, 5], np.int64)]
    table = pa.chunked_array([pa.array([7, 8]), pa.array([9, 7])])
    chunks = [
        pa.table({"user": mixed[0], "item": table.chunk(0)}),
        pa.table({"user": mixed[1], "item": table.chunk(1)}),
    ]
    for chunk in chunks:
        assert Interactions.from_arrow(chunk).num_positives == 2
    encoder = IdEncoder("user")
    assert [encoder.add(piece) for piece in mixed] == [2, 2]
    found, codes = encoder.finish()
    assert found.ids.tolist() == [1, 5, 2**63], "ids must stay integers"
    assert codes.tolist() == [0, 2, 0, 1]


# Runs in a separate process, in which nothing else has allocated and freed memory.
MEMORY = """
import sys, numpy as np
from fastpipe.recsys import Interactions

count, spread, timed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
random = np.random.default_rng(1)
def column(most):
    made = np.empty(count, np.int64)
    for i in range(0, count, 1 << 16):
        made[i : i + (1 << 16)] = random.integers(0, most, len(made[i : i + (1 << 16)])) * spread
    return made
users, items, times = column(count // 200), column(count // 1000), column(10**9) if timed else None
given = users.nbytes + items.nbytes + (times.nbytes if timed else 0)
few = Interactions.from_arrays(users[:1000], items[:1000], times[:1000] if timed else None)
def used(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
before = used("VmRSS")
made = Interactions.from_arrays(users, items, times)
print((used("VmHWM") - before + given) / given)
assert made.num_positives > count * 0.9
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("spread", [1, 2**40 + 15], ids=["dense", "sparse"])
@pytest.mark.parametrize("timed", [False, True])
def test_memory_is_at_most_two_and_a_half_times_the_input(spread: int, timed: bool) -> None:
    arguments = ["4000000", str(spread), str(timed)]
    ran = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) <= 2.5


# --- Sources ---

USERS = ["ann", "bob", "ann", "cid", "bob", "ann"]
ITEMS = [30, 10, 10, 20, 30, 20]
TIMES = [5, 1, 3, 9, 2, 4]


def same(found: Interactions) -> None:
    expected = Interactions.from_arrays(USERS, ITEMS, TIMES)
    assert histories(found) == histories(expected)
    assert found.fingerprint() == expected.fingerprint()
    assert histories(found.leave_one_out()[0]) == histories(expected.leave_one_out()[0])


def avro(path: Path, **types: Any) -> str:
    types = {"user": "string", "item": "int", "time": "long"} | types
    schema = {
        "type": "record",
        "name": "Event",
        "fields": [{"name": name, "type": kind} for name, kind in types.items()],
    }
    rows = [{"user": user, "item": item, "time": time} for user, item, time in zip(USERS, ITEMS, TIMES, strict=True)]
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), rows)
    return str(path)


@pytest.mark.parametrize(
    "types",
    [
        {},
        {"user": ["null", "string"], "time": "double"},
        {"user": {"type": "enum", "name": "E", "symbols": ["cid", "bob", "ann"]}},
        {"time": {"type": "long", "logicalType": "local-timestamp-millis"}},
        {"user": {"type": "string", "logicalType": "uuid"}, "item": {"type": "int", "logicalType": "date"}},
        {"user": ["null", {"type": "string", "logicalType": "uuid"}]},
        {"time": ["null", {"type": "long", "logicalType": "local-timestamp-millis"}]},
    ],
)
def test_from_avro(tmp_path: Path, types: dict[str, Any]) -> None:
    same(Interactions.from_avro(avro(tmp_path / "a.avro", **types), timestamp="time"))


def test_from_avro_of_invalid_input(tmp_path: Path) -> None:
    path = avro(tmp_path / "a.avro")
    with pytest.raises(fastpipe.errors.SchemaError, match="no column 'who'"):
        Interactions.from_avro(path, user="who")
    with pytest.raises(fastpipe.errors.MissingFileError):
        Interactions.from_avro(tmp_path / "b.avro")
    nulls = tmp_path / "nulls.avro"
    fields = [{"name": "user", "type": ["null", "long"]}, {"name": "item", "type": {"type": "array", "items": "int"}}]
    rows = [{"user": 1, "item": [1]}, {"user": None, "item": [2, 3]}]
    with nulls.open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "E", "fields": fields}, rows)
    with pytest.raises(InteractionsError, match="a value of the column 'user' is null"):
        Interactions.from_avro(nulls, item="user")
    with pytest.raises(fastpipe.errors.SchemaError, match="'item' must have one id per record"):
        Interactions.from_avro(nulls)
    with pytest.raises(fastpipe.errors.SchemaError, match="'item' must have one time per record"):
        Interactions.from_avro(nulls, item="user", timestamp="item")


@pytest.mark.parametrize(("column", "match"), [("user", "ids: integers, strings"), ("time", "times: numbers")])
def test_from_avro_suggests_only_possible_columns(tmp_path: Path, column: str, match: str) -> None:
    path = avro(tmp_path / "a.avro", **{column: ["string", "long"]})
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match=f"'{column}' must contain {match}.*from_arrays"
    ) as caught:
        Interactions.from_avro(path, timestamp="time")
    assert not re.search("columns=|features=|nulls=", str(caught.value))
    assert (caught.value.path, caught.value.feature) == (path, column)


def test_values_may_be_null_in_some_files_of_avro(tmp_path: Path) -> None:
    paths = [avro(tmp_path / "a.avro"), avro(tmp_path / "b.avro", user=["null", "string"], item=["null", "int"])]
    for order in (paths, paths[::-1]):
        found = Interactions.from_avro(order)
        assert found.fingerprint() == Interactions.from_arrays(USERS, ITEMS).fingerprint()


@pytest.mark.parametrize(
    "users",
    [
        pa.array(USERS),
        pa.array(USERS, pa.large_string()),
        pa.array(USERS).dictionary_encode(),
        pa.array(USERS, pa.string_view()),
        pa.chunked_array([USERS[:2], USERS[2:]]).dictionary_encode(),
    ],
)
@pytest.mark.parametrize("time", [pa.int32(), pa.float64(), pa.timestamp("ms"), pa.date32()])
def test_from_arrow(users: Any, time: Any) -> None:
    table = pa.table({"item": pa.array(ITEMS, pa.uint8()), "user": users, "at": pa.array(TIMES, time)})
    same(Interactions.from_arrow(table, timestamp="at"))
    same(Interactions.from_arrow(table.to_reader(2), timestamp="at"))
    coded = table.set_column(0, "item", table["item"].dictionary_encode())
    same(Interactions.from_arrow(coded, timestamp="at"))


def test_from_arrow_of_invalid_input() -> None:
    with pytest.raises(TypeError, match=r"must be a pyarrow\.Table"):
        Interactions.from_arrow({"user": [1]})
    with pytest.raises(fastpipe.errors.SchemaError, match="column 'item' must exist exactly once"):
        Interactions.from_arrow(pa.table({"user": [1, 2]}))
    with pytest.raises(InteractionsError, match="the column 'item' is null"):
        Interactions.from_arrow(pa.table({"user": [1, 2], "item": [1, None]}))
    with pytest.raises(InteractionsError, match="got float64"):
        Interactions.from_arrow(pa.table({"user": [1, 2], "item": [1.0, 2.0]}))
    with pytest.raises(InteractionsError, match="got Arrow's list"):
        Interactions.from_arrow(pa.table({"user": [1, 2], "item": [[1], [2]]}))
    binary = Interactions.from_arrow(pa.table({"user": [1, 2], "item": [b"x", b"y"]}))
    assert binary.items.tolist() == [b"x", b"y"]


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("header", [True, False])
def test_from_csv(tmp_path: Path, delimiter: str, header: bool) -> None:
    lines = [delimiter.join(map(str, row)) for row in zip(USERS, "abcdef", ITEMS, TIMES, strict=True)]
    names = ["name", "x", "thing", "t"]
    (tmp_path / "a.csv").write_text("\n".join([delimiter.join(names)] * header + lines[:4]) + "\n")
    (tmp_path / "b.csv").write_text("\n".join([delimiter.join(names)] * header + lines[4:]) + "\n")
    options = {} if header else {"header": names}
    same(Interactions.from_csv(tmp_path, user="name", item="thing", timestamp="t", delimiter=delimiter, **options))


def test_from_csv_of_invalid_input(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(fastpipe.errors.MissingFileError):
        Interactions.from_csv(path)
    path.write_text("user,item\n1,2\n3,\n")
    with pytest.raises(InteractionsError, match="the column 'item' is null"):
        Interactions.from_csv(path)
    with pytest.raises(fastpipe.errors.SchemaError, match="who"):
        Interactions.from_csv(path, user="who")
    with pytest.raises(ValueError, match=r"overrides must name the columns .* got 'who'"):
        Interactions.from_csv(path, overrides={"who": fastpipe.DenseSpec((), "int64")})
    path.write_text("user,item\na,2\n,3\n")
    with pytest.raises(InteractionsError, match="the column 'user' is null"):
        Interactions.from_csv(path)
    path.write_text("user,item\n1,2\n3\n")
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"a\.csv"):
        Interactions.from_csv(path)
    path.write_text("")
    with pytest.raises(fastpipe.FastpipeError, match=r"a\.csv"):
        Interactions.from_csv(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("from_memory", [False, True])
def test_csv_ids_with_leading_zeros_are_text(pack: Callable[[bytes], bytes], from_memory: bool, tmp_path: Path) -> None:
    packed = pack(b"user,item\n007,1\n7,1\n8,2\n")
    path = tmp_path / "a.csv"
    path.write_bytes(packed)
    source = packed if from_memory else path
    data = Interactions.from_csv(source)
    assert (data.users.tolist(), data.items.tolist()) == (["007", "7", "8"], [1, 2])
    integers, text = fastpipe.DenseSpec((), "int64"), fastpipe.DenseSpec((), "string")
    data = Interactions.from_csv(source, overrides={"user": integers, "item": text})
    assert (data.users.tolist(), data.items.tolist()) == ([7, 8], ["1", "2"])


@pytest.mark.parametrize("text", ["007", "+7"])
def test_csv_ids_that_inference_did_not_see(text: str) -> None:
    # Of more than 16 MiB, inference reads some chunks.
    rows = b"12345678,9\n" * 2_000_000
    for after in range(6000, len(rows) // 11, 6000):  # Finds a place that inference doesn't read.
        content = b"user,item\n" + rows[: 11 * after] + f"{text},8\n".encode() + rows[11 * after :]
        if fastpipe.read_csv(content, columns=["user"], batch_size=9).features["user"].dtype == "int64":
            break
    with pytest.raises(fastpipe.errors.ValueRangeError, match=rf"the id '{re.escape(text)}'.*overrides=") as caught:
        Interactions.from_csv(content)
    assert caught.value.feature == "user"
    override = re.search(r"overrides=(\{.*?\})", str(caught.value))
    assert override is not None
    data = Interactions.from_csv(content, overrides=eval(override[1]))
    assert data.users.tolist() == sorted([text, "12345678"])


def test_csv_ids_of_all_widths() -> None:
    ids = sorted({0, 1, 2**63 - 1, *(10**n for n in range(19)), *(10**n - 1 for n in range(1, 19))})
    data = Interactions.from_csv(b"user,item\n" + b"".join(f"{i},{i}\n".encode() for i in ids))
    assert data.users.tolist() == data.items.tolist() == ids


def test_csv_options_are_those_of_read_csv() -> None:
    content = b"#x\n'a;b';1;2,5\n'c';2;1,5\nragged\n'NA';1;0\n"
    options = {"delimiter": ";", "quote": "'", "header": False, "comment": "#", "decimal": ",", "null_values": []}
    with pytest.warns(fastpipe.errors.RowsLeftOutWarning, match="1 of 4 rows"):
        data = Interactions.from_csv(content, user="f0", item="f1", timestamp="f2", on_ragged="skip", **options)
    assert (data.users.tolist(), data.items.tolist()) == (["NA", "a;b", "c"], [1, 2])


def test_csv_needs_no_pyarrow() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from fastpipe.recsys import Interactions\n"
        "print(Interactions.from_csv(b'user,item\\na,1\\nb,2\\n').num_positives)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


@pytest.mark.parametrize("column", ["user", "item", "at"])
def test_from_csv_rejects_duplicate_columns(tmp_path: Path, column: str) -> None:
    names = ["user", "item", "at"]
    (tmp_path / "a.csv").write_text(",".join([*names, column]) + "\n1,2,3,9\n4,5,6,9\n")
    with pytest.raises(fastpipe.errors.SchemaError, match=rf"{column}.*a\.csv"):
        Interactions.from_csv(tmp_path, timestamp="at")
    with pytest.raises(ValueError, match=f"header names '{column}' twice"):
        Interactions.from_csv(tmp_path, timestamp="at", header=[*names, column])


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    folder = tmp_path / "a.csv"
    folder.mkdir()
    for read in (lambda: Interactions.from_csv([folder]), lambda: Interactions.from_movielens(folder)):
        with pytest.raises(fastpipe.FastpipeError, match=r"a\.csv") as caught:
            read()
        assert isinstance(caught.value, OSError)
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(b"user,item\n" + b"1,2\n" * 1000)[:-20])
    with pytest.raises(fastpipe.FastpipeError, match=r"b\.csv\.gz"):
        Interactions.from_csv(packed)
    packed.write_bytes(b"no gzip")
    with pytest.raises(fastpipe.FastpipeError, match=r"b\.csv\.gz"):
        Interactions.from_csv(packed)


@pytest.mark.parametrize(
    ("header", "delimiter"),
    [
        ("", "\t"),
        ("", "::"),
        ("userId,movieId,rating,timestamp\n", ","),
        ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n", "\t"),
    ],
)
def test_from_movielens(tmp_path: Path, header: str, delimiter: str) -> None:
    path = tmp_path / "ratings"
    users = [ord(user[0]) for user in USERS]
    rows = zip(users, ITEMS, [3.5] * 6, TIMES, strict=True)
    path.write_text(header + "".join(delimiter.join(map(str, row)) + "\n" for row in rows))
    found = Interactions.from_movielens(path)
    expected = Interactions.from_arrays(users, ITEMS, TIMES)
    assert histories(found) == histories(expected)
    assert histories(found.leave_one_out()[0]) == histories(expected.leave_one_out()[0])


def test_from_movielens_of_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(fastpipe.errors.MissingFileError):
        Interactions.from_movielens(tmp_path / "u.data")
    (tmp_path / "u.data").write_text("1|2|3\n")
    with pytest.raises(InteractionsError, match="the file doesn't contain MovieLens ratings"):
        Interactions.from_movielens(tmp_path / "u.data")
