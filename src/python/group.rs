//! The memory of all ranks of a job.

use std::sync::Arc;

use egmem::exchange::group::{AllGather, GatherOptions, GroupSecret, Sealed, from_env};
use egmem::exchange::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::args::timeout_of;
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, ToPy};
use crate::ledger::from_program;
use crate::memory::{Memory, SharedBuffer, make};
use crate::pickle::{part_of, shareable};
use crate::region::Owner;

/// The ranks of a Python library: a function that gathers bytes.
struct Ranks {
    rank: u32,
    size: u32,
    all_gather: Py<PyAny>,
    /// The exception that the function raised.
    raised: Arc<std::sync::Mutex<Option<PyErr>>>,
}

impl AllGather for Ranks {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = Python::attach(|py| {
            let all = self.all_gather.call1(py, (PyBytes::new(py, own),))?;
            all.extract::<Vec<Vec<u8>>>(py)
        });
        gathered.map_err(|error| {
            let text = error.to_string();
            *crate::interpreter::lock(&self.raised) = Some(error);
            Error::all_gather(text)
        })
    }
}

/// Gathers memory over `all_gather`, or over the ranks that the environment describes. Returns the memory of each rank;
/// `None` for this one and for ranks without memory.
#[pyfunction]
#[pyo3(name = "_gather")]
pub fn gather<'py>(
    py: Python<'py>,
    memory: Option<&Bound<'py, Memory>>,
    ranks: Option<(u32, u32, Py<PyAny>)>,
    secret: Option<&[u8]>,
    driver: Option<&Bound<'py, Driver>>,
    timeout: f64,
) -> PyResult<(u32, Bound<'py, PyList>)> {
    let timeout = timeout_of(timeout)?;
    let driver = given_or_default(py, driver)?;
    let secret = secret.map(GroupSecret::new).transpose().or_raise()?;
    let region = memory.map(|memory| memory.get().region()).transpose()?;
    let shared = region
        .as_ref()
        .map(|region| shareable(py, region, "memory"));
    let shared = shared.transpose()?;
    let raised = Arc::default();
    let gathered = from_program(py, || {
        py.detach(|| {
            let own = shared.map(|(shared, window)| part_of(&shared, window));
            let own = own.transpose()?;
            let mut all: Box<dyn AllGather + Send> = match ranks {
                None => from_env(timeout)?,
                Some((rank, size, all_gather)) => Box::new(Ranks {
                    rank,
                    size,
                    all_gather,
                    raised: Arc::clone(&raised),
                }),
            };
            if let Some(secret) = &secret {
                all = Box::new(Sealed::new(all, secret)?);
            }
            let options = GatherOptions::new().deadline(timeout);
            options.gather(&mut *all, own, &driver)
        })
    });
    let gathered = gathered.map_err(|error| {
        crate::interpreter::lock(&raised)
            .take()
            .unwrap_or_else(|| error.to_py())
    })?;
    let all = PyList::empty(py);
    for rank in 0..gathered.size() {
        match gathered.rank(rank) {
            Ok(imported) => {
                all.append(make(py, SharedBuffer, Owner::Imported(imported.clone()))?)?;
            }
            Err(_) => all.append(py.None())?,
        }
    }
    Ok((gathered.own_rank(), all))
}
