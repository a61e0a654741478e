//! Copies rows between buffers by index.
//!
//! A row is `width` consecutive elements, and row `i` starts at `i * width`. Indices and spans are checked before
//! anything is copied, unless a function says otherwise. Elements may have any `Copy` type, including bytes that may be
//! uninitialized.
//!
//! Narrow rows of common widths are copied without a function call. Wide rows are prefetched several rows in advance
//! because the processor can't predict the next address.

use std::fmt;

use fastpipe_memory::{LINE, LINES, copy_and_prefetch, hint};

use crate::error::{Error, ErrorKind};

/// An index or a span is out of range, or the target has the wrong size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBounds;

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rows to copy are out of bounds")
    }
}

impl std::error::Error for OutOfBounds {}

impl From<OutOfBounds> for Error {
    #[cold]
    fn from(out: OutOfBounds) -> Error {
        Error::new(ErrorKind::Internal, out.to_string())
    }
}

/// A range of consecutive rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The first row.
    pub start: usize,
    /// The number of rows.
    pub len: usize,
}

/// A row in one of several sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the source.
    pub source: u32,
    /// Index of the row in the source.
    pub row: u32,
}

/// Calls `$narrow::<T, W>` if `$width` is a common width, otherwise evaluates `$wide`.
macro_rules! by_width {
    ($width:expr, $narrow:ident($($argument:expr),*), $wide:expr) => {
        match $width {
            1 => $narrow::<T, 1>($($argument),*),
            2 => $narrow::<T, 2>($($argument),*),
            4 => $narrow::<T, 4>($($argument),*),
            8 => $narrow::<T, 8>($($argument),*),
            16 => $narrow::<T, 16>($($argument),*),
            32 => $narrow::<T, 32>($($argument),*),
            64 => $narrow::<T, 64>($($argument),*),
            _ => $wide,
        }
    };
}

/// Copies row `index[k]` of `source` to row `k` of `target`, for all `k`.
///
/// # Errors
///
/// Returns [`OutOfBounds`] if an index is out of range or if `target` doesn't have exactly one row per index. Nothing
/// is copied in this case.
pub fn gather<T: Copy>(source: &[T], width: usize, index: &[u32], target: &mut [T]) -> Result<(), OutOfBounds> {
    let rows = source.len().checked_div(width).unwrap_or(usize::MAX);
    check(rows, width, index, 0, target.len())?;
    by_width!(
        width,
        gather_narrow(source, index, target),
        gather_wide(source, width, index, target)
    );
    Ok(())
}

/// Copies row `k` of `source` to row `index[k] - first` of `target`, for all `k`.
///
/// # Errors
///
/// Returns [`OutOfBounds`] if an index is out of range or if `source` doesn't have exactly one row per index. Nothing
/// is copied in this case.
pub fn scatter<T: Copy>(
    source: &[T],
    width: usize,
    index: &[u32],
    first: u32,
    target: &mut [T],
) -> Result<(), OutOfBounds> {
    let rows = target.len().checked_div(width).unwrap_or(usize::MAX);
    check(rows, width, index, first, source.len())?;
    by_width!(
        width,
        scatter_narrow(source, index, first, target),
        scatter_wide(source, width, index, first, target)
    );
    Ok(())
}

/// Copies spans of rows of `source` to consecutive rows of `target`.
///
/// # Errors
///
/// Returns [`OutOfBounds`] if a span is not within `source` or if `target` doesn't have exactly the size of all spans.
/// Nothing is copied in this case.
pub fn gather_spans<T: Copy>(source: &[T], width: usize, spans: &[Span], target: &mut [T]) -> Result<(), OutOfBounds> {
    let rows = source.len().checked_div(width).unwrap_or(usize::MAX);
    let mut total = 0usize;
    for span in spans {
        let end = span.start.checked_add(span.len).ok_or(OutOfBounds)?;
        if span.len > 0 && end > rows {
            return Err(OutOfBounds);
        }
        total = total.checked_add(span.len).ok_or(OutOfBounds)?;
    }
    if total.checked_mul(width) != Some(target.len()) {
        return Err(OutOfBounds);
    }
    let mut rest = target;
    for (k, span) in spans.iter().enumerate() {
        if let Some(later) = spans.get(k + AHEAD).filter(|later| later.len > 0) {
            ask_for(source, later.start * width, later.len * width);
        }
        let (now, behind) = rest.split_at_mut(span.len * width);
        if !now.is_empty() {
            now.copy_from_slice(&source[span.start * width..][..now.len()]);
        }
        rest = behind;
    }
    Ok(())
}

