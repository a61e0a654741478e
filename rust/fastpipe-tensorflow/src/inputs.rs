//! Inputs of kernels.

use std::ffi::{c_int, c_void};
use std::slice;

use crate::api::handle::{Context, Tensor};
use crate::api::{Api, Code, Failure, OwnStatus, STRING_SIZE, TF_BOOL, TF_INT64, TF_STRING};

/// An argument of a dataset.
pub enum Argument {
    /// A scalar.
    Int(i64),
    /// A scalar.
    Bool(bool),
    /// Strings.
    Texts(Vec<Vec<u8>>),
}

/// An input of a kernel.
pub(super) struct Input<'a> {
    api: &'a Api,
    tensor: *mut Tensor,
}

impl<'a> Input<'a> {
    /// # Safety
    ///
    /// `context` must belong to a kernel call that hasn't returned and that has this input.
    pub(super) unsafe fn get(api: &'a Api, context: *mut Context, index: c_int) -> Result<Self, Failure> {
        let status = OwnStatus::new(api);
        let mut tensor = std::ptr::null_mut();
        // SAFETY: the caller guarantees that the context has this input.
        unsafe { (api.input)(context, index, &mut tensor, status.as_ptr()) };
        status.result()?;
        Ok(Input { api, tensor })
    }

    /// Returns the tensor. The caller must delete it.
    pub(super) fn into_tensor(self) -> *mut Tensor {
        std::mem::ManuallyDrop::new(self).tensor
    }

    /// Returns the elements, if they have this type.
    ///
    /// # Safety
    ///
    /// `T` must be the representation of elements of this type.
    pub(super) unsafe fn elements<T>(&self, dtype: c_int) -> Option<&[T]> {
        // SAFETY: the tensor is valid. Its elements have this type and are contiguous for the lifetime of the tensor.
        unsafe {
            if (self.api.tensor_type)(self.tensor) != dtype {
                return None;
            }
            let count = usize::try_from((self.api.tensor_elements)(self.tensor)).ok()?;
            if (self.api.tensor_bytes)(self.tensor) < count * size_of::<T>() {
                return None;
            }
            let data = (self.api.tensor_data)(self.tensor).cast::<T>();
            Some(if count == 0 {
                &[]
            } else {
                slice::from_raw_parts(data, count)
            })
        }
    }

    pub(super) fn number(&self) -> Result<i64, Failure> {
        // SAFETY: elements of TF_INT64 are i64.
        let first = unsafe { self.elements::<i64>(TF_INT64) }.and_then(|found| found.first().copied());
        first.ok_or_else(|| Failure::new(Code::Internal, "an input isn't an int64"))
    }

    /// The number of dimensions.
    pub(super) fn rank(&self) -> c_int {
        // SAFETY: the tensor is valid.
        unsafe { (self.api.tensor_rank)(self.tensor) }
    }

    /// Returns the elements, if they are strings.
    pub(super) fn strings(&self) -> Option<impl ExactSizeIterator<Item = &[u8]>> {
        // SAFETY: strings are structs of this size. Only TensorFlow's functions read them.
        let strings = unsafe { self.elements::<[u8; STRING_SIZE]>(TF_STRING) }?;
        Some(strings.iter().map(|string| {
            let string: *const c_void = std::ptr::from_ref(string).cast();
            // SAFETY: it is one of the tensor's strings. Its bytes are valid for the lifetime of the tensor.
            unsafe {
                let (data, size) = ((self.api.string_data)(string), (self.api.string_size)(string));
                if size == 0 {
                    &[]
                } else {
                    slice::from_raw_parts(data.cast::<u8>(), size)
                }
            }
        }))
    }

    /// Converts the input into an argument for Python.
    pub(super) fn argument(&self) -> Result<Argument, Failure> {
        // SAFETY: elements of TF_INT64 are i64.
        if let Some([number]) = unsafe { self.elements::<i64>(TF_INT64) } {
            return Ok(Argument::Int(*number));
        }
        // SAFETY: a bool of C++ is a byte.
        if let Some([flag]) = unsafe { self.elements::<u8>(TF_BOOL) } {
            return Ok(Argument::Bool(*flag != 0));
        }
        let Some(texts) = self.strings() else {
            return Err(Failure::new(
                Code::InvalidArgument,
                "an argument is neither an int64, a bool nor strings",
            ));
        };
        Ok(Argument::Texts(texts.map(<[u8]>::to_vec).collect()))
    }
}

impl Drop for Input<'_> {
    fn drop(&mut self) {
        // SAFETY: `get` acquired a reference, which is released here.
        unsafe { (self.api.delete_tensor)(self.tensor) };
    }
}
