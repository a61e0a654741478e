//! Interactions as a source whose units are shards.

use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, ColumnSpec, DType, Error, ErrorKind, Fetched, Form, Leaf, NestedForm, Pass, Result, Row, Sink, Source,
    SourceFacts, Unit, UnitInfo, Unpicked, Work,
};
use fastpipe_random::{Key, Purpose};

use crate::candidates::of_user;
use crate::positives::Positives;
use crate::sampler::Sampler;
use crate::shards::{Shard, cut, is_full};
use crate::unit::{Groups, Layout, OpenShard};

/// Approximate number of positives per shard by default.
pub const SHARD_POSITIVES: u64 = 32_000;

/// If all shards together take more bytes than this, shards are larger than [`SHARD_POSITIVES`]. Rows that are picked
/// at random would otherwise be spread over more pages than the TLB holds, unless pages are large.
const MANY_BYTES: u64 = 64 << 20;

/// Approximate size of a large shard in bytes: two large pages.
const LARGE_SHARD: u64 = 4 << 20;

/// Returns the approximate number of positives per shard, given the total and the bytes per positive. Orders depend on
/// this number.
fn shard_positives(positives: u64, stride: u64) -> u64 {
    match positives.saturating_mul(stride) {
        ..=MANY_BYTES => SHARD_POSITIVES,
        _ => SHARD_POSITIVES.max(LARGE_SHARD / stride),
    }
}

/// Options of the conversion of interactions into rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The type of the item column: an integer type that can represent each item.
    pub item_dtype: DType,
    /// The type of the label column: int8 or float32.
    pub label_dtype: DType,
    /// Whether users with too few unseen items are left out. Otherwise they are an error.
    pub skip_full: bool,
    /// The index of the first user, if the data is a part of a larger dataset.
    pub first_user: u32,
    /// The index of the first positive, if the data is a part of a larger dataset.
    pub first_positive: u64,
    /// Maximum number of positives per shard, unless its first user has more; `None` for [`SHARD_POSITIVES`], or more
    /// if the data is large.
    pub shard_positives: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            item_dtype: DType::I32,
            label_dtype: DType::I8,
            skip_full: false,
            first_user: 0,
            first_positive: 0,
            shard_positives: None,
        }
    }
}

/// The origin of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The shard.
    pub shard: u64,
    /// The user.
    pub user: u32,
    /// The index of the positive in the whole dataset.
    pub positive: u64,
    /// 0 for the positive itself, `k + 1` for its `k`-th negative.
    pub draw: u32,
}

/// Positives and their negatives, as rows of `user` (int32), `item` and `label` (1 or 0).
///
/// Row `r` of a shard belongs to its positive `r / (1 + negatives)`. The positive comes first, then its negatives.
#[derive(Debug)]
pub struct InteractionsSource {
    positives: Arc<Positives>,
    sampler: Sampler,
    settings: Settings,
    shards: Vec<Shard>,
    facts: SourceFacts,
    layout: Layout,
}