/// Copies the rows at these places of `sources` to consecutive rows of `target`. Intended for wide rows.
///
/// # Errors
///
/// Returns [`OutOfBounds`] if a place doesn't exist or if `target` doesn't have exactly one row per place. Some rows
/// may already be copied in this case.
pub fn gather_places<T: Copy>(
    sources: &[&[T]],
    width: usize,
    places: &[Place],
    target: &mut [T],
) -> Result<(), OutOfBounds> {
    if places.len().checked_mul(width) != Some(target.len()) {
        return Err(OutOfBounds);
    }
    if width == 0 {
        return Ok(());
    }
    let row = |place: &Place| row_of(sources.get(place.source as usize)?, width, place.row);
    let ahead = rows_ahead::<T>(width);
    for now in places.iter().take(ahead).filter_map(row) {
        ask_for(now, 0, width);
    }
    for (k, (target, place)) in target.chunks_exact_mut(width).zip(places).enumerate() {
        let later = places.get(k + ahead).and_then(row);
        copy_and_prefetch(row(place).ok_or(OutOfBounds)?, target, later.unwrap_or_default());
    }
    Ok(())
}

/// Copies row `from[k]` of `source` to row `to[k]` of `target`, for all `k`. Intended for wide rows.
///
/// # Errors
///
/// Returns [`OutOfBounds`] if a row doesn't exist or if `from` and `to` have different lengths. Some rows may already
/// be copied in this case.
pub fn move_rows<T: Copy>(
    source: &[T],
    width: usize,
    from: &[u32],
    to: &[u32],
    target: &mut [T],
) -> Result<(), OutOfBounds> {
    if from.len() != to.len() {
        return Err(OutOfBounds);
    }
    let ahead = rows_ahead::<T>(width);
    for (k, (&from_row, &to_row)) in from.iter().zip(to).enumerate() {
        let later = from.get(k + ahead).and_then(|&row| row_of(source, width, row));
        let start = (to_row as usize).checked_mul(width).ok_or(OutOfBounds)?;
        let target = target.get_mut(start..).and_then(|rest| rest.get_mut(..width));
        let source = row_of(source, width, from_row);
        let (source, target) = (source.ok_or(OutOfBounds)?, target.ok_or(OutOfBounds)?);
        copy_and_prefetch(source, target, later.unwrap_or_default());
    }
    Ok(())
}

#[inline(always)]
fn row_of<T>(source: &[T], width: usize, row: u32) -> Option<&[T]> {
    source.get((row as usize).checked_mul(width)?..)?.get(..width)
}

/// Returns how many rows in advance wide rows are prefetched. The distance is long enough for the memory to arrive in
/// time, and short enough that it isn't evicted from the cache before use.
fn rows_ahead<T>(width: usize) -> usize {
    BYTES_AHEAD
        .checked_div(width * size_of::<T>())
        .unwrap_or(0)
        .clamp(1, AHEAD)
}

/// Checks that all indices, less `first`, are below `rows` and that `len` is the number of elements of all indexed
/// rows.
fn check(rows: usize, width: usize, index: &[u32], first: u32, len: usize) -> Result<(), OutOfBounds> {
    // This doesn't stop at the first bad index. Bad indices are rare, and the loop can be vectorized without the early
    // exit.
    let most = index.iter().fold(0, |most, &i| most.max(i.wrapping_sub(first)));
    let below = index.is_empty() || (most as usize) < rows;
    if below && index.len().checked_mul(width) == Some(len) {
        Ok(())
    } else {
        Err(OutOfBounds)
    }
}

fn gather_narrow<T: Copy, const W: usize>(source: &[T], index: &[u32], target: &mut [T]) {
    let (source, target) = (source.as_chunks::<W>().0, target.as_chunks_mut::<W>().0);
    for (row, &i) in target.iter_mut().zip(index) {
        *row = source[i as usize];
    }
}

