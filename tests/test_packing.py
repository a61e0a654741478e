"""Packs, beside the rows that they contain."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from every_source import ROWS, Make, digests, make, order
from fastpipe import mix
from fastpipe._reader.grouping import GroupedDataset, Grouping
from fastpipe.errors import NullValueError, SchemaError, StateError, UnsupportedError
from test_pipelines import Model

pa = pytest.importorskip("pyarrow")

__all__ = ["make"]

pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

Docs = list[list[int]]
Piece = tuple[int, int]


def naive_packs(lengths: list[int], length: int, *, split: bool = False) -> list[list[Piece]]:
    """Returns the rows, and their first items, of each pack of a window: best-fit decreasing by the definition."""
    pieces = [
        (row, start)
        for row, count in enumerate(lengths)
        for start in (range(0, max(count, 1), length) if split else [0])
    ]
    sizes = {(row, start): min(lengths[row] - start, length) for row, start in pieces}
    packs: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (-sizes[piece], piece)):
        free = [(length - sum(sizes[each] for each in pack), number) for number, pack in enumerate(packs)]
        fitting = [each for each in free if each[0] >= sizes[piece]]
        if fitting:
            packs[min(fitting)[1]].append(piece)
        else:
            packs.append([piece])
    return sorted(sorted(pack) for pack in packs)


def padded(docs: Docs, packs: list[list[Piece]], length: int, pad: int = 0) -> dict[str, list[list[int]]]:
    """Returns the arrays of a batch of packs."""
    found: dict[str, list[list[int]]] = {"tokens": [], "segment_ids": [], "positions": []}
    for pack in packs:
        kept = [docs[row][start : start + length] for row, start in pack]
        rows = {
            "tokens": [item for items in kept for item in items],
            "segment_ids": [number for number, items in enumerate(kept, 1) for _ in items],
            "positions": [position for items in kept for position in range(len(items))],
        }
        assert len(rows["tokens"]) <= length
        for name, row in rows.items():
            found[name].append(row + [pad if name == "tokens" else 0] * (length - len(row)))
    return found


def of_docs(docs: Docs, **options: Any) -> fastpipe.Reader:
    """Returns a reader of documents, with their number and twice their tokens."""
    offsets = np.cumsum([0, *map(len, docs)])
    tokens = np.array([item for doc in docs for item in doc], np.int32)
    columns = {
        "id": np.arange(len(docs)),
        "tokens": fastpipe.Ragged(tokens, offsets),
        "twice": fastpipe.Ragged(tokens.astype(np.int64) * 2, offsets),
    }
    return fastpipe.from_arrays(columns, **{"batch_size": 4} | options)


def random_docs(count: int, seed: int = 1, most: int = 12) -> Docs:
    draw = np.random.default_rng(seed)
    return [draw.integers(1, 1000, draw.integers(0, most)).tolist() for _ in range(count)]


@given(
    st.lists(st.integers(0, 20), max_size=40),
    st.integers(1, 15),
    st.sampled_from(["truncate", "split"]),
    st.integers(1, 5),
    st.booleans(),
)
def test_packs_are_best_fits(lengths: list[int], length: int, on_long: Any, batch_size: int, drop_last: bool) -> None:
    docs = [[100 * row + item for item in range(count)] for row, count in enumerate(lengths)]
    naive = naive_packs(lengths, length, split=on_long == "split")
    reader = of_docs(docs, batch_size=batch_size, drop_last=drop_last)
    batches = list(reader.pack("tokens", length, on_long=on_long, pad=-1))
    cut = [naive[at : at + batch_size] for at in range(0, len(naive), batch_size)]
    cut = [packs for packs in cut if len(packs) == batch_size or not drop_last]
    assert len(batches) == len(cut)
    for batch, packs in zip(batches, cut, strict=True):
        expected = padded(docs, packs, length, -1)
        assert {name: batch[name].tolist() for name in expected} == expected
        assert batch["id"].to_list() == [[row for row, _ in pack] for pack in packs]
        assert all(batch[name].dtype == np.int32 for name in ("tokens", "segment_ids", "positions"))
    ragged = reader.pack(["tokens", "twice"], length, on_long=on_long, padded=False)
    for batch, packs in zip(ragged, cut, strict=True):
        assert set(batch) == {"id", "tokens", "twice"}
        kept = [[docs[row][start : start + length] for row, start in pack] for pack in packs]
        assert batch["tokens"].to_list() == kept
        assert batch["twice"].to_list() == [[[2 * item for item in items] for items in rows] for rows in kept]


def column_of(reader: fastpipe.Reader) -> str | None:
    """Returns the name of a feature that can be packed."""
    names = (
        name
        for name, spec in reader.features.items()
        if type(spec) is fastpipe.RaggedSpec and spec.shape == (None,) and spec.dtype.startswith("int")
    )
    return next(names, None)


@pytest.fixture(scope="module")
def model(make: Make) -> Model:
    return Model(make)


def packable(make: Make, **options: Any) -> fastpipe.Reader:
    """Returns a reader without sparse features, which can't be packed, if it can leave features out."""
    reader = make(**options)
    names = [name for name, spec in reader.features.items() if not isinstance(spec, fastpipe.SparseSpec)]
    return reader if "bag" in reader.features or len(names) == len(reader.features) else make(**options, columns=names)


