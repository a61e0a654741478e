//! Tables whose size depends on a file or an argument. If memory is exhausted, they return an error and don't abort the
//! process.

use crate::error::Error;

/// Reserves room for `more` elements. `what` names the table in the error.
pub fn try_reserve<T>(table: &mut Vec<T>, more: usize, what: &str) -> Result<(), Error> {
    table
        .try_reserve(more)
        .map_err(|_| Error::out_of_memory((table.len().saturating_add(more)).saturating_mul(size_of::<T>()), what))
}

/// Returns an empty table with room for exactly `capacity` elements.
pub fn try_with_capacity<T>(capacity: usize, what: &str) -> Result<Vec<T>, Error> {
    let mut table = Vec::new();
    table
        .try_reserve_exact(capacity)
        .map_err(|_| Error::out_of_memory(capacity.saturating_mul(size_of::<T>()), what))?;
    Ok(table)
}

/// Returns a table of `len` clones of `element`.
pub fn try_filled<T: Clone>(element: T, len: usize, what: &str) -> Result<Vec<T>, Error> {
    let mut table = try_with_capacity(len, what)?;
    table.resize(len, element);
    Ok(table)
}

/// Collects all elements of an iterator. The iterator's size hint determines the initial capacity.
#[inline]
pub fn try_collect<T>(elements: impl Iterator<Item = T>, what: &str) -> Result<Vec<T>, Error> {
    let (least, most) = elements.size_hint();
    let mut table = try_with_capacity(least, what)?;
    if most == Some(least) {
        // There is room for all elements, so checking the capacity for each is unnecessary.
        table.extend(elements);
        return Ok(table);
    }
    for element in elements {
        if table.len() == table.capacity() {
            try_reserve(&mut table, 1, what)?;
        }
        table.push(element);
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn impossible_allocations_are_errors() {
        let huge = usize::MAX / 32;
        let errors = [
            try_with_capacity::<u64>(huge, "a test").unwrap_err(),
            try_filled(7u64, huge, "a test").unwrap_err(),
            try_reserve(&mut vec![1u64], huge, "a test").unwrap_err(),
            try_collect((0..huge).map(|i| i as u64), "a test").unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::OutOfMemory);
            assert!(error.reason().ends_with("bytes for a test"), "{error}");
        }
    }

    #[test]
    fn collecting_keeps_all_items() {
        let odd: Vec<u32> = try_collect((0..1000).filter(|i| i % 2 == 1), "a test").unwrap();
        assert!(odd.iter().copied().eq((0..500).map(|i| 2 * i + 1)));
        assert_eq!(try_filled(7, 3, "a test").unwrap(), [7; 3]);
    }
}