impl InteractionsSource {
    /// Creates a source from positives, and a sampler that draws their negatives.
    pub fn new(positives: Arc<Positives>, sampler: Sampler, settings: Settings) -> Result<InteractionsSource> {
        let most_users = i32::MAX as u32 - settings.first_user.min(i32::MAX as u32);
        if positives.users() > most_users {
            let (users, first) = (positives.users(), settings.first_user);
            let reason = format!("{users} users from number {first} on exceed the range of int32");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        check_dtype(settings.item_dtype, positives.num_items())?;
        check_label_dtype(settings.label_dtype)?;
        let full = (0..positives.users()).find(|&user| is_full(&positives, &sampler, user));
        if let (Some(user), false) = (full, settings.skip_full) {
            let (left, needed) = (sampler.left(positives.of(user)), sampler.needed());
            let reason = format!(
                "user {user} has {} of {} items, and {left} are left to draw {needed} negatives from; skip such users, or \
                 draw fewer negatives",
                positives.of(user).len(),
                positives.num_items(),
            );
            return Err(Error::new(ErrorKind::ValueRange, reason));
        }
        let layout = Layout::new(
            positives.num_items(),
            sampler.negatives(),
            settings.item_dtype,
            settings.label_dtype,
        );
        let default = || shard_positives(positives.len() as u64, layout.stride() as u64);
        let shards = cut(&positives, &sampler, settings.shard_positives.unwrap_or_else(default))?;
        let most_positives = u64::from(u32::MAX) / (1 + u64::from(sampler.negatives()));
        if let Some(shard) = shards.iter().find(|shard| shard.positives > most_positives) {
            let reason = format!(
                "user {} has {} positives, which is too many to draw {} negatives for each",
                shard.first_user,
                shard.positives,
                sampler.negatives(),
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let column =
            |name: &str, dtype| ColumnSpec::new(name, Form::Nested(NestedForm::dense(&[], Leaf::Fixed(dtype))));
        let columns = [
            column("user", DType::I32),
            column("item", settings.item_dtype),
            column("label", settings.label_dtype),
        ];
        let work = Work {
            open: "sampling",
            place: "gathering",
        };
        Ok(InteractionsSource {
            facts: SourceFacts::new(columns, "interactions", work),
            layout,
            positives,
            sampler,
            settings,
            shards,
        })
    }

    /// The shards.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the origin of a row of a unit, if the row exists.
    pub fn place_of(&self, unit: u64, record: u32) -> Option<Place> {
        let shard = self.shards.get(usize::try_from(unit).ok()?)?;
        let width = 1 + self.sampler.negatives();
        let mut group = (record / width) as usize;
        for user in self.users(shard) {
            let range = self.positives.range(user);
            if group < range.len() {
                return Some(Place {
                    shard: unit,
                    user: self.settings.first_user + user,
                    positive: self.settings.first_positive + (range.start + group) as u64,
                    draw: record % width,
                });
            }
            group -= range.len();
        }
        None
    }

    /// The users of a shard whose positives are rows.
    fn users(&self, shard: &Shard) -> impl Iterator<Item = u32> + '_ {
        let skip_full = self.settings.skip_full;
        (shard.first_user..shard.end_user)
            .filter(move |&user| !(skip_full && is_full(&self.positives, &self.sampler, user)))
    }

    /// Draws the negatives of a shard.
    fn sample(&self, shard: &Shard, pass: Pass, groups: &mut Groups<'_>) -> Result<()> {
        let negatives = self.sampler.negatives() as usize;
        let key = Key {
            seed: pass.seed,
            epoch: pass.epoch,
        };
        let mut sampling = self.sampler.start(key, Purpose::Negatives);
        let mut drawn = Vec::new();
        for user in self.users(shard) {
            let (items, range) = (self.positives.of(user), self.positives.range(user));
            drawn.resize(items.len() * negatives, 0);
            let first = self.settings.first_positive.wrapping_add(range.start as u64);
            sampling
                .draw(items, first.wrapping_mul(negatives as u64), &mut drawn)
                .map_err(|error| of_user(user, &error))?;
            groups.extend(user - shard.first_user, items, &drawn);
        }
        Ok(())
    }
}

/// Checks that labels can have this type.
fn check_label_dtype(dtype: DType) -> Result<()> {
    if matches!(dtype, DType::I8 | DType::F32) {
        return Ok(());
    }
    let reason = format!("labels must be int8 or float32; got {dtype}");
    Err(Error::new(ErrorKind::Unsupported, reason).at_feature("label"))
}

/// Checks that a type can represent each of `num_items` items.
fn check_dtype(dtype: DType, num_items: u32) -> Result<()> {
    let bits = match dtype {
        DType::I8 => 7,
        DType::U8 => 8,
        DType::I16 => 15,
        DType::U16 => 16,
        DType::I32 | DType::U32 | DType::I64 | DType::U64 => 31,
        DType::Bool | DType::F16 | DType::F32 | DType::F64 | DType::Datetime(_) | DType::Timedelta(_) => 0,
    };
    if bits == 0 {
        let reason = format!("items must have an integer type; got {dtype}");
        return Err(Error::new(ErrorKind::Unsupported, reason).at_feature("item"));
    }
    if u64::from(num_items) > 1 << bits {
        let reason = format!("{dtype} cannot represent {num_items} items: use int32");
        return Err(Error::new(ErrorKind::ValueRange, reason).at_feature("item"));
    }
    Ok(())
}

impl Source for InteractionsSource {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.shards.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let shard = &self.shards[unit as usize];
        UnitInfo {
            // The cast is exact, which `new` has checked.
            rows: shard.positives as u32 * (1 + self.sampler.negatives()),
            range: None,
            class: 0,
            apart: false,
            held: Some(shard.positives * self.layout.stride() as u64),
        }
    }

    fn open(&self, unit: u64, pass: Pass, _fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let shard = &self.shards[unit as usize];
        let mut open = OpenShard {
            layout: self.layout.clone(),
            rows: self.describe(unit).rows,
            first_user: self.settings.first_user + shard.first_user,
            bytes: pool.take(shard.positives as usize * self.layout.stride())?,
        };
        let sampled = self.sample(shard, pass, &mut open.groups());
        if let Err(error) = sampled {
            open.recycle(pool);
            return Err(error);
        }
        Ok(Box::new(open))
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        self.layout.pick(units, rows, slots, out)
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        let _ = unit;
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes to this function would change the order of rows.
    #[test]
    fn shard_sizes_never_change() {
        assert_eq!(shard_positives(0, 12), 32_000);
        assert_eq!(shard_positives(5_592_405, 12), 32_000);
        assert_eq!(shard_positives(5_592_406, 12), 349_525);
        assert_eq!(shard_positives(20_000_000, 404), 32_000);
        assert_eq!(shard_positives(u64::MAX, 4), 1 << 20);
    }
}