@order
def test_every_source_can_be_packed(make: Make, model: Model, order: dict[str, Any]) -> None:
    whole = packable(make, batch_size=3, seed=3)
    column = column_of(whole)
    if column is None:
        with pytest.raises(SchemaError, match="only numbers of one ragged dimension can be packed"):
            make(batch_size=3, seed=3).pack(next(iter(whole.features)), 9)
        return
    if "bag" in whole.features:
        with pytest.raises(UnsupportedError, match="is sparse"):
            whole.pack(column, 9)
        return
    docs: Docs = [doc or [] for doc in model.batch[column].to_list()]

    def packs(rank: int = 0, ranks: int = 1, threads: int = 2) -> fastpipe.typing.Mapped:
        reader = packable(
            make, **{"batch_size": 3, "seed": 3} | order, num_threads=threads, rank=rank, world_size=ranks,
            shard_by="batch", on_uneven="allow",
        )  # fmt: skip
        return reader.pack(column, 9, window=50, on_long="truncate")

    one = packs()
    whole_pass = list(one)
    found: list[int] = []
    for step, batch in enumerate(whole_pass):
        assert digests([batch]) == digests([one.batch_at(step, 0)])
        places = [one.locate(step, row, 0) for row in range(len(batch[column]))]
        assert all(isinstance(place, fastpipe.typing.PackLocation) for place in places)
        rows = [[model.index[each] for each in place.rows] for place in places]  # type: ignore[attr-defined]
        expected = padded(docs, [[(row, 0) for row in pack] for pack in rows], 9)
        expected[column] = expected.pop("tokens")
        assert {name: batch[name].tolist() for name in expected} == expected
        for name in set(batch) - set(expected):
            wanted = [model.batch[name][np.array(pack)] for pack in rows]
            spans = itertools.pairwise(batch[name].offsets.tolist())
            each = [{"x": batch[name].values[start:end]} for start, end in spans]
            assert digests(each) == digests([{"x": values} for values in wanted])
        found += [row for pack in rows for row in pack]
    assert sorted(found) == list(range(ROWS))
    # Any step resumes with other threads, and with another number of ranks.
    wanted = digests(whole_pass)
    assert digests(packs(threads=1)) == wanted
    for step in range(0, len(whole_pass), 5):
        one.set_epoch(0)
        for _ in itertools.islice(one, step):
            pass
        state = json.loads(json.dumps(one.state_dict()))
        again = packs(threads=1)
        again.load_state_dict(state)
        assert digests(again) == wanted[step:]
        for ranks in (2, 3):
            left = []
            for rank in range(ranks):
                share = packs(rank, ranks)
                share.load_state_dict(state)
                left += digests(share)
            assert sorted(left) == sorted(wanted[step:])


