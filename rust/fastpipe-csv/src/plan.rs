//! Plans the processing of each field in the rows of a file.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    ColumnSpec, DType, Error, ErrorKind, Feature, Form, Leaf, Lookup, Nulls, PartIds, Request, Result, Scalar,
    TextParts, ValueParts, nearest, shown_path,
};

use crate::header::Header;

/// The type and the destination of a field's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// An element of a dtype, written to a cell.
    Element(DType, u32),
    /// Text, or arbitrary bytes.
    Text { utf8: bool, parts: TextParts },
}

/// How a null field is handled.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Null {
    Error,
    /// The mask marks the null, and the value is zero.
    Mask,
    /// The null is replaced by these bytes.
    Fill(Vec<u8>),
}

/// The destination of a field.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Target {
    /// Index of the column.
    pub(crate) column: usize,
    pub(crate) to: To,
    /// The cell of the mask.
    pub(crate) mask: Option<u32>,
    pub(crate) null: Null,
    /// The conversion of text to an index, if the element is an index.
    pub(crate) lookup: Option<Arc<Lookup>>,
}

/// The layout of a source's columns, which is the same for all files.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) specs: Vec<ColumnSpec>,
    /// The field name of each column.
    pub(crate) fields: Vec<String>,
    targets: Vec<Target>,
    /// The parts that are written as cells.
    pub(crate) cells: Arc<[u32]>,
}

impl Layout {
    /// Creates the layout of these features.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if a feature has a form that CSV fields can't provide.
    pub(crate) fn new(features: &[Feature]) -> Result<Layout> {
        let (mut specs, mut targets) = (Vec::new(), Vec::new());
        let (mut cells, mut first) = (Vec::new(), 0);
        for (column, feature) in features.iter().enumerate() {
            let leaf = scalar(feature)?;
            let form = Form::of(feature, &[true]);
            let ids = PartIds::new(&form, first);
            first += form.parts().len() as u32;
            let mut cell = |part| {
                cells.push(part);
                cells.len() as u32 - 1
            };
            let mask = ids.leaf_mask().map(&mut cell);
            let to = match ids.values {
                ValueParts::Elements(dtype, part) => To::Element(dtype, cell(part)),
                ValueParts::Text { utf8, to } => To::Text { utf8, parts: to },
            };
            let null = null(feature, leaf).map_err(|e| e.at_feature(&feature.name))?;
            targets.push(Target {
                column,
                to,
                mask,
                null,
                lookup: feature.lookup.clone(),
            });
            specs.push(ColumnSpec::new(&feature.name, form));
        }
        Ok(Layout {
            specs,
            fields: features.iter().map(|feature| feature.field.clone()).collect(),
            targets,
            cells: cells.into(),
        })
    }
}

/// Returns the type of a feature with one value per row.
fn scalar(feature: &Feature) -> Result<Leaf> {
    let refused = |reason: &str| Err(Error::new(ErrorKind::Schema, reason).at_feature(&feature.name));
    let Request::Dense { shape, leaf, .. } = &feature.request else {
        return refused("a CSV field has one value: use DenseSpec((), dtype)");
    };
    if !shape.is_empty() || feature.counts {
        return refused("a CSV field has one value: use DenseSpec((), dtype), and build arrays from several features");
    }
    match leaf {
        _ if feature.lookup.as_ref().is_some_and(|lookup| lookup.drops()) => refused(
            "on_unknown=\"drop\" leaves keys out of bags and arrays, but each row has one key here: use on_unknown=\"bucket\" to give \
             keys outside of the vocabulary an index, or on_unknown=\"error\" to reject them",
        ),
        _ if feature.scale.is_some() => refused("decimals are not supported in CSV: read float64 or strings"),
        Leaf::Fixed(DType::Timedelta(_)) => refused("durations are not supported in CSV: read numbers"),
        leaf => Ok(*leaf),
    }
}

fn null(feature: &Feature, leaf: Leaf) -> Result<Null> {
    Ok(match (&feature.nulls, leaf) {
        (Nulls::Error, _) => Null::Error,
        (Nulls::Mask, _) => Null::Mask,
        // The null value of times is NaT.
        (Nulls::Fill(None), Leaf::Fixed(dtype)) if dtype.is_time() => Null::Fill(i64::MIN.to_le_bytes().to_vec()),
        (Nulls::Fill(fill), Leaf::Fixed(dtype)) => Null::Fill(fill.as_ref().unwrap_or(&Scalar::Int(0)).element(dtype)?),
        (Nulls::Fill(None), Leaf::Bytes { .. }) => Null::Fill(Vec::new()),
        (Nulls::Fill(Some(Scalar::Bytes(bytes))), Leaf::Bytes { .. }) => Null::Fill(bytes.clone()),
        (Nulls::Fill(Some(_)), Leaf::Bytes { .. }) => {
            return Err(Error::new(
                ErrorKind::Schema,
                "the fill value of a text feature must be text",
            ));
        }
    })
}

/// The plan for the fields of one file, in order.
#[derive(Debug)]
pub(crate) struct Program {
    /// The range of targets for each field.
    pub(crate) fields: Vec<Range<usize>>,
    pub(crate) targets: Vec<Target>,
    /// The names of the file's columns.
    pub(crate) names: Vec<Arc<str>>,
}

impl Program {
    /// Creates the plan for files with this header. `first` is the path of the first file, if it has all columns.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if a column doesn't exist or exists twice.
    pub(crate) fn new(layout: &Layout, header: &Header, first: Option<&str>) -> Result<Program> {
        let mut by_field: HashMap<&str, Vec<&Target>> = HashMap::new();
        for (field, target) in layout.fields.iter().zip(&layout.targets) {
            by_field.entry(field).or_default().push(target);
        }
        let (mut fields, mut targets) = (Vec::with_capacity(header.names.len()), Vec::new());
        let mut found: HashMap<&str, usize> = HashMap::new();
        for name in &header.names {
            let start = targets.len();
            targets.extend(by_field.get(&**name).into_iter().flatten().copied().cloned());
            fields.push(start..targets.len());
            *found.entry(name).or_default() += 1;
        }
        for (field, spec) in layout.fields.iter().zip(&layout.specs) {
            let reason = match found.get(field.as_str()) {
                Some(1) => continue,
                Some(count) => format!("{count} columns are called {field:?}: pass other names with header=[...]"),
                None => missing(field, header, first),
            };
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(&spec.name));
        }
        Ok(Program {
            fields,
            targets,
            names: header.names.clone(),
        })
    }
}

fn missing(field: &str, header: &Header, first: Option<&str>) -> String {
    let names = header.names.iter().map(|name| &**name);
    let near = nearest(field, names.clone()).map(|name| format!("; did you mean {name:?}?"));
    let all: Vec<String> = names.take(20).map(|name| format!("{name:?}")).collect();
    let more = if header.names.len() > 20 { ", ..." } else { "" };
    let hint = first.map(|first| {
        format!(
            "; {} has this column, and files must have each column that is read: columns= with the names of other columns \
             reads all files",
            shown_path(first)
        )
    });
    format!(
        "the file has no column {field:?}{}: it has {}{more}{}",
        near.unwrap_or_default(),
        all.join(", "),
        hint.unwrap_or_default()
    )
}
