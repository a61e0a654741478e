from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from fastpipe.csv._dialect import LoweredDialect
from fastpipe.specs import Described, Lowered
from fastpipe.vocabularies import LoweredLookup

__all__ = [
    "ArrowBatches",
    "AvroDataset",
    "AvroWriter",
    "ContainerFile",
    "CsvDataset",
    "CsvReservoir",
    "Data",
    "Drawing",
    "InteractionsDataset",
    "Memory",
    "MessageDecoder",
    "Messages",
    "Order",
    "Pass",
    "PassMemory",
    "Position",
    "Positives",
    "RowBuffer",
    "TableDataset",
    "UnitCall",
    "UnitCalls",
    "UnitsDataset",
    "Vocabulary",
    "__version__",
    "compress_interactions",
    "core_of",
    "drawn_within",
    "estimate_csv",
    "index_file",
    "keep_positives",
    "leave_tensorflow",
    "number_ids",
    "register_tensorflow",
    "register_tensorflow_parser",
]
__version__: str

_Kept: TypeAlias = Literal["nowhere", "before", "now", "unsettled", "changed"]

_InMemory: TypeAlias = tuple[bytes, int, int] | None

_Rows: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], npt.NDArray[np.uint32] | None]

def compress_interactions(
    users: npt.NDArray[np.uint32],
    items: npt.NDArray[np.uint32],
    times: npt.NDArray[Any] | None,
    *,
    num_users: int,
    duplicates: str,
    num_threads: int | None = None,
) -> _Rows: ...
def core_of(
    indptr: npt.NDArray[np.int64], items: npt.NDArray[np.uint32], num_items: int, least_user: int, least_item: int
) -> npt.NDArray[np.bool_]: ...
def keep_positives(
    indptr: npt.NDArray[np.int64],
    items: npt.NDArray[np.uint32],
    sequence: npt.NDArray[np.uint32] | None,
    kept: npt.NDArray[np.bool_],
) -> _Rows: ...
def number_ids(
    ids: npt.NDArray[Any], *, num_threads: int | None = None
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]: ...
def drawn_within(
    units: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.int64],
    *,
    seed: int,
    epoch: int = 0,
) -> npt.NDArray[np.int64]: ...
def index_file(path: str, index_cache: str, progress: Callable[[int], object]) -> tuple[int, int, int, int, _Kept]: ...
def register_tensorflow(
    begin: Callable[
        ...,
        tuple[
            Pass | None,
            list[tuple[str, list[int] | None]],
            dict[str, str] | None,
            list[tuple[Exception, str]],
            bool,
        ],
    ],
) -> None: ...
def register_tensorflow_parser(
    number: int, decoder: MessageDecoder, wanted: list[tuple[str, list[int] | None]]
) -> None: ...
def leave_tensorflow() -> None: ...

@final
class AvroWriter:
    def __new__(
        cls,
        path: str,
        *,
        shown: str,
        schema: str | None,
        codec: str,
        level: int | None,
        block_bytes: int,
        num_threads: int,
        sync: bytes,
        metadata: list[tuple[str, bytes]],
        appending_to: str | None,
    ) -> AvroWriter: ...
    def declare(self, schema: object, required: list[str]) -> None: ...
    def write(self, table: object, required: list[str], told: Callable[[int], object] | None) -> None: ...
    def finish(self) -> tuple[int, int, int]: ...
    def close(self) -> None: ...

