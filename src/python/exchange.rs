//! `egmem.connect`: memory by name, of a running `egmem serve` or another exporter; and the memory of all ranks of a job.

use std::sync::Arc;

use egmem::driver::{Access, Location, NodeId};
use egmem::exchange::group::{AllGather, GatherOptions, GroupSecret, Sealed, from_env};
use egmem::exchange::protocol::Entry;
use egmem::exchange::{
    Address, CreateOptions, Error, FetchOptions, Owner as Peer, Security, Tls, TlsFiles, blocking,
};
use egmem::share::Peers;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::args::{self, List, NodeArg, Size, With, timeout_of};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, closed, invalid};
use crate::interpreter::{Closing, Open, check, closing, goes_on, interruptible, python, record};
use crate::ledger::from_program;
use crate::memory::{Memory, SharedBuffer, make};
use crate::pickle::{part_of, shareable};
use crate::region::Owner;

/// A connection to a server of memory by name. Made by `connect`.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "Client")]
pub struct Client {
    inner: Open<blocking::Client>,
    address: String,
    driver: egmem::Driver,
}

impl Client {
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&blocking::Client) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.driver.expect_this_process("client").or_raise()?;
        let client = self.inner.value().ok_or_else(|| closed("client"))?;
        // The closure drops the handle, without the GIL.
        interruptible(py, move || work(&client))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.driver.is_of_this_process() {
            // The thread that it would wait for is the parent's.
            std::mem::forget(self.inner.take());
        }
    }
}

/// Makes the object of a name.
fn entry_of<'py>(py: Python<'py>, entry: &Entry) -> PyResult<Bound<'py, PyAny>> {
    let (leases, owner) = (entry.leases, entry.owner.to_string());
    record(py, "Entry", (&entry.name, entry.memory.len, leases, owner))
}

#[pymethods]
impl Client {
    /// Returns the names that begin with `prefix`.
    #[pyo3(signature = (prefix=""))]
    fn list<'py>(&self, py: Python<'py>, prefix: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let entries = self.run(py, |client| client.list(prefix))?;
        entries.iter().map(|entry| entry_of(py, entry)).collect()
    }

    /// Waits until a name exists, at most `timeout` seconds; raises `TimedOut` then.
    #[pyo3(signature = (name, timeout=60.0))]
    fn wait<'py>(&self, py: Python<'py>, name: &str, timeout: f64) -> PyResult<Bound<'py, PyAny>> {
        let patience = timeout_of(timeout)?;
        entry_of(py, &self.run(py, |client| client.wait(name, patience))?)
    }

    /// Takes a lease on a name's memory and maps it here: `mode` is `"rw"`, `"r"`, or by default the access
    /// that the exporter allows. `expect_owner` is the peer that must have created it.
    ///
    /// With `probe`, a GPU (the CPU where no GPU may read the memory) proves that both ends see the same bytes of memory that
    /// comes by fabric handle, as that of another node does. Memory of this machine needs no proof.
    ///
    /// If a signal handler raises meanwhile, nothing stays leased or mapped.
    #[pyo3(signature = (name, *, mode=None, expect_owner=None, probe=true))]
    fn fetch<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        mode: Option<&str>,
        expect_owner: Option<&str>,
        probe: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mode = mode.map(args::mode).transpose()?;
        let owner = expect_owner
            .map(|owner| owner.parse::<Peer>().or_raise())
            .transpose()?;
        let fetch = |client: &blocking::Client| {
            client.fetch_with(name, |options| {
                let options = options.probe(probe);
                let options = options.with(owner, FetchOptions::expect_owner);
                match mode {
                    Some(Access::Read) => options.read_only(),
                    Some(_) => options.read_write(),
                    None => options,
                }
            })
        };
        let remote = from_program(py, || self.run(py, fetch))?;
        let proved = remote.proved().by.map(|by| match by {
            Location::Device(gpu) => format!("cuda:{gpu}"),
            _ => "cpu".to_owned(),
        });
        let name = remote.name().to_owned();
        let object = RemoteBuffer { name, proved };
        make(py, object, Owner::Remote(Arc::new(remote)))
    }

    /// Has the server create memory, which stays until it is deleted. With `exist_ok`, memory that this peer created
    /// there before with the same size and node is accepted. If a signal handler raises meanwhile, the memory may have
    /// been created: `list` shows it.
    #[pyo3(signature = (name, nbytes, *, node=None, share_with=List(Vec::new()), exist_ok=false))]
    fn create<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        nbytes: Size,
        node: Option<NodeArg>,
        share_with: List<String>,
        exist_ok: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = CreateOptions::new(name, nbytes.0)
            .with(node.map(|node| NodeId(node.0)), CreateOptions::node);
        let options = share_with
            .into_iter()
            .fold(options, CreateOptions::share_with);
        let entry = self.run(py, |client| match exist_ok {
            true => client.create_or_get(options),
            false => client.create(options),
        })?;
        entry_of(py, &entry)
    }

    /// Deletes memory that this peer has created, and waits at most `timeout` seconds for its holders. Raises `TimedOut`
    /// with the holders if there still are some; no process gets the memory meanwhile, and it goes with the last of
    /// them.
    #[pyo3(signature = (name, timeout=10.0))]
    fn delete(&self, py: Python<'_>, name: &str, timeout: f64) -> PyResult<()> {
        let patience = timeout_of(timeout)?;
        self.run(py, |client| client.delete(name, patience))
    }

    /// The server's name for this client.
    #[getter]
    fn peer_name(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |client| Ok(client.name()))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Ends the connection's use. Memory that was fetched keeps it until it is released.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.driver.expect_this_process("client").or_raise()?;
        self.inner.close(py);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { " closed" } else { "" };
        format!("<egmem.Client of {}{state}>", self.address)
    }
}