def test_whole_windows_go_to_ranks() -> None:
    docs = random_docs(3000)
    options: dict[str, Any] = {"shuffle": True, "shuffle_buffer": 400, "seed": 5, "num_threads": 2}
    whole = sorted(digests(of_docs(docs, **options).pack("tokens", 20, window=100)))
    shares = [
        digests(of_docs(docs, **options, rank=rank, world_size=3, on_uneven="allow").pack("tokens", 20, window=100))
        for rank in range(3)
    ]
    assert sorted(itertools.chain(*shares)) == whole
    one = of_docs(docs, **options).pack("tokens", 20, window=100)
    assert set(itertools.chain(*(digests(one.shard(3, index)) for index in range(3)))) <= set(whole)


def test_each_epoch_has_the_packs_in_another_order() -> None:
    docs = random_docs(500)
    packs = of_docs(docs, batch_size=1, shuffle=True, seed=5, epochs=1).pack("tokens", 20)
    epochs = [digests(packs) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(packs) == len(epochs[0])


def test_padded_ranks_mark_valid_packs() -> None:
    docs = random_docs(50)
    readers = [
        of_docs(docs, batch_size=4, rank=rank, world_size=3, on_uneven="pad", shuffle=True, seed=1) for rank in range(3)
    ]
    found, counts = [], set()
    for reader in readers:
        packs = reader.pack("tokens", 20)
        counts.add(len(list(packs)))
        for step in range(len(packs)):
            batch = packs.batch_at(step, 0)
            assert batch["tokens"].shape == (4, 20)
            assert batch["valid"].shape == (4,)
            found += [tuple(ids) for ids, valid in zip(batch["id"].to_list(), batch["valid"], strict=True) if valid]
    assert len(counts) == 1
    assert sorted(itertools.chain(*found)) == list(range(50))


@pytest.mark.parametrize(("window", "least"), [(1_000, 0.995), (10_000, 0.999)])
def test_packs_are_full(window: int, least: float) -> None:
    draw = np.random.default_rng(1)
    lengths = np.minimum(draw.lognormal(5, 1, 30_000).astype(np.int64) + 1, 2048)
    tokens = fastpipe.Ragged(np.ones(lengths.sum(), np.int8), np.r_[0, np.cumsum(lengths)])
    packs = fastpipe.from_arrays({"tokens": tokens}, batch_size=32).pack("tokens", 2048, window=window)
    count = sum(len(batch["tokens"]) for batch in packs)
    assert lengths.sum() / (count * 2048) >= least
    assert f"{lengths.sum() / (count * 2048):.2%} filled" in str(packs.plan())


def test_packs_are_mixed() -> None:
    one, two = random_docs(400, 1), random_docs(300, 2)

    def packs(docs: Docs, **options: Any) -> fastpipe.typing.Mapped:
        return of_docs(docs, shuffle=True, seed=7, batch_size=1, **options).pack("tokens", 20, on_long="split")

    mixed = mix({"one": packs(one), "two": packs(two)}, [0.7, 0.3], batch_size=4, num_threads=2)
    batches = list(mixed)
    places = [mixed.locate(step, row, 0) for step, batch in enumerate(batches) for row in range(len(batch["tokens"]))]
    names = [place.rows[0].reader for place in places]  # type: ignore[attr-defined]
    share = np.cumsum(np.array(names) == "one")
    assert (abs(share - 0.7 * np.arange(1, len(names) + 1)) < 1).all()
    rows = [(name, digests([batch])[0]) for name, docs in (("one", one), ("two", two)) for batch in packs(docs)]
    for name in ("one", "two"):
        own = [
            {key: value[at : at + 1] for key, value in batch.items()}
            for batch in batches
            for at in range(len(batch["tokens"]))
        ]
        mine = [digests([batch])[0] for batch, of in zip(own, names, strict=True) if of == name]
        assert mine == [found for of, found in rows if of == name][: len(mine)]
    # The packs of a mixture are the mixture of the packs.
    readers = {name: of_docs(docs, shuffle=True, seed=7, batch_size=1) for name, docs in (("one", one), ("two", two))}
    other = mix(readers, [0.7, 0.3], batch_size=4, num_threads=1).pack("tokens", 20, on_long="split")
    assert digests(other) == digests(batches)
    for step in range(0, len(batches), 7):
        mixed.set_epoch(0)
        for _ in itertools.islice(mixed, step):
            pass
        other.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
        assert digests(other) == digests(batches[step:])
    # Readers may split rows in different ways.
    both = mix([packs(one), of_docs(two, batch_size=1).pack("tokens", 20)], batch_size=8)
    assert sum(len(batch["tokens"]) for batch in both) > 100
    with pytest.raises(ValueError, match="'0' and '1' are packed differently"):
        mix([packs(one), of_docs(two, batch_size=1).pack("tokens", 21)])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="'0' and '1' are packed differently"):
        mix([packs(one), of_docs(two, batch_size=1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="mixture of groups can't have on_uneven"):
        mix([packs(one)], on_uneven="pad")
    with pytest.raises(ValueError, match="mixture of groups can't have on_uneven"):
        mix(readers, on_uneven="pad").pack("tokens", 20)


def test_selections_and_taken_rows_are_packed() -> None:
    docs = random_docs(300)
    reader = of_docs(docs)
    chosen = np.random.default_rng(3).integers(0, 300, 500)
    packs = reader.take(chosen).pack("tokens", 20)
    ids = [row for batch in packs for pack in batch["id"].to_list() for row in pack]
    assert sorted(ids) == sorted(chosen.tolist())
    assert ids != chosen.tolist()
    short = reader.filter(fastpipe.col("id") < 100).pack("tokens", 20)
    assert sorted(row for batch in short for pack in batch["id"].to_list() for row in pack) == list(range(100))
    states = [json.dumps(packs.state_dict()) for packs in (reader.pack("tokens", 20), reader.pack("tokens", 21))]
    with pytest.raises(StateError, match="cannot resume from this state"):
        reader.pack("tokens", 20).load_state_dict(json.loads(states[1]))
    reader.pack("tokens", 20, padded=False).load_state_dict(json.loads(states[0]))
    copy = pickle.loads(pickle.dumps(packs))
    assert digests(copy) == digests(packs)


def test_states_of_other_groups_are_refused() -> None:
    """Even if there are equally many."""
    tens = [[1] * 10 for _ in range(40)]
    state = of_docs(tens).pack("tokens", 20).state_dict()
    for other in (
        of_docs(tens).pack("tokens", 21),
        of_docs(tens).pack("tokens", 20, window=20),
        of_docs(tens).pack("twice", 20),
    ):
        with pytest.raises(StateError, match="cannot resume from this state"):
            other.load_state_dict(state)
    data = of_docs(tens)._data
    grouping = Grouping(("tokens",), 20, 100, "error")
    lengths = [np.full(40, length, np.uint32) for length in (9, 10)]
    one, two = (GroupedDataset(data, each, grouping).fingerprint() for each in lengths)
    assert one["rows"] == two["rows"]
    assert one["digest"] != two["digest"]


def test_shuffle_buffers_are_converted_to_packs() -> None:
    docs = [[1] * 5 for _ in range(1000)]
    reader = of_docs(docs, batch_size=4, shuffle=True, shuffle_buffer=200, seed=1)
    assert reader.pack("tokens", 20)._passes.origin.shuffle_buffer == 50 // 4 * 4 + 4
    assert reader.bucket("tokens")._passes.origin.shuffle_buffer == 50


def test_weights_of_a_mixture_change_at_the_same_step() -> None:
    one, two = of_docs(random_docs(400, 1), batch_size=1), of_docs(random_docs(400, 2), batch_size=1)
    mixed = mix({"one": one, "two": two}, [(0, [1, 0]), (3, [0, 1])], batch_size=8, stop=30)
    packs, batches = mixed.pack("tokens", 20), mixed.bucket("tokens")
    of_packs = [packs.locate(step, 0, 0).rows[0].reader for step in range(4)]  # type: ignore[attr-defined]
    of_batches = [batches.locate(step, 0, 0).reader for step in range(5)]  # type: ignore[attr-defined]
    assert of_packs == of_batches[:4] == ["one", "one", "one", "two"]
    readers = [of_docs(random_docs(400, number), batch_size=1) for number in (1, 2)]
    random: dict[str, Any] = {"assignment": "random", "seed": 9, "batch_size": 8}
    expected = digests(mix([reader.pack("tokens", 20) for reader in readers], **random))
    assert digests(mix(readers, **random).pack("tokens", 20)) == expected


def test_long_rows_and_unfit_features_are_refused() -> None:
    docs = [[1], [2] * 30, [3] * 40]
    reader = of_docs(docs)
    with pytest.raises(ValueError, match=r"row 1 has 30 items of 'tokens', more than length=20, as do 1 other rows"):
        reader.pack("tokens", 20)
    for arguments, error, match in [
        (("id", 5), SchemaError, "only numbers of one ragged dimension"),
        (("x", 5), SchemaError, "'x' is not a feature"),
        (([], 5), TypeError, "columns must be"),
        ((["tokens", "tokens"], 5), ValueError, "a name twice"),
        (("tokens", 0), ValueError, "length must be between 1"),
        (("tokens", 2.5), TypeError, "length must be"),
    ]:
        with pytest.raises(error, match=match):
            reader.pack(*arguments)  # type: ignore[arg-type]
    for options, error, match in [
        ({"window": 0}, ValueError, "window must be between 1"),
        ({"on_long": "cut"}, ValueError, "on_long must be"),
        ({"pad": 2**40}, ValueError, "pad"),
        ({"padded": 1}, TypeError, "padded"),
    ]:
        with pytest.raises(error, match=match):
            reader.pack("tokens", 50, **options)  # type: ignore[arg-type]
    offsets = np.array([0, 1, 3])
    uneven = {"a": fastpipe.Ragged(np.arange(3), offsets), "b": fastpipe.Ragged(np.arange(3), np.array([0, 2, 3]))}
    nulls = fastpipe.from_arrow(pa.table({"tokens": [[1], [], None, [2, None], [3]]}), batch_size=2)
    with pytest.raises(NullValueError, match="row 3 has a null item in 'tokens'"):
        nulls.pack("tokens", 5)
    with pytest.raises(SchemaError, match="row 0 has 1 items of 'a' and 2 of 'b'"):
        fastpipe.from_arrays(uneven, batch_size=2).pack(["a", "b"], 5)
    clash = {"tokens": fastpipe.Ragged(np.arange(3), offsets), "positions": np.arange(2)}
    with pytest.raises(SchemaError, match="an entry 'positions'"):
        fastpipe.from_arrays(clash, batch_size=2).pack("tokens", 5)
    with pytest.raises(ValueError, match=r"pack\(\) cannot select rows of samples"):
        reader.sample(2, redraw=True).pack("tokens", 50)
    groups = reader.pack("tokens", 50)._passes.origin
    for call in (
        lambda: groups.filter(fastpipe.col("id") > 0),
        lambda: groups.take([0]),
        lambda: groups.pack("tokens", 50),
        lambda: groups._data.handle.partition(0, 1),
    ):
        with pytest.raises(UnsupportedError, match=r"packs: call it before pack\(\)|groups of rows can't be selected"):
            call()


def test_no_rows_and_empty_rows_are_packed() -> None:
    nothing = of_docs([], batch_size=2).pack("tokens", 5)
    assert (len(nothing), list(nothing)) == (0, [])
    empty = of_docs([[], [], []], batch_size=2).pack("tokens", 5)
    (batch,) = empty
    assert batch["tokens"].tolist() == [[0] * 5]
    assert batch["id"].to_list() == [[0, 1, 2]]


def test_packs_have_features_for_arrow_and_adapters() -> None:
    import torch

    import fastpipe.torch

    docs = random_docs(60)
    for options in ({}, {"padded": False}):
        packs = of_docs(docs).pack(["tokens", "twice"], 20, **options)  # type: ignore[arg-type]
        assert packs.features is not None
        batches = list(packs)
        table = pa.table(packs)
        assert table.column_names == list(packs.features) == list(batches[0])
        for name in table.column_names:
            each = [batch[name] for batch in batches]
            lists = [one.tolist() if isinstance(one, np.ndarray) else one.to_list() for one in each]
            assert table[name].to_pylist() == list(itertools.chain(*lists))
    dataset = fastpipe.torch.dataset(of_docs(docs).pack("tokens", 20), select=("tokens", "positions"))
    for (tokens, positions), batch in zip(dataset, of_docs(docs).pack("tokens", 20), strict=True):
        assert isinstance(tokens, torch.Tensor)
        assert tokens.tolist() == batch["tokens"].tolist()
        assert positions.tolist() == batch["positions"].tolist()


@given(
    st.lists(st.integers(0, 20), max_size=40), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 80)),
)  # fmt: skip
def test_batches_have_rows_of_similar_lengths(lengths: list[int], batch_size: int, max_items: int | None) -> None:
    docs = [[100 * row + item for item in range(count)] for row, count in enumerate(lengths)]
    expected: list[list[int]] = []
    for row in sorted(range(len(docs)), key=lambda row: (lengths[row], row)):
        last = expected[-1] if expected else []
        full = not last or len(last) == batch_size or (len(last) + 1) * lengths[row] > (max_items or 2**62)
        if full:
            expected.append([row])
        else:
            last.append(row)
    batches = of_docs(docs, batch_size=batch_size).bucket("tokens", max_items=max_items)
    found = [batch["id"].tolist() for batch in batches]
    assert found == sorted(sorted(rows) for rows in expected)
    assert [batch["tokens"].to_list() for batch in batches] == [[docs[row] for row in rows] for rows in found]
    assert len(batches) == len(found)


