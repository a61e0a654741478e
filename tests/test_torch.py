"""Batches as tensors: they share memory, have the same values, and use types that Torch users know."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fastpipe
import fastpipe.torch as adapter
import samples
from samples import FEATURES, SHUFFLES, Data, ids_by_batch

CSR = FEATURES | {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}
# A loader in the same process does not move tensors to shared memory.
OPTIONS: dict[str, Any] = {"batch_size": 7, "seed": 11}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("torch"), [samples.blocks_of(60), samples.blocks_of(45, (3, 1))])


def arrays(node: Any) -> list[np.ndarray]:
    """Returns all arrays of a column. The arrays of its values come first."""
    if isinstance(node, np.ndarray):
        return [node]
    if isinstance(node, fastpipe.Sparse):
        return [node.indices, node.values]
    parts = [part for part in node if not isinstance(part, (tuple, bool))]
    return [array for part in parts for array in arrays(part)]


def parts(node: Any) -> list[torch.Tensor]:
    """Returns all tensors of a column, in the same order."""
    if isinstance(node, torch.Tensor):
        return [node._indices(), node._values()] if node.is_sparse else [node]
    return [tensor for part in node for tensor in parts(part)]


@pytest.mark.parametrize("features", [FEATURES, CSR], ids=["coo", "csr"])
def test_tensors_share_the_memory_of_arrays(data: Data, features: dict[str, Any]) -> None:
    for batch in data.read(batch_size=7, features=features):
        found = adapter.tensors(batch, sparse="coo" if features is FEATURES else "bag")
        assert list(found) == list(batch)
        for name, node in batch.items():
            if isinstance(node, fastpipe.batch.SparseCSR):
                assert isinstance(found[name], adapter.Bag)
                ours = [node.indices, node.offsets, node.values]
            else:
                ours = arrays(node)
            theirs = parts(found[name])
            assert len(ours) == len(theirs)
            for array, tensor in zip(ours, theirs, strict=True):
                assert tensor.numel() == array.size
                assert tensor.data_ptr() == array.ctypes.data or not array.size
                assert sorted(tensor.flatten().tolist()) == sorted(array.flatten().tolist())


def test_tensors_keep_the_memory(data: Data) -> None:
    kept = [adapter.tensors(batch)["vector"] for batch in data.read(batch_size=7, num_threads=2)]
    expected = [row["vector"] for row in map(samples.row, range(data.total))]
    assert torch.cat(kept).tolist() == expected


def test_reprs_name_dtypes_and_shapes() -> None:
    strings = fastpipe.Strings(np.full(3000, 97, "u1"), np.arange(0, 3001, 3), (1000,), False)
    ragged = fastpipe.Ragged(np.zeros(500, "float32"), np.arange(0, 501, 5))
    batch = {
        "s": fastpipe.Masked(strings, np.ones(1000, bool)),
        "r": ragged,
        "b": fastpipe.batch.SparseCSR(np.arange(10), np.arange(9), ragged.values[:9], np.array([9, 9])),
    }
    found = adapter.tensors(batch, sparse="bag")
    assert repr(found["s"]) == ("Masked(values=Strings(values=uint8[3000], offsets=int64[1001]), valid=bool[1000])")
    assert repr(found["r"]) == "Jagged(values=float32[500], offsets=int64[101])"
    assert repr(found["b"]) == "Bag(indices=int64[9], offsets=int64[10], values=float32[9])"
    elsewhere = adapter.Masked(torch.zeros(2, 3, device="meta"), torch.ones(2, dtype=torch.bool))
    assert repr(elsewhere) == "Masked(values=float32[2, 3] on meta, valid=bool[2])"


# Torch warns once per process that CSR is in beta.
@pytest.mark.filterwarnings("ignore:.*beta")
def test_array_types(data: Data) -> None:
    batch = next(iter(data.read(batch_size=50)))
    wanted = [samples.row(i) for i in range(50)]

    nested = adapter.tensors({"items": batch["items"]}, ragged="nested")["items"]
    assert nested.layout == torch.jagged
    assert nested.values().data_ptr() == batch["items"].values.ctypes.data
    assert [row.tolist() for row in nested.unbind()] == [row["items"] for row in wanted]
    longest = max(len(row["items"]) for row in wanted)
    padded = torch.nested.to_padded_tensor(nested, 0)
    assert padded.shape == (50, longest), "padded to the longest row, not to the sum of all lengths"
    assert padded.tolist() == [row["items"] + [0] * (longest - len(row["items"])) for row in wanted]

    terms = adapter.tensors({"terms": batch["terms"]})["terms"]
    dense = np.zeros((50, 8), np.float32)
    for i, row in enumerate(wanted):
        for (index,), value in row["terms"]:
            dense[i, index] = value
    assert terms.to_dense().tolist() == dense.tolist()
    compressed = next(iter(data.read(batch_size=50, features=CSR)))["terms"]
    for node in (batch["terms"], compressed):
        bag = adapter.tensors({"terms": node}, sparse="bag")["terms"]
        # Sums of these weights are exact.
        weights = torch.arange(24.0).reshape(8, 3)
        layer = torch.nn.EmbeddingBag.from_pretrained(weights, mode="sum", include_last_offset=True)
        summed = layer(bag.indices, bag.offsets, per_sample_weights=bag.values)
        assert torch.equal(summed, torch.from_numpy(dense) @ weights)
    assert adapter.tensors({"terms": compressed}, sparse="coo")["terms"].to_dense().tolist() == dense.tolist()
    csr = adapter.tensors({"terms": compressed}, sparse="csr")["terms"]
    assert csr.layout == torch.sparse_csr
    assert csr.crow_indices().data_ptr() == compressed.offsets.ctypes.data
    assert csr.to_dense().tolist() == dense.tolist()

    words = adapter.tensors(batch, strings="lists")
    assert words["words"] == [row["words"] for row in wanted]
    assert [
        text if valid else None for text, valid in zip(words["note"].values, words["note"].valid.tolist(), strict=True)
    ] == [row["note"] for row in wanted]
    note = adapter.tensors(batch)["note"]
    assert bytes(note.values.values[note.values.offsets[1] : note.values.offsets[2]].tolist()) == b"note 1"
    assert note.valid.tolist() == [row["note"] is not None for row in wanted]


def test_keyed_jagged(data: Data) -> None:
    for features in (FEATURES, CSR):
        batch = next(iter(data.read(batch_size=20, features=features)))
        found = adapter.keyed_jagged(batch, ["terms", "terms"])
        terms = [samples.row(i)["terms"] for i in range(20)]
        assert found["keys"] == ["terms", "terms"]
        assert found["lengths"].tolist() == 2 * [len(row) for row in terms]
        assert found["values"].tolist() == 2 * [index for row in terms for (index,), _ in row]
        assert found["weights"].tolist() == 2 * [value for row in terms for _, value in row]
    found = adapter.keyed_jagged(batch, ["items"])
    assert found["values"].dtype == torch.int64
    assert found["values"].tolist() == [item for i in range(20) for item in samples.row(i)["items"]]
    assert found["weights"] is None
    with pytest.raises(fastpipe.errors.UnsupportedError, match="'vector' is a ndarray"):
        adapter.keyed_jagged(batch, ["vector"])
    text = fastpipe.Strings(np.frombuffer(bytearray(b"a"), np.uint8), np.array([0, 1]), (1,), False)
    of_text = fastpipe.Sparse(np.zeros((1, 2), np.int64), text, np.array([1, 4]))
    with pytest.raises(fastpipe.errors.UnsupportedError, match="'x' is a Sparse"):
        adapter.keyed_jagged({"x": of_text}, ["x"])
    with pytest.raises(fastpipe.errors.UnsupportedError, match="one for each kind"):
        adapter.keyed_jagged(batch, ["terms", "items"])


def test_unsupported_conversions_are_refused(data: Data, tmp_path: Path) -> None:
    batch = next(iter(data.read(batch_size=20)))
    with pytest.raises(fastpipe.errors.UnsupportedError, match="'words' is ragged over a Strings"):
        adapter.tensors(batch, ragged="nested")
    node = fastpipe.Sparse(np.zeros((1, 3), np.int64), np.ones(1, np.float32), np.array([1, 4, 4]))
    assert adapter.tensors({"x": node})["x"].to_dense().sum() == 1
    for sparse in ("csr", "bag"):
        with pytest.raises(fastpipe.errors.UnsupportedError, match="'x' has 2 sparse dimensions"):
            adapter.tensors({"x": node}, sparse=sparse)
    text = fastpipe.Strings(np.frombuffer(bytearray(b"a"), np.uint8), np.array([0, 1]), (1,), False)
    node = fastpipe.Sparse(np.zeros((1, 2), np.int64), text, np.array([1, 4]))
    with pytest.raises(fastpipe.errors.UnsupportedError, match="'x' has sparse strings"):
        adapter.tensors({"x": node})


def test_select_and_map(data: Data) -> None:
    dataset = adapter.dataset(data.read(batch_size=7), select=(["vector", "items"], "id"))
    assert isinstance(dataset, adapter.IterableDataset)
    features, ids = next(iter(dataset))
    assert list(features) == ["vector", "items"]
    assert ids.tolist() == list(range(7))
    only = adapter.dataset(data.read(batch_size=7), select="id", map=lambda ids: ids * 2)
    assert next(iter(only)).tolist() == list(range(0, 14, 2))
    with pytest.raises(ValueError, match="select names 'nothing'"):
        adapter.dataset(data.read(batch_size=7), select=(["nothing"], "id"))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_dataset_yields_the_batches_of_its_reader(data: Data, shuffle: Any) -> None:
    options = samples.order_of(shuffle)
    reader, dataset = data.read(**options), adapter.dataset(data.read(**options))
    assert len(dataset) == len(reader) == len(DataLoader(dataset, batch_size=None))
    for _ in range(2):  # The end of a pass advances the epoch.
        assert ids_by_batch(dataset) == ids_by_batch(reader)
    assert ids_by_batch(DataLoader(dataset, batch_size=None)) == ids_by_batch(reader)
    dataset.set_epoch(9)
    reader.set_epoch(9)
    assert ids_by_batch(dataset) == ids_by_batch(reader)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("loader", [None, DataLoader, StatefulDataLoader, adapter.DataLoader])
def test_a_pass_that_was_left_counts_as_an_epoch(data: Data, loader: Any) -> None:
    options = samples.order_of(True)
    reader = data.read(**options)
    expected = [ids_by_batch(reader) for _ in range(5)]
    dataset = adapter.dataset(data.read(**options))
    batches = dataset if loader is None else loader(dataset, batch_size=None)
    for epoch, steps in enumerate((1, 3, len(expected[2]))):
        assert ids_by_batch(itertools.islice(batches, steps)) == expected[epoch][:steps]
        again = adapter.dataset(data.read(**options))
        again.load_state_dict(dataset.state_dict())
        assert ids_by_batch(again) == expected[epoch][steps:]
    assert ids_by_batch(batches) == expected[3]
    dataset.set_epoch(1)
    assert ids_by_batch(itertools.islice(batches, 2)) == expected[1][:2]
    assert ids_by_batch(batches) == expected[2]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_datasets_resume_at_every_step(data: Data, shuffle: Any) -> None:
    options = samples.order_of(shuffle)
    expected = [ids_by_batch(data.read(**options)), []]
    second = data.read(**options)
    second.set_epoch(1)
    expected[1] = ids_by_batch(second)
    for step in range(len(expected[0]) + 1):
        dataset = adapter.dataset(data.read(**options))
        batches = iter(dataset)
        assert ids_by_batch(next(batches) for _ in range(step)) == expected[0][:step]
        if step == len(expected[0]):
            assert next(batches, None) is None
        state = json.loads(json.dumps(dataset.state_dict()))
        other = adapter.dataset(data.read(**options))
        other.load_state_dict(state)
        if step < len(expected[0]):
            assert ids_by_batch(other) == expected[0][step:]
        assert ids_by_batch(other) == expected[1]


# torchdata still calls the deprecated function.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [False, True, "buffer"])
@pytest.mark.parametrize("kind", [StatefulDataLoader, adapter.DataLoader])
def test_a_stateful_loader_resumes_at_every_step(data: Data, kind: Any, shuffle: Any) -> None:
    options = samples.order_of(shuffle)

    def loader() -> Any:
        return kind(adapter.dataset(data.read(**options)), batch_size=None)

    expected = loader()
    expected = [ids_by_batch(expected), ids_by_batch(expected)]
    for step in range(len(expected[0]) + 1):
        first = loader()
        batches = iter(first)
        seen = ids_by_batch(next(batches) for _ in range(step))
        state = copy.deepcopy(first.state_dict())
        second = loader()
        second.load_state_dict(state)
        assert seen + ids_by_batch(second) == expected[0]
        assert ids_by_batch(second) == expected[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_distributed_checkpoints(data: Data, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    dataset = adapter.dataset(data.read(**samples.order_of(True)))
    assert isinstance(dataset, Stateful)
    batches = iter(dataset)
    seen = ids_by_batch(next(batches) for _ in range(4))
    dcp.save({"data": dataset}, checkpoint_id=tmp_path / "saved", no_dist=True)
    other = adapter.dataset(data.read(**samples.order_of(True)))
    dcp.load({"data": other}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert seen + ids_by_batch(other) == ids_by_batch(data.read(**samples.order_of(True)))


def test_a_state_of_another_reader_is_refused(data: Data) -> None:
    state = adapter.dataset(data.read(batch_size=7, shuffle=True, seed=1)).state_dict()
    with pytest.raises(fastpipe.errors.StateError, match="seed was 1"):
        adapter.dataset(data.read(batch_size=7, shuffle=True, seed=2)).load_state_dict(state)


def test_an_unstarted_dataset_can_be_pickled(data: Data) -> None:
    dataset = adapter.dataset(data.read(batch_size=7, shuffle=True, seed=1))
    dataset.set_epoch(3)
    assert ids_by_batch(pickle.loads(pickle.dumps(dataset))) == ids_by_batch(dataset)


class Interrupt(BaseException):
    """An interrupt that differs from Ctrl-C, so that it can't be confused with an interrupt of the test run."""


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_batches_that_next_did_not_return_are_read_again(data: Data, shuffle: Any) -> None:
    options = samples.order_of(shuffle)
    expected = ids_by_batch(data.read(**options))

    def failing(batch: Any) -> Any:
        if batch["id"].tolist() == expected[3]:
            raise ZeroDivisionError("the map failed")
        return batch

    dataset = adapter.dataset(data.read(**options), map=failing)
    batches = iter(dataset)
    assert ids_by_batch(next(batches) for _ in range(3)) == expected[:3]
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="the map failed"):
            next(batches)
    other = adapter.dataset(data.read(**options))
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert ids_by_batch(other) == expected[3:]


