//! Infers features from a schema.

use std::collections::HashSet;

use arrow_schema::{DataType, Field, Fields, Schema};
use fastpipe_batch::{
    Error, ErrorKind, Feature, MAX_DIMENSIONS, MAX_FIXED_DIMENSIONS, Nulls, Request, SparseLayout, nearest,
};

use crate::trace::{entries, items, plain};
use crate::types::leaf;

/// Maximum number of inferred columns. For wider schemas, the user must select columns.
const MOST_COLUMNS: usize = 1 << 16;

/// The features inferred from a schema.
#[derive(Debug, Default)]
pub struct Inferred {
    /// The columns that can be read.
    pub features: Vec<Feature>,
    /// The columns that can't be read, each with the reason.
    pub left_out: Vec<(String, String)>,
}

/// The path and the nesting of a field.
#[derive(Clone, Default)]
struct Above {
    path: String,
    /// Lengths of the outer lists. `None` means any length.
    shape: Vec<Option<usize>>,
    nullable: bool,
}

impl Above {
    fn enter(&self, name: &str) -> Above {
        let dot = if self.path.is_empty() { "" } else { "." };
        Above {
            path: format!("{}{dot}{name}", self.path),
            ..self.clone()
        }
    }

    fn list(mut self, length: Option<usize>) -> Above {
        self.shape.push(length);
        self
    }
}

/// Infers the features of a schema like [`infer`], but requires that all columns can be read.
///
/// # Errors
/// Returns an error if a column can't be read, if one of `columns` doesn't exist, or if two features have the same
/// name.
pub fn infer_all(schema: &Schema, columns: Option<&[String]>) -> Result<Vec<Feature>, Error> {
    let Inferred { features, left_out } = infer(schema, columns)?;
    let Some((name, reason)) = left_out.first() else {
        return Ok(features);
    };
    let names: Vec<_> = features.iter().map(|feature| format!("{:?}", feature.name)).collect();
    let reason = format!("{reason}; columns=[{}] reads the others", names.join(", "));
    Err(Error::new(ErrorKind::Unsupported, reason).at_feature(name))
}

/// Infers the features of all columns of a schema, or of the given ones, including nested columns.
pub fn infer(schema: &Schema, columns: Option<&[String]>) -> Result<Inferred, Error> {
    let mut inferred = Inferred::default();
    for field in &schema.fields {
        inferred.field(&Above::default().enter(field.name()), field)?;
    }
    let Some(wanted) = columns else {
        check_unique(&inferred.features)?;
        return Ok(inferred);
    };
    let mut chosen = Inferred::default();
    for column in wanted {
        let below = format!("{column}.");
        let is_wanted = |name: &str| name == column || name.starts_with(&below);
        let found = inferred.features.iter().filter(|feature| is_wanted(&feature.name));
        let found: Vec<_> = found.cloned().collect();
        check_unique(&found)?;
        let refused = inferred.left_out.iter().find(|(name, _)| is_wanted(name));
        match (found.is_empty(), refused) {
            (_, Some((name, reason))) if name == column || found.is_empty() => {
                return Err(Error::new(ErrorKind::Unsupported, reason.clone()).at_feature(name));
            }
            (true, _) => return Err(no_column(schema, &inferred, column)),
            (false, _) => chosen.features.extend(found),
        }
    }
    let mut seen = HashSet::new();
    chosen.features.retain(|feature| seen.insert(feature.name.clone()));
    Ok(chosen)
}

fn check_unique(features: &[Feature]) -> Result<(), Error> {
    let mut names = HashSet::new();
    match features.iter().find(|feature| !names.insert(&feature.name)) {
        Some(twice) => {
            let reason = format!("several columns are called '{}': rename them", twice.name);
            Err(Error::new(ErrorKind::Schema, reason).at_feature(&twice.name))
        }
        None => Ok(()),
    }
}

fn no_column(schema: &Schema, inferred: &Inferred, column: &str) -> Error {
    const SHOWN: usize = 30;
    let names: Vec<&str> = schema.fields.iter().map(|field| field.name().as_str()).collect();
    let all = inferred.features.iter().map(|feature| feature.name.as_str());
    let meant = nearest(column, names.iter().copied().chain(all));
    let meant = meant.map_or_else(String::new, |near| format!("; did you mean '{near}'?"));
    let more = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let reason = format!(
        "the schema has no column '{column}'; it has {}{more}{meant}",
        names[..names.len().min(SHOWN)].join(", ")
    );
    Error::new(ErrorKind::Schema, reason).at_feature(column)
}

