//! Infers features from some of the records. A TFRecord file has no schema.
//!
//! A feature whose lists all have the same number of values is dense, and any other is ragged. A feature that some
//! records lack is nullable. The values of a `bytes_list` are strings if all of them are UTF-8.

use std::collections::HashMap;

use fastpipe_batch::{
    DType, Error, ErrorKind, Feature, Leaf, Nulls, Request, Result, Unit, nearest, try_collect, try_reserve,
};

use crate::example::{Kind, entries, list};
use crate::plan::Program;
use crate::unit::Records;
use crate::wire::Cursor;

/// Maximum number of inferred features.
pub const MAX_COLUMNS: usize = 10_000;

/// What is known about a feature.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Whether lists of each kind were seen, by [`Kind`].
    kinds: [bool; 4],
    /// Number of records with a list.
    rows: u64,
    /// The number of values of the first list.
    count: usize,
    /// Whether the lists have different numbers of values.
    varies: bool,
    /// Whether a value isn't UTF-8.
    binary: bool,
}

impl Seen {
    /// Adds the feature of a record.
    fn add(&mut self, feature: Cursor<'_>) -> std::result::Result<(), crate::wire::Fault> {
        let Some(list) = list(feature)? else { return Ok(()) };
        let count = list.count()?;
        self.varies |= self.rows > 0 && count != self.count;
        self.count = if self.rows == 0 { count } else { self.count };
        self.rows += 1;
        self.kinds[list.kind as usize] = true;
        if list.kind == Kind::Bytes && !self.binary {
            list.pieces(|piece| {
                self.binary |= simdutf8::basic::from_utf8(piece.rest()).is_err();
                Ok::<(), crate::wire::Fault>(())
            })?;
        }
        Ok(())
    }

    fn has(&self, kind: Kind) -> bool {
        self.kinds[kind as usize]
    }

    /// Returns the type of the values. Numbers that are integers in some records and floats in others are `float64`.
    fn leaf(&self) -> Option<Leaf> {
        let (ints, floats) = (self.has(Kind::Ints), self.has(Kind::Floats));
        match (self.has(Kind::Bytes), ints, floats) {
            (true, false, false) => Some(Leaf::Bytes { utf8: !self.binary }),
            (false, true, false) => Some(Leaf::Fixed(DType::I64)),
            (false, false, true) => Some(Leaf::Fixed(DType::F32)),
            (false, true, true) => Some(Leaf::Fixed(DType::F64)),
            _ => None,
        }
    }
}

/// What is known about the features of records.
#[derive(Default)]
pub struct Evidence {
    indices: HashMap<Box<[u8]>, usize>,
    seen: Vec<Seen>,
    /// The only names that are examined. `None` for all.
    wanted: Option<Vec<String>>,
    records: u64,
    /// The indices of the features of a record.
    own: Vec<usize>,
}

impl Evidence {
    /// Creates an empty collection. With `wanted`, only features with these names are examined.
    pub fn new(wanted: Option<Vec<String>>) -> Evidence {
        Evidence {
            wanted,
            ..Evidence::default()
        }
    }

    /// Whether each of the wanted features was seen in a record.
    pub fn is_complete(&self) -> bool {
        let complete = |name: &String| self.of(name).is_some_and(|seen| seen.rows > 0);
        self.wanted.as_ref().is_some_and(|wanted| wanted.iter().all(complete))
    }

    /// Returns the wanted features that no record has, if any record was examined.
    pub fn never_seen(&self) -> Vec<&str> {
        let never = |name: &&String| self.records > 0 && self.of(name).is_none_or(|seen| seen.rows == 0);
        let wanted = self.wanted.iter().flatten();
        wanted.filter(never).map(String::as_str).collect()
    }

    fn of(&self, name: &str) -> Option<&Seen> {
        self.indices.get(name.as_bytes()).map(|&index| &self.seen[index])
    }

    /// Examines the first records of a unit.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if a record is damaged; [`ErrorKind::Limit`] if the records have too many features.
    pub fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()> {
        let Some(unit) = (unit as &dyn std::any::Any).downcast_ref::<Records>() else {
            return Ok(());
        };
        let mut at = 0;
        for number in 0..records.min(unit.rows) {
            let (message, end) = unit.message(at, number)?;
            let fault = |fault: crate::wire::Fault| fault.into_error(unit.offset).at_record(number.into());
            self.record(message).map_err(fault)?;
            if self.seen.len() > MAX_COLUMNS && self.wanted.is_none() {
                let reason = format!(
                    "the records have more than {MAX_COLUMNS} features, the limit of inference; name the features that you need with \
                     columns= or features="
                );
                return Err(Error::new(ErrorKind::Limit, reason).at_record(number.into()));
            }
            at = end;
        }
        Ok(())
    }

