//! The default element type of the values of each Avro type.

use fastpipe_batch::{DType, Leaf};

use crate::schema::{Logical, NodeId, Schema, Type, UnionShape};

/// Maximum number of decimal digits that always fit into an int64.
const INT64_DIGITS: u32 = 18;

/// The element type of the codes of a union's branches.
pub(crate) const CODES: Leaf = Leaf::Fixed(DType::I32);

/// Removes the unions around a type that only make it nullable.
pub(crate) fn bare(schema: &Schema, mut id: NodeId) -> NodeId {
    while let Type::Union(union) = schema.ty(id) {
        match union.shape {
            UnionShape::One(inner) | UnionShape::Nullable(inner) => id = inner,
            _ => break,
        }
    }
    id
}

/// How the values of a type are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Values {
    pub(crate) leaf: Leaf,
    /// The fixed length of values that are arrays.
    pub(crate) last: Option<usize>,
    /// The scale of decimals that are read as integers.
    pub(crate) scale: Option<i8>,
}

impl Values {
    pub(crate) const fn plain(leaf: Leaf) -> Values {
        Values {
            leaf,
            last: None,
            scale: None,
        }
    }
}

/// Returns how the values of a type without components are read.
pub(crate) fn values_of(schema: &Schema, id: NodeId) -> Option<Values> {
    let plain = Values::plain(leaf(schema.ty(id))?);
    let Some(logical) = schema.node(id).logical else {
        return Some(plain);
    };
    Some(match logical {
        Logical::Decimal { precision, scale } if precision <= INT64_DIGITS => Values {
            leaf: Leaf::Fixed(DType::I64),
            last: None,
            // The scale is at most the precision.
            scale: i8::try_from(scale).ok(),
        },
        Logical::Decimal { .. } => Values::plain(Leaf::Fixed(DType::F64)),
        Logical::Duration => Values {
            leaf: Leaf::Fixed(DType::U32),
            last: Some(3),
            scale: None,
        },
        Logical::Uuid | Logical::BigDecimal => plain,
        time => time.time().map_or(plain, |dtype| Values::plain(Leaf::Fixed(dtype))),
    })
}

/// Returns the element type of a type without components. Ignores logical types.
pub(crate) fn leaf(ty: &Type) -> Option<Leaf> {
    Some(match ty {
        Type::Null | Type::Boolean => Leaf::Fixed(DType::Bool),
        Type::Int | Type::Enum(_) => Leaf::Fixed(DType::I32),
        Type::Long => Leaf::Fixed(DType::I64),
        Type::Float => Leaf::Fixed(DType::F32),
        Type::Double => Leaf::Fixed(DType::F64),
        Type::String => Leaf::Bytes { utf8: true },
        Type::Bytes | Type::Fixed(_) => Leaf::Bytes { utf8: false },
        _ => return None,
    })
}
