"""Random generators that a thread has for itself, in place of the process's.

Items draw from the generators of `random`, `numpy.random` and `torch`, which a process has once. A worker's process
seeds them for each item; a worker's thread can't, for the program and other workers draw from them at the same time. So
a worker's thread has generators of its own, and what it draws from the process's comes from these:

- `random` has one object, whose class is changed to one that looks at the thread first;
- the functions of `numpy.random` are replaced by such that do, and those by which `torch` seeds its generator;
- torch's operators are given the thread's generator as they are called, by the stack of objects with a method
  `__torch_dispatch__` that each thread has. (`TorchDispatchMode` puts itself there, too, but tells the whole process of
  it, in which `torch.compile` would do nothing meanwhile, and imports a thousand modules.)

For other threads all is as before, and when the last such worker has ended, everything is put back. Some ways around it
are left: functions of `numpy.random`, and `random.random`, that a module has imported by name before, and code in C
that draws from the process's generators itself. `Draws` notices what is drawn there.
"""

from __future__ import annotations

import _random
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["OwnGenerators", "own_generators", "own_of_this_thread", "warm_up_torch"]


class OwnGenerators:
    """A thread's generators.

    Attributes:
        python: in place of `random`.
        numpy: in place of `numpy.random`.
        torch: in place of `torch.default_generator`.
    """

    def __init__(self) -> None:
        self.python = random.Random()
        self.numpy = np.random.RandomState(np.random.MT19937())
        self.torch = torch.Generator()
        self._operators: _Operators | None = None

    def watch_torch(self) -> None:
        """What this thread draws by torch's operators is its own from now on, which makes each slower by some µs."""
        if self._operators is None:
            self._operators = _Operators(self.torch)
            torch._C._push_on_torch_dispatch_stack(self._operators)  # type: ignore[arg-type]

    def leave_torch(self) -> None:
        """It is the process's again, but for what seeds it."""
        operators, self._operators = self._operators, None
        if operators is not None:
            torch._C._pop_torch_dispatch_stack(None)


class _Here(threading.local):
    own: OwnGenerators | None = None


_here = _Here()


def own_of_this_thread() -> OwnGenerators | None:
    """None for a thread that draws from the process's."""
    return _here.own


class _Random(random.Random):
    """The process's generator for all threads that have none of their own.

    Its methods may outlive that it is of this class, where somebody keeps them.
    """

    # The same memory as the class that it is of otherwise.
    __slots__ = ()

    def random(self) -> float:
        own = _here.own
        return _random.Random.random(self) if own is None else own.python.random()

    def getrandbits(self, k: int, /) -> int:
        own = _here.own
        return _random.Random.getrandbits(self, k) if own is None else own.python.getrandbits(k)

    def seed(self, *arguments: Any, **options: Any) -> None:
        own = _here.own
        if own is None:
            random.Random.seed(self, *arguments, **options)
        else:
            own.python.seed(*arguments, **options)

    def getstate(self) -> tuple[Any, ...]:
        own = _here.own
        return random.Random.getstate(self) if own is None else own.python.getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        own = _here.own
        if own is None:
            random.Random.setstate(self, state)
        else:
            own.python.setstate(state)

    @property
    def gauss_next(self) -> float | None:
        """The second of two numbers that `gauss` makes at once."""
        own = _here.own
        found: float | None = self.__dict__["gauss_next"] if own is None else own.python.gauss_next  # type: ignore[attr-defined]
        return found

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        own = _here.own
        if own is None:
            self.__dict__["gauss_next"] = value
        else:
            own.python.gauss_next = value  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return random.Random, (), self.getstate()


class _RandomState(np.random.RandomState):
    """NumPy's generator for all threads that have none of their own, and theirs for others.

    Args:
        process: what the process has without this.
    """

    def __init__(self, process: np.random.RandomState) -> None:
        super().__init__(0)
        object.__getattribute__(self, "__dict__")["process"] = process

    def __getattribute__(self, name: str) -> Any:
        own = _here.own
        found = object.__getattribute__(self, "__dict__")["process"] if own is None else own.numpy
        return getattr(found, name)

    def __reduce__(self) -> Any:
        return self.__getattribute__("__reduce__")()


class _Seeds:
    """`torch.default_generator` for `torch.manual_seed` and its like: this thread's, where it has one."""

    def __init__(self, process: torch.Generator) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        own = _here.own
        return getattr(self._process if own is None else own.torch, name)


