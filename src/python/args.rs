//! Arguments as Python programs have them: sizes as numbers or text, nodes and GPUs as numbers or objects.

use std::alloc::Layout;
use std::fmt::Debug;
use std::time::Duration;

use egmem::Backing;
use egmem::driver::{Access, Location};
use egmem::size::Bytes;
use pyo3::exceptions::{PyMemoryError, PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

use crate::error::{OrRaise, invalid, raise};
use crate::interpreter::{detached, python, record_class};

/// A number of bytes: an integer of any type, or text such as `"64MiB"`.
#[derive(Clone, Copy)]
pub struct Size(pub u64);

/// A number of pages or blocks, or the index of one.
#[derive(Clone, Copy)]
pub struct Count(pub u64);

/// A host node: its id, or an `egmem.Node`.
#[derive(Clone, Copy)]
pub struct NodeArg(pub i32);

/// A GPU: its ordinal, or an `egmem.Gpu`.
#[derive(Clone, Copy)]
pub struct GpuArg(pub i32);

const SIZES: &str =
    "pass 0 to 2**64 - 1 bytes, as an integer or as text such as \"64MiB\" or \"1.5 GiB\"";

impl FromPyObject<'_, '_> for Size {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        // Python has True as the integer 1, but it is meant as a switch.
        let is_bool = given.is_instance_of::<PyBool>();
        if !is_bool && let Ok(bytes) = given.extract::<u64>() {
            return Ok(Self(bytes));
        }
        if let Ok(text) = given.cast::<PyString>() {
            let text = text.to_cow()?;
            let wrong = |_| {
                let why = format!("a size or offset is {text:?}");
                raise("InvalidArgument", &why, SIZES)
            };
            return text
                .parse()
                .map(|bytes: Bytes| Self(bytes.0))
                .map_err(wrong);
        }
        // A number of another type, or out of range.
        let is_number = given.hasattr("__index__")? || given.hasattr("__float__")?;
        if is_number && !is_bool {
            let why = format!("a size or offset is {} bytes", given.str()?);
            return Err(raise("InvalidArgument", &why, SIZES));
        }
        let kind = given.get_type().name()?;
        let why = format!("a size or offset is an integer or text such as \"64MiB\", not {kind}");
        Err(PyTypeError::new_err(why))
    }
}

impl FromPyObject<'_, '_> for Count {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        given.extract().map(Self).map_err(|error: PyErr| {
            if !error.is_instance_of::<PyOverflowError>(given.py()) {
                return error;
            }
            let message = format!("a number of pages or blocks, or an index, is {}", *given);
            raise("InvalidArgument", &message, "pass 0 to 2**64 - 1")
        })
    }
}

/// A list, or another iterable; text is none.
pub struct List<T>(pub Vec<T>);

impl<'py, T: FromPyObjectOwned<'py>> FromPyObject<'_, 'py> for List<T> {
    type Error = PyErr;

    // Not by the class of sequences: late in the interpreter's shutdown it cannot be imported.
    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let has_elements = given.hasattr("__iter__")? || given.hasattr("__getitem__")?;
        if given.is_instance_of::<PyString>() || !has_elements {
            let kind = given.get_type().name()?;
            let why = format!("{kind} where a list is needed: pass [{}]", given.repr()?);
            return Err(PyTypeError::new_err(why));
        }
        let mut values = room_for(&given)?;
        // Without `collect`, whose hint of the size is an import.
        python(given.py(), || {
            for value in given.try_iter()? {
                values.push(value?.extract().map_err(Into::into)?);
            }
            Ok(Self(values))
        })
    }
}

/// Returns a vector with room for the elements of an object, whose length may be any number.
///
/// # Errors
/// `MemoryError`.
pub fn room_for<T>(given: &Bound<'_, PyAny>) -> PyResult<Vec<T>> {
    let mut values = Vec::new();
    let len = given.len().unwrap_or(0);
    let room = values.try_reserve_exact(len);
    room.map_err(|_| PyMemoryError::new_err(format!("no room for a list of {len} elements")))?;
    Ok(values)
}