def test_an_error_keeps_no_pass(data: Data) -> None:
    def failing(_batch: Any) -> Any:
        raise ZeroDivisionError("the map failed")

    batches = iter(adapter.dataset(data.read(batch_size=7), map=failing))
    for _ in range(3):
        try:
            next(batches)
        except ZeroDivisionError as error:
            assert str(error) == "the map failed"  # noqa: PT017 # pytest.raises would keep all frames alive.
    there = weakref.ref(batches)
    del batches
    assert there() is None


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_interrupt_loses_nothing(data: Data, shuffle: Any) -> None:
    options = samples.order_of(shuffle)
    expected = ids_by_batch(data.read(**options))
    interrupts = {0, 2, 3, len(expected) - 1}

    def interrupted(batch: Any) -> Any:
        number = expected.index(batch["id"].tolist())
        if number in interrupts:
            interrupts.remove(number)
            raise Interrupt
        return batch

    dataset = adapter.dataset(data.read(**options), map=interrupted)
    batches, found = iter(dataset), []
    while (batch := next_or_interrupt(batches)) is not None:
        other = adapter.dataset(data.read(**options))
        other.load_state_dict(dataset.state_dict())
        if batch is not Interrupt:
            found += ids_by_batch([batch])
        assert ids_by_batch(other) == expected[len(found) :]
    assert found == expected
    assert not interrupts
    # The epoch still advances.
    assert dataset.state_dict()["progress"]["epoch"] == 1


