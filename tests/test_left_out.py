"""Rows that are in no batch: an error if ranks would get none, and a warning if there are many, for every source."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
import samples
from samples import SHUFFLES

ROWS = 200

Make = Callable[..., fastpipe.Reader]


@pytest.fixture(scope="module", params=["avro", "interactions", "table"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes readers of 200 rows."""
    if request.param == "avro":
        data = samples.write(tmp_path_factory.mktemp("left-out"), [[20] * 5, [20] * 5])
        return lambda **options: data.read(**options, columns=["id"])
    if request.param == "table":
        table = {"id": np.arange(ROWS)}
        return lambda **options: fastpipe.from_arrays(table, **options)
    ids = np.arange(100)
    positives = fastpipe.recsys.Interactions.from_arrays(ids % 20, ids % 20 + ids // 20)
    return lambda **options: fastpipe.recsys.read_interactions(
        positives, num_negatives=1, **{"shuffle": False, **options}
    )


def yielded(reader: fastpipe.Reader) -> int:
    return sum(int(batch.get("valid", np.ones(len(next(iter(batch.values()))))).sum()) for batch in reader)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_without_a_batch_are_rejected(make: Make, shuffle: bool, shared: bool) -> None:
    order = {"shuffle": shuffle, "seed": 1} if shuffle else {}

    def ranks(world: int, **options: Any) -> list[fastpipe.Reader]:
        options = order | options
        if shared:
            whole = make(**options)
            return [whole.shard(world, rank) for rank in range(world)]
        return [make(**options, rank=rank, world_size=world) for rank in range(world)]

    with pytest.raises(ValueError, match="would leave every rank without a batch") as error:
        ranks(8, batch_size=64)
    text = str(error.value)
    assert text.startswith('200 rows make 4 batches of batch_size=64, and there are 8 ranks: on_uneven="drop"')
    assert re.findall(r"(?:Use one of: |; )(\S+)", text) == [
        'on_uneven="pad",',
        'on_uneven="allow",',
        "world_size=4",
        "batch_size=25",
    ]
    # Each option that the message suggests works.
    for world, options in [
        (8, {"batch_size": 64, "on_uneven": "pad"}),
        (8, {"batch_size": 64, "on_uneven": "allow"}),
        (4, {"batch_size": 64}),
        (8, {"batch_size": 25}),
    ]:
        readers = ranks(world, **options)
        assert sum(map(yielded, readers)) == ROWS
        assert all(map(len, readers)) or options.get("on_uneven") == "allow"


def test_rows_dropped_by_drop_last_are_named(make: Make) -> None:
    with pytest.raises(ValueError, match=r"leaves out a shorter one.*batch_size=66 or less; drop_last=False") as error:
        make(batch_size=80, drop_last=True, rank=0, world_size=3)
    assert "200 rows make 2 batches" in str(error.value)
    with pytest.raises(ValueError, match="fewer rows than ranks") as error:
        make(batch_size=300, drop_last=True, rank=0, world_size=300)
    assert "200 rows make 0 batches" in str(error.value)


@pytest.mark.parametrize("shuffle", ["block", "buffer"])
def test_ranks_with_separate_blocks(tmp_path: Path, shuffle: Any) -> None:
    data = samples.write(tmp_path, [[20] * 10])
    options = {"shuffle": shuffle, "seed": 1, "columns": ["id"], "rank": 0, "world_size": 5, "drop_last": True}
    with pytest.raises(ValueError, match="no rank's blocks have the rows of a batch") as error:
        data.read(batch_size=40 + 1, **options)
    assert "batch_size=40 or less; drop_last=False" in str(error.value)
    assert "on_uneven=" not in str(error.value).partition("Use one of")[2], "ranks would be empty with it as well"
    assert len(data.read(batch_size=40, **options)) == 1
    assert len(data.read(batch_size=40, **options | {"shard_by": "batch"})) == 1


def test_no_rows_are_not_an_error(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[], [0, 0]])
    for shuffle in SHUFFLES:
        order = {"shuffle": shuffle, "seed": 1} if shuffle else {}
        reader = data.read(batch_size=4, rank=1, world_size=3, **order)
        assert list(reader) == []


@pytest.mark.parametrize(
    ("options", "left_out", "words"),
    [
        ({"batch_size": 112, "drop_last": True}, 88, r"88 of 200 rows \(44%\).*drop_last=True.*drop_last=False"),
        ({"batch_size": 300, "drop_last": True}, 200, r"all 200 rows \(100%\) are in no batch"),
        ({"batch_size": 60, "world_size": 3}, 20, None),
        (
            {"batch_size": 58, "world_size": 3},
            26,
            r'26 of 200 rows \(13%\).*world_size=3, on_uneven="drop".*"pad" or "allow"',
        ),
        ({"batch_size": 60, "drop_last": True}, 20, None),
        ({"batch_size": 112}, 0, None),
        ({"batch_size": 58, "world_size": 3, "on_uneven": "pad"}, 0, None),
        ({"batch_size": 112, "world_size": 1, "drop_last": True, "on_uneven": "allow"}, 88, "88 of 200"),
    ],
)
def test_leaving_out_is_logged_once_and_over_a_tenth_warns_once(
    make: Make, options: dict[str, Any], left_out: int, words: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fastpipe")
    if not words:
        reader = make(**options)  # Warnings are errors.
    else:
        with pytest.warns(fastpipe.errors.RowsLeftOutWarning, match=words) as warned:
            reader = make(**options)
        (warning,) = warned
        assert warning.filename in (__file__, samples.__file__), "the warning must point to the caller's line"
    assert reader._order.left_out == left_out
    world = options.get("world_size", 1)
    with warnings.catch_warnings():
        # Neither passes nor copies repeat the warning.
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(reader))
        assert len(list(again)) == len(list(reader)) == len(reader)
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    share = "all" if left_out == ROWS else f"{left_out} of"
    text = f"{share} 200 rows ({left_out / ROWS:.0%}) are in no batch of an epoch"
    assert [(level, message[: len(text)]) for level, message in logged] == ([("INFO", text)] if left_out else [])
    if words:
        assert logged[0][1] == str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastpipe.errors.RowsLeftOutWarning)
        rest = [make(**options | {"rank": rank}) for rank in range(1, world)]
    assert sum(map(yielded, [again, *rest])) == ROWS - left_out


