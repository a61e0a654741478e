//! Requested features: their names and the form of each.

use std::sync::Arc;

use half::f16;

use crate::dtype::{DType, Leaf};
use crate::error::{Error, ErrorKind};
use crate::lookup::Lookup;
use crate::sparse::SparseLayout;

/// Maximum number of dimensions of a ragged or sparse feature. Its forms are nested, and Python traverses them
/// recursively.
pub const MAX_DIMENSIONS: usize = 128;

/// Maximum number of fixed dimensions of a feature: the limit of a NumPy array, less one for the rows. The limit is 32
/// before NumPy 2 and in the library that creates arrays here. It doesn't depend on the installed NumPy version because
/// inferred features determine the form of a batch.
pub const MAX_FIXED_DIMENSIONS: usize = 31;

/// A requested feature.
#[derive(Clone, Debug, PartialEq)]
pub struct Feature {
    /// Its name in batches.
    pub name: String,
    /// The path of its field: names of nested record fields joined by dots, or `keys` or `values` below a map. Several
    /// features may read one field.
    pub field: String,
    /// The requested form.
    pub request: Request,
    /// How nulls are handled.
    pub nulls: Nulls,
    /// Whether the values are item counts of the arrays or maps below all of the dimensions.
    pub counts: bool,
    /// Whether the values are the Avro-encoded bytes of the field's value, regardless of its type. If the field's path
    /// is empty, they are the bytes of the whole record.
    pub encoded: bool,
    /// The number of decimal places if the values are decimals that are read as integers.
    pub scale: Option<i8>,
    /// How text is converted to indices, if the values or the coordinates of a sparse feature are indices.
    pub lookup: Option<Arc<Lookup>>,
}

/// The requested form of a feature.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// The same shape in every row.
    Dense {
        /// Exact lengths of the arrays, outermost first.
        shape: Vec<usize>,
        /// The type of the values.
        leaf: Leaf,
        /// The padding value. If it is set, shorter arrays are padded and longer ones are truncated.
        pad: Option<Scalar>,
    },
    /// Arrays of different lengths.
    Ragged {
        /// Lengths of the arrays, outermost first. `None` allows any length.
        shape: Vec<Option<usize>>,
        /// The type of the values.
        leaf: Leaf,
    },
    /// A record of `indices0`, `indices1`, ... and `values`.
    Sparse {
        /// The dense shape. `None` means that the size is the minimum that the batch needs.
        shape: Vec<Option<u64>>,
        /// The type of the values.
        leaf: Leaf,
        /// Whether coordinates include the batch index.
        layout: SparseLayout,
        /// Whether indices are checked against the shape.
        check_indices: bool,
    },
}

impl Request {
    /// Returns the number of dimensions of a row.
    pub fn rank(&self) -> usize {
        match self {
            Request::Dense { shape, .. } => shape.len(),
            Request::Ragged { shape, .. } => shape.len(),
            Request::Sparse { shape, .. } => shape.len(),
        }
    }

    /// Returns the rule for the length of arrays in dimension `dim`.
    pub fn length_rule(&self, dim: usize) -> LengthRule {
        match self {
            Request::Dense { shape, pad: None, .. } => LengthRule::Exact(shape[dim]),
            Request::Dense { shape, .. } => LengthRule::Pad(shape[dim]),
            Request::Ragged { shape, .. } => shape[dim].map_or(LengthRule::Free, LengthRule::Exact),
            Request::Sparse { .. } => LengthRule::Free,
        }
    }

    /// Returns the type of the values.
    pub fn leaf(&self) -> Leaf {
        match self {
            Request::Dense { leaf, .. } | Request::Ragged { leaf, .. } | Request::Sparse { leaf, .. } => *leaf,
        }
    }
}

/// The rule for the length of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthRule {
    /// Any length.
    Free,
    /// Exactly this length.
    Exact(usize),
    /// The array is padded or truncated to this length.
    Pad(usize),
}

/// Returns the Python code of the spec that reads values within `dims` levels of arrays of any length. `last` adds an
/// innermost fixed dimension, and `scale` reads decimals as integers in units of a power of ten.
pub fn spec_code(dims: usize, last: Option<usize>, leaf: Leaf, nullable: bool, scale: Option<i8>) -> String {
    let nulls = if nullable { ", on_null=\"mask\"" } else { "" };
    let scale = scale.map_or_else(String::new, |scale| format!(", scale={scale}"));
    let sizes = std::iter::repeat_n("None".to_owned(), dims).chain(last.map(|n| n.to_string()));
    let sizes: Vec<_> = sizes.collect();
    let shape = match &sizes[..] {
        [one] => format!("({one},)"),
        sizes => format!("({})", sizes.join(", ")),
    };
    let kind = if dims == 0 { "Dense" } else { "Ragged" };
    format!("fastpipe.{kind}Spec({shape}, \"{leaf}\"{nulls}{scale})")
}

