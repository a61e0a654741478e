"""The position of a reader's passes: where the last pass is, and where the next one starts."""

from __future__ import annotations

from fastpipe._fastpipe import Position
from fastpipe._reader import state as _state


class PassCursor:
    """The position of a reader's passes.

    Args:
        epoch: Epoch with which the next pass begins.
        loaded: Loaded state to resume from, if any: the epoch with which its pass began, and its progress.

    Attributes:
        loaded: Loaded state, until a pass starts.
        position: Position of the last pass. None before the first pass, and after the start of the next pass was set.
        begun: The start of the last pass: its epoch, and the progress of the state from which it resumed, if any.
    """

    def __init__(self, epoch: int = 0, loaded: tuple[int, _state.State] | None = None) -> None:
        self.loaded = loaded
        self.position: Position | None = None
        # The epoch with which the last pass began, or the next one will.
        self._first = epoch
        self.begun: tuple[int, _state.State | None] = 0, None

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was yielded. Before a pass or after its end, the epoch of the next pass."""
        return self._first if self.position is None else self.position.epoch

    @property
    def pass_epoch(self) -> int:
        """The epoch with which the active or last pass began, or in which the pass of a loaded state began."""
        return self._first if self.loaded is None else self.loaded[0]

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass start at the beginning of this epoch."""
        self._first, self.position, self.loaded = epoch, None, None

    def load(self, pass_epoch: int, progress: _state.State) -> None:
        """Makes the next pass resume, at this progress, a pass that began with epoch `pass_epoch`."""
        self.set_epoch(int(progress["epoch"]))
        self.loaded = pass_epoch, progress

    def go_back(self, progress: _state.State) -> None:
        """Makes the next pass repeat the last one from this progress."""
        self.loaded = self._first, progress

    def next_start(self) -> tuple[int, _state.State | None]:
        """Returns the epoch with which the next pass begins, and the progress at which a loaded state resumes it.

        A pass that has yielded a batch counts as an epoch, even if the consumer left it or an error ended it. The next
        pass then begins with the epoch after the one that was being read. A pass without a batch starts again at the
        same place: `tqdm.auto.tqdm(reader)` calls `iter` twice, and the second call must not discard a loaded state.
        """
        if self.loaded is not None:
            return self.loaded
        position = self.position
        if position is None:
            return self._first, None
        if position.ended:
            return position.epoch, None
        return self.begun if position.delivered == 0 else (position.epoch + 1, None)

    def following(self) -> tuple[int, tuple[int, _state.State] | None]:
        """Returns the arguments of a new cursor that continues with the next pass of this one."""
        epoch, progress = self.next_start()
        return (epoch, None) if progress is None else (int(progress["epoch"]), (epoch, progress))

    def start(self, epoch: int, progress: _state.State | None, position: Position) -> None:
        """Records that a pass has begun, with the values that `next_start` returned."""
        self.loaded = None
        self._first, self.position = epoch, position
        self.begun = epoch, progress

    def here(self, world_size: int, *, ended_stays: bool) -> tuple[int, _state.State]:
        """Returns the epoch with which the pass began, and its progress.

        Args:
            world_size: Number of ranks.
            ended_stays: Whether the state of a pass that the consumer saw end stays at that end. Otherwise it is at the
                start of the next pass.
        """
        if self.loaded is not None:
            return self.loaded
        if self.position is None:
            return self._first, _state.fresh(self._first, world_size)
        progress = self.position.progress()
        return self.at(progress, ended=self.position.ended and not ended_stays)

    def at(self, progress: _state.State, *, ended: bool) -> tuple[int, _state.State]:
        """Returns the epoch with which the last pass began, and an earlier progress of it.

        Args:
            progress: Progress of the position after a batch.
            ended: Whether the consumer has seen the end of the pass.
        """
        # After the end a new pass begins. Until the consumer has seen the end, the state still belongs to the old pass.
        return int(progress["epoch"]) if ended else self._first, progress
