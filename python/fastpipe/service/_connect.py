"""`connect`: a reader whose batches are prepared by servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastpipe._arguments import within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.ordering import LARGEST_WORLD, Ordering
from fastpipe._reader.packing import yielding
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader
from fastpipe.errors import ServiceError, UnsupportedError
from fastpipe.service._settings import Directory, Options

if TYPE_CHECKING:
    from fastpipe._reader.mapped import Mapped
    from fastpipe.service._connection import Connection
    from fastpipe.service._directory import Servers
    from fastpipe.service._remote_data import Description, RemoteData


def connect(
    urls: str | Sequence[str] | Directory,
    name: str = "default",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int | None = None,
    epochs: int | Literal["served"] | None = "served",
    prefetch: int | None = None,
    memory_limit: int | str | None = None,
    progress: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    certificate: tuple[str | Path, str | Path] | None = None,
    timeout: float = 30.0,
    fallback: Reader | Mapped | None = None,
) -> Reader:
    """Returns a reader whose batches are prepared by servers (`fastpipe serve`, `Reader.serve`; extra `arrow`).

    The reader behaves like any other `Reader`. Its batches equal the served reader's bit for bit, for every order,
    rank and state. States saved by either reader can be loaded into the other. Several servers of the same data share
    the work according to their speed. Any server can produce any batch: nothing is lost when a server fails, and it is
    used again when it comes back. Connections never use a proxy from the environment.

    Args:
        urls: URLs of one or more servers, `grpc://host:port` or `grpc+tls://host:port`; or a
            `fastpipe.service.Directory`, which lists servers that come and go.
        name: Name of the reader on the servers. Defaults to "default".
        rank: Rank of this reader, 0 to `world_size` - 1. Pass it together with `world_size`.
        world_size: Number of ranks. Defaults to the rank and world size of the served reader.
        seed: Seed of the shuffle, 0 to 2^64 - 1. Defaults to the served reader's seed.
        epochs: Number of epochs in a pass; None for endless passes. Defaults to `"served"`, the served reader's number.
        prefetch: Number of batches to receive in advance. Defaults to about 32 MiB of batches: at least two per server
            and at most 256.
        memory_limit: Maximum size of the prefetched batches in bytes, or as text such as `"512MB"`; None for no limit.
        progress: Whether passes show a progress bar (extra `progress`).
        token: Token that the servers require.
        ca: PEM file with the CA certificates that the servers' certificates must be signed by. Defaults to the
            certificates of the system.
        certificate: PEM files with the client's certificate chain and private key, if the servers require them.
        timeout: Maximum time in seconds to wait for an answer, or for more data of requested batches. If no server
            responds in that time, passes, `batch_at`, `locate` and this call raise `ServiceError`.
        fallback: Reader of the same data in the same order in this process. It prepares the batches when no server
            responds within `timeout` seconds, or immediately if no server was available the last time. Servers that
            come back take over again. With a fallback, this call waits for servers that hang, but not for servers that
            are down. If no server answers, the reader uses the fallback's order, seed and epochs.

    Returns:
        The reader. Its `prefetch` and `memory_limit` apply to this process; the served reader has separate ones. If
        packs or buckets are served, it is a `Mapped`, as `pack` and `bucket` return it.

    Raises:
        ServiceError: If no server answers in time, or the servers don't have the reader.
        ImportError: If pyarrow isn't installed.
        UnsupportedError: If the data, specs or order of the fallback differ from the servers', or the fallback could
            not be served.
        ValueError: If a value is out of range, a URL is invalid, or a mixture is served and `seed` is given.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> with reader.serve() as server:
        ...     remote = fastpipe.connect(server.url)
        ...     labels = [batch["label"] for batch in remote]
        >>> all((a == b["label"]).all() for a, b in zip(labels, reader))
        True
    """
    require_pyarrow()
    from fastpipe.service._directory import Fixed, Servers, checked_url
    from fastpipe.service._remote_data import Description, RemoteData, check_fallback

    if isinstance(urls, Directory):
        directory: Directory = urls
    else:
        given = [checked_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not given:
            raise ValueError("urls is empty: pass at least one server")
        directory = Fixed(given)
    asked = Asked(rank, world_size, seed, epochs, progress)
    options = Options(
        token=token,
        ca=None if ca is None else Path(ca).read_bytes(),
        certificate=None
        if certificate is None
        else (Path(certificate[0]).read_bytes(), Path(certificate[1]).read_bytes()),
        timeout=check_timeout(timeout),
    )
    running = PassOptions.checked(num_threads=None, prefetch=prefetch, memory_limit=memory_limit)
    servers = Servers(directory, options)
    description = _described(servers, name, fallback)
    if fallback is not None:
        check_fallback(fallback, description)
        asked.check_order(description, Description.of(name, fallback))
    data = RemoteData(name, description, servers, options.timeout, fallback)
    return asked.reader(data, description, running)


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of a remote reader that the caller chooses.

    Args:
        rank: Rank of the reader. Pass it together with `world_size`.
        world_size: Number of ranks; None for the served reader's.
        seed: Seed of the shuffle; None for the served reader's.
        epochs: Number of epochs in a pass; None for endless passes; `"served"` for the served reader's number.
        progress: Whether passes show a progress bar.

    Raises:
        ValueError: If only one of `rank` and `world_size` is given.
    """

    rank: int | None
    world_size: int | None
    seed: int | None
    epochs: int | Literal["served"] | None
    progress: bool

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("pass both rank and world_size, or neither")

    def reader(self, data: RemoteData, description: Description, running: PassOptions) -> Reader:
        """Returns a reader of the remote data.

        Raises:
            ValueError: If an option is out of range.
        """
        ordering = self._ordering(description)
        made = Reader._of(
            data, ordering=ordering, running=running, progress=self.progress, epochs=self._epochs(description)
        )
        rows = made._reported()
        packs: Any = rows if description.groups is None else yielding(rows, description.groups, rows)
        return packs  # type: ignore[no-any-return]

    def check_order(self, served: Description, fallback: Description) -> None:
        """Checks that the fallback's order equals the servers', given the options of this reader.

        The fallback's order is used if no server answers. The order must not depend on which of them answer.

        Raises:
            UnsupportedError: If the orders differ. The message names the differences.
        """
        theirs, ours = asdict(self._ordering(served)), asdict(self._ordering(fallback))
        theirs["epochs"], ours["epochs"] = self._epochs(served), self._epochs(fallback)
        if not (theirs["seed_given"] and ours["seed_given"]):
            # A seed that wasn't given is random: it differs between servers as well.
            ours["seed"] = theirs["seed"]
        ours |= {name: theirs[name] for name in ("seed_given", "buffer_given")}
        differing = [
            f"{name} is {ours[name]!r}, and {theirs[name]!r} there" for name in ours if ours[name] != theirs[name]
        ]
        if differing:
            raise UnsupportedError(
                f"the fallback's order differs from the servers' order: {'; '.join(differing)}. Create the fallback"
                " with the same arguments: its order is used if no server answers"
            )

    def _epochs(self, description: Description) -> int | None:
        return description.epochs if self.epochs == "served" else self.epochs

    def _ordering(self, description: Description) -> Ordering:
        ordering = description.ordering
        if self.world_size is not None and self.rank is not None:
            world = within("world_size", self.world_size, 1, LARGEST_WORLD)
            ordering = replace(ordering, rank=within("rank", self.rank, 0, world - 1), world_size=world)
        if self.seed is not None:
            if ordering.is_mixture:
                raise ValueError(
                    "the order of a mixture has the seeds of its readers: pass seed to mix, not to connect"
                )
            ordering = replace(ordering, seed=within("seed", self.seed, 0, 2**64 - 1), seed_given=True)
        return ordering


def check_timeout(timeout: float) -> float:
    """Returns the timeout in seconds.

    Raises:
        ValueError: If it isn't positive, or exceeds a day.
    """
    if not 0 < timeout <= 86_400:
        raise ValueError(f"timeout must be positive and at most 86400 seconds; got {timeout}")
    return float(timeout)


def _described(servers: Servers, name: str, fallback: Reader | Mapped | None) -> Description:
    """Returns a server's description of the reader, or the fallback's if no server is available."""
    from fastpipe.service._asking import NoAnswerError, Question
    from fastpipe.service._remote_data import Description

    def read(told: list[bytes], connection: Connection) -> Description:
        if len(told) != 2:
            raise ServiceError(f"{connection.url} is not a fastpipe server")
        return Description(told[0], told[1], connection.url)

    question = Question("describe", {"reader": name}, read, servers.options.timeout)
    try:
        # A server may still be starting, but one that refuses won't change its answer. With a fallback, don't wait.
        come, again = servers.changes and fallback is None, fallback is None
        return question.answer(servers.now_listed, come=come, again=again)
    except NoAnswerError as none:
        if fallback is None or not none.passes:
            raise none.error from none.error.__cause__
    servers.absent = True
    return Description.of(name, fallback)
