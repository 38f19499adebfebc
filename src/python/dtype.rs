//! Element types of views.

use pyo3::prelude::*;

use crate::error::invalid;

/// An element type, as DLPack and the array interfaces name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dtype {
    /// The name, as in NumPy and PyTorch.
    pub name: &'static str,
    /// DLPack's code: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool.
    pub code: u8,
    /// The size in bytes.
    pub size: u8,
    /// The letter of the array interface, without byte order and size.
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

const ALL: [Dtype; 15] = [
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

    /// Reads a name, a NumPy type, a PyTorch type, or a class such as `numpy.float32`.
    ///
    /// # Errors
    /// `InvalidArgument` for a type that is not here.
    pub fn parse(given: &Bound<'_, PyAny>) -> PyResult<Self> {
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
        let known = |name: &String| {
            let name = name.strip_prefix("torch.").unwrap_or(name);
            ALL.into_iter().find(|dtype| {
                dtype.name == name || dtype.typestr() == name || dtype.typestr()[1..] == *name
            })
        };
        names.iter().find_map(known).ok_or_else(|| {
            let all: Vec<_> = ALL.iter().map(|dtype| dtype.name).collect();
            invalid(&format!(
                "there is no element type {given}; valid: {}",
                all.join(", ")
            ))
        })
    }
}
