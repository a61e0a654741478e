//! The part of TensorFlow's C API for kernels that this crate uses, as declared in
//! `tensorflow/c/{kernels,ops,tf_tensor,tf_status,tf_tstring}.h`. Functions are looked up in the libraries of the
//! TensorFlow that Python has imported; nothing is linked.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

/// Handles that TensorFlow owns.
pub(crate) mod handle {
    macro_rules! opaque {
        ($($name:ident)*) => {$(
            #[repr(C)]
            pub(crate) struct $name {
                _private: [u8; 0],
            }
        )*};
    }
    opaque!(Status OpDefinition KernelBuilder Construction Context ShapeContext Tensor);
}
use handle::*;

/// `TF_Code`.
#[allow(missing_docs)] // TensorFlow documents them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    NotFound = 5,
    FailedPrecondition = 9,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
}

/// `TF_DataType`s that the code refers to by name.
pub(crate) const TF_STRING: c_int = 7;
pub(crate) const TF_INT64: c_int = 9;
pub(crate) const TF_BOOL: c_int = 10;

/// Size of a `TF_TString` in bytes.
pub(crate) const STRING_SIZE: usize = 24;

/// The function that TensorFlow calls to release a tensor's memory: data, size, and the argument that it was given.
pub(crate) type Deallocator = unsafe extern "C" fn(*mut c_void, usize, *mut c_void);

type Create = Option<unsafe extern "C" fn(*mut Construction) -> *mut c_void>;
type Compute = unsafe extern "C" fn(*mut c_void, *mut Context);
type Delete = Option<unsafe extern "C" fn(*mut c_void)>;

macro_rules! functions {
    ($($name:ident: $symbol:literal fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// TensorFlow's functions. Each must be called as its header says.
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn find(libraries: &[Library]) -> Result<Api, String> {
                Ok(Api {
                    $($name: {
                        let symbol = concat!($symbol, "\0").as_bytes();
                        // SAFETY: TensorFlow's headers declare this function with these arguments and this result, from
                        // 2.16 on. `load` checks the version.
                        let found = libraries.iter().find_map(|library| unsafe { library.get(symbol) }.ok());
                        *found.ok_or_else(|| format!("TensorFlow has no function {}", $symbol))?
                    },)*
                })
            }
        }
    };
}

functions! {
    version: "TF_Version" fn() -> *const c_char;
    new_status: "TF_NewStatus" fn() -> *mut Status;
    delete_status: "TF_DeleteStatus" fn(*mut Status);
    set_status: "TF_SetStatus" fn(*mut Status, c_int, *const c_char);
    code: "TF_GetCode" fn(*const Status) -> c_int;
    message: "TF_Message" fn(*const Status) -> *const c_char;
    new_op: "TF_NewOpDefinitionBuilder" fn(*const c_char) -> *mut OpDefinition;
    add_attribute: "TF_OpDefinitionBuilderAddAttr" fn(*mut OpDefinition, *const c_char);
    add_input: "TF_OpDefinitionBuilderAddInput" fn(*mut OpDefinition, *const c_char);
    add_output: "TF_OpDefinitionBuilderAddOutput" fn(*mut OpDefinition, *const c_char);
    set_stateful: "TF_OpDefinitionBuilderSetIsStateful" fn(*mut OpDefinition, bool);
    set_shape_function: "TF_OpDefinitionBuilderSetShapeInferenceFunction"
        fn(*mut OpDefinition, unsafe extern "C" fn(*mut ShapeContext, *mut Status));
    register_op: "TF_RegisterOpDefinition" fn(*mut OpDefinition, *mut Status);
    set_unknown_shape: "TF_ShapeInferenceContextSetUnknownShape" fn(*mut ShapeContext, *mut Status);
    new_kernel: "TF_NewKernelBuilder" fn(*const c_char, *const c_char, Create, Compute, Delete) -> *mut KernelBuilder;
    register_kernel: "TF_RegisterKernelBuilder" fn(*const c_char, *mut KernelBuilder, *mut Status);
    inputs: "TF_NumInputs" fn(*mut Context) -> c_int;
    outputs: "TF_NumOutputs" fn(*mut Context) -> c_int;
    input: "TF_GetInput" fn(*mut Context, c_int, *mut *mut Tensor, *mut Status);
    set_output: "TF_SetOutput" fn(*mut Context, c_int, *const Tensor, *mut Status);
    allocate_output: "TF_AllocateOutput"
        fn(*mut Context, c_int, c_int, *const i64, c_int, usize, *mut Status) -> *mut Tensor;
    output_type: "TF_ExpectedOutputDataType" fn(*mut Context, c_int) -> c_int;
    fail: "TF_OpKernelContext_Failure" fn(*mut Context, *mut Status);
    new_tensor: "TF_NewTensor"
        fn(c_int, *const i64, c_int, *mut c_void, usize, Deallocator, *mut c_void) -> *mut Tensor;
    delete_tensor: "TF_DeleteTensor" fn(*mut Tensor);
    tensor_type: "TF_TensorType" fn(*const Tensor) -> c_int;
    tensor_rank: "TF_NumDims" fn(*const Tensor) -> c_int;
    tensor_elements: "TF_TensorElementCount" fn(*const Tensor) -> i64;
    tensor_bytes: "TF_TensorByteSize" fn(*const Tensor) -> usize;
    tensor_data: "TF_TensorData" fn(*const Tensor) -> *mut c_void;
    string_copy: "TF_StringCopy" fn(*mut c_void, *const c_char, usize);
    string_data: "TF_StringGetDataPointer" fn(*const c_void) -> *const c_char;
    string_size: "TF_StringGetSize" fn(*const c_void) -> usize;
}

