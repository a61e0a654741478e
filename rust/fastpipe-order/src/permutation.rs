//! A random permutation of units.

use fastpipe_random::{Draws, Key, Purpose};

use crate::failure::{Result, collected};

/// Up to this many units, the permutation is a table, drawn uniformly from all permutations. For more units it is
/// computed: a table would use as much memory as the index, and building it would take as long as iterating over it.
const MOST_IN_TABLE: usize = 1 << 16;

/// Rounds of the Feistel network: four for each half.
const ROUNDS: usize = 8;

/// A permutation of `0..len`.
#[derive(Debug)]
pub enum Permutation {
    /// A table.
    Table(Vec<u32>),
    /// A keyed bijection.
    Keyed(Feistel),
}

impl Permutation {
    /// Returns the random permutation of `len` units for this key.
    pub(crate) fn new(len: usize, key: Key) -> Result<Permutation> {
        Permutation::of(len, key, Purpose::Units)
    }

    /// Returns a random permutation of `0..len` for a purpose. It draws from streams 0 and 1.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the table of a short permutation can't be allocated.
    pub fn of(len: usize, key: Key, purpose: Purpose) -> Result<Permutation> {
        if len > MOST_IN_TABLE {
            return Ok(Permutation::Keyed(Feistel::new(len as u64, key, purpose)));
        }
        let mut table = collected(0..len as u32)?;
        Draws::new(key, purpose, 0).swap(0, len, &mut table, |i| len as u64 - i);
        Ok(Permutation::Table(table))
    }

    /// Returns the memory of a permutation of this many units, in bytes.
    pub(crate) fn bytes(len: usize) -> u64 {
        if len > MOST_IN_TABLE { 0 } else { 4 * len as u64 }
    }

    /// Returns the number of units.
    pub(crate) fn len(&self) -> usize {
        match self {
            Permutation::Table(table) => table.len(),
            Permutation::Keyed(feistel) => feistel.len as usize,
        }
    }

    /// Returns the unit at a position below `len`.
    #[inline]
    pub fn at(&self, place: usize) -> usize {
        match self {
            Permutation::Table(table) => table.get(place).map_or(0, |&unit| unit as usize),
            Permutation::Keyed(feistel) => feistel.at(place as u64) as usize,
        }
    }

    /// Returns the position of a unit below `len`, or `None` if that would need a search.
    #[inline]
    pub(crate) fn place_of(&self, unit: u64) -> Option<u64> {
        match self {
            Permutation::Table(_) => None,
            Permutation::Keyed(feistel) => Some(feistel.place_of(unit)),
        }
    }

    /// Returns the units from position `place` on, up to the length of `out`. A group is much faster than single
    /// look-ups: neither the multiplications nor the caller's memory accesses wait for each other.
    #[inline]
    pub(crate) fn some<'a>(&self, place: usize, out: &'a mut [u32; SOME]) -> &'a [u32] {
        let count = SOME.min(self.len().saturating_sub(place));
        let out = &mut out[..count];
        match self {
            Permutation::Table(table) => out.copy_from_slice(&table[place..place + count]),
            Permutation::Keyed(feistel) => feistel.some(place as u32, out),
        }
        out
    }
}

/// Number of units in a group look-up.
pub(crate) const SOME: usize = 64;

/// A keyed permutation of `0..len`. It is an alternating Feistel network over the next power of two, applied repeatedly
/// until the value is below `len` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It isn't a
/// secure cipher: the round function is a multiplication and a fold. That suffices: our statistical tests can't
/// distinguish the result from a random permutation.
#[derive(Clone, Copy, Debug)]
pub struct Feistel {
    len: u64,
    /// Number of bits in the lower half.
    low: u32,
    /// Number of bits in the upper half: the same as in the lower half, or one more.
    high: u32,
    keys: [u64; ROUNDS],
}

impl Feistel {
    fn new(len: u64, key: Key, purpose: Purpose) -> Feistel {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        // Each half has at least one bit, so that the shifts below are shorter than a word.
        let low = (bits / 2).max(1);
        let draws = Draws::new(key, purpose, 1);
        Feistel {
            len,
            low,
            high: bits.saturating_sub(low).max(1),
            keys: std::array::from_fn(|round| draws.word(round as u64)),
        }
    }