def test_batches_of_similar_lengths_keep_the_promises() -> None:
    docs = random_docs(300)
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_size": 8}
    batches = of_docs(docs, **options).bucket("tokens", max_items=40, window=50)
    whole = list(batches)
    assert sorted(row for batch in whole for row in batch["id"]) == list(range(300))
    assert "bucket" in str(batches.plan())
    assert set(whole[0]) == {"id", "tokens", "twice"} == set(batches.features or {})
    for step in range(0, len(whole), 9):
        batches.set_epoch(0)
        for _ in itertools.islice(batches, step):
            pass
        left = []
        for rank in range(2):
            share = of_docs(docs, **options, rank=rank, world_size=2, shard_by="window", on_uneven="allow")
            rest = share.bucket("tokens", max_items=40, window=50)
            rest.load_state_dict(json.loads(json.dumps(batches.state_dict())))
            left += digests(rest)
        assert sorted(left) == sorted(digests(whole[step:]))
    for step in range(len(whole)):
        ids = whole[step]["id"].tolist()
        assert [batches.locate(step, row, 0).row for row in range(len(ids))] == ids
        with pytest.raises(IndexError, match=f"row {len(ids)} does not exist"):
            batches.map(len).locate(step, len(ids), 0)
    mixed = mix({"a": batches, "b": of_docs(docs[:50]).bucket("tokens")}, [0.75, 0.25])
    of = [mixed.locate(step, 0, 0).reader for step in range(len(mixed))]  # type: ignore[attr-defined]
    assert of[:8].count("a") == 6
    assert all(len(batch["id"]) <= 8 for batch in mixed)
    with pytest.raises(ValueError, match="omit batch_size"):
        mix([batches], batch_size=8)
    with pytest.raises(SchemaError, match="no lengths to compare"):
        of_docs(docs).bucket("id")
