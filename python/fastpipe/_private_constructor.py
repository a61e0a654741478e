"""Constructors of public classes whose objects only fastpipe creates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class PrivateConstructor(Generic[_P]):
    """An alternative constructor, which replaces that of its class: calling the class raises `TypeError`.

    Args:
        instead: Calls that return an object of the class, for the message.
        initialize: Method that initializes a new object.
    """

    def __init__(self, instead: str, initialize: Callable[Concatenate[Any, _P], None]) -> None:
        self._instead, self._initialize = instead, initialize

    def __set_name__(self, owner: type, name: str) -> None:
        message = f"{owner.__name__} can't be constructed: use {self._instead}"

        def __init__(self: object, *arguments: object, **options: object) -> None:
            raise TypeError(message)

        __init__.__doc__ = f"Raises `TypeError`: use {self._instead}."
        owner.__init__ = __init__  # type: ignore[misc]

    def __get__(self, instance: object, owner: type[_T]) -> Callable[_P, _T]:
        def construct(*arguments: _P.args, **options: _P.kwargs) -> _T:
            made = owner.__new__(owner)
            self._initialize(made, *arguments, **options)
            return made

        return construct


def private_constructor(
    instead: str,
) -> Callable[[Callable[Concatenate[Any, _P], None]], PrivateConstructor[_P]]:
    """Decorates a method that initializes an object, like `__init__`. Call it on the class to create an object.

    Example:
        >>> from fastpipe._private_constructor import private_constructor
        >>> class Pair:
        ...     @private_constructor("pair(...)")
        ...     def _of(self, first: int, second: int) -> None:
        ...         self.first, self.second = first, second
        >>> Pair._of(1, 2).second
        2
        >>> Pair(1, 2)
        Traceback (most recent call last):
        TypeError: Pair can't be constructed: use pair(...)

    Args:
        instead: Calls that return an object of the class, for the message.
    """
    return lambda initialize: PrivateConstructor(instead, initialize)
