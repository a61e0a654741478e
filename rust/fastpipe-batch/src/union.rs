//! A source that has the units of several other sources, for mixtures.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::buffers::BufferPool;
use crate::error::{Error, ErrorKind};
use crate::fallible::{try_collect, try_filled, try_reserve};
use crate::sink::Sink;
use crate::source::{
    Access, ByteRange, Fetched, Mark, Pass, Pick, Row, Source, SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work,
};
use crate::{Result, try_with_capacity};

/// The purpose of the memory for lists of a batch's units, as named in error messages.
const UNITS: &str = "the list of a batch's units";

/// One of the sources of a union.
#[derive(Clone)]
pub struct UnionMember {
    /// The source.
    pub source: Arc<dyn Source>,
    /// How many numbers of its units occur. A source that is itself a union has more of them than units.
    pub units: u64,
    /// Number of passes over this source in each epoch.
    pub passes: u64,
    /// The seed of its random draws.
    pub seed: u64,
}

/// Where a member's units, files and classes begin among those of all members.
#[derive(Clone, Copy)]
struct Offsets {
    unit: u64,
    location: u32,
    class: u32,
    /// The first member whose units the same call of [`Source::pick`] accepts.
    family: u32,
}

/// The units of several sources with equal columns, one source after the other.
///
/// Let `n` be the number of all units. Unit `p * n + u` is unit `u` in pass `p` of the epoch. So a unit that is read
/// several times in an epoch is a different unit each time, with other random draws.
pub struct Union {
    facts: SourceFacts,
    members: Vec<UnionMember>,
    offsets: Vec<Offsets>,
    units: u64,
}

impl Union {
    /// Creates the source.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if there are no members, or columns differ; [`ErrorKind::Limit`] if there are too many
    /// units; [`ErrorKind::Unsupported`] if a member can't be read in any order; [`ErrorKind::OutOfMemory`].
    pub fn new(members: Vec<UnionMember>) -> Result<Union> {
        let Some(first) = members.first() else {
            return Err(Error::new(ErrorKind::Shape, "a mixture needs at least one reader"));
        };
        let first = first.source.facts();
        let mut facts = SourceFacts {
            columns: first.columns.clone(),
            classes: Vec::new(),
            work: first.work,
            locations: Vec::new(),
            stamps: Vec::new(),
            contents: Vec::new(),
            access: Access::Random,
            fetches: 0,
        };
        let (mut units, mut offsets) = (0u64, try_with_capacity(members.len(), UNITS)?);
        for (index, member) in members.iter().enumerate() {
            let own = member.source.facts();
            member.source.check_random()?;
            if own.columns != facts.columns {
                let reason = format!("the columns of reader {index} of a mixture differ from those of the first one");
                return Err(Error::new(ErrorKind::Shape, reason));
            }
            let alike = |other: &&UnionMember| other.source.shares_pick(&*member.source);
            let family = members[..index].iter().take_while(|other| !alike(other)).count();
            offsets.push(Offsets {
                unit: units,
                location: 0,
                class: facts.classes.len() as u32,
                family: family as u32,
            });
            units = units
                .checked_add(member.units)
                .filter(|&units| units < 1 << 62)
                .ok_or_else(|| Error::new(ErrorKind::Limit, "the readers of a mixture have more than 2^62 units"))?;
            facts.classes.extend_from_slice(&own.classes);
            facts.fetches = facts.fetches.saturating_add(own.fetches);
            if own.work != facts.work {
                facts.work = Work {
                    open: "opening",
                    place: "decoding",
                };
            }
            if own.access == Access::Sequence {
                facts.access = Access::Sequence;
            }
        }
        // Files with a stamp come first, because stamps are listed without gaps.
        for stamped in [true, false] {
            for (member, offset) in members.iter().zip(&mut offsets) {
                let own = member.source.facts();
                if own.stamps.is_empty() != stamped {
                    offset.location = facts.locations.len() as u32;
                    facts.locations.extend_from_slice(&own.locations);
                    facts.stamps.extend_from_slice(&own.stamps);
                    facts.contents.extend_from_slice(&own.contents);
                    facts.contents.resize(facts.locations.len(), None);
                }
            }
        }
        Ok(Union {
            facts,
            members,
            offsets,
            units,
        })
    }

    /// Returns the index of the member that has a unit, the pass over it, and the member's own number of the unit.
    pub fn find(&self, unit: u64) -> (usize, u64, u64) {
        let (pass, unit) = (unit / self.units.max(1), unit % self.units.max(1));
        // Members without units have the same offset as the next member.
        let member = self
            .offsets
            .partition_point(|offset| offset.unit <= unit)
            .saturating_sub(1);
        (member, pass, unit - self.offsets[member].unit)
    }

    fn member(&self, unit: u64) -> (&UnionMember, u64) {
        let (member, _, own) = self.find(unit);
        (&self.members[member], own)
    }
}