impl<T> IntoIterator for List<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// One value for all, or a sequence with one for each. Text is no sequence.
pub enum OneOrEach<T> {
    One(T),
    Each(Vec<T>),
}

impl<T> IntoIterator for OneOrEach<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        match self {
            Self::One(value) => vec![value],
            Self::Each(values) => values,
        }
        .into_iter()
    }
}

impl<T: Copy> OneOrEach<T> {
    /// Returns the value for each of `count` things.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of values.
    pub fn each(&self, name: &str, count: usize, thing: &str) -> PyResult<Vec<T>> {
        match self {
            Self::One(value) => Ok(vec![*value; count]),
            Self::Each(values) if values.len() == count => Ok(values.clone()),
            Self::Each(values) => Err(invalid(&format!(
                "{name} has {} numbers for {count} {thing}s; pass one number, or one for each {thing}",
                values.len()
            ))),
        }
    }
}

impl<'py, T: FromPyObjectOwned<'py, Error = PyErr>> FromPyObject<'_, 'py> for OneOrEach<T> {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let object = given.as_ptr();
        // SAFETY: `given` is a live object, and the thread is attached. The function only looks at the object's type.
        let is_sequence = unsafe { ffi::PySequence_Check(object) == 1 };
        // An array of one number is that number; one of several has the same type.
        let is_number = || given.call_method0("__index__").is_ok();
        if is_sequence && !given.is_instance_of::<PyString>() && !is_number() {
            let List(values) = given.extract()?;
            return Ok(Self::Each(values));
        }
        given.extract().map(Self::One)
    }
}

impl FromPyObject<'_, '_> for NodeArg {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        number(given, "node", ("Node", "id")).map(Self)
    }
}

impl FromPyObject<'_, '_> for GpuArg {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        number(given, "GPU", ("Gpu", "ordinal")).map(Self)
    }
}

/// Options of which a program may leave some out.
pub trait With: Sized {
    /// Sets an option that is given.
    fn with<V>(self, given: Option<V>, set: impl FnOnce(Self, V) -> Self) -> Self {
        match given {
            Some(value) => set(self, value),
            None => self,
        }
    }
}

impl<T> With for T {}

impl From<GpuArg> for Location {
    fn from(gpu: GpuArg) -> Self {
        Self::Device(gpu.0)
    }
}

/// Returns the value of one of the words that an argument may be.
///
/// # Errors
/// `InvalidArgument` for another word.
pub fn choice<T: Copy>(
    name: &str,
    given: &str,
    words: &[(impl AsRef<str> + Debug, T)],
) -> PyResult<T> {
    let found = words.iter().find(|(word, _)| word.as_ref() == given);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let words: Vec<_> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
        invalid(&format!("{name} is {given:?}; valid: {}", words.join(", ")))
    })
}

/// Parses the CPU's access.
///
/// # Errors
/// `InvalidArgument`.
pub fn access(text: &str) -> PyResult<Access> {
    let words = [
        ("rw", Access::ReadWrite),
        ("r", Access::Read),
        ("", Access::None),
    ];
    choice("host", text, &words)
}

/// Parses what memory is to be.
///
/// # Errors
/// `InvalidArgument`.
pub fn backing(text: &str) -> PyResult<Backing> {
    let all = [Backing::Auto, Backing::Driver, Backing::Registered];
    let words = all.map(|backing| (backing.to_string(), backing));
    choice("backing", text, &words)
}

/// Parses the access of other processes.
///
/// # Errors
/// `InvalidArgument`.
pub fn mode(text: &str) -> PyResult<Access> {
    choice(
        "mode",
        text,
        &[("rw", Access::ReadWrite), ("r", Access::Read)],
    )
}

/// Reads a time in seconds, which the words in front of it name. Infinity is the most that a `Duration` has.
///
/// # Errors
/// `InvalidArgument`.
pub fn seconds(name: &str, given: f64) -> PyResult<Duration> {
    if given == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(given).map_err(|_| {
        let valid = "0 or more and below 2**64, or infinity";
        invalid(&format!("{name} {given} s; valid: {valid}"))
    })
}