@final
class ContainerFile:
    def __new__(cls, path: str, in_memory: _InMemory = None) -> ContainerFile: ...
    @property
    def path(self) -> str: ...
    @property
    def schema_json(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def metadata(self) -> dict[str, bytes]: ...
    @property
    def sync_marker(self) -> bytes: ...
    @property
    def size(self) -> int: ...
    def blocks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def sample_uncompressed(self, max_blocks: int) -> tuple[int, int]: ...

@disjoint_base
class Data:
    @property
    def num_rows(self) -> int: ...
    def arrow_schema(self, padded: bool, metadata: dict[str, str]) -> object: ...
    def stretches(self, count: int) -> list[tuple[int, int, int]]: ...
    def stretch(self, start: int, end: int) -> Data: ...
    def unit_rows(self) -> npt.NDArray[np.uint32]: ...

@final
class TableDataset(Data):
    def __new__(
        cls, table: Any, features: list[tuple[str, Lowered]] | None = None, columns: list[str] | None = None
    ) -> TableDataset: ...
    def features(self) -> list[Described]: ...
    def symbols(self) -> list[tuple[str, list[str]]]: ...
    def row_of(self, unit: int, record: int) -> int: ...
    def digest(self) -> bytes: ...

@final
class UnitCalls:
    def next(self) -> UnitCall | None: ...
    def end(self) -> None: ...

@final
class UnitCall:
    @property
    def unit(self) -> int: ...
    @property
    def rows(self) -> tuple[int, int] | None: ...
    def answer(self, table: Any) -> None: ...
    def fail(self, exception: BaseException) -> None: ...

@final
class UnitsDataset(Data):
    def __new__(
        cls,
        schema: Any,
        rows: Sequence[int],
        bytes: Sequence[int] | None,
        name: Callable[[int], str],
        start: Callable[[UnitCalls, int], int],
        at_once: int,
        features: list[tuple[str, Lowered]] | None = None,
        columns: list[str] | None = None,
        slice_bytes: int | None = None,
        dictionaries: Mapping[str, list[str]] | None = None,
    ) -> UnitsDataset: ...
    def features(self) -> list[Described]: ...
    def symbols(self) -> list[tuple[str, list[str]]]: ...
    def used(self) -> list[str]: ...
    def row_of(self, unit: int, record: int) -> tuple[int, int]: ...
    def row_bytes(self) -> int: ...

@final
class AvroDataset(Data):
    def __new__(
        cls,
        paths: list[str],
        features: list[tuple[str, Lowered]] | None,
        columns: list[str] | None,
        index_cache: str | None = None,
        check: Callable[[str, str], None] | None = None,
        damaged: list[Exception] | None = None,
        reader_schema: str | None = None,
        merged: bool = False,
        logical_types: bool = True,
        lookups: dict[str, LoweredLookup] | None = None,
        contents: list[_InMemory] = ...,
        folders: list[tuple[str, list[int | str | None]]] | None = None,
    ) -> AvroDataset: ...
    def folders(self) -> list[str]: ...
    def left_out(self) -> list[tuple[str, str]]: ...
    def features(self) -> list[Described]: ...
    def symbols(self) -> list[tuple[str, list[str]]]: ...
    def files(self) -> list[tuple[str, int, bytes]]: ...
    def layout(self) -> bytes: ...
    def blocks(self) -> list[int]: ...
    def column_times(self) -> tuple[float, list[tuple[str, float]]]: ...
    def place_of(self, unit: int) -> tuple[str, int]: ...

@final
class CsvDataset(Data):
    def __new__(
        cls,
        paths: list[str],
        dialect: LoweredDialect,
        features: list[tuple[str, Lowered]] | None,
        columns: list[str] | None,
        index_cache: str | None = None,
        contents: list[_InMemory] = ...,
        lookups: dict[str, LoweredLookup] | None = None,
    ) -> CsvDataset: ...
    def with_features(
        self, features: list[tuple[str, Lowered]], lookups: dict[str, LoweredLookup] | None = None
    ) -> CsvDataset: ...
    def inferred(self) -> CsvDataset: ...
    def features(self) -> list[Described]: ...
    def files(self) -> list[tuple[str, int, int]]: ...
    def text_bytes(self) -> int: ...
    def layout(self) -> bytes: ...
    def place_of(self, unit: int, record: int) -> tuple[str, int]: ...

@final
class CsvReservoir:
    def __new__(
        cls,
        name: str,
        dialect: LoweredDialect,
        features: list[tuple[str, Lowered]],
        rows: int,
        seed: int,
        memory_limit: int | None,
        lookups: dict[str, LoweredLookup] | None = None,
    ) -> CsvReservoir: ...
    def push(self, bytes: bytes) -> None: ...
    def end(self) -> int: ...
    def take(self) -> tuple[CsvDataset, npt.NDArray[np.int64]]: ...

def estimate_csv(
    paths: list[str],
    dialect: LoweredDialect,
    contents: list[_InMemory],
    rows: int,
    seed: int,
    *,
    replace: bool,
    num_threads: int | None,
) -> tuple[CsvDataset, npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[float, float, float]]: ...

@final
class Vocabulary:
    @staticmethod
    def of(keys: list[str | bytes], indices: list[int] | None = None) -> Vocabulary: ...
    @staticmethod
    def read(path: str) -> Vocabulary: ...
    @staticmethod
    def load(dumped: bytes) -> Vocabulary: ...
    def __len__(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def items(self, most: int | None = None) -> list[tuple[bytes, int]]: ...
    def dump(self) -> bytes: ...

@final
class Messages:
    def __new__(cls, messages: list[bytes]) -> Messages: ...
    @staticmethod
    def joined(bytes: bytes, offsets: list[int]) -> Messages: ...
    def __len__(self) -> int: ...

@final
class MessageDecoder:
    def __new__(
        cls, framing: str | None, features: list[tuple[str, Lowered]] | None, columns: list[str] | None
    ) -> MessageDecoder: ...
    def add(self, schema: str, key: int | None) -> list[tuple[str, str]]: ...
    def unknown(self, messages: Messages) -> list[tuple[int, int]]: ...
    @property
    def is_ready(self) -> bool: ...
    def features(self) -> list[Described]: ...
    def symbols(self) -> list[tuple[str, list[str]]]: ...
    def decode(self, messages: Messages, num_threads: int | None) -> dict[str, Any]: ...

@final
class Drawing:
    def __new__(cls, total: int, rows: int, *, skipped: int = 0, seed: int, epoch: int = 0) -> Drawing: ...
    def within(self, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...

@final
class Positives:
    def __new__(cls, indptr: npt.NDArray[np.int64], items: npt.NDArray[np.uint32], num_items: int) -> Positives: ...
    def full_users(
        self, *, negatives: int, repeats: bool = True, weights: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.int64]: ...
    def sample_negatives(
        self,
        *,
        negatives: int,
        seed: int,
        epoch: int = 0,
        first_positive: int = 0,
        repeats: bool = True,
        weights: npt.NDArray[np.float64] | None = None,
        num_threads: int | None = None,
    ) -> npt.NDArray[np.uint32]: ...
    def sample_unseen(
        self,
        users: npt.NDArray[np.int64],
        exclude: npt.NDArray[np.int64],
        *,
        negatives: int,
        seed: int,
        first: int = 0,
        repeats: bool = True,
        weights: npt.NDArray[np.float64] | None = None,
        num_threads: int | None = None,
    ) -> npt.NDArray[np.uint32]: ...

@final
class InteractionsDataset(Data):
    def __new__(
        cls,
        positives: Positives,
        *,
        negatives: int,
        repeats: bool = True,
        item_dtype: str = "int32",
        weights: npt.NDArray[np.float64] | None = None,
        skip_full: bool = False,
        first_user: int = 0,
        first_positive: int = 0,
        shard_positives: int | None = None,
    ) -> InteractionsDataset: ...
    def shard_users(self) -> npt.NDArray[np.int64]: ...
    def place_of(self, unit: int, record: int) -> tuple[int, int, int, int]: ...

@final
class Memory:
    @property
    def nbytes(self) -> int: ...
    def pieces(self) -> list[tuple[npt.NDArray[np.uint8], int]]: ...
    def place(self, array: npt.NDArray[Any]) -> int | None: ...

@final
class Order:
    def __new__(
        cls,
        data: Data,
        *,
        shuffle: str,
        shuffle_buffer: int | None,
        batch_size: int,
        drop_last: bool,
        seed: int,
        rank: int,
        world_size: int,
        shard_by: str,
        uneven: str,
        in_step: int | None = None,
        skipped: int = 0,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> Order: ...
    @property
    def num_rows(self) -> int: ...
    def sample(self, epoch: int) -> npt.NDArray[np.int64] | None: ...
    @property
    def shuffle_buffer(self) -> int: ...
    @property
    def left_out(self) -> int: ...
    @property
    def own_rows(self) -> int | None: ...
    @property
    def steps(self) -> int: ...
    def start(
        self,
        *,
        epoch: int,
        end_epoch: int | None,
        progress: dict[str, Any] | None,
        num_threads: int | None,
        sharers: int,
        prefetch: int | None,
        memory_limit: int | None,
        record_tasks: bool,
        memory: PassMemory | None = None,
        csr: bool = False,
    ) -> Pass: ...
    def check(self, progress: dict[str, Any]) -> None: ...
    def batches(
        self,
        epoch: int,
        start: int,
        stop: int,
        *,
        num_threads: int | None,
        sharers: int,
        prefetch: int | None,
        memory_limit: int | None,
    ) -> Pass: ...
    def locate(self, epoch: int, step: int, row: int, memory_limit: int | None = None) -> tuple[int, int]: ...
    def rows(self, epoch: int, step: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]: ...

@final
class ArrowBatches:
    def __new__(
        cls, started: Pass, metadata: dict[str, str], count: Callable[[int | None, bool], object] | None = None
    ) -> ArrowBatches: ...
    def __iter__(self) -> ArrowBatches: ...
    def __next__(self) -> tuple[object, object]: ...
    def stream(self) -> object: ...

@final
class Pass:
    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def __next__(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    @property
    def total(self) -> int | None: ...
    @property
    def position(self) -> Position: ...

@final
class PassMemory:
    def __new__(cls, data: Data, allocate: Callable[[int], npt.NDArray[np.uint8]], held: int) -> PassMemory: ...

@final
class Position:
    @property
    def epoch(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    @property
    def active(self) -> bool: ...
    def close(self, by: str | None = None) -> None: ...
    def stats(self) -> dict[str, Any] | None: ...
    def tasks(self) -> list[tuple[str, int, int, int, int, int]]: ...
    def progress(self) -> dict[str, Any]: ...

@final
class RowBuffer:
    def __new__(
        cls,
        columns: list[list[int | tuple[np.dtype[Any], tuple[int, ...]]]],
        *,
        batch_size: int,
        shuffle_buffer: int,
        seed: int,
        epoch: int,
        drop_last: bool,
        copy: bool,
        arrays: list[str] | None = None,
    ) -> RowBuffer: ...
    def push(self, rows: int, parts: list[npt.NDArray[Any]]) -> None: ...
    def push_arrays(self, batch: object) -> bool: ...
    def finish(self) -> None: ...
    def next(self) -> tuple[int, list[npt.NDArray[Any]]] | None: ...
    def next_arrays(self) -> dict[str, npt.NDArray[Any]] | None: ...
    @property
    def nbytes(self) -> int: ...