/// The oldest version whose headers were compared with these declarations: major and minor.
const OLDEST: (u32, u32) = (2, 16);

impl Api {
    /// Looks up the functions in libraries of one TensorFlow that are already loaded. Returns an error if a library
    /// isn't loaded. It never loads a library, so no code of a file runs.
    ///
    /// # Safety
    ///
    /// The files must be TensorFlow's own libraries.
    pub(crate) unsafe fn load(libraries: &[impl AsRef<Path>]) -> Result<Api, String> {
        let open = |path: &Path| {
            loaded(path).map_err(|e| {
                format!(
                    "{} isn't loaded, so it doesn't belong to the imported TensorFlow: {e}",
                    path.display()
                )
            })
        };
        let libraries: Vec<Library> = libraries.iter().map(|p| open(p.as_ref())).collect::<Result<_, _>>()?;
        let api = Api::find(&libraries)?;
        // The functions are used until the process ends.
        std::mem::forget(libraries);
        // SAFETY: it has no arguments, and its result is valid as long as the library is loaded.
        let version = unsafe { CStr::from_ptr((api.version)()) }.to_string_lossy();
        let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
        match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(major), Some(minor)) if major == OLDEST.0 && minor >= OLDEST.1 => Ok(api),
            _ => Err(format!(
                "TensorFlow {version} is not supported: use 2.16 or later, before 3"
            )),
        }
    }
}

/// Opens a library that the process has already loaded.
#[cfg(unix)]
fn loaded(path: &Path) -> Result<Library, libloading::Error> {
    use libloading::os::unix;
    /// As in `dlfcn.h`. Without this flag, the file would be loaded, and its initialization code would run.
    #[cfg(target_os = "linux")]
    const RTLD_NOLOAD: c_int = 4;
    #[cfg(not(target_os = "linux"))]
    const RTLD_NOLOAD: c_int = 16;
    // SAFETY: the flag prevents loading, so no code of the library runs.
    let library = unsafe { unix::Library::open(Some(path), unix::RTLD_NOW | RTLD_NOLOAD) };
    library.map(Library::from)
}

/// Opens a library that the process has already loaded.
#[cfg(windows)]
fn loaded(path: &Path) -> Result<Library, libloading::Error> {
    libloading::os::windows::Library::open_already_loaded(path).map(Library::from)
}

/// The reason why a call failed.
#[derive(Debug)]
pub struct Failure {
    pub(crate) code: Code,
    /// The explanation.
    pub message: String,
}

impl Failure {
    /// Creates a failure with a code and an explanation.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Failure {
            code,
            message: message.into(),
        }
    }
}

/// A TensorFlow status that this value owns.
pub(crate) struct OwnStatus<'a> {
    api: &'a Api,
    status: *mut Status,
}

impl<'a> OwnStatus<'a> {
    pub(crate) fn new(api: &'a Api) -> Self {
        // SAFETY: the function has no arguments, and the caller owns the returned status.
        let status = unsafe { (api.new_status)() };
        OwnStatus { api, status }
    }

    pub(crate) fn as_ptr(&self) -> *mut Status {
        self.status
    }

    /// Returns the outcome of the last call with this status.
    pub(crate) fn result(&self) -> Result<(), Failure> {
        // SAFETY: the status is valid until it is dropped.
        if unsafe { (self.api.code)(self.status) } == Code::Ok as c_int {
            return Ok(());
        }
        // SAFETY: as above; the message is valid until the status changes.
        let message = unsafe { CStr::from_ptr((self.api.message)(self.status)) };
        Err(Failure::new(Code::Internal, message.to_string_lossy()))
    }

    pub(crate) fn set(&self, failure: &Failure) {
        let message: Vec<u8> = failure.message.bytes().filter(|&byte| byte != 0).collect();
        let message = CString::new(message).unwrap_or_default();
        // SAFETY: the status is valid. The message ends with a zero byte, and TensorFlow copies it.
        unsafe { (self.api.set_status)(self.status, failure.code as c_int, message.as_ptr()) };
    }
}

impl Drop for OwnStatus<'_> {
    fn drop(&mut self) {
        // SAFETY: this value owns the status, and nothing else uses it.
        unsafe { (self.api.delete_status)(self.status) };
    }
}
