"""Simulates consumers and servers of the data service, up to a thousand of each, with failures.

    python benches/scaling.py           # the table of docs/scaling.md
    python benches/scaling.py --quick   # up to 100 servers

Each consumer deals its batches out with the service's own `Schedule`; servers, networks and storage are queues that
give so many bytes a second, and servers fail and come back by chance. What the simulation leaves out: threads, and what
a message costs beside its bytes. The formulas of docs/scaling.md are `ideal` and `lost` below; tests hold them to
what is simulated.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from dataclasses import dataclass, field, replace

import fastpipe
import kept
from fastpipe.service._schedule import _TURN as TURN
from fastpipe.service._schedule import Schedule, Stretch

MB, GB = 1e6, 1e9
# As in the service: seconds between looks of whoever has nothing to do, and between tries to connect.
TICK = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
NO_END = 1 << 40


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated. Rates are in bytes a second; those of no limit are infinite.

    Attributes:
        servers: how many there are.
        consumers: how many there are.
        each: servers that a consumer connects to.
        batch: bytes of a batch.
        decode: of a server.
        network: of a server.
        demand: what a consumer takes.
        consumer_network: of a consumer.
        storage: of the whole storage.
        stored: bytes that are read for a byte of batches.
        group: batches that are made of the same stored bytes, as those of a window of a shuffled order are.
        ahead: batches for which a consumer has room.
        request: seconds until a server answers.
        uneven: by how much batches take more or less than their mean, as a share of it.
        mtbf: seconds that a server runs, on average, until it fails.
        mttr: seconds until it is back, on average.
        vanish: whether servers that fail go without a word, as machines do, or are killed, as processes are.
        timeout: seconds after which a consumer gives up on a silent server.
        together: whether consumers wait for each other after each batch, as ranks of a job do.
    """

    servers: int
    consumers: int
    each: int
    batch: float = 1 * MB
    decode: float = 100 * MB
    network: float = math.inf
    demand: float = math.inf
    consumer_network: float = math.inf
    storage: float = math.inf
    stored: float = 1.0
    group: int = 1
    ahead: int = 64
    request: float = 0.002
    uneven: float = 0.5
    mtbf: float = math.inf
    mttr: float = 0.0
    vanish: bool = False
    timeout: float = 30.0
    together: bool = False

    @property
    def server(self) -> float:
        """What a server gives while it runs and is kept busy."""
        return min(self.decode, self.network)

    def stretch(self, rate: float) -> int:
        """Batches that a consumer asks a server for at once, as the schedule does, at some rate of all together."""
        of_a_stream = rate / (self.consumers * self.each)
        return max(1, min(int(TURN * of_a_stream / self.batch), self.ahead // self.each))

    def reads(self, rate: float) -> int:
        """How often stored bytes are read: once for each stretch of a group."""
        return math.ceil(self.group / self.stretch(rate))

    @property
    def busy(self) -> float:
        """The share of its time that a server works: it waits for requests, unless others have asked meanwhile."""
        if self.consumers * self.each >= 2 * self.servers:
            return 1.0
        work = self.stretch(self.servers * self.server) * self.batch / self.server
        return work / (work + self.request)

    @property
    def lost(self) -> float:
        """Seconds of a server's work that a failure costs: until it is asked again and there.

        It is asked in turns of the longest pause, and one that is silent in turns of the timeout.
        """
        turn = LONGEST_PAUSE + (self.timeout if self.vanish else self.request)
        return turn / (1 - math.exp(-turn / self.mttr))

    @property
    def running(self) -> float:
        """The share of their time that servers give something."""
        return 1.0 if math.isinf(self.mtbf) else self.mtbf / (self.mtbf + self.lost)

    @property
    def ideal(self) -> float:
        """The rate of all together: the least of what is asked for, carried, made, and stored."""
        wanted = self.consumers * min(self.demand, self.consumer_network)
        rate = min(wanted, self.servers * self.server * self.busy * self.running)
        # Where the storage is the limit stretches become shorter, which has more read: until that is settled.
        while (less := self.storage / (self.stored * self.reads(rate))) < rate:
            rate = less
        return rate


@dataclass(slots=True)
class Result:
    """What came of it.

    Attributes:
        rate: bytes a second that all consumers took.
        slowest: the same of the consumer that took least, times their number.
        made: batches that came.
        twice: of these, those that had come already.
        failures: of servers.
        down: seconds that servers were gone, in all.
        read: bytes that were read from the storage.
        idle: the longest that any consumer waited for a batch, in seconds.
    """

    rate: float
    slowest: float
    made: int
    twice: int
    failures: int
    down: float
    read: float
    idle: float


@dataclass(slots=True, eq=False)
class _Queue:
    """Whatever gives so many bytes a second, one request after the other."""

    rate: float
    free: float = 0.0

    def given(self, now: float, nbytes: float) -> float:
        """When these bytes are there."""
        self.free = max(self.free, now) + nbytes / self.rate
        return self.free


@dataclass(slots=True, eq=False)
class _Server:
    decode: _Queue
    network: _Queue
    up: bool = True
    workers: list[_Worker] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Worker:
    """A consumer's thread for one server; `turn` tells what was meant for an earlier stretch."""

    consumer: _Consumer
    number: int
    server: _Server
    stretch: Stretch | None = None
    turn: int = 0
    pause: float = FIRST_PAUSE
    held: float = math.nan
    group: int = -1


@dataclass(slots=True, eq=False)
class _Consumer:
    schedule: Schedule
    network: _Queue
    workers: list[_Worker] = field(default_factory=list)
    idle: dict[int, _Worker] = field(default_factory=dict)
    holding: list[_Worker] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    wanted: int = 0
    free: float = 0.0
    since: float = 0.0
    taken: int = 0


class Simulation:
    """Lets a cluster run.

    Args:
        cluster: what is simulated.
        seed: of the failures.
    """

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, object, tuple[object, ...]]] = []
        self._numbers = itertools.count()
        self._storage = _Queue(cluster.storage)
        self._servers = [_Server(_Queue(cluster.decode), _Queue(cluster.network)) for _ in range(cluster.servers)]
        self._consumers = [self._connected(rank) for rank in range(cluster.consumers)]
        self._now = self._warm = 0.0
        self._made = self._twice = self._failures = self._met = 0
        self._read = self._idle = self._down = self._end = 0.0

    def _connected(self, rank: int) -> _Consumer:
        """A consumer, of servers that begin at its share of them, and overlap with its neighbours'."""
        cluster = self._cluster
        schedule = Schedule(cluster.each, None, NO_END, NO_END, cluster.group)
        consumer = _Consumer(schedule, _Queue(cluster.consumer_network))
        first = rank * cluster.servers // cluster.consumers
        for number in range(cluster.each):
            server = self._servers[(first + number) % cluster.servers]
            worker = _Worker(consumer, number, server)
            server.workers.append(worker)
            consumer.workers.append(worker)
            consumer.idle[number] = worker
        return consumer

    def run(self, seconds: float, warm: float = 2.0) -> Result:
        """Runs for so many seconds, of which the first aren't counted."""
        cluster, self._warm = self._cluster, warm
        for consumer in self._consumers:
            self._at(0.0, self._look, consumer)
        if not math.isinf(cluster.mtbf):
            for server in self._servers:
                # As many are down as are on average.
                if self._draw.random() < cluster.mttr / (cluster.mtbf + cluster.mttr):
                    self._at(0.0, self._fail, server)
                else:
                    self._at(self._draw.expovariate(1 / cluster.mtbf), self._fail, server)
        self._end = warm + seconds
        while self._events and self._events[0][0] < warm + seconds:
            self._now, _, do, of = heapq.heappop(self._events)
            do(*of)  # type: ignore[operator]
        taken = [consumer.taken for consumer in self._consumers]
        nbytes = cluster.batch / seconds
        slowest = min(taken) * len(taken) * nbytes
        return Result(
            sum(taken) * nbytes, slowest, self._made, self._twice, self._failures, self._down, self._read, self._idle
        )

    def _at(self, when: float, do: object, *of: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), do, of))

    # A consumer.

    def _look(self, consumer: _Consumer) -> None:
        """Whoever has nothing to do looks again now and then: whether a batch is late, for one."""
        self._take(consumer)
        self._at(self._now + TICK, self._look, consumer)

    def _step(self, consumer: _Consumer) -> None:
        """The consumer takes what is there, one after the other, and servers what there is room for then."""
        moved = False
        while consumer.free <= self._now and consumer.wanted in consumer.ready:
            consumer.ready.discard(consumer.wanted)
            consumer.wanted += 1
            moved = True
            if self._now >= self._warm:
                consumer.taken += 1
                self._idle = max(self._idle, self._now - max(consumer.since, self._warm))
            if self._cluster.together:
                consumer.free = math.inf
                self._meet()
            else:
                self._work(consumer)
        if moved:
            room = consumer.wanted + self._cluster.ahead
            holding, consumer.holding = consumer.holding, []
            for worker in holding:
                if worker.stretch is not None and worker.stretch.next < room:
                    self._come(worker, worker.turn)
                else:
                    consumer.holding.append(worker)
        self._take(consumer)

    def _work(self, consumer: _Consumer) -> None:
        """The consumer does what it does with a batch."""
        consumer.free = consumer.since = self._now + self._cluster.batch / self._cluster.demand
        if consumer.free > self._now:
            self._at(consumer.free, self._step, consumer)

    def _meet(self) -> None:
        """A consumer has its batch; the last one of them lets all go on."""
        self._met += 1
        if self._met == len(self._consumers):
            self._met = 0
            for consumer in self._consumers:
                self._work(consumer)
                self._at(self._now, self._step, consumer)

    def _take(self, consumer: _Consumer) -> None:
        waiting = consumer.wanted not in consumer.ready and consumer.free <= self._now
        for worker in list(consumer.idle.values()):
            ahead = self._cluster.ahead
            found = consumer.schedule.take(worker.number, self._now, consumer.wanted, ahead, waiting=waiting)
            if found is None:
                if waiting:
                    continue
                return
            del consumer.idle[worker.number]
            worker.stretch, worker.group = found, -1
            self._ask(worker, self._cluster.request)

    # A server.

    def _ask(self, worker: _Worker, delay: float) -> None:
        """Asks for the next batch of a stretch."""
        assert worker.stretch is not None
        cluster, server, now = self._cluster, worker.server, self._now + delay
        if not server.up:
            silent = cluster.timeout if cluster.vanish else cluster.request
            self._at(self._now + silent, self._broken, worker, worker.turn)
            return
        cost = cluster.batch * self._draw.uniform(1 - cluster.uneven, 1 + cluster.uneven)
        there = max(server.decode.given(now, cost), server.network.given(now, cluster.batch))
        there = max(there, worker.consumer.network.given(now, cluster.batch))
        group = worker.stretch.next // cluster.group
        if group != worker.group:
            worker.group = group
            nbytes = cluster.group * cluster.batch * cluster.stored
            there = max(there, self._storage.given(now, nbytes))
            self._read += nbytes
        self._at(there, self._come, worker, worker.turn)

    def _come(self, worker: _Worker, turn: int) -> None:
        """A batch has come, and waits for room."""
        stretch, consumer = worker.stretch, worker.consumer
        if stretch is None or turn != worker.turn:
            return
        if stretch.next >= consumer.wanted + self._cluster.ahead:
            worker.held = self._now
            consumer.holding.append(worker)
            return
        waited = 0.0 if math.isnan(worker.held) else self._now - worker.held
        worker.held = math.nan
        worker.pause = FIRST_PAUSE
        number = stretch.next
        self._made += 1
        if number < consumer.wanted or number in consumer.ready:
            self._twice += 1
        else:
            consumer.ready.add(number)
        consumer.schedule.brought(stretch, self._now, waited=waited)
        if stretch.next < stretch.stop and not (stretch.again and stretch.next < consumer.wanted):
            self._ask(worker, 0.0)
        else:
            self._rest(worker)
            consumer.idle[worker.number] = worker
        self._at(self._now, self._step, consumer)

    def _rest(self, worker: _Worker) -> None:
        assert worker.stretch is not None
        worker.consumer.schedule.done(worker.stretch)
        worker.stretch = None
        worker.held = math.nan
        worker.turn += 1

    # Failures.

    def _fail(self, server: _Server) -> None:
        cluster = self._cluster
        server.up = False
        self._failures += self._now >= self._warm
        back = self._now + self._draw.expovariate(1 / cluster.mttr)
        self._down += max(min(back, self._end) - max(self._now, self._warm), 0.0)
        self._at(back, self._return, server)
        for worker in server.workers:
            if worker.stretch is not None:
                if worker in worker.consumer.holding:
                    worker.consumer.holding.remove(worker)
                worker.turn += 1
                self._at(self._now + (cluster.timeout if cluster.vanish else 0.0), self._broken, worker, worker.turn)

    def _broken(self, worker: _Worker, turn: int) -> None:
        """A worker learns that its server is gone, and tries again after a pause."""
        if worker.stretch is None or turn != worker.turn:
            return
        self._rest(worker)
        self._at(self._now + worker.pause * self._draw.uniform(0.5, 1.5), self._again, worker)
        worker.pause = min(worker.pause * 2, LONGEST_PAUSE)
        self._take(worker.consumer)

    def _again(self, worker: _Worker) -> None:
        worker.consumer.idle[worker.number] = worker
        self._take(worker.consumer)

    def _return(self, server: _Server) -> None:
        server.up = True
        server.decode.free = server.network.free = self._now
        self._at(self._now + self._draw.expovariate(1 / self._cluster.mtbf), self._fail, server)