def next_or_interrupt(batches: Any) -> Any:
    try:
        return next(batches, None)
    except Interrupt:
        return Interrupt


def test_an_interrupted_pass_does_not_restart_after_the_next(data: Data) -> None:
    def interrupted(_batch: Any) -> Any:
        raise Interrupt

    dataset = adapter.dataset(data.read(**samples.order_of(True)), map=interrupted)
    batches = iter(dataset)
    with pytest.raises(Interrupt):
        next(batches)
    dataset.set_epoch(2)
    with pytest.raises(fastpipe.FastpipeError, match=r"iter\(\) starts it"):
        next(batches)


def test_stop_iteration_in_map_does_not_end_the_pass(data: Data) -> None:
    def stop(_batch: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        ids_by_batch(adapter.dataset(data.read(batch_size=7), map=stop))


def test_an_epoch_set_during_a_pass_applies_to_the_next(data: Data) -> None:
    reader = data.read(**samples.order_of(True))
    dataset = adapter.dataset(data.read(**samples.order_of(True)))
    found = []
    for each in (reader, dataset):
        first = [ids_by_batch([batch])[0] for k, batch in enumerate(each) if k or each.set_epoch(4) is None]
        found.append([first, ids_by_batch(each), ids_by_batch(each)])
    assert found[0] == found[1]


def test_loaders_that_would_batch_batches_warn(data: Data) -> None:
    dataset = adapter.dataset(data.read(batch_size=7), select="id")
    with pytest.warns(UserWarning, match=r"DataLoader\(dataset, batch_size=None\)"):
        assert next(iter(DataLoader(dataset))).shape == (1, 7)
    # With batch_size=None it must not warn. Warnings are errors here.
    assert next(iter(DataLoader(dataset, batch_size=None))).shape == (7,)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"select": 3}, TypeError, "select must be the name of a feature, .*; got 3"),
        ({"select": (["id", ["items"]], "id")}, TypeError, "select must be .*; got "),
        ({"select": {"id": "id"}}, TypeError, "select must be .*; got "),
        ({"select": "vektor"}, ValueError, r"select names 'vektor' \(did you mean 'vector'\?\)"),
        ({"map": 3}, TypeError, "map must be a function of the selected features; got int"),
        ({"sparse": "COO"}, ValueError, 'sparse must be "coo", "csr" or "bag"; got \'COO\''),
        ({"ragged": "offset"}, ValueError, 'ragged must be "offsets" or "nested"; got \'offset\''),
        ({"strings": None}, ValueError, 'strings must be "tensors" or "lists"; got None'),
    ],
)
def test_arguments_are_checked_when_passed(
    data: Data, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    reader = data.read(batch_size=7)
    with pytest.raises(error, match=text):
        adapter.dataset(reader, **arguments)
    if error is ValueError and "select" not in arguments:
        with pytest.raises(error, match=text):
            adapter.tensors(next(iter(reader)), **arguments)


def test_a_path_is_not_a_reader(data: Data) -> None:
    with pytest.raises(TypeError, match=r"got str: fastpipe\.torch\.dataset\(fastpipe\.read_avro\(path"):
        adapter.dataset(data.paths[0])


def test_strings_are_not_ids(data: Data) -> None:
    batch = next(iter(data.read(batch_size=20)))
    text = fastpipe.Strings(np.frombuffer(bytearray(b"abc"), np.uint8), np.array([0, 1, 3]), (2,), False)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="'x' is a Strings"):
        adapter.keyed_jagged(batch | {"x": text}, ["x"])


@pytest.mark.parametrize(
    ("rank", "ranks", "text"),
    [
        ("", "2", "RANK is '' in the environment"),
        ("0", "two", "WORLD_SIZE is 'two'"),
        ("2", "2", "RANK is 2 and WORLD"),
    ],
)
def test_an_invalid_rank_in_the_environment(
    data: Data, monkeypatch: pytest.MonkeyPatch, rank: str, ranks: str, text: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    dataset = adapter.dataset(data.read(batch_size=7))
    with pytest.raises(ValueError, match=text):
        iter(dataset)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_a_loader_state_is_not_a_dataset_state(data: Data) -> None:
    loader = StatefulDataLoader(adapter.dataset(data.read(batch_size=7)), batch_size=None)
    next(iter(loader))
    with pytest.raises(fastpipe.errors.StateError, match="state of a StatefulDataLoader"):
        adapter.dataset(data.read(batch_size=7)).load_state_dict(loader.state_dict())