    #[inline(always)]
    fn at(&self, place: u64) -> u64 {
        let mut x = place;
        loop {
            x = self.once(x);
            // Less than half of all values are outside, so the loop takes less than two steps on average. It terminates
            // because it would return to its start value at the latest.
            if x < self.len {
                return x;
            }
        }
    }

    /// Returns the position of a value below `len`, by the same steps backward.
    #[inline(always)]
    fn place_of(&self, value: u64) -> u64 {
        let mut x = value;
        loop {
            x = self.once_back(x);
            if x < self.len {
                return x;
            }
        }
    }

    fn some(&self, place: u32, out: &mut [u32]) {
        // Indices of values that are still outside of the range, packed at the front.
        let (mut outside, mut walking) = ([0u8; SOME], 0);
        for (i, unit) in (0u8..).zip(out.iter_mut()) {
            *unit = self.once(u64::from(place) + u64::from(i)) as u32;
            // Written without a branch, which would be unpredictable.
            outside[walking.min(SOME - 1)] = i;
            walking += usize::from(u64::from(*unit) >= self.len);
        }
        while walking > 0 {
            let mut still = 0;
            for n in 0..walking {
                let i = outside[n];
                let unit = &mut out[usize::from(i)];
                *unit = self.once(u64::from(*unit)) as u32;
                outside[still] = i;
                still += usize::from(u64::from(*unit) >= self.len);
            }
            walking = still;
        }
    }

    #[inline(always)]
    fn once(&self, x: u64) -> u64 {
        let mut low = x & ((1 << self.low) - 1);
        let mut high = x >> self.low;
        for pair in self.keys.as_chunks::<2>().0 {
            high ^= mix(low, pair[0]) >> (u64::BITS - self.high);
            low ^= mix(high, pair[1]) >> (u64::BITS - self.low);
        }
        high << self.low | low
    }

    /// Inverse of [`once`](Self::once).
    #[inline(always)]
    fn once_back(&self, x: u64) -> u64 {
        let mut low = x & ((1 << self.low) - 1);
        let mut high = x >> self.low;
        for pair in self.keys.as_chunks::<2>().0.iter().rev() {
            low ^= mix(high, pair[1]) >> (u64::BITS - self.low);
            high ^= mix(low, pair[0]) >> (u64::BITS - self.high);
        }
        high << self.low | low
    }
}

/// Returns a word whose upper bits depend on all bits of both arguments.
#[inline(always)]
const fn mix(half: u64, key: u64) -> u64 {
    let x = (half ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_unit_stands_once(len in prop_oneof![0..200usize, 65_530..65_560usize, 131_000..131_100usize], seed: u64, epoch: u64) {
            let permutation = Permutation::new(len, Key { seed, epoch }).unwrap();
            let mut seen = vec![false; len];
            for place in 0..len {
                prop_assert!(!std::mem::replace(&mut seen[permutation.at(place)], true));
            }
            for place in (0..len).step_by(61) {
                let mut out = [0; SOME];
                let some = permutation.some(place, &mut out);
                prop_assert_eq!(some.len(), SOME.min(len - place));
                prop_assert!((place..).zip(some).all(|(place, &unit)| permutation.at(place) == unit as usize));
            }
        }

        #[test]
        fn networks_of_all_sizes_are_bijections(len in 1..3000u64, seed: u64) {
            let feistel = Feistel::new(len, Key { seed, epoch: 0 }, Purpose::Units);
            let mut seen = vec![false; len as usize];
            for place in 0..len {
                prop_assert!(!std::mem::replace(&mut seen[feistel.at(place) as usize], true));
                prop_assert_eq!(feistel.place_of(feistel.at(place)), place);
            }
        }
    }

    /// The permutation must never change.
    #[test]
    fn golden() {
        let key = Key { seed: 42, epoch: 1 };
        let few: Vec<_> = (0..10).map(|i| Permutation::new(10, key).unwrap().at(i)).collect();
        let many = Permutation::new(1_000_000, key).unwrap();
        let many: Vec<_> = (0..5).map(|i| many.at(i)).collect();
        assert_eq!(few, [0, 5, 9, 6, 1, 3, 8, 4, 2, 7]);
        assert_eq!(many, [75_365, 59_275, 656_518, 97_820, 628_282]);
    }
}