impl Feature {
    /// Returns a copy of the feature. If it is sparse, the copy uses this layout.
    #[must_use]
    pub fn in_layout(&self, wanted: SparseLayout) -> Feature {
        let mut feature = self.clone();
        if let Request::Sparse { layout, .. } = &mut feature.request {
            *layout = wanted;
        }
        feature
    }
}

/// How nulls are handled.
#[derive(Clone, Debug, PartialEq)]
pub enum Nulls {
    /// A null is an error.
    Error,
    /// A mask marks the nulls.
    Mask,
    /// A null is replaced by this value, or by 0, false or an empty string. A null array is read as an empty array if
    /// its length is free.
    Fill(Option<Scalar>),
}

/// A value that replaces nulls or pads arrays.
#[derive(Clone, Debug, PartialEq)]
pub enum Scalar {
    /// For bool.
    Bool(bool),
    /// For integers and floats.
    Int(i128),
    /// For floats.
    Float(f64),
    /// For strings and bytes.
    Bytes(Vec<u8>),
}

impl Scalar {
    /// Returns the bytes of this value as an element of `dtype`.
    pub fn element(&self, dtype: DType) -> Result<Vec<u8>, Error> {
        let misfit = || {
            Error::new(
                ErrorKind::Schema,
                format!("the fill or pad value {self:?} doesn't fit {dtype}"),
            )
        };
        macro_rules! integer {
            ($t:ty) => {
                match self {
                    Scalar::Int(v) => <$t>::try_from(*v).map_err(|_| misfit())?.to_le_bytes().to_vec(),
                    Scalar::Bool(v) => <$t>::from(*v).to_le_bytes().to_vec(),
                    _ => return Err(misfit()),
                }
            };
        }
        let float = || match self {
            Scalar::Int(v) => Ok(*v as f64),
            Scalar::Float(v) => Ok(*v),
            Scalar::Bool(v) => Ok(f64::from(u8::from(*v))),
            Scalar::Bytes(_) => Err(misfit()),
        };
        Ok(match dtype {
            DType::Bool => match self {
                Scalar::Bool(v) => vec![u8::from(*v)],
                Scalar::Int(v @ 0..=1) => vec![*v as u8],
                _ => return Err(misfit()),
            },
            DType::I8 => integer!(i8),
            DType::I16 => integer!(i16),
            DType::I32 => integer!(i32),
            DType::I64 | DType::Datetime(_) | DType::Timedelta(_) => integer!(i64),
            DType::U8 => integer!(u8),
            DType::U16 => integer!(u16),
            DType::U32 => integer!(u32),
            DType::U64 => integer!(u64),
            DType::F16 => f16::from_f64(float()?).to_le_bytes().to_vec(),
            DType::F32 => (float()? as f32).to_le_bytes().to_vec(),
            DType::F64 => float()?.to_le_bytes().to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_have_the_requested_length() {
        let leaf = Leaf::Fixed(DType::I32);
        let dense = |pad| Request::Dense {
            shape: vec![2, 3],
            leaf,
            pad,
        };
        assert_eq!(dense(None).length_rule(1), LengthRule::Exact(3));
        assert_eq!(dense(Some(Scalar::Int(0))).length_rule(0), LengthRule::Pad(2));
        let ragged = Request::Ragged {
            shape: vec![None, Some(3)],
            leaf,
        };
        assert_eq!(ragged.length_rule(0), LengthRule::Free);
        assert_eq!(ragged.length_rule(1), LengthRule::Exact(3));
        let sparse = Request::Sparse {
            shape: vec![Some(3)],
            leaf,
            layout: SparseLayout::Csr,
            check_indices: true,
        };
        assert_eq!(sparse.length_rule(0), LengthRule::Free);
    }

    #[test]
    fn specs_are_rendered_as_python_code() {
        let numbers = Leaf::Fixed(DType::F32);
        let code = |dims, last, leaf| spec_code(dims, last, leaf, false, None);
        assert_eq!(code(0, None, numbers), r#"fastpipe.DenseSpec((), "float32")"#);
        assert_eq!(code(0, Some(3), numbers), r#"fastpipe.DenseSpec((3,), "float32")"#);
        let text = spec_code(1, None, Leaf::Bytes { utf8: true }, true, None);
        assert_eq!(text, r#"fastpipe.RaggedSpec((None,), "string", on_null="mask")"#);
        assert_eq!(
            code(2, None, numbers),
            r#"fastpipe.RaggedSpec((None, None), "float32")"#
        );
        assert_eq!(
            spec_code(1, Some(2), Leaf::Fixed(DType::I64), true, Some(2)),
            r#"fastpipe.RaggedSpec((None, 2), "int64", on_null="mask", scale=2)"#
        );
    }
}
