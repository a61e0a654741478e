//! The plan for reading features: where the values of each list are written, and how many there must be.

use std::sync::Arc;

use fastpipe_batch::{
    Absent, ColumnSpec, DType, Error, ErrorKind, Feature, Form, Leaf, Lookup, Nulls, PartId, PartIds, Request, Result,
    Scalar, TextParts, ValueParts,
};

use crate::example::Kind;
use crate::keys::Keys;
use crate::numbers;

/// The type and the destination of a list's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// Elements of a dtype.
    Elements(DType, PartId),
    /// Text, or arbitrary bytes.
    Text { utf8: bool, parts: TextParts },
}

/// The number of values of a list.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Length {
    /// Exactly this many.
    Exact(usize),
    /// At most or at least `values`, in items of `width` values. Further values are dropped, and missing ones are
    /// `pad`.
    Padded { values: usize, width: usize, pad: Vec<u8> },
    /// Any number of items of `width` values. Their number is written to `lengths`.
    Ragged { width: usize, lengths: PartId },
}

/// How a missing feature is handled.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Null {
    Error,
    /// The mask marks the row as null.
    Mask(Absent),
    /// Each value is replaced by these bytes. A ragged row is empty.
    Fill(Vec<u8>),
}

/// The destination of a feature.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Index of its key among all keys.
    pub(crate) key: usize,
    pub(crate) name: Arc<str>,
    pub(crate) leaf: Leaf,
    pub(crate) to: To,
    pub(crate) length: Length,
    /// The mask, and its number of entries per row.
    pub(crate) mask: Option<(PartId, usize)>,
    pub(crate) null: Null,
    /// The conversion of text to indices, if the elements are indices.
    pub(crate) lookup: Option<Arc<Lookup>>,
}

impl Target {
    /// Whether the values of a list of some kind can be read.
    pub(crate) fn reads(&self, kind: Kind) -> bool {
        let numbers = kind != Kind::Bytes;
        match self.to {
            _ if self.buckets() => numbers,
            _ if self.lookup.is_some() => !numbers,
            To::Text { .. } => kind == Kind::Bytes,
            To::Elements(dtype, _) => kind == Kind::Ints || (kind == Kind::Floats && dtype.is_float()),
        }
    }

    /// Whether the elements are the indices of buckets of numbers.
    fn buckets(&self) -> bool {
        self.lookup.as_ref().is_some_and(|lookup| lookup.buckets().is_some())
    }

    /// Returns the reason why a list of some kind can't be read.
    #[cold]
    pub(crate) fn refused(&self, kind: Kind) -> String {
        let leaf = self.leaf;
        match (self.lookup.is_some(), kind) {
            (true, Kind::Bytes) if self.buckets() => {
                "only numbers have buckets, and the feature is a bytes_list: VocabularySpec and HashSpec read its keys"
                    .to_owned()
            }
            (true, kind) => format!(
                "only the keys of a bytes_list can be looked up, and the feature is a {kind}: BucketSpec reads numbers"
            ),
            (false, Kind::Bytes) => {
                format!("the feature is a bytes_list, not {leaf}: use dtype \"string\" or \"bytes\"")
            }
            (false, Kind::Floats) => format!("the feature is a float_list, not {leaf}: use dtype \"float32\""),
            (false, Kind::Ints) => format!("the feature is an int64_list, not {leaf}: use dtype \"int64\""),
        }
    }
}

/// The plan for all features. It is the same for all files.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) specs: Vec<ColumnSpec>,
    pub(crate) keys: Keys,
    pub(crate) targets: Vec<Target>,
    /// The keys of all features, if a record with another feature is an error.
    all: Option<Keys>,
}

impl Program {
    /// Creates the plan for these features. If `all` names all features of the records, a record with another feature
    /// is an error.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if lists can't provide the form of a feature; errors of memory.
    pub(crate) fn new(features: &[Feature], all: Option<&[String]>) -> Result<Program> {
        let (keys, indices) = Keys::new(features.iter().map(|feature| feature.field.as_str()))?;
        let (mut specs, mut targets, mut first) = (Vec::new(), Vec::new(), 0);
        for (feature, key) in features.iter().zip(indices) {
            let target = target(feature, key, first).map_err(|error| error.at_feature(&feature.name))?;
            let form = Form::of(feature, &[true]);
            first += form.parts().len() as u32;
            specs.push(ColumnSpec::new(&feature.name, form));
            targets.push(target);
        }
        let all = match all {
            Some(all) => Some(Keys::new(all.iter().map(String::as_str))?.0),
            None => None,
        };
        Ok(Program {
            specs,
            keys,
            targets,
            all,
        })
    }