/// Returns the number of dimensions and the value field of a sparse struct. A sparse struct contains only lists, named
/// `indices0`, `indices1`, ... and `values`.
fn sparse_dims(fields: &Fields) -> Option<(usize, &Field)> {
    let item = |name: &str| {
        let field = fields.iter().find(|field| field.name() == name)?;
        items(plain(field.data_type()))
    };
    let values = item("values")?;
    let dims = fields.len() - 1;
    let alone = dims == 1 && item("indices").is_some_and(|item| plain(item.data_type()).is_integer());
    let integers = |dim: usize| item(&format!("indices{dim}")).is_some_and(|item| plain(item.data_type()).is_integer());
    let all = alone || (0..dims).all(integers);
    (all && (1..=MAX_DIMENSIONS).contains(&dims)).then_some((dims, values))
}

impl Inferred {
    fn leave_out(&mut self, above: &Above, reason: String) {
        self.left_out.push((above.path.clone(), reason));
    }

    fn push(&mut self, above: &Above, request: Request) -> Result<(), Error> {
        if self.features.len() == MOST_COLUMNS {
            let reason =
                format!("the schema has more than {MOST_COLUMNS} columns; select the ones to read with columns=[...]");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        self.features.push(Feature {
            name: above.path.clone(),
            field: above.path.clone(),
            request,
            nulls: if above.nullable { Nulls::Mask } else { Nulls::Error },
            counts: false,
            encoded: false,
            scale: None,
            lookup: None,
        });
        Ok(())
    }

    fn field(&mut self, above: &Above, field: &Field) -> Result<(), Error> {
        let ty = plain(field.data_type());
        let mut above = above.clone();
        above.nullable |= field.is_nullable() || *ty == DataType::Null;
        if above.shape.len() > MAX_DIMENSIONS {
            let reason = format!("lists are nested deeper than {MAX_DIMENSIONS} levels, the maximum for a feature");
            self.leave_out(&above, reason);
            return Ok(());
        }
        if let Some(item) = items(ty) {
            let length = match ty {
                DataType::FixedSizeList(_, n) => usize::try_from(*n).ok().filter(|&n| n > 0),
                _ => None,
            };
            return self.field(&above.list(length), item);
        }
        if let Some((keys, values)) = entries(ty) {
            self.field(&above.enter("keys").list(None), keys)?;
            return self.field(&above.enter("values").list(None), values);
        }
        if let DataType::Struct(fields) = ty {
            if let (true, Some((dims, values))) = (above.shape.is_empty(), sparse_dims(fields)) {
                let Some(leaf) = leaf(plain(values.data_type())) else {
                    self.leave_out(&above, format!("values of type {} are not read", values.data_type()));
                    return Ok(());
                };
                return self.push(
                    &above,
                    Request::Sparse {
                        shape: vec![None; dims],
                        leaf,
                        layout: SparseLayout::Coo,
                        check_indices: true,
                    },
                );
            }
            return fields
                .iter()
                .try_for_each(|field| self.field(&above.enter(field.name()), field));
        }
        let Some(leaf) = leaf(ty) else {
            self.leave_out(&above, format!("values of type {ty} are not read"));
            return Ok(());
        };
        let fixed: Option<Vec<usize>> = above.shape.iter().copied().collect();
        let request = match fixed {
            Some(shape) if shape.len() <= MAX_FIXED_DIMENSIONS => Request::Dense { shape, leaf, pad: None },
            _ => {
                let mut shape = above.shape.clone();
                // NumPy arrays represent the dimensions after the last open one.
                let open = shape.iter().rposition(Option::is_none).map_or(0, |i| i + 1);
                let most = shape.len().saturating_sub(MAX_FIXED_DIMENSIONS);
                if open < most {
                    shape[most - 1] = None;
                }
                Request::Ragged { shape, leaf }
            }
        };
        self.push(&above, request)
    }
}
