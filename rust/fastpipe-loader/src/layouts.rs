//! Layouts: descriptions of where the parts of items lie. What a description says is the workers' matter; here it is
//! told to all of them, once for each layout.
//!
//! Whoever tells of one holds the turn meanwhile. A worker that is killed then keeps others waiting for their turn; but
//! without the killed one's rows no batch comes, so whoever waits for a batch finds out.

use std::sync::atomic::Ordering;
use std::time::Duration;

use fastpipe_memory::{Refused, futex};

use crate::control::LAYOUTS;
use crate::control_block::ControlBlock;

/// The number of the last layout, after one was told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastLayout {
    /// It is the one that was told of.
    Own(u32),
    /// Another was quicker.
    Others(u32),
}

/// How long a worker waits before it looks whether it is to end.
const PATIENCE: Duration = Duration::from_millis(100);

impl ControlBlock {
    /// The number of the layout that batches begin with; `None` while there is none.
    pub fn layout(&self) -> Option<u32> {
        Some(self.header().layout.load(Ordering::Acquire)).filter(|&layout| layout != 0)
    }

    /// Where the description of a layout lies. `None` if there is no such layout.
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

    /// The number of the last layout that was told of; 0 if there is none. The first one is no more than proposed until
    /// it is settled: it is that of one item, and others may be much smaller.
    pub fn last_layout(&self) -> u32 {
        self.header().layouts.load(Ordering::Acquire)
    }

    /// Lets batches begin with the first layout, unless there is another one meanwhile.
    pub fn settle_first_layout(&self) {
        if self.last_layout() > 0 {
            let layout = &self.header().layout;
            let _ = layout.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Tells of a layout with which batches are to begin from now on, once it is settled if it is the first one; unless
    /// another has been told of since `known` was the last one. Returns which one is the last now; `None` if there may
    /// be no more layouts, or workers are to end.
    ///
    /// # Errors
    ///
    /// [`Refused`] if there is no memory for the description.
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
            // SAFETY: the piece was just taken, with at least as many bytes.
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

    /// Tells of a layout that was known before, unless there is one already. It is settled.
    ///
    /// # Errors
    ///
    /// [`Refused`] if there is no memory for the description.
    pub fn tell_of(&self, description: &[u8]) -> Result<(), Refused> {
        self.tell(self.item_workers(), 0, description)?;
        self.settle_first_layout();
        Ok(())
    }
}
