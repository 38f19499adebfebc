//! `egmem.Driver` and the driver that functions use if none is given; `egmem.Topology`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use egmem::Machine;
use egmem::driver::NodeId;
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::args::NodeArg;
use crate::error::OrRaise;
use crate::interpreter::{PerProcess, lock, to_python};
use crate::places::{self, simulated_of};

/// A driver: CUDA's, or a simulated one. Made by `open()` and `simulated()`.
#[pyclass(frozen, module = "egmem", name = "Driver")]
pub struct Driver {
    pub inner: egmem::Driver,
}

#[pymethods]
impl Driver {
    /// `"cuda"` or `"simulated"`.
    #[getter]
    fn name(&self) -> &'static str {
        if self.inner.is_simulated() {
            "simulated"
        } else {
            "cuda"
        }
    }

    /// Whether the machine is simulated: times measured on it mean nothing, and no GPU can use its memory.
    #[getter]
    fn is_simulated(&self) -> bool {
        self.inner.is_simulated()
    }

    /// The number of GPUs.
    #[getter]
    fn gpu_count(&self, py: Python<'_>) -> PyResult<i32> {
        self.here()?;
        py.detach(|| self.inner.device_count()).or_raise()
    }

    /// The newest CUDA version that the driver supports, such as `"13.0"`.
    #[getter]
    fn cuda_version(&self, py: Python<'_>) -> PyResult<String> {
        self.here()?;
        py.detach(|| self.inner.driver_version())
            .or_raise()
            .map(|version| version.to_string())
    }

    /// Reads the machine's GPUs and host nodes.
    fn topology(&self, py: Python<'_>) -> PyResult<Topology> {
        self.here()?;
        py.detach(|| egmem::Topology::discover(&self.inner))
            .or_raise()
            .map(|inner| Topology { inner })
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Self>()
            .is_ok_and(|other| other.get().inner.same(&self.inner))
    }

    fn __hash__(&self) -> isize {
        self.inner.address() as isize
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let simulated = simulated_of(&self.inner);
        let gpus = self.gpu_count(py);
        let gpus = gpus.map_or_else(|_| "GPUs unknown".into(), |count| format!("{count} GPU(s)"));
        format!("<egmem.Driver {}: {gpus}{simulated}>", self.name())
    }
}

impl Driver {
    /// Returns the object of a driver.
    pub fn of(driver: &egmem::Driver) -> Self {
        let inner = driver.clone();
        Self { inner }
    }

    fn here(&self) -> PyResult<()> {
        self.inner.expect_this_process("driver").or_raise()
    }
}

/// The default driver of one process.
#[derive(Default)]
struct DefaultDriver {
    driver: Mutex<Option<egmem::Driver>>,
    /// Whether the driver was opened, or is being opened, and no other was set since.
    opened: AtomicBool,
    /// The parent process had opened one when it forked this one.
    of_parent: AtomicBool,
}

static DEFAULT: PerProcess<DefaultDriver> = PerProcess::new();

fn default_of_process() -> &'static DefaultDriver {
    DEFAULT.get(|parent| {
        let of_parent =
            |parent: &DefaultDriver| parent.opened.load(Relaxed) || parent.of_parent.load(Relaxed);
        DefaultDriver {
            of_parent: parent.is_some_and(of_parent).into(),
            ..DefaultDriver::default()
        }
    })
}

/// Returns the driver that was given, if one was.
///
/// # Errors
/// `InvalidArgument` for a driver of the parent process in a forked child.
pub fn given(given: Option<&Bound<'_, Driver>>) -> PyResult<Option<egmem::Driver>> {
    let Some(driver) = given else {
        return Ok(None);
    };
    let driver = driver.get().inner.clone();
    driver.expect_this_process("driver").or_raise()?;
    Ok(Some(driver))
}

/// Returns the driver that was given, or else the default one, opened at the first call: the machine that `EGMEM_SIM`
/// names, or CUDA's.
///
/// # Errors
/// `NoDriver` and other errors of opening; `InvalidArgument` in a forked child, where the parent's driver does not
/// work.
pub fn given_or_default(
    py: Python<'_>,
    given: Option<&Bound<'_, Driver>>,
) -> PyResult<egmem::Driver> {
    if let Some(driver) = self::given(given)? {
        return Ok(driver);
    }
    let driver = py.detach(default).or_raise()?;
    driver.expect_this_process("driver").or_raise()?;
    Ok(driver)
}

