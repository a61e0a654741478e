"""Framework adapters of remote readers have the local reader's batches and states at each step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import fastpipe
import samples
from apart import apart
from processes import outputs, run
from samples import SHUFFLES, Data, order_of
from samples import ids_by_batch as ids
from service_faults import rows_of

pytest.importorskip("pyarrow.flight")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

# JAX has no strings.
NUMBERS = {name: samples.FEATURES[name] for name in ("id", "vector", "items", "score", "terms")}
CSR = NUMBERS | {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")}


class Started(NamedTuple):
    """A pass of an adapter.

    Attributes:
        elements: The batches, each as NumPy arrays in a fixed order.
        state: Returns the state after the last batch.
    """

    elements: Iterator[list[np.ndarray]]
    state: Callable[[], Any]


def started_by_jax(reader: fastpipe.Reader, state: Any = None) -> Started:
    jax = pytest.importorskip("jax")
    fpjax = pytest.importorskip("fastpipe.jax")
    batches = fpjax.iterator(reader)
    if state is not None:
        batches.set_state(state)
    return Started(([np.asarray(leaf) for leaf in jax.tree.leaves(batch)] for batch in batches), batches.get_state)


def of_tensors(batch: Any) -> list[np.ndarray]:
    import torch
    from torch.utils._pytree import tree_leaves

    found: list[np.ndarray] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_sparse:
            found += [leaf._indices().numpy(), leaf._values().numpy(), np.array(leaf.shape)]
        else:
            found.append(leaf.numpy() if isinstance(leaf, torch.Tensor) else np.array(leaf))
    return found


def started_by_torch(reader: fastpipe.Reader, state: Any = None, *, by: str = "") -> Started:
    torch_data = pytest.importorskip("torch.utils.data")
    fptorch = pytest.importorskip("fastpipe.torch")
    dataset = fptorch.dataset(reader)
    batches, keeps = dataset, dataset
    if by == "torch":
        batches = torch_data.DataLoader(dataset, batch_size=None)
    elif by == "fastpipe":
        batches = fptorch.DataLoader(dataset, batch_size=None)
    elif by == "torchdata":
        batches = keeps = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(
            dataset, batch_size=None
        )
    if state is not None:
        keeps.load_state_dict(state)
    return Started(map(of_tensors, batches), keeps.state_dict)


def started_by_tensorflow(reader: fastpipe.Reader, state: Any = None) -> Started:
    tf = pytest.importorskip("tensorflow", exc_type=ImportError)
    fptf = pytest.importorskip("fastpipe.tf")
    if state is not None:
        reader.load_state_dict(state)
    flat = lambda batch: [part.numpy() for part in tf.nest.flatten(batch, expand_composites=True)]  # noqa: E731
    return Started(map(flat, fptf.dataset(reader)), reader.state_dict)


ADAPTERS: dict[str, Callable[..., Started]] = {
    "jax": started_by_jax,
    "torch": started_by_torch,
    "torch's loader": lambda *args: started_by_torch(*args, by="torch"),
    "torchdata's loader": lambda *args: started_by_torch(*args, by="torchdata"),
    "fastpipe's loader": lambda *args: started_by_torch(*args, by="fastpipe"),
    "tensorflow": started_by_tensorflow,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """59 rows in two files."""
    return samples.write(tmp_path_factory.mktemp("adapters"), [samples.blocks_of(40), samples.blocks_of(19, (6, 0, 2))])


def texts(elements: Any) -> list[str]:
    """Returns dtypes, shapes and values of elements as text."""
    return [
        json.dumps([[str(part.dtype), part.shape, part.astype(str).tolist()] for part in element])
        for element in elements
    ]


@pytest.mark.parametrize(
    ("features", "shuffle"),
    [*((NUMBERS, shuffle) for shuffle in SHUFFLES), (CSR, True), (samples.FEATURES, True)],
    ids=[*map(str, SHUFFLES), "csr", "strings"],
)
@pytest.mark.parametrize("start", ADAPTERS.values(), ids=ADAPTERS)
def test_batches_and_states_are_the_local_ones_at_every_step(
    data: Data, start: Callable[..., Started], features: dict[str, Any], shuffle: bool | str
) -> None:
    if start is started_by_jax:
        features = {name: spec for name, spec in features.items() if name in NUMBERS}

    def local() -> fastpipe.Reader:
        return data.read(features=features, **order_of(shuffle))

    with local().serve() as server:
        remote = fastpipe.connect(server.url)
        if start is started_by_tensorflow and features is CSR:
            for reader in (remote, local()):
                with pytest.raises(ValueError, match='use layout="coo"'):
                    start(reader)
            return
        whole = texts(start(local()).elements)
        assert len(whole) == 9
        here_reader = local()
        here, there = start(here_reader), start(remote)
        for step in range(4):
            assert texts([next(there.elements)]) == texts([next(here.elements)]) == [whole[step]]
            state = there.state()
            assert json.loads(json.dumps(state)) == json.loads(json.dumps(here.state()))
            for reader in (local(), fastpipe.connect(server.url)):
                assert texts(start(reader, state).elements) == whole[step + 1 :]
        assert texts(there.elements) == texts(here.elements) == whole[4:]
        # The next epoch.
        assert texts(start(remote).elements) == texts(start(here_reader).elements)


def test_xgboost_trains_to_the_same_model(data: Data) -> None:
    xgboost = pytest.importorskip("xgboost")
    fpxgboost = pytest.importorskip("fastpipe.xgboost")
    features = {name: NUMBERS[name] for name in ("id", "vector", "score")}

    def trained(reader: fastpipe.Reader) -> bytes:
        matrix = xgboost.QuantileDMatrix(fpxgboost.data_iter(reader, label="id"), max_bin=16)
        return bytes(xgboost.train({"tree_method": "hist", "max_bin": 16, "seed": 1}, matrix, 3).save_raw())

    reader = data.read(features=features, **order_of(True))
    with reader.serve() as server:
        assert trained(fastpipe.connect(server.url)) == trained(reader)


def test_spawned_workers_of_a_loader_open_new_connections() -> None:
    pytest.importorskip("torch")
    script = """
        import numpy as np
        from torch.utils.data import DataLoader
        import fastpipe, fastpipe.torch

        def main():
            reader = fastpipe.from_arrays({"id": np.arange(500)}, batch_size=10, shuffle=True, seed=7)
            with reader.serve() as server:
                dataset = fastpipe.torch.dataset(fastpipe.connect(server.url))
                loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
                found = [batch["id"].tolist() for batch in loader]
                assert found == [batch["id"].tolist() for batch in reader]
            print("the same")

        if __name__ == "__main__":
            main()
    """
    assert outputs(run(script)) == ["the same\n"]


def in_forked_workers(remote: fastpipe.Reader) -> list[list[int]]:
    """Returns the sorted batches of a reader in two forked workers."""
    from torch.utils.data import DataLoader

    import fastpipe.torch

    dataset = fastpipe.torch.dataset(remote)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    return sorted(ids(loader))


linux = pytest.mark.skipif(sys.platform != "linux", reason="sharing memory between processes requires Linux")


@linux
@apart
def test_forked_workers_of_a_loader_read_from_a_local_service() -> None:
    with fastpipe.service.LocalService(rows_of(500, batch_size=10)) as service:
        remote = service.reader
        assert in_forked_workers(remote) == sorted(ids(rows_of(500, batch_size=10)))


# The loader keeps its mappings of its workers' memory.
@linux
@apart(looks=False)
def test_forked_workers_of_a_loader_open_new_connections() -> None:
    with rows_of(500, batch_size=10).serve() as server:
        remote = fastpipe.connect(server.url)
        next(iter(remote))
        remote.set_epoch(0)
        assert in_forked_workers(remote) == sorted(ids(rows_of(500, batch_size=10)))
