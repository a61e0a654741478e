//! Copies of rows. Large copies are split over threads.
//!
//! The threads live for one call. Starting one takes as long as copying a few hundred kilobytes, so the caller copies
//! few rows itself. No threads remain when a rebatcher is dropped or the process forks.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

use fastpipe_batch::{OutOfBounds, Place, Span, gather, gather_places, gather_spans, scatter};

/// Minimum bytes per thread that are worth its start, and the wait for it when processors are busy.
const BYTES_PER_THREAD: usize = 4 << 20;

/// The rows to copy, and where they go.
pub(crate) enum Which<'a, T> {
    /// Copies all rows to the same places.
    All,
    /// Copies row `index[k]` to row `k`.
    From(&'a [u32]),
    /// Copies row `k` to row `index[k] - first`. The index ascends.
    To(&'a [u32], u32),
    /// Copies spans to consecutive places.
    Spans(&'a [Span]),
    /// Copies places of separate sources to consecutive places.
    Places(&'a [&'a [T]], &'a [Place]),
}

impl<T> Clone for Which<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Which<'_, T> {}

/// A copy of rows of `width` elements.
pub(crate) struct Copies<'a, T> {
    pub(crate) source: &'a [T],
    pub(crate) width: usize,
    pub(crate) which: Which<'a, T>,
    pub(crate) target: &'a mut [T],
}

impl<T: Copy> Copies<'_, T> {
    /// The size of the copied data in bytes.
    fn bytes(&self) -> usize {
        match self.which {
            Which::To(..) => size_of_val(self.source),
            _ => size_of_val(self.target),
        }
    }

    fn run(self) -> Result<(), OutOfBounds> {
        let Copies {
            source,
            width,
            which,
            target,
        } = self;
        match which {
            Which::All if source.len() != target.len() => Err(OutOfBounds),
            Which::All => {
                target.copy_from_slice(source);
                Ok(())
            }
            Which::From(index) => gather(source, width, index, target),
            Which::To(index, first) => scatter(source, width, index, first, target),
            Which::Spans(spans) => gather_spans(source, width, spans, target),
            Which::Places(sources, places) => gather_places(sources, width, places, target),
        }
    }

    /// Splits the copy into the first of `parts` shares of about the same size, and the rest.
    fn split(self, parts: usize) -> Result<(Self, Self), OutOfBounds> {
        let (width, len) = (self.width, self.target.len());
        // Work of both sides, and where the target and the source are split; `None` if both read the whole source.
        let (first, second, target_at, source_at) = match self.which {
            Which::All => (Which::All, Which::All, len / parts, Some(len / parts)),
            Which::From(index) => {
                let (a, b) = index.split_at(index.len() / parts);
                (Which::From(a), Which::From(b), a.len() * width, None)
            }
            Which::To(index, first) => {
                let (a, b) = index.split_at(index.len() / parts);
                let second = b.first().copied().unwrap_or(first);
                let at = second.saturating_sub(first) as usize * width;
                (Which::To(a, first), Which::To(b, second), at, Some(a.len() * width))
            }
            Which::Spans(spans) => {
                let (mut at, mut count) = (0, 0);
                while at < len / parts && count < spans.len() {
                    at += spans[count].len * width;
                    count += 1;
                }
                (Which::Spans(&spans[..count]), Which::Spans(&spans[count..]), at, None)
            }
            Which::Places(sources, places) => {
                let (a, b) = places.split_at(places.len() / parts);
                (
                    Which::Places(sources, a),
                    Which::Places(sources, b),
                    a.len() * width,
                    None,
                )
            }
        };
        let sources = match source_at {
            Some(at) => self.source.split_at_checked(at).ok_or(OutOfBounds)?,
            None => (self.source, self.source),
        };
        let targets = self.target.split_at_mut_checked(target_at).ok_or(OutOfBounds)?;
        let part = |source, which, target| Copies {
            source,
            width,
            which,
            target,
        };
        Ok((part(sources.0, first, targets.0), part(sources.1, second, targets.1)))
    }
}

/// Performs copies with at most this many threads. After an error, some copies may have been performed.
pub(crate) fn copy_all<T: Copy + Send + Sync>(copies: Vec<Copies<'_, T>>, threads: usize) -> Result<(), OutOfBounds> {
    let bytes: usize = copies.iter().map(Copies::bytes).sum();
    let threads = threads.min(bytes / BYTES_PER_THREAD);
    if threads <= 1 {
        return copies.into_iter().try_for_each(Copies::run);
    }
    // Every thread gets a share of every copy.
    let mut shares: Vec<Vec<_>> = (0..threads).map(|_| Vec::with_capacity(copies.len())).collect();
    for mut rest in copies {
        for (i, share) in shares.iter_mut().enumerate().skip(1) {
            let (part, others) = rest.split(threads + 1 - i)?;
            share.push(part);
            rest = others;
        }
        shares[0].push(rest);
    }
    // If a thread can't be started, other threads take its share.
    let shares = Mutex::new(shares);
    let work = || {
        while let Some(share) = next(&shares) {
            share.into_iter().try_for_each(Copies::run)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let start = |_| {
            let builder = std::thread::Builder::new().name("fastpipe-copy".to_owned());
            builder.spawn_scoped(scope, work).ok()
        };
        let started: Vec<_> = (1..threads).filter_map(start).collect();
        let own = work();
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        started.into_iter().map(join).fold(own, Result::and)
    })
}

fn next<S>(shares: &Mutex<Vec<S>>) -> Option<S> {
    shares.lock().unwrap_or_else(PoisonError::into_inner).pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_do_not_depend_on_the_number_of_threads() {
        const ROWS: usize = 120_000;
        const WIDTH: usize = 24;
        let source: Vec<u64> = (0..ROWS * WIDTH).map(|i| i as u64).collect();
        let index: Vec<u32> = (0..ROWS as u32).map(|i| i * 7919 % ROWS as u32).collect();
        let every_other: Vec<u32> = (0..ROWS as u32 / 2).map(|i| i * 2).collect();
        let spans: Vec<Span> = (0..ROWS - 5).map(|start| Span { start, len: start % 4 }).collect();
        let spanned = spans.iter().map(|span| span.len).sum::<usize>();
        let cases = [
            (Which::All, ROWS, ROWS),
            (Which::From(&index), ROWS, ROWS),
            (Which::To(&every_other, 0), ROWS / 2, ROWS),
            (Which::Spans(&spans), ROWS, spanned),
        ];
        for (which, from, to) in cases {
            let copied = |threads| {
                let mut target = vec![0; to * WIDTH];
                let copies = Copies {
                    source: &source[..from * WIDTH],
                    width: WIDTH,
                    which,
                    target: &mut target,
                };
                copy_all(vec![copies], threads).unwrap();
                target
            };
            let expected = copied(1);
            assert!(expected.iter().any(|&x| x > 0));
            for threads in [2, 3, 5] {
                assert!(copied(threads) == expected);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_match_are_errors() {
        let source = vec![1u64; 1 << 20];
        for threads in [1, 4] {
            for which in [Which::All, Which::From(&[0, 1]), Which::To(&[5], 2), Which::Spans(&[])] {
                let mut target = vec![0; (1 << 20) - 1];
                let copies = Copies {
                    source: &source,
                    width: 1,
                    which,
                    target: &mut target,
                };
                assert_eq!(copy_all(vec![copies], threads), Err(OutOfBounds));
            }
        }
    }
}
