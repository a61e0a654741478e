//! The texts that the codes of a dictionary represent.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef};
use arrow_buffer::{BooleanBuffer, Buffer};
use fastpipe_batch::{DType, Error, ErrorKind, Feature, Leaf, Result, Scalar, try_reserve, try_with_capacity};

use crate::trace::misfit;
use crate::values::Values;

/// Names the allocated memory in out-of-memory errors.
const WHAT: &str = "the values of a dictionary";

/// Texts and their codes: code `i` represents text `i`.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Categories {
    texts: Vec<Arc<str>>,
    codes: HashMap<Arc<str>, usize>,
}

impl Categories {
    /// Creates a table of these texts, in this order.
    pub(crate) fn new(texts: &[String]) -> Result<Categories> {
        let mut categories = Categories::default();
        for text in texts {
            if !categories.add(text)? {
                return Err(misfit(format!(
                    "`dictionaries` lists '{text}' twice for this column: its texts must be unique"
                )));
            }
        }
        Ok(categories)
    }

    /// Appends a text unless it already exists. Returns whether it was appended.
    fn add(&mut self, text: &str) -> Result<bool> {
        let memory = |_| Error::out_of_memory(text.len(), WHAT);
        self.codes.try_reserve(1).map_err(memory)?;
        try_reserve(&mut self.texts, 1, WHAT)?;
        let text: Arc<str> = text.into();
        let Entry::Vacant(entry) = self.codes.entry(text.clone()) else {
            return Ok(false);
        };
        entry.insert(self.texts.len());
        self.texts.push(text);
        Ok(true)
    }

    /// Adds the values of a dictionary of text.
    pub(crate) fn add_all(&mut self, dictionary: &ArrayRef) -> Result<()> {
        let texts = Values::of_text(dictionary)?;
        (0..dictionary.len())
            .filter(|&i| dictionary.is_valid(i))
            .try_for_each(|i| self.add(text(&texts, i)?).map(|_| ()))
    }

    pub(crate) fn texts(&self) -> &[Arc<str>] {
        &self.texts
    }

    /// Returns an error if the largest code doesn't fit the requested dtype.
    pub(crate) fn check(&self, feature: &Feature) -> Result<()> {
        let (Leaf::Fixed(to), Some(greatest)) = (feature.request.leaf(), self.texts.len().checked_sub(1)) else {
            return Ok(());
        };
        let fits = Scalar::Int(greatest as i128).element(to).is_ok();
        if fits {
            return Ok(());
        }
        let texts = self.texts.len();
        Err(misfit(format!(
            "codes of {texts} values don't fit {to}; request a wider integer dtype"
        ))
        .at_feature(&feature.name))
    }

    /// Returns the codes of a dictionary's values as elements of type `to`. Also returns which values have a code, if
    /// some don't.
    pub(crate) fn codes(&self, dictionary: &ArrayRef, to: DType) -> Result<(Buffer, Option<BooleanBuffer>)> {
        let texts = Values::of_text(dictionary)?;
        let size = to.size();
        let mut found: Vec<u8> = try_with_capacity(dictionary.len().saturating_mul(size), WHAT)?;
        let mut known: Vec<bool> = try_with_capacity(dictionary.len(), WHAT)?;
        for i in 0..dictionary.len() {
            let code = match dictionary.is_valid(i) {
                true => self.codes.get(text(&texts, i)?).copied(),
                false => Some(0),
            };
            known.push(code.is_some());
            // The largest code fits, so all codes fit. Little-endian numbers begin with their lowest bytes.
            found.extend_from_slice(&(code.unwrap_or(0) as u64).to_le_bytes()[..size]);
        }
        let lost = known.contains(&false);
        Ok((Buffer::from_vec(found), lost.then(|| BooleanBuffer::from(known))))
    }
}

/// Returns a value of a dictionary.
fn text(texts: &Values, i: usize) -> Result<&str> {
    let text = texts.text(i).and_then(|text| str::from_utf8(text).ok());
    text.ok_or_else(|| {
        Error::new(
            ErrorKind::Internal,
            "a dictionary has fewer values than declared, or a value isn't text",
        )
    })
}

#[cfg(test)]
mod tests {
    use arrow_array::{StringArray, StringViewArray};
    use fastpipe_batch::{Nulls, Request};

    use super::*;

    fn array(texts: &[Option<&str>]) -> ArrayRef {
        Arc::new(StringArray::from(texts.to_vec()))
    }

    #[test]
    fn dictionaries_are_unified_in_order_of_first_occurrence() {
        let mut categories = Categories::default();
        categories
            .add_all(&array(&[Some("b"), None, Some("a"), Some("b")]))
            .unwrap();
        categories
            .add_all(&(Arc::new(StringViewArray::from(vec!["c", "a"])) as ArrayRef))
            .unwrap();
        assert_eq!(
            categories.texts().iter().map(|text| &**text).collect::<Vec<_>>(),
            ["b", "a", "c"]
        );
        let (codes, known) = categories
            .codes(&array(&[Some("c"), None, Some("x"), Some("b")]), DType::U16)
            .unwrap();
        assert_eq!(codes.typed_data::<u16>(), [2, 0, 0, 0]);
        assert_eq!(known.unwrap().iter().collect::<Vec<_>>(), [true, true, false, true]);
        assert!(categories.codes(&array(&[Some("a")]), DType::I64).unwrap().1.is_none());
    }

    #[test]
    fn duplicate_values_and_codes_out_of_range_are_refused() {
        let error = Categories::new(&["a".into(), "b".into(), "a".into()]).unwrap_err();
        assert!(error.reason().contains("lists 'a' twice"), "{error}");
        let texts: Vec<String> = (0..129).map(|i| i.to_string()).collect();
        let feature = |dtype| Feature {
            name: "x".into(),
            field: "x".into(),
            request: Request::Dense {
                shape: Vec::new(),
                leaf: Leaf::Fixed(dtype),
                pad: None,
            },
            nulls: Nulls::Error,
            counts: false,
            encoded: false,
            scale: None,
            lookup: None,
        };
        let categories = Categories::new(&texts).unwrap();
        assert!(categories.check(&feature(DType::U8)).is_ok());
        let error = categories.check(&feature(DType::I8)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Schema);
        assert!(
            error
                .to_string()
                .contains("feature 'x': codes of 129 values don't fit int8"),
            "{error}"
        );
        assert!(
            Categories::new(&texts[..128])
                .unwrap()
                .check(&feature(DType::I8))
                .is_ok()
        );
    }
}
