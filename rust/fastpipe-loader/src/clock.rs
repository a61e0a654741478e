//! Clocks. On Unix, all processes of a machine share the same time.

/// Returns nanoseconds of the system's monotonic clock.
#[cfg(unix)]
pub fn nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Returns nanoseconds since the first call in this process. Without shared memory, no other process compares them.
#[cfg(not(unix))]
pub fn nanos() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;

    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Returns the processor time of this thread in nanoseconds, or the clock's time if the system doesn't report it.
#[cfg(unix)]
pub(crate) fn busy_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Returns the processor time of this thread in nanoseconds, or the clock's time if the system doesn't report it.
#[cfg(not(unix))]
pub(crate) fn busy_nanos() -> u64 {
    nanos()
}
