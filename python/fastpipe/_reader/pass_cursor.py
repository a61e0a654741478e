"""How far the passes of a reader have come, and where the next one begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpipe._reader import state as _state

if TYPE_CHECKING:
    from fastpipe._fastpipe import Position

__all__ = ["PassCursor"]


class PassCursor:
    """How far the passes of a reader have come.

    Args:
        epoch: with which the next pass begins.
        loaded: what is to be resumed, if anything: the epoch with which its pass began, and its progress.

    Attributes:
        loaded: as above, until a pass begins.
        position: of the last pass; None if there was none, or something was said of the next one since.
    """

    def __init__(self, epoch: int = 0, loaded: tuple[int, _state.State] | None = None) -> None:
        self.loaded = loaded
        self.position: Position | None = None
        # With which the last pass began, or the next one will.
        self._first = epoch
        # What the pass of that position began with.
        self._begun: tuple[int, _state.State | None] = 0, None

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last; before a pass, or after its end, that of the next pass."""
        return self._first if self.position is None else self.position.epoch

    @property
    def pass_epoch(self) -> int:
        """The epoch with which the active or last pass began, or that of a loaded state."""
        return self._first if self.loaded is None else self.loaded[0]

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass start with this epoch, from its beginning."""
        self._first, self.position, self.loaded = epoch, None, None

    def load(self, pass_epoch: int, progress: _state.State) -> None:
        """Lets the next pass resume one that began with this epoch, behind this progress."""
        self.set_epoch(int(progress["epoch"]))
        self.loaded = pass_epoch, progress

    def go_back(self, progress: _state.State) -> None:
        """Lets the next pass be the last one once more, behind this progress."""
        self.loaded = self._first, progress

    def next_start(self) -> tuple[int, _state.State | None]:
        """The epoch with which the next pass begins, and where a loaded state resumes it.

        A pass that has yielded a batch counts as an epoch, whether the consumer saw its end, left it, or an error ended
        it: the next pass begins with the epoch after the one that was being read. A pass without a batch begins again
        where it began: `tqdm.auto.tqdm(reader)` calls `iter` twice, and a loaded state must outlive that.
        """
        if self.loaded is not None:
            return self.loaded
        position = self.position
        if position is None:
            return self._first, None
        if position.ended:
            return position.epoch, None
        return self._begun if position.delivered == 0 else (position.epoch + 1, None)

    def following(self) -> tuple[int, tuple[int, _state.State] | None]:
        """The arguments of a cursor whose first pass is the next pass of this one."""
        epoch, progress = self.next_start()
        return (epoch, None) if progress is None else (int(progress["epoch"]), (epoch, progress))

    def start(self, epoch: int, progress: _state.State | None, position: Position) -> None:
        """A pass has begun, with what `next_start` returned."""
        self.loaded = None
        self._first, self.position = epoch, position
        self._begun = epoch, progress

    def here(self, world_size: int, *, ended_stays: bool) -> tuple[int, _state.State]:
        """The epoch with which the pass began, and its progress.

        Args:
            world_size: number of ranks.
            ended_stays: whether a pass that the consumer saw end is at that end; otherwise at the start of the next.
        """
        if self.loaded is not None:
            return self.loaded
        if self.position is None:
            return self._first, _state.fresh(self._first, world_size)
        progress = self.position.progress()
        return self.behind(progress, ended=self.position.ended and not ended_stays)

    def behind(self, progress: _state.State, *, ended: bool) -> tuple[int, _state.State]:
        """The same of the last pass when its position had made this progress.

        Args:
            progress: of the position, behind a batch.
            ended: whether the consumer has seen the end of the pass.
        """
        # Behind the end a new pass begins. Before the consumer has seen that, its pass is to end where it is.
        return int(progress["epoch"]) if ended else self._first, progress