impl Source for Union {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        let mut members = try_with_capacity(self.members.len(), UNITS)?;
        for member in &self.members {
            // The columns are equal, so either all members have another layout or none has.
            let Some(source) = member.source.in_csr()? else {
                return Ok(None);
            };
            members.push(UnionMember {
                source,
                ..member.clone()
            });
        }
        Ok(Some(Arc::new(Union::new(members)?)))
    }

    fn units(&self) -> u64 {
        self.units
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let (index, _, own) = self.find(unit);
        let (offset, info) = (self.offsets[index], self.members[index].source.describe(own));
        let range = info.range.map(|range| ByteRange {
            location: range.location + offset.location,
            ..range
        });
        UnitInfo {
            range,
            class: info.class + offset.class,
            ..info
        }
    }

    fn follows(&self, unit: u64) -> bool {
        let (member, own) = self.member(unit);
        own > 0 && member.source.follows(own)
    }

    fn is_fetched(&self, unit: u64) -> bool {
        let (member, own) = self.member(unit);
        member.source.is_fetched(own)
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        let (member, own) = self.member(unit);
        member.source.fetch(own, cancelled)
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let (index, number, own) = self.find(unit);
        let member = &self.members[index];
        let pass = Pass {
            seed: member.seed,
            epoch: pass.epoch.wrapping_mul(member.passes).wrapping_add(number),
            ..pass
        };
        Ok(Box::new(UnionUnit {
            whole: member.source.open(own, pass, fetched, pool)?,
            family: self.offsets[index].family,
            indexed: member.source.facts().access == Access::Random,
        }))
    }

    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked> {
        let at_start = |error| Unpicked {
            slot: slots.start,
            error,
        };
        let own = crate::own_units::<UnionUnit>(units).map_err(at_start)?;
        let Some(first) = own.first() else { return Ok(()) };
        let source = |family: u32| &self.members[family as usize].source;
        if own.iter().all(|unit| unit.family == first.family) {
            let whole: Vec<&dyn Unit> = try_collect(own.iter().map(|unit| &*unit.whole), UNITS).map_err(at_start)?;
            return source(first.family).pick(&whole, rows, slots, out);
        }
        // Rows whose units belong to one family, in consecutive slots, are picked by one call.
        let mut runs = Runs::new(own.len(), slots.end).map_err(at_start)?;
        let mut from = slots.start;
        while from < slots.end {
            let family = |slot: usize| own[rows[slot].unit as usize].family;
            let to = (from..slots.end)
                .find(|&slot| family(slot) != family(from))
                .unwrap_or(slots.end);
            let (whole, rows) = runs.of(&own, rows, from..to).map_err(at_start)?;
            source(family(from)).pick(whole, rows, from..to, out)?;
            from = to;
        }
        Ok(())
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        let (member, own) = self.member(unit);
        member.source.locate(own, error)
    }

    fn shares_pick(&self, other: &dyn Source) -> bool {
        // The families of two unions are numbered differently.
        (other as &dyn Any)
            .downcast_ref::<Union>()
            .is_some_and(|other| std::ptr::eq(self, other))
    }
}

/// The units and rows of one run at a time.
struct Runs<'u> {
    units: Vec<&'u dyn Unit>,
    rows: Vec<Row>,
    /// For each unit of the batch: the slot in which the last run with this unit begins, and its index in that run.
    numbers: Vec<(usize, u32)>,
}

impl<'u> Runs<'u> {
    /// Prepares for the runs of a batch.
    fn new(units: usize, slots: usize) -> Result<Runs<'u>> {
        Ok(Runs {
            units: Vec::new(),
            rows: try_filled(Row { unit: 0, record: 0 }, slots, UNITS)?,
            numbers: try_filled((usize::MAX, 0), units, UNITS)?,
        })
    }

    /// Returns the units of the rows in these slots, and the rows with indices into them. Only these slots are valid.
    fn of(&mut self, own: &[&'u UnionUnit], rows: &[Row], slots: Range<usize>) -> Result<(&[&'u dyn Unit], &[Row])> {
        self.units.clear();
        for slot in slots.clone() {
            let row = rows[slot];
            let number = &mut self.numbers[row.unit as usize];
            if number.0 != slots.start {
                *number = (slots.start, self.units.len() as u32);
                try_reserve(&mut self.units, 1, UNITS)?;
                self.units.push(&*own[row.unit as usize].whole);
            }
            self.rows[slot] = Row {
                unit: number.1,
                record: row.record,
            };
        }
        Ok((&self.units, &self.rows[..slots.end]))
    }
}

/// An open unit of a member.
struct UnionUnit {
    whole: Box<dyn Unit>,
    family: u32,
    /// Whether its rows are found without an index.
    indexed: bool,
}

impl Unit for UnionUnit {
    fn rows(&self) -> u32 {
        self.whole.rows()
    }

    fn held_bytes(&self) -> usize {
        self.whole.held_bytes()
    }

    fn bytes(&self) -> usize {
        self.whole.bytes()
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        self.whole.place(from, picks, out)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        self.whole.advance(from, record)
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        match self.indexed {
            true => Ok(known.unwrap_or_default()),
            false => self.whole.index(known),
        }
    }

    fn recycle(&mut self, pool: &BufferPool) {
        self.whole.recycle(pool);
    }
}