/// Reads a timeout in seconds.
///
/// # Errors
/// `InvalidArgument`.
pub fn timeout_of(timeout: f64) -> PyResult<Duration> {
    seconds("a timeout of", timeout)
}

/// Returns the layout of a block.
///
/// # Errors
/// `InvalidArgument` for an alignment that is no power of two, and for more bytes than an address space has.
pub fn layout(nbytes: Size, align: Size) -> PyResult<Layout> {
    let (nbytes, align) = (nbytes.0, align.0);
    Layout::from_size_align(nbytes as usize, align as usize).map_err(|_| {
        if align.is_power_of_two() {
            return invalid(&format!("a size is {nbytes} bytes; valid: below 2**63"));
        }
        invalid(&format!(
            "align is {align}; valid: a power of two, up to 2**62"
        ))
    })
}

/// Returns the layouts of many blocks.
///
/// # Errors
/// `InvalidArgument` as for [`layout`], and for a block of no bytes; `TypeError` for what is no list of sizes.
pub fn layouts(sizes: &Bound<'_, PyAny>, align: Size) -> PyResult<Vec<Layout>> {
    // An array's numbers are read as a whole.
    let List::<Size>(sizes) = match sizes.getattr("tolist") {
        Ok(list) => python(sizes.py(), || list.call0())?.extract()?,
        Err(_) => sizes.extract()?,
    };
    if let Some(index) = sizes.iter().position(|size| size.0 == 0) {
        return Err(invalid(&format!(
            "size {index} of {} is 0 bytes; valid: 1 byte or more",
            sizes.len()
        )));
    }
    sizes.into_iter().map(|size| layout(size, align)).collect()
}

/// Reads the number of a node or a GPU: an integer, or an object of a class with this attribute.
///
/// # Errors
/// `NoSuchPlace` for one that no machine has; `TypeError` for another object than an integer.
fn number(
    given: Borrowed<'_, '_, PyAny>,
    what: &str,
    (class, attribute): (&str, &str),
) -> PyResult<i32> {
    let is_bool = given.is_instance_of::<PyBool>();
    if !is_bool && let Ok(number) = given.extract::<i32>() {
        return Ok(number);
    }
    if !is_bool && given.hasattr("__index__")? {
        let message = format!("there is no {what} {}", given.str()?);
        let remedy = "pass one that egmem.topology() lists";
        return Err(raise("NoSuchPlace", &message, remedy));
    }
    // Late in the interpreter's shutdown there is no such object.
    if let Ok(class) = record_class(given.py(), class)
        && given.is_instance(&class)?
    {
        return given.getattr(attribute)?.extract();
    }
    let kind = given.get_type().name()?;
    let why = format!("a {what} is an integer or an egmem.{class}, not {kind}");
    Err(PyTypeError::new_err(why))
}

/// Returns an argument's number of bytes, for the package's modules in Python.
#[pyfunction]
#[pyo3(name = "_size")]
pub fn size(nbytes: Size) -> u64 {
    nbytes.0
}

/// Returns an argument's GPU, for the package's modules in Python.
#[pyfunction]
#[pyo3(name = "_gpu")]
pub fn gpu(gpu: GpuArg) -> i32 {
    gpu.0
}

/// Returns an argument's host node, for the package's modules in Python.
#[pyfunction]
#[pyo3(name = "_node")]
pub fn node(node: NodeArg) -> i32 {
    node.0
}

/// Checks that the driver's machine has this GPU.
///
/// # Errors
/// `NoSuchPlace`, which names the GPU and how many there are.
pub fn expect_gpu(gpu: i32, driver: &egmem::Driver) -> PyResult<()> {
    let mut count = Ok(0);
    detached(|| count = driver.device_count());
    count
        .and_then(|count| egmem::Error::expect_gpu(gpu, count))
        .or_raise()
}
