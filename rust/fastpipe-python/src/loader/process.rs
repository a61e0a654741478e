//! Requests from a worker process to the operating system.

use pyo3::prelude::*;

/// Makes the operating system kill this process when the thread that started it ends, or the whole parent process. This
/// works even while this process is stopped. Returns false if the process with the ID `parent` has already ended.
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

/// Returns the memory in bytes that is currently available, or None if the system doesn't report it.
#[pyfunction]
pub(crate) fn available_memory() -> Option<u64> {
    fastpipe_memory::available_memory()
}
