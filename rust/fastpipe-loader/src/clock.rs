//! The time, as all processes of a machine have it.

/// Nanoseconds of the system's monotonic clock.
#[cfg(unix)]
pub fn nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Nanoseconds since this process first asked: without processes in common there is no other.
#[cfg(not(unix))]
pub fn nanos() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;

    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Nanoseconds of a processor that this thread has used; those of the clock where there is no such number.
#[cfg(unix)]
pub(crate) fn busy_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Nanoseconds of a processor that this thread has used; those of the clock where there is no such number.
#[cfg(not(unix))]
pub(crate) fn busy_nanos() -> u64 {
    nanos()
}