class _Operators:
    """Gives operators of a thread that draw numbers the thread's generator, where no other is named.

    Args:
        generator: the thread's.
    """

    # What calls functions of its own, such as `torch.cond`, asks whether it may.
    supports_higher_order_operators = True

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = _drawing(func)
        if drawing is None or _has_own(args, kwargs) or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        return drawing(*args, **{**kwargs, "generator": self._generator})


@functools.cache
def _drawing(operator: Any) -> Any:
    """The operator with an argument for a generator, itself or one beside it; None where there is none."""

    def names(of: Any) -> list[str]:
        return [argument.name for argument in of._schema.arguments]

    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return None
    if "generator" in names(operator):
        return operator
    packet = operator.overloadpacket
    for overload in packet.overloads():
        found = getattr(packet, overload)
        of_arguments = [(each.name, str(each.type)) for each in found._schema.arguments if each.name != "generator"]
        if "generator" in names(found) and of_arguments == [
            (each.name, str(each.type)) for each in operator._schema.arguments
        ]:
            return found
    return None


def _has_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is given a generator other than the process's."""
    generator: Any = kwargs.get("generator")
    if generator is None:
        return any(isinstance(each, torch.Generator) for each in args)
    of_process: Any = torch.default_generator
    return bool(generator._cdata != of_process._cdata)


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's result is in memory of the host: other devices have generators of their own."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    return all(tensor.device.type == "cpu" for tensor in tensors)


@contextmanager
def _python() -> Iterator[None]:
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random:
        # Somebody else has replaced it.
        yield
        return
    generator.__class__ = _Random
    # Those are of the object alone, and all others ask these.
    names = ("random", "getrandbits", "seed", "getstate", "setstate")
    try:
        with _replaced(random, {name: getattr(generator, name) for name in names}):
            yield
    finally:
        generator.__class__ = random.Random


@contextmanager
def _numpy() -> Iterator[None]:
    module: Any = np.random.mtrand
    process = getattr(module, "_rand", None)
    if type(process) is not np.random.RandomState:
        yield
        return
    shared = _RandomState(process)

    def looked_up(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(process, name))
        def function(*arguments: Any, **options: Any) -> Any:
            return getattr(shared, name)(*arguments, **options)

        return function

    names = [name for name, value in vars(module).items() if getattr(value, "__self__", None) is process]
    functions: dict[str, Any] = {name: looked_up(name) for name in names}
    with _replaced(np.random, functions), _replaced(module, functions | {"_rand": shared}):
        yield


@contextmanager
def _torch() -> Iterator[None]:
    with _replaced(torch.random, {"default_generator": _Seeds(torch.default_generator)}):
        yield


@contextmanager
def _replaced(module: Any, values: dict[str, Any]) -> Iterator[None]:
    """Has these values under these names, until it ends; what others put there meanwhile stays."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in values.items():
            if getattr(module, name) is value:
                setattr(module, name, before[name])


class _Replacing:
    """Replaces what looks at the thread, for as long as there are threads with generators of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._warm = False
        self._replaced = ExitStack()

    def renew_lock(self) -> None:
        """In a child of a process of which another thread may have it."""
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        with self._lock:
            if not self._warm:
                own = OwnGenerators()
                own.watch_torch()
                try:
                    torch.rand(1, device="cpu")
                finally:
                    own.leave_torch()
                self._warm = True

    def begin(self) -> None:
        with self._lock:
            if self._threads == 0:
                with ExitStack() as replaced:
                    for generator in (_python, _numpy, _torch):
                        replaced.enter_context(generator())
                    self._replaced = replaced.pop_all()
            self._threads += 1

    def end(self) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self._replaced.close()


_replacing = _Replacing()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replacing.renew_lock)


def warm_up_torch() -> None:
    """Calls an operator of torch's with an object on this thread's dispatch stack, once in each process.

    Call it before worker threads start: the first such calls of several threads at once can end the process with a
    segmentation fault in torch.
    """
    _replacing.warm_up()


@contextmanager
def own_generators() -> Iterator[OwnGenerators]:
    """This thread draws from generators of its own until it ends."""
    _replacing.begin()
    _here.own = own = OwnGenerators()
    try:
        own.watch_torch()
        yield own
    finally:
        own.leave_torch()
        _here.own = None
        _replacing.end()
