//! Element types and devices of views.

use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use crate::args::expect_gpu;
use crate::error::{invalid, raise};

/// An element type, as DLPack and the array interfaces name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dtype {
    /// The name, as in NumPy and PyTorch.
    pub name: &'static str,
    /// DLPack's code: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool, from 7 on the kinds of float8.
    pub code: u8,
    /// The size in bytes.
    pub size: u8,
    /// The letter of the array interface, without byte order and size. `V` are bytes without a meaning.
    letter: char,
}

const fn dtype(name: &'static str, code: u8, size: u8, letter: char) -> Dtype {
    Dtype {
        name,
        code,
        size,
        letter,
    }
}

const ALL: [Dtype; 23] = [
    dtype("uint8", 1, 1, 'u'),
    dtype("int8", 0, 1, 'i'),
    dtype("uint16", 1, 2, 'u'),
    dtype("int16", 0, 2, 'i'),
    dtype("uint32", 1, 4, 'u'),
    dtype("int32", 0, 4, 'i'),
    dtype("uint64", 1, 8, 'u'),
    dtype("int64", 0, 8, 'i'),
    dtype("float16", 2, 2, 'f'),
    dtype("float32", 2, 4, 'f'),
    dtype("float64", 2, 8, 'f'),
    dtype("bfloat16", 4, 2, 'V'),
    dtype("complex64", 5, 8, 'c'),
    dtype("complex128", 5, 16, 'c'),
    dtype("bool", 6, 1, 'b'),
    dtype("float8_e3m4", 7, 1, 'V'),
    dtype("float8_e4m3", 8, 1, 'V'),
    dtype("float8_e4m3b11fnuz", 9, 1, 'V'),
    dtype("float8_e4m3fn", 10, 1, 'V'),
    dtype("float8_e4m3fnuz", 11, 1, 'V'),
    dtype("float8_e5m2", 12, 1, 'V'),
    dtype("float8_e5m2fnuz", 13, 1, 'V'),
    dtype("float8_e8m0fnu", 14, 1, 'V'),
];

impl Dtype {
    /// Bytes.
    pub const BYTES: Self = ALL[0];

    /// Returns the array interfaces' name: `<f4`, `|u1`.
    pub fn typestr(self) -> String {
        let order = if self.size == 1 || self.letter == 'V' {
            '|'
        } else {
            '<'
        };
        format!("{order}{}{}", self.letter, self.size)
    }

    /// Returns the first version of DLPack that has the type.
    pub fn dlpack_version(self) -> [u32; 2] {
        let float8 = self.code >= 7;
        [1, u32::from(float8)]
    }

    /// Reads a name, a NumPy type, a PyTorch type, or a class such as `numpy.float32`.
    ///
    /// # Errors
    /// `InvalidArgument` for a type that is not here, and for one of the other byte order.
    pub fn parse(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if given.is_instance_of::<PyTuple>()
            || given.is_instance_of::<PyList>()
            || given.is_instance_of::<PyInt>()
        {
            return Err(raise(
                "InvalidArgument",
                &format!("dtype is {given}, which is a shape"),
                &format!("pass shape={given}, and the element type as dtype"),
                None,
            ));
        }
        // NumPy's types have the same name in each byte order.
        let native = given.getattr("isnative").and_then(|is| is.extract());
        if !native.unwrap_or(true) {
            return Err(swapped(given));
        }
        let mut names = Vec::new();
        for attribute in ["name", "__name__"] {
            if let Ok(name) = given
                .getattr(attribute)
                .and_then(|name| name.extract::<String>())
            {
                names.push(name);
            }
        }
        names.push(given.str()?.to_string());
        if let Some(dtype) = names.iter().find_map(|name| Self::named(name)) {
            return Ok(dtype);
        }
        let other_order = |name: &String| name.strip_prefix('>').and_then(Self::named).is_some();
        if names.iter().any(other_order) {
            return Err(swapped(given));
        }
        let all: Vec<_> = ALL.iter().map(|dtype| dtype.name).collect();
        Err(invalid(&format!(
            "there is no element type {given}; valid: {}",
            all.join(", ")
        )))
    }

    /// Returns the type of a name, such as `float32` or `torch.float32`, or of a string of the array interfaces, such
    /// as `<f4`, `=f4` or `f4`.
    fn named(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        let short = name.strip_prefix(['<', '=', '|']).unwrap_or(name);
        // Bytes without a meaning are no type: several types are exported as such.
        ALL.into_iter().find(|dtype| {
            dtype.name == name || dtype.letter != 'V' && dtype.typestr()[1..] == *short
        })
    }
}

fn swapped(given: &Bound<'_, PyAny>) -> PyErr {
    raise(
        "InvalidArgument",
        &format!("elements of type {given} have the other byte order"),
        "pass a little-endian type, or view the memory as bytes and give those the type in NumPy",
        None,
    )
}

/// `kDLCPU`.
pub const CPU: i32 = 1;
/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`: pinned memory of the CPU.
pub const CUDA_HOST: i32 = 3;

/// Returns DLPack's device for its name.
///
/// # Errors
/// `InvalidArgument` for another name; `NoSuchPlace` for a GPU that the driver's machine does not have.
pub fn parse_device(name: &str, driver: &egmem::Driver) -> PyResult<(i32, i32)> {
    let gpu = |digits: &str| digits.parse::<i32>().ok().filter(|gpu| *gpu >= 0);
    match (name, name.strip_prefix("cuda:").and_then(gpu)) {
        ("cpu", _) => Ok((CPU, 0)),
        ("cuda_host", _) => Ok((CUDA_HOST, 0)),
        (_, Some(gpu)) => {
            expect_gpu(gpu, driver)?;
            Ok((CUDA, gpu))
        }
        _ => Err(invalid(&format!(
            "there is no device {name:?}; valid: \"cpu\", \"cuda_host\", \"cuda:0\" and so on"
        ))),
    }
}

/// Returns the name of DLPack's device.
pub fn device_name((kind, gpu): (i32, i32)) -> String {
    match kind {
        CPU => "cpu".into(),
        CUDA_HOST => "cuda_host".into(),
        _ => format!("cuda:{gpu}"),
    }
}