    /// Whether no feature with a key that isn't read is known.
    pub(crate) fn is_unknown(&self, key: &[u8]) -> bool {
        self.all.as_ref().is_some_and(|all| all.find(key).is_none())
    }
}

fn refused(reason: &str) -> Error {
    Error::new(ErrorKind::Schema, reason)
}

/// Returns the destination of a feature whose parts begin with `first`.
fn target(feature: &Feature, key: usize, first: PartId) -> Result<Target> {
    let leaf = feature.request.leaf();
    if feature.encoded {
        return Err(refused(
            "EncodedSpec reads Avro only: use DenseSpec((), \"bytes\") for a bytes_list",
        ));
    }
    if feature.counts {
        return Err(refused(
            "the number of values can't be read on its own: use RaggedSpec, whose rows have lengths",
        ));
    }
    if feature.scale.is_some() {
        return Err(refused(
            "TFRecord files store no decimals: read float32, int64 or strings",
        ));
    }
    if let Leaf::Fixed(dtype) = leaf {
        numbers::check(dtype)?;
    }
    let form = Form::of(feature, &[true]);
    let ids = PartIds::new(&form, first);
    let length = match &feature.request {
        Request::Sparse { .. } => {
            let reason = "TFRecord files have no sparse type: read the lists of indices and values with RaggedSpec";
            return Err(refused(reason));
        }
        Request::Dense { shape, pad, .. } => dense(shape, pad.as_ref(), leaf)?,
        Request::Ragged { shape, .. } => ragged(shape, &ids)?,
    };
    let is_one = matches!(length, Length::Exact(_));
    if is_one && feature.lookup.as_ref().is_some_and(|lookup| lookup.drops()) {
        let reason = "on_unknown=\"drop\" leaves keys out of arrays, but each row has one key here: use on_unknown=\"bucket\" to \
                      give keys outside of the vocabulary an index, or on_unknown=\"error\" to reject them";
        return Err(refused(reason));
    }
    let null = match &feature.nulls {
        Nulls::Error => Null::Error,
        Nulls::Mask => Null::Mask(ids.absent(&form, 0)),
        Nulls::Fill(fill) => Null::Fill(filling(fill.as_ref(), leaf)?),
    };
    let mask = match &form {
        Form::Nested(nested) if nested.ragged > 0 => ids.mask_at(0).map(|mask| (mask, 1)),
        _ => ids.leaf_mask().map(|mask| (mask, 1)),
    };
    Ok(Target {
        key,
        name: feature.name.as_str().into(),
        leaf,
        to: match ids.values {
            ValueParts::Elements(dtype, part) => To::Elements(dtype, part),
            ValueParts::Text { utf8, to } => To::Text { utf8, parts: to },
        },
        length,
        mask,
        null,
        lookup: feature.lookup.clone(),
    })
}

/// Returns the number of values of a dense feature. Its list has the values of all dimensions, the last of which varies
/// fastest.
fn dense(shape: &[usize], pad: Option<&Scalar>, leaf: Leaf) -> Result<Length> {
    let values = product(shape)?;
    let Some(pad) = pad else {
        return Ok(Length::Exact(values));
    };
    Ok(Length::Padded {
        values,
        width: product(shape.get(1..).unwrap_or_default())?,
        pad: filling(Some(pad), leaf)?,
    })
}

/// Returns the number of values of a ragged feature.
fn ragged(shape: &[Option<usize>], ids: &PartIds) -> Result<Length> {
    let (open, fixed) = match shape.iter().position(Option::is_none) {
        Some(0) => (true, &shape[1..]),
        _ => (false, shape),
    };
    let fixed: Option<Vec<usize>> = fixed.iter().copied().collect();
    let width = match fixed {
        Some(fixed) => product(&fixed)?,
        None => {
            return Err(refused(
                "a list has one dimension of any length, which is the outermost: use a shape such as (None,) or (None, 3)",
            ));
        }
    };
    match ids.lengths.first() {
        Some(&lengths) if open => Ok(Length::Ragged { width, lengths }),
        _ => Ok(Length::Exact(width)),
    }
}

fn product(shape: &[usize]) -> Result<usize> {
    let product = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
    product.ok_or_else(|| refused("the shape has too many values"))
}

/// Returns the bytes of a value that replaces or pads others.
fn filling(fill: Option<&Scalar>, leaf: Leaf) -> Result<Vec<u8>> {
    match (leaf, fill) {
        (Leaf::Fixed(dtype), fill) => fill.unwrap_or(&Scalar::Int(0)).element(dtype),
        (Leaf::Bytes { .. }, None) => Ok(Vec::new()),
        (Leaf::Bytes { .. }, Some(Scalar::Bytes(bytes))) => Ok(bytes.clone()),
        (Leaf::Bytes { .. }, Some(_)) => Err(refused("the fill or pad value of a text feature must be text")),
    }
}