fn scatter_narrow<T: Copy, const W: usize>(source: &[T], index: &[u32], first: u32, target: &mut [T]) {
    let (source, target) = (source.as_chunks::<W>().0, target.as_chunks_mut::<W>().0);
    for (row, &i) in source.iter().zip(index) {
        target[(i - first) as usize] = *row;
    }
}

fn gather_wide<T: Copy>(source: &[T], width: usize, index: &[u32], target: &mut [T]) {
    if width == 0 {
        return;
    }
    for (k, (row, &i)) in target.chunks_exact_mut(width).zip(index).enumerate() {
        if let Some(&later) = index.get(k + AHEAD) {
            ask_for(source, later as usize * width, width);
        }
        row.copy_from_slice(&source[i as usize * width..][..width]);
    }
}

fn scatter_wide<T: Copy>(source: &[T], width: usize, index: &[u32], first: u32, target: &mut [T]) {
    if width == 0 {
        return;
    }
    for (row, &i) in source.chunks_exact(width).zip(index) {
        target[(i - first) as usize * width..][..width].copy_from_slice(row);
    }
}

/// Maximum number of rows in advance that memory is prefetched.
const AHEAD: usize = 8;
/// Number of bytes in advance that wide rows are prefetched.
const BYTES_AHEAD: usize = 4096;