# One server to a thousand. With several consumers, each needs four servers' work, and connects to twice as many.
STEADY = [
    Cluster(1, 1, 1),
    Cluster(4, 1, 4),
    Cluster(32, 1, 32, ahead=256),
    Cluster(32, 8, 8),
    Cluster(100, 25, 8),
    Cluster(1000, 250, 8),
    Cluster(1000, 250, 16, ahead=128),
]
# A failure each quarter of an hour is far too many, so that there are some in a short time.
MTBF, MTTR = 1000.0, 60.0


def clusters(steady: Cluster) -> dict[str, Cluster]:
    """A cluster whose servers never fail, and ones that do, with and without spare ones."""
    if steady.consumers == 1:
        return {"none": steady}
    killed = replace(steady, mtbf=MTBF, mttr=MTTR)
    silent = replace(killed, vanish=True)
    # Consumers take what four fifths of the servers make.
    spare = replace(silent, demand=0.8 * steady.servers * steady.server / steady.consumers)
    return {
        "none": steady,
        "killed": killed,
        "silent": silent,
        "silent, in step": replace(silent, together=True),
        "silent, a fifth spare": spare,
        "silent, a fifth spare, in step": replace(spare, together=True),
    }


def main() -> None:
    """Simulates, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="up to 100 servers")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="simulated; of 1,000 servers a quarter (%(default)s)"
    )
    arguments = parser.parse_args()
    found = {}
    print(
        "| servers | consumers | servers of each | failures | GB/s by the formulas | simulated | share | slowest"
        " consumer | made twice | a failure costs, server-seconds (by the formula) | longest wait, s |\n"
        "|--:|--:|--:|---|" + "--:|" * 7
    )
    for steady in STEADY:
        if arguments.quick and steady.servers > 100:
            continue
        undisturbed = 0.0
        for name, cluster in clusters(steady).items():
            begun = time.perf_counter()
            result = Simulation(cluster).run(arguments.seconds / (4 if cluster.servers >= 1000 else 1))
            undisturbed = undisturbed or result.rate
            cost = math.nan
            if name in ("killed", "silent"):
                failures = cluster.servers / (cluster.mtbf + cluster.lost)
                cost = (undisturbed - result.rate) / cluster.server / failures
            print(
                f"| {cluster.servers} | {cluster.consumers} | {cluster.each} | {name} |"
                f" {cluster.ideal / GB:.2f} | {result.rate / GB:.2f} | {result.rate / cluster.ideal:.2f} |"
                f" {result.slowest / cluster.ideal:.2f} | {result.twice / max(result.made, 1):.2%} |"
                f" {'' if math.isnan(cost) else f'{cost:.1f} ({cluster.lost:.1f})'} | {result.idle:.2f} |",
                flush=True,
            )
            found[f"{cluster.servers}/{cluster.consumers} {name}"] = {
                "formulas": cluster.ideal,
                "simulated": result.rate,
                "slowest": result.slowest,
                "seconds": time.perf_counter() - begun,
            }
    kept.save("scaling", found, {"fastpipe-data": fastpipe.__version__}, arguments.quick)


if __name__ == "__main__":
    main()