/// Another process's memory, mapped here, with a lease on it. Made by `Client.fetch` and `fetch`.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct RemoteBuffer {
    /// The name that it was fetched by.
    #[pyo3(get)]
    name: String,
    /// The processor that proved, when it was fetched by fabric handle, that both ends see the same bytes: `"cuda:0"`,
    /// `"cpu"`; `None` without a proof.
    #[pyo3(get)]
    proved: Option<String>,
}

#[pymethods]
impl RemoteBuffer {
    /// The lease's state, in words: `"held"` while all is well.
    #[getter]
    fn state(slf: PyRef<'_, Self>) -> PyResult<String> {
        let region = slf.as_super().region()?;
        match region.owner().or_raise()? {
            Owner::Remote(remote) => Ok(remote.state().to_string()),
            _ => Err(invalid("it is no fetched memory")),
        }
    }

    /// Unmaps the memory, ends the lease, and waits until the exporter has recorded it. Raises `InUse` while a view
    /// lives.
    fn release(slf: PyRef<'_, Self>, py: Python<'_>) -> PyResult<()> {
        let memory = slf.as_super();
        memory.region()?.expect_here()?;
        let region = memory.take(py)?.ok_or_else(|| closed("memory"))?;
        if let Err(error) = region.wait_for_gpus(py) {
            memory.put_back(region);
            return Err(error);
        }
        let remote = match region.into_owner() {
            Some(Owner::Remote(remote)) => Arc::into_inner(remote),
            _ => None,
        };
        let remote = remote.ok_or_else(|| invalid("it is no fetched memory"))?;
        interruptible(py, || remote.release())
    }
}

/// Connects to a server: `"unix:/path"` or `"tcp://host:port"`. Memory is imported into `driver`, or into the default
/// one.
///
/// Between machines `ca`, `cert` and `key` name files for mutual TLS, `crl` revocation lists, and `expect_peer` the
/// name that the server's certificate must have. Unix sockets of this user, of root and of `server_users` are
/// trusted. `timeout` is in seconds: connecting may take as long in all, and then each request until its answer.
///
/// Signal handlers run while a call of the client waits: Ctrl-C raises `KeyboardInterrupt`.
#[pyfunction]
#[pyo3(signature = (
    address, *, driver=None, timeout=10.0, ca=None, cert=None, key=None, crl=None, expect_peer=None, server_users=List(Vec::new()),
))]
#[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub fn connect(
    py: Python<'_>,
    address: &str,
    driver: Option<&Bound<'_, Driver>>,
    timeout: f64,
    ca: Option<std::path::PathBuf>,
    cert: Option<std::path::PathBuf>,
    key: Option<std::path::PathBuf>,
    crl: Option<std::path::PathBuf>,
    expect_peer: Option<&str>,
    server_users: List<u32>,
) -> PyResult<Py<Client>> {
    let driver = given_or_default(py, driver)?;
    let parsed: Address = address.parse::<Address>().or_raise()?;
    let security = match (ca, cert, key) {
        (Some(ca), Some(cert), Some(key)) => {
            let tls = Tls::load(TlsFiles { ca, cert, key, crl }).or_raise()?;
            Security::Tls(match expect_peer {
                Some(name) => tls.expect_peer(name).or_raise()?,
                None => tls,
            })
        }
        (None, None, None) if crl.is_none() && expect_peer.is_none() => Security::Plain,
        _ => {
            return Err(invalid(
                "ca, cert and key go together; crl and expect_peer need them",
            ));
        }
    };
    let trusted = Peers::same_user().and_user(0);
    let peers = server_users.into_iter().fold(trusted, Peers::and_user);
    let options = egmem::exchange::Client::options(parsed)
        .security(security)
        .peers(peers)
        .agent(concat!("egmem ", env!("CARGO_PKG_VERSION"), " (Python)"))
        .timeout(timeout_of(timeout)?);
    let client = interruptible(py, || {
        blocking::Client::connect_interruptible(options, &driver, check())
    })?;
    let client = Client {
        inner: Open::new(client),
        address: address.to_owned(),
        driver,
    };
    Py::new(py, closing(client))
}

/// The ranks of a Python library: a function that gathers bytes.
struct Ranks {
    rank: u32,
    size: u32,
    all_gather: Py<PyAny>,
}

impl AllGather for Ranks {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let mut gathered = None;
        // What the function raises is the exception of `interruptible`.
        let _ = goes_on(|py| {
            let all = python(py, || self.all_gather.call1(py, (PyBytes::new(py, own),)))?;
            gathered = Some(all.extract(py)?);
            Ok(())
        });
        gathered.ok_or_else(|| Error::all_gather("the interpreter ends"))
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
    let gather = || {
        let own = shared.map(|(shared, window)| part_of(&shared, window));
        let own = own.transpose()?;
        let mut all: Box<dyn AllGather + Send> = match ranks {
            None => from_env(timeout)?,
            Some((rank, size, all_gather)) => Box::new(Ranks {
                rank,
                size,
                all_gather,
            }),
        };
        if let Some(secret) = &secret {
            all = Box::new(Sealed::new(all, secret)?);
        }
        let options = GatherOptions::new().deadline(timeout);
        options.gather(&mut *all, own, &driver)
    };
    let gathered = from_program(py, || interruptible(py, gather))?;
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
