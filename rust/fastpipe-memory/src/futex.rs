//! Waiting until a number in memory changes, and waking threads of any process that wait for it.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Waits while the number is `expected`, but no longer than `most`. It may return earlier, so the caller must check
/// again.
pub fn wait(number: &AtomicU32, expected: u32, most: Duration) {
    system::wait(number, expected, most);
}

/// Wakes all threads that wait for the number. The caller must have changed it before.
pub fn wake_all(number: &AtomicU32) {
    system::wake(number, i32::MAX.unsigned_abs());
}

/// Wakes up to `most` threads that wait for the number. The caller must have changed it before.
pub fn wake(number: &AtomicU32, most: u32) {
    system::wake(number, most);
}

/// Wakes one thread that waits for the number. The caller must have changed it before.
pub fn wake_one(number: &AtomicU32) {
    system::wake(number, 1);
}

#[cfg(all(target_os = "linux", not(miri)))]
mod system {
    use rustix::thread::futex::{self, Flags, Timespec};

    use super::*;

    pub(super) fn wait(number: &AtomicU32, expected: u32, most: Duration) {
        let most = Timespec::try_from(most).unwrap_or(Timespec {
            tv_sec: i64::MAX,
            tv_nsec: 0,
        });
        // The number had already changed, a signal arrived, or the time is over. The caller checks which.
        let _ = futex::wait(number, Flags::empty(), expected, Some(&most));
    }

    pub(super) fn wake(number: &AtomicU32, most: u32) {
        // This fails only for addresses that aren't mapped, and a reference is always mapped.
        let _ = futex::wake(number, Flags::empty(), most);
    }
}

/// A replacement within one process, for systems without a supported futex.
#[cfg(not(all(target_os = "linux", not(miri))))]
mod system {
    use std::sync::atomic::Ordering;
    use std::sync::{Condvar, Mutex, PoisonError};

    use super::*;

    const QUEUES: usize = 64;
    static LOCKS: [Mutex<()>; QUEUES] = [const { Mutex::new(()) }; QUEUES];
    static CHANGED: [Condvar; QUEUES] = [const { Condvar::new() }; QUEUES];

    fn queue(number: &AtomicU32) -> usize {
        (std::ptr::from_ref(number).addr() / 4) % QUEUES
    }

    pub(super) fn wait(number: &AtomicU32, expected: u32, most: Duration) {
        let queue = queue(number);
        let lock = LOCKS[queue].lock().unwrap_or_else(PoisonError::into_inner);
        if number.load(Ordering::SeqCst) == expected {
            // A wake-up for another number in the same queue is a spurious wake-up.
            drop(CHANGED[queue].wait_timeout(lock, most));
        }
    }

    pub(super) fn wake(number: &AtomicU32, _most: u32) {
        let queue = queue(number);
        drop(LOCKS[queue].lock().unwrap_or_else(PoisonError::into_inner));
        CHANGED[queue].notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_change_wakes_waiting_threads() {
        let number = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let waits = || {
                while number.load(Ordering::Acquire) == 0 {
                    wait(&number, 0, Duration::from_secs(60));
                }
            };
            let waiting: Vec<_> = (0..3).map(|_| scope.spawn(waits)).collect();
            std::thread::sleep(Duration::from_millis(20));
            let begin = Instant::now();
            number.store(1, Ordering::Release);
            wake_one(&number);
            wake_all(&number);
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(begin.elapsed() < Duration::from_secs(30));
        });
    }

    #[test]
    fn waiting_ends_at_once_after_a_change_or_at_the_timeout() {
        let number = AtomicU32::new(5);
        wait(&number, 4, Duration::from_secs(600));
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(5) {
            wait(&number, 5, Duration::from_millis(5));
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
        wait(&number, 4, Duration::MAX);
    }
}