    fn record(&mut self, message: Cursor<'_>) -> std::result::Result<(), crate::wire::Fault> {
        let (indices, seen, own) = (&mut self.indices, &mut self.seen, &mut self.own);
        let mut last: Vec<Option<Cursor<'_>>> = Vec::new();
        own.clear();
        entries(message, |key, feature| {
            let index = match indices.get(key) {
                Some(&index) => index,
                None if seen.len() > MAX_COLUMNS => return,
                None => {
                    indices.insert(key.into(), seen.len());
                    seen.push(Seen::default());
                    seen.len() - 1
                }
            };
            // A later entry with the same key replaces the earlier one.
            match own
                .iter()
                .position(|&earlier| earlier == index)
                .filter(|_| own.len() <= 64)
            {
                Some(place) => last[place] = Some(feature),
                None => {
                    own.push(index);
                    last.push(Some(feature));
                }
            }
        })?;
        if own.len() > 64 {
            // Too many to compare each with each. The last entry of each key is kept.
            let mut places: HashMap<usize, usize> = HashMap::new();
            for (place, &index) in own.iter().enumerate() {
                if let Some(earlier) = places.insert(index, place) {
                    last[earlier] = None;
                }
            }
        }
        for (&index, feature) in own.iter().zip(&last) {
            if let Some(feature) = feature {
                seen[index].add(*feature)?;
            }
        }
        self.records += 1;
        Ok(())
    }

    /// Returns the inferred features, sorted by name, and the names of features whose type is unknown because all of
    /// their lists are missing.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if a wanted feature doesn't exist, or if a feature has values of different types.
    pub fn features(&self) -> Result<(Vec<Feature>, Vec<String>)> {
        let mut names: Vec<&str> = match &self.wanted {
            Some(wanted) => wanted.iter().map(String::as_str).collect(),
            None => try_collect(
                self.indices.keys().filter_map(|key| std::str::from_utf8(key).ok()),
                "features",
            )?,
        };
        if self.wanted.is_none() {
            names.sort_unstable();
        }
        let (mut features, mut unknown) = (Vec::new(), Vec::new());
        for name in names {
            let Some(seen) = self.of(name).filter(|seen| seen.rows > 0) else {
                if self.wanted.is_some() && self.records > 0 {
                    return Err(self.missing(name).at_feature(name));
                }
                if self.records > 0 {
                    unknown.push(name.to_owned());
                }
                continue;
            };
            try_reserve(&mut features, 1, "features")?;
            features.push(self.feature(name, seen)?);
        }
        Ok((features, unknown))
    }

    fn feature(&self, name: &str, seen: &Seen) -> Result<Feature> {
        let leaf = seen.leaf().ok_or_else(|| {
            let reason = "the feature is a bytes_list in some records and a list of numbers in others, which no spec can read: name \
                          the other features with columns=";
            Error::new(ErrorKind::Schema, reason).at_feature(name)
        })?;
        Ok(Feature {
            name: name.to_owned(),
            field: name.to_owned(),
            request: form(seen, leaf),
            nulls: if seen.rows < self.records {
                Nulls::Mask
            } else {
                Nulls::Error
            },
            counts: false,
            encoded: false,
            scale: None,
            lookup: None,
        })
    }

    /// Returns features whose lookups have the form of their lists: one key per record, or any number.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if no record has a feature that must not be null, or if a list has another type than its
    /// spec.
    pub fn with_forms(&self, features: Vec<Feature>) -> Result<Vec<Feature>> {
        let mut features = features;
        for feature in &mut features {
            let lookup = feature.lookup.clone();
            let Some(seen) = self.of(&feature.field).filter(|seen| seen.rows > 0) else {
                if self.records > 0 && feature.nulls == Nulls::Error {
                    return Err(self.missing(&feature.field).at_feature(&feature.name));
                }
                if lookup.is_some_and(|lookup| lookup.drops()) {
                    feature.request = list_of(feature.request.leaf());
                }
                continue;
            };
            if lookup.is_some() && (seen.varies || seen.count != 1) {
                feature.request = list_of(feature.request.leaf());
            }
        }
        let program = Program::new(&features, None)?;
        for (feature, target) in features.iter().zip(&program.targets) {
            let Some(seen) = self.of(&feature.field) else { continue };
            let mut kinds = [Kind::Bytes, Kind::Floats, Kind::Ints].into_iter();
            if let Some(kind) = kinds.find(|&kind| seen.has(kind) && !target.reads(kind)) {
                return Err(Error::new(ErrorKind::Schema, target.refused(kind)).at_feature(&feature.name));
            }
        }
        Ok(features)
    }

    #[cold]
    fn missing(&self, name: &str) -> Error {
        let names = self.indices.keys().filter_map(|key| std::str::from_utf8(key).ok());
        let near = nearest(name, names.clone()).map_or_else(String::new, |near| format!("; did you mean {near:?}?"));
        let mut names: Vec<&str> = names.collect();
        names.sort_unstable();
        let all: Vec<String> = names.iter().take(20).map(|name| format!("{name:?}")).collect();
        let more = if names.len() > 20 { ", ..." } else { "" };
        let reason = format!(
            "no record has the feature {name:?}{near}: the records have {}{more}",
            all.join(", ")
        );
        Error::new(ErrorKind::Schema, reason)
    }
}

/// Returns the form of lists of any length.
pub(crate) fn list_of(leaf: Leaf) -> Request {
    Request::Ragged {
        shape: vec![None],
        leaf,
    }
}

fn form(seen: &Seen, leaf: Leaf) -> Request {
    match (seen.varies, seen.count) {
        (true, _) | (false, 0) => list_of(leaf),
        (false, 1) => Request::Dense {
            shape: Vec::new(),
            leaf,
            pad: None,
        },
        (false, count) => Request::Dense {
            shape: vec![count],
            leaf,
            pad: None,
        },
    }
}
