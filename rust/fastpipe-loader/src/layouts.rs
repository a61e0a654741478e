//! Layouts: descriptions of where the parts of items are stored. The workers define the content of a description. This
//! module publishes each layout once, to all workers.
//!
//! A worker holds a lock, its *turn*, while it publishes a layout. If it is killed before it is done, other workers
//! wait for their turn forever. But the batch with the killed worker's rows is never ready either, so the consumer
//! notices.

use std::sync::atomic::Ordering;
use std::time::Duration;

use fastpipe_memory::{Refused, futex};

use crate::control::LAYOUTS;
use crate::control_block::ControlBlock;

/// The index of the last layout, returned after a worker has tried to publish one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastLayout {
    /// The layout that this worker published.
    Own(u32),
    /// A layout that another worker published first.
    Others(u32),
}

/// How often a waiting worker checks whether it must stop.
const PATIENCE: Duration = Duration::from_millis(100);

impl ControlBlock {
    /// Returns the number of the layout for new batches, or `None` until it is known.
    pub fn layout(&self) -> Option<u32> {
        Some(self.header().layout.load(Ordering::Acquire)).filter(|&layout| layout != 0)
    }

    /// Returns the offset and length of a layout's description, or `None` if the layout doesn't exist.
    pub fn description(&self, layout: u32) -> Option<(usize, usize)> {
        let header = self.header();
        if layout == 0 || layout > header.layouts.load(Ordering::Acquire) {
            return None;
        }
        let told = header.told.get(layout as usize - 1)?;
        Some((
            told.offset.load(Ordering::Relaxed) as usize,
            told.len.load(Ordering::Relaxed) as usize,
        ))
    }

    /// Returns the number of the last published layout, or 0 before the first one. The first layout is only a proposal
    /// until it is settled: it was derived from one item, and other items may be much smaller.
    pub fn last_layout(&self) -> u32 {
        self.header().layouts.load(Ordering::Acquire)
    }

    /// Makes the first layout the one for new batches, unless another layout has been published since.
    pub fn settle_first_layout(&self) {
        if self.last_layout() > 0 {
            let layout = &self.header().layout;
            let _ = layout.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Publishes a layout for new batches. If it is the first layout, it isn't used until it is settled. Nothing is
    /// published if another layout was published after `known`. Returns the last layout, or `None` if the maximum
    /// number of layouts is reached or workers must stop.
    ///
    /// # Errors
    ///
    /// [`Refused`] if memory for the description can't be allocated.
    pub fn tell(&self, item_worker: usize, known: u32, description: &[u8]) -> Result<Option<LastLayout>, Refused> {
        let header = self.header();
        let turn = item_worker as u32 + 1;
        while let Err(other) = header
            .telling
            .compare_exchange(0, turn, Ordering::Acquire, Ordering::Relaxed)
        {
            if self.stopped() {
                return Ok(None);
            }
            futex::wait(&header.telling, other, PATIENCE);
        }
        let last = header.layouts.load(Ordering::Relaxed);
        let told = self.tell_in_turn(known, last, description);
        header.telling.store(0, Ordering::Release);
        futex::wake_all(&header.telling);
        told
    }

    #[allow(unsafe_code)]
    fn tell_in_turn(&self, known: u32, last: u32, description: &[u8]) -> Result<Option<LastLayout>, Refused> {
        let header = self.header();
        if last != known {
            return Ok(Some(LastLayout::Others(last)));
        }
        let Some(told) = header.told.get(last as usize).filter(|_| (last as usize) < LAYOUTS) else {
            return Ok(None);
        };
        let len = description.len();
        let piece = self.arena().take(len)?;
        if let Some(start) = self.at(piece.offset, len) {
            // SAFETY: the extent was just allocated, with at least this many bytes.
            unsafe { start.as_ptr().copy_from_nonoverlapping(description.as_ptr(), len) };
        }
        told.offset.store(piece.offset as u64, Ordering::Relaxed);
        told.len.store(len as u64, Ordering::Relaxed);
        header.layouts.store(last + 1, Ordering::Release);
        if last > 0 {
            header.layout.store(last + 1, Ordering::Release);
        }
        Ok(Some(LastLayout::Own(last + 1)))
    }

    /// Publishes and settles a layout that was known in advance, unless a layout has already been published.
    ///
    /// # Errors
    ///
    /// [`Refused`] if memory for the description can't be allocated.
    pub fn tell_of(&self, description: &[u8]) -> Result<(), Refused> {
        self.tell(self.item_workers(), 0, description)?;
        self.settle_first_layout();
        Ok(())
    }
}