/// Prefetches `len` elements from `start`.
#[inline(always)]
fn ask_for<T>(source: &[T], start: usize, len: usize) {
    let Some(wanted) = source.get(start..).map(|rest| &rest[..len.min(rest.len())]) else {
        return;
    };
    for line in 0..size_of_val(wanted).div_ceil(LINE).min(LINES) {
        hint(wanted.as_ptr().cast::<u8>().wrapping_add(line * LINE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTHS: [usize; 16] = [0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 64, 65, 1500];

    fn rows(n: usize, width: usize) -> Vec<u16> {
        (0..n * width).map(|i| i as u16).collect()
    }

    #[test]
    fn gathered_rows_match_the_index() {
        let index = [3, 0, 9, 9, 1, 7, 2, 2, 5];
        for width in WIDTHS {
            let source = rows(10, width);
            let mut target = vec![0; index.len() * width];
            gather(&source, width, &index, &mut target).unwrap();
            let expected: Vec<u16> = index
                .iter()
                .flat_map(|&i| &source[i as usize * width..][..width])
                .copied()
                .collect();
            assert_eq!(target, expected, "{width}");
        }
    }

    #[test]
    fn scattering_undoes_gathering() {
        let index = [4, 0, 3, 1, 2];
        for width in WIDTHS {
            let source = rows(5, width);
            let (mut there, mut back) = (vec![0; 5 * width], vec![0; 5 * width]);
            gather(&source, width, &index, &mut there).unwrap();
            scatter(&there, width, &index, 0, &mut back).unwrap();
            assert_eq!(back, source, "{width}");
            // Scatter again, this time from row 2 on.
            let mut tail = vec![0; 3 * width];
            scatter(&source[..2 * width], width, &[2, 4], 2, &mut tail).unwrap();
            assert_eq!(
                [&tail[..width], &tail[2 * width..]].concat(),
                source[..2 * width],
                "{width}"
            );
        }
    }

    #[test]
    fn spans_are_copied_consecutively() {
        let spans = [(3, 2), (0, 0), (9, 1), (0, 4), (10, 0), (3, 1), (1, 1), (0, 10)];
        let spans = spans.map(|(start, len)| Span { start, len });
        for width in WIDTHS {
            let source = rows(10, width);
            let mut target = vec![0; spans.iter().map(|s| s.len).sum::<usize>() * width];
            gather_spans(&source, width, &spans, &mut target).unwrap();
            let expected: Vec<u16> = spans
                .iter()
                .flat_map(|s| &source[s.start * width..][..s.len * width])
                .copied()
                .collect();
            assert_eq!(target, expected, "{width}");
        }
    }

    #[test]
    fn rows_are_gathered_from_several_sources_and_scattered() {
        let places: Vec<Place> = (0..40)
            .map(|k| (k % 3, k * 7 % 10))
            .map(|(source, row)| Place { source, row })
            .collect();
        let (from, to) = ([9, 0, 4, 4], [3, 0, 7, 1]);
        for width in WIDTHS {
            let sources = [rows(10, width), rows(20, width).split_off(10 * width), rows(10, width)];
            let sources = sources.each_ref().map(Vec::as_slice);
            let mut target = vec![0; places.len() * width];
            gather_places(&sources, width, &places, &mut target).unwrap();
            for (k, place) in places.iter().enumerate() {
                let expected = &sources[place.source as usize][place.row as usize * width..][..width];
                assert_eq!(&target[k * width..][..width], expected, "{width}");
            }
            let mut target = vec![7; 8 * width];
            move_rows(sources[0], width, &from, &to, &mut target).unwrap();
            for row in 0..8 {
                let moved = to.iter().position(|&to| to == row as u32);
                let expected = moved.map_or(vec![7; width], |k| {
                    sources[0][from[k] as usize * width..][..width].to_vec()
                });
                assert_eq!(target[row * width..][..width], expected, "{width}");
            }
        }
        let (source, mut target) = (rows(2, 3), [0; 6]);
        for (source_number, row) in [(1, 0), (0, 2), (u32::MAX, u32::MAX)] {
            let places = [
                Place { source: 0, row: 1 },
                Place {
                    source: source_number,
                    row,
                },
            ];
            assert_eq!(gather_places(&[&source], 3, &places, &mut target), Err(OutOfBounds));
        }
        assert_eq!(gather_places(&[&source], 3, &[], &mut target), Err(OutOfBounds));
        for (from, to) in [(&[2][..], &[0][..]), (&[0], &[2]), (&[0, 1], &[0])] {
            assert_eq!(move_rows(&source, 3, from, to, &mut target), Err(OutOfBounds));
        }
    }

    #[test]
    fn wide_rows_of_bytes_are_copied_whole() {
        for width in [1, 63, 64, 65, 512, 1000] {
            let source: Vec<u8> = (0..20 * width).map(|i| (i % 251) as u8).collect();
            let index: Vec<u32> = (0..20).map(|k| k * 7 % 20).collect();
            let places: Vec<Place> = index.iter().map(|&row| Place { source: 0, row }).collect();
            let row = |&i: &u32| &source[i as usize * width..][..width];
            let mut target = vec![0; source.len()];
            gather_places(&[&source], width, &places, &mut target).unwrap();
            assert_eq!(target, index.iter().map(row).collect::<Vec<_>>().concat(), "{width}");
            let mut back = vec![0; source.len()];
            let all: Vec<u32> = (0..20).collect();
            move_rows(&target, width, &all, &index, &mut back).unwrap();
            assert_eq!(back, source, "{width}");
        }
    }

    #[test]
    fn nothing_is_copied_if_an_index_is_out_of_bounds() {
        for width in [1, 3, 4, 100] {
            let source = rows(10, width);
            let mut target = vec![7; 3 * width];
            let spans = |start, len| [Span { start: 0, len: 1 }, Span { start, len }];
            assert_eq!(gather(&source, width, &[0, 1, 10], &mut target), Err(OutOfBounds));
            assert_eq!(gather(&source, width, &[0, 1], &mut target), Err(OutOfBounds));
            assert_eq!(gather(&source, width, &[0; 4], &mut target), Err(OutOfBounds));
            assert_eq!(scatter(&source, width, &[0; 9], 0, &mut target), Err(OutOfBounds));
            assert_eq!(
                scatter(&source[..2 * width], width, &[0, 3], 0, &mut target),
                Err(OutOfBounds)
            );
            for index in [[4, 8], [4, 3]] {
                assert_eq!(
                    scatter(&source[..2 * width], width, &index, 4, &mut target),
                    Err(OutOfBounds)
                );
            }
            for (start, len) in [(9, 2), (usize::MAX, 2), (11, 2), (0, 1), (0, 3)] {
                assert_eq!(
                    gather_spans(&source, width, &spans(start, len), &mut target),
                    Err(OutOfBounds)
                );
            }
            assert!(target.iter().all(|&x| x == 7));
        }
    }
}