def test_shards_warn_as_well(make: Make) -> None:
    whole = make(batch_size=58)
    with pytest.warns(fastpipe.errors.RowsLeftOutWarning, match="26 of 200") as warned:
        whole.shard(3, 0)
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("unsupported", ["warn", "ignore"])
def test_columns_of_unsupported_types_are_logged(
    unsupported: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"type": "record", "name": "Tree", "fields": [{"name": "below", "type": {"type": "array", "items": "Tree"}}]}
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "tree", "type": tree}]}
    path = tmp_path / "x.avro"
    with path.open("wb") as file:
        fastavro.writer(file, schema, [{"id": 1, "tree": {"below": []}}])
    caplog.set_level("INFO", "fastpipe")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        reader = fastpipe.read_avro(path, batch_size=1, on_unsupported=unsupported)
        list(pickle.loads(pickle.dumps(reader)))
    (said,) = caplog.messages
    assert said.startswith("1 column is left out, of types that are not read: 'tree")
    assert [str(warning.message) for warning in warned] == ([said] if unsupported == "warn" else [])


@pytest.mark.parametrize("source", ["avro", "table"])
@pytest.mark.parametrize("unknown", ["drop", "bucket"])
def test_features_that_drop_keys_are_logged(
    source: str, unknown: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fastpipe")
    features = {"words": fastpipe.VocabularySpec(["a"], on_unknown=unknown), "id": fastpipe.DenseSpec((), "int64")}
    if source == "avro":
        strings = {"type": "array", "items": "string"}
        fields = [{"name": "words", "type": strings}, {"name": "id", "type": "long"}]
        path = tmp_path / "x.avro"
        with path.open("wb") as file:
            fastavro.writer(file, {"type": "record", "name": "R", "fields": fields}, [{"words": ["a", "b"], "id": 1}])
        reader = fastpipe.read_avro(path, features=features, batch_size=1)
    else:
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"words": [["a", "b"]], "id": [1]})
        reader = fastpipe.from_arrow(table, features=features, batch_size=1)
    list(pickle.loads(pickle.dumps(reader)))
    starts = ("on_unknown=\"drop\" omits the keys of 'words' ", "1 of 2 keys (50%) of feature 'words' are left out of ")
    if unknown == "drop":
        for start, message in zip(starts, caplog.messages, strict=True):
            assert message.startswith(start)
    else:
        assert caplog.messages == []


@pytest.mark.parametrize("method", ["exact", "block", "stream"])
def test_ragged_rows_of_samples_are_logged(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastpipe")
    content = b"a,b\n" + b"1,2\n" * 19 + b"3\n"
    fastpipe.csv.sample_csv(content, 5, method=method, on_ragged="skip", seed=1)
    (said,) = caplog.messages
    assert said.startswith("1 of 20 rows (5%)")


def test_filters_of_interactions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastpipe")
    users, items = [0, 0, 0, 1, 1, 1, 2, 3, 0], [0, 1, 2, 0, 1, 2, 0, 1, 0]
    fastpipe.recsys.Interactions.from_arrays(users, items, duplicates="last")
    repeated, *rest = caplog.messages
    assert not rest
    assert repeated.startswith("1 of 9 interactions (11%) repeat the user and the item of another one")
    caplog.clear()
    fastpipe.recsys.Interactions.from_arrays(users[:-1], items[:-1], min_per_user=2)
    (filtered,) = caplog.messages
    assert filtered.startswith(
        "2 of 8 positives (25%), 2 of 4 users (50%) and 0 of 3 items (0%) are left out, with min"
    )
    users, items = [0, 0, 1, 1, *range(2, 8)], [0, 1, 0, 1, *range(2, 8)]
    with pytest.warns(
        fastpipe.errors.RowsLeftOutWarning, match=r"6 of 10 positives \(60%\), 6 of 8 users.*6 of 8 items"
    ):
        fastpipe.recsys.Interactions.from_arrays(users, items, min_per_item=2)


def test_positives_of_users_without_unseen_items_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastpipe")
    data = fastpipe.recsys.Interactions.from_arrays([0, 0, 1], [0, 1, 0])
    with pytest.warns(fastpipe.errors.RowsLeftOutWarning, match=r"2 of 3 positives \(67%\)") as warned:
        reader = fastpipe.recsys.read_interactions(data, num_negatives=1, batch_size=1, on_full="skip")
    list(pickle.loads(pickle.dumps(reader)))
    assert caplog.messages == [str(warning.message) for warning in warned]
