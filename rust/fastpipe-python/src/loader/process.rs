//! What a worker's process asks the system for.

use pyo3::prelude::*;

/// Ends this process when the thread that started it ends, as it does with its process, even while this one is stopped.
/// False if that has ended already: `parent` is the process's id.
#[pyfunction]
pub(crate) fn end_with_parent(parent: u32) -> PyResult<bool> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};

        set_parent_process_death_signal(Some(Signal::KILL)).map_err(std::io::Error::from)?;
    }
    #[cfg(unix)]
    return Ok(std::os::unix::process::parent_id() == parent);
    #[cfg(not(unix))]
    {
        let _ = parent;
        Ok(true)
    }
}

/// Bytes of memory that may be taken at present; None where the system doesn't say.
#[pyfunction]
pub(crate) fn available_memory() -> Option<u64> {
    fastpipe_memory::available_memory()
}
