//! Open units.

use std::sync::Arc;

use fastpipe_batch::Unit;

use crate::memory::Memory;

/// An open unit. Its memory returns to the pool when it is dropped.
pub(crate) struct OpenUnit {
    unit: Box<dyn Unit>,
    memory: Arc<Memory>,
}

impl OpenUnit {
    pub(crate) fn new(unit: Box<dyn Unit>, memory: Arc<Memory>) -> Self {
        OpenUnit { unit, memory }
    }

    pub(crate) fn get(&self) -> &dyn Unit {
        &*self.unit
    }

    pub(crate) fn get_mut(&mut self) -> &mut dyn Unit {
        &mut *self.unit
    }
}

impl Drop for OpenUnit {
    fn drop(&mut self) {
        self.unit.recycle(self.memory.buffers());
    }
}
