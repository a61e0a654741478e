"""`connect`: a reader whose batches servers make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, SupportsIndex

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.ordering import LARGEST_WORLD, Ordering, within
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader
from fastpipe.errors import ServiceError, UnsupportedError
from fastpipe.service._settings import Directory, Options

if TYPE_CHECKING:
    from fastpipe.service._connection import Connection
    from fastpipe.service._directory import Servers
    from fastpipe.service._remote_data import Description, RemoteData


def connect(
    urls: str | Sequence[str] | Directory,
    reader: str = "default",
    *,
    rank: SupportsIndex | None = None,
    world_size: SupportsIndex | None = None,
    seed: SupportsIndex | None = None,
    epochs: SupportsIndex | Literal["served"] | None = "served",
    prefetch: SupportsIndex | None = None,
    memory_limit: SupportsIndex | str | None = None,
    progress: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    certificate: tuple[str | Path, str | Path] | None = None,
    timeout: float = 30.0,
    fallback: Reader | None = None,
) -> Reader:
    """A reader whose batches are made by servers (`fastpipe serve`, `Reader.serve`; extra `arrow`).

    It is a `Reader` as any other: its batches are bit for bit those of the reader that is served, in every order, for
    every rank, from every state; its states load there, and the other way round. Several servers of the same data share
    the work: each makes as many batches as it can. Any server can make any batch, so one that dies loses nothing, and
    one that comes back is used again. Connections never use a proxy of the environment.

    Args:
        urls: of one or several servers, `grpc://host:port`, or `grpc+tls://host:port`; or a
            `fastpipe.service.Directory`, which lists them while they come and go.
        reader: its name at the servers.
        rank: of this reader; with `world_size`.
        world_size: number of ranks; by default as the served reader has it.
        seed: another one than the served reader's.
        epochs: epochs a pass; None for passes without end; `"served"` for as many as the served reader has.
        prefetch: batches to have ahead; None for as many as have 32 MiB, at least two of each server, at most 256.
        memory_limit: bytes that these may take, or a size such as `"512MB"`; None for no limit.
        progress: whether passes show a progress bar (extra `progress`).
        token: that the servers want.
        ca: file of certificates, PEM, one of which has signed those of the servers; None for those of the system.
        certificate: files of the client's certificate chain and private key, PEM, where servers ask for them.
        timeout: seconds within which a server must answer, or send something when it was asked for batches. If none
            does for that long, passes end in a `ServiceError`, and so do `batch_at`, `locate` and this call.
        fallback: a reader of the same data and the same order in this process. It makes the batches when no server
            does for `timeout` seconds, or at once where none was there when one was last needed; servers that come back
            make them again. With it, this call waits for servers that hang alone, not for those that aren't there: if
            none answers, order, seed and epochs are the fallback's.

    Returns:
        The reader. `prefetch` and `memory_limit` are of this side; a served reader has its own.

    Raises:
        ServiceError: if no server answers within the time, or none has such a reader.
        ImportError: if pyarrow isn't installed.
        UnsupportedError: if the fallback has other data, specs or order than the servers, or can't be served itself.
        ValueError: for values out of range, and URLs that are none.

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
            raise ValueError("urls is empty: name at least one server")
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
    description = _described(servers, reader, fallback)
    if fallback is not None:
        check_fallback(fallback, description)
        asked.check_order(description, Description.of(reader, fallback))
    data = RemoteData(reader, description, servers, options.timeout, fallback)
    return asked.reader(data, description, running)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a remote reader.

    Args:
        rank: of it; with `world_size`.
        world_size: number of ranks; None for those of the served reader.
        seed: None for the served reader's.
        epochs: epochs a pass; None for passes without end; "served" for as many as the served reader has.
        progress: whether passes show a progress bar.

    Raises:
        ValueError: if one is out of range, or comes without the other.
    """

    rank: SupportsIndex | None
    world_size: SupportsIndex | None
    seed: SupportsIndex | None
    epochs: SupportsIndex | Literal["served"] | None
    progress: bool

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("give rank and world_size together")

    def reader(self, data: RemoteData, description: Description, running: PassOptions) -> Reader:
        """A reader of remote data, which is so described.

        Raises:
            ValueError: if what is asked for is out of range.
        """
        ordering = self._ordering(description)
        made = Reader(
            data, ordering=ordering, running=running, progress=self.progress, epochs=self._epochs(description)
        )
        return made._warned()

    def check_order(self, served: Description, fallback: Description) -> None:
        """Whether a fallback has the order that servers have, as far as nothing else is asked for.

        Without servers its order holds. So which ones answer must not matter.

        Raises:
            UnsupportedError: if it has another one; it says what differs.
        """
        theirs, ours = asdict(self._ordering(served)), asdict(self._ordering(fallback))
        theirs["epochs"], ours["epochs"] = self._epochs(served), self._epochs(fallback)
        if not (theirs["seed_given"] and ours["seed_given"]):
            # One that was drawn differs from server to server, too.
            ours["seed"] = theirs["seed"]
        ours["seed_given"] = theirs["seed_given"]
        differing = [
            f"{name} is {ours[name]!r}, and {theirs[name]!r} there" for name in ours if ours[name] != theirs[name]
        ]
        if differing:
            raise UnsupportedError(
                f"the fallback has another order than the servers: {'; '.join(differing)}; make it with the same"
                " arguments, since its order holds where no server answers"
            )

    def _epochs(self, description: Description) -> SupportsIndex | None:
        return description.epochs if self.epochs == "served" else self.epochs

    def _ordering(self, description: Description) -> Ordering:
        ordering = description.ordering
        if self.world_size is not None and self.rank is not None:
            world = within("world_size", self.world_size, 1, LARGEST_WORLD)
            ordering = replace(ordering, rank=within("rank", self.rank, 0, world - 1), world_size=world)
        if self.seed is not None:
            ordering = replace(ordering, seed=within("seed", self.seed, 0, 2**64 - 1), seed_given=True)
        return ordering


def check_timeout(timeout: float) -> float:
    """Seconds within which servers must answer.

    Raises:
        ValueError: if it is none, or more than a day.
    """
    if not 0 < timeout <= 86_400:
        raise ValueError(f"timeout is up to 86400 seconds, not {timeout}")
    return float(timeout)


def _described(servers: Servers, reader: str, fallback: Reader | None) -> Description:
    """Describes a reader: as a server does, or like the fallback if all servers are absent."""
    from fastpipe.service._asking import NoAnswerError, Question
    from fastpipe.service._remote_data import Description

    def read(told: list[bytes], connection: Connection) -> Description:
        if len(told) != 2:
            raise ServiceError(f"{connection.url} is no server of fastpipe")
        return Description(told[0], told[1], connection.url)

    question = Question("describe", {"reader": reader}, read, servers.options.timeout)
    try:
        # A server that starts may come; one that refuses won't do otherwise. Who has a fallback need not wait for it.
        come, again = servers.changes and fallback is None, fallback is None
        return question.answer(servers.now_listed, come=come, again=again)
    except NoAnswerError as none:
        if fallback is None or not none.passes:
            raise none.error from none.error.__cause__
    servers.absent = True
    return Description.of(reader, fallback)