/// Opening takes a while and needs no Python: other threads that ask meanwhile wait without the GIL.
fn default() -> egmem::Result<egmem::Driver> {
    let default = default_of_process();
    if default.of_parent.load(Relaxed) {
        let why = "the parent process opened it, and a forked child has no GPU: start workers with spawn or forkserver";
        return Err(egmem::Error::invalid("driver", why));
    }
    let mut slot = lock(&default.driver);
    if let Some(driver) = &*slot {
        return Ok(driver.clone());
    }
    default.opened.store(true, Relaxed);
    let driver = egmem::Driver::from_env().inspect_err(|_| default.opened.store(false, Relaxed))?;
    *slot = Some(driver.clone());
    Ok(driver)
}

/// Opens the CUDA driver of this machine.
///
/// Raises `NoDriver` without a usable driver.
#[pyfunction]
pub fn open(py: Python<'_>) -> PyResult<Driver> {
    py.detach(egmem::Driver::open)
        .or_raise()
        .map(|inner| Driver { inner })
}

/// Returns a simulated driver with real memory: `"gh200"`, `"gh200x4"`, `"gb200"`, `"h200x8"`, or a description as a
/// JSON file. Each call makes a machine of its own.
#[pyfunction]
#[pyo3(signature = (machine="gh200"))]
pub fn simulated(py: Python<'_>, machine: &str) -> PyResult<Driver> {
    let open = || egmem::Driver::simulated(Machine::load(machine)?);
    py.detach(open).or_raise().map(|inner| Driver { inner })
}

/// Returns the driver that calls without `driver=` use, and opens it if no call has.
#[pyfunction]
pub fn default_driver(py: Python<'_>) -> PyResult<Driver> {
    given_or_default(py, None).map(|inner| Driver { inner })
}

/// Sets the driver that calls without `driver=` use. `None` has it chosen anew at the next call.
#[pyfunction]
#[pyo3(signature = (driver))]
pub fn set_default_driver(py: Python<'_>, driver: Option<&Bound<'_, Driver>>) {
    let new = driver.map(|driver| driver.get().inner.clone());
    let default = default_of_process();
    py.detach(|| {
        let old = {
            let mut slot = lock(&default.driver);
            default.opened.store(new.is_some(), Relaxed);
            default.of_parent.store(false, Relaxed);
            std::mem::replace(&mut *slot, new)
        };
        drop(old);
    });
}

/// The GPUs and host NUMA nodes of a machine, as they were read.
#[pyclass(frozen, module = "egmem", name = "Topology")]
pub struct Topology {
    inner: egmem::Topology,
}

#[pymethods]
impl Topology {
    /// The GPUs, by ordinal.
    #[getter]
    fn gpus<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let gpus = self.inner.gpus().iter();
        gpus.map(|gpu| places::gpu(py, gpu)).collect()
    }

    /// The host nodes, by ascending id; never a GPU's own memory.
    #[getter]
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let nodes = self.inner.nodes().iter();
        nodes.map(|node| places::node(py, node)).collect()
    }

    /// Returns the GPU with this ordinal.
    fn gpu<'py>(&self, py: Python<'py>, ordinal: i32) -> PyResult<Bound<'py, PyAny>> {
        places::gpu(py, self.inner.gpu(ordinal).or_raise()?)
    }

    /// Returns the host node with this id.
    fn node<'py>(&self, py: Python<'py>, id: i32) -> PyResult<Bound<'py, PyAny>> {
        places::node(py, self.inner.node(NodeId(id)).or_raise()?)
    }

    /// Returns the bytes that an allocation on a host node could get now; `None` if unknown.
    fn free_memory(&self, node: NodeArg) -> PyResult<Option<u64>> {
        self.inner.free_memory(NodeId(node.0)).or_raise()
    }

    /// Returns the text of `egmem topo`.
    fn to_text(&self) -> String {
        self.inner.to_text()
    }

    /// Returns the drawing of `egmem topo --svg`.
    fn to_svg(&self) -> String {
        self.inner.to_svg()
    }

    /// Returns the output of `egmem topo --json`, as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.inner)
    }

    fn __str__(&self) -> String {
        self.inner.to_text()
    }

    fn __repr__(&self) -> String {
        let (nodes, gpus) = (self.inner.nodes().len(), self.inner.gpus().len());
        let machine = self
            .inner
            .machine()
            .map(|name| format!(" of {name}, SIMULATED"))
            .unwrap_or_default();
        format!("<egmem.Topology{machine}: {nodes} host node(s), {gpus} GPU(s)>")
    }
}

/// Reads the topology of the machine of `driver`, or of the default one.
#[pyfunction]
#[pyo3(signature = (driver=None))]
pub fn topology(py: Python<'_>, driver: Option<&Bound<'_, Driver>>) -> PyResult<Topology> {
    let driver = given_or_default(py, driver)?;
    py.detach(|| egmem::Topology::discover(&driver))
        .or_raise()
        .map(|inner| Topology { inner })
}
