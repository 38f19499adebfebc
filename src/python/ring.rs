//! `egmem.ring`: queues of records between threads and processes.

use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use egmem::driver::Driver as Native;
use egmem::shapes::ring::{RingOptions, Untyped};
use egmem::shapes::{Consumer, Producer, Ring};
use egmem::share::{Channel, Result as Sent};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::args::{Count, GpuArg, NodeArg, Size, With, timeout_of};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, closed, invalid};
use crate::interpreter::{detached, lock, not_copied, until};
use crate::ledger::from_program;
use crate::pickle::{GRANTED, pickled};
use crate::places::location;

/// One side of a ring.
pub enum Side {
    Producer(Producer<Untyped>),
    Consumer(Consumer<Untyped>),
}

impl Side {
    fn is_alone(&self) -> bool {
        match self {
            Self::Producer(side) => side.is_alone(),
            Self::Consumer(side) => side.is_alone(),
        }
    }

    fn shape(&self) -> (u64, usize) {
        match self {
            Self::Producer(side) => (side.record_bytes(), side.capacity()),
            Self::Consumer(side) => (side.record_bytes(), side.capacity()),
        }
    }

    fn share_other(&mut self, channel: &mut Channel) -> Sent<()> {
        match self {
            Self::Producer(side) => side.share_consumer(channel),
            Self::Consumer(side) => side.share_producer(channel),
        }
    }
}

/// How much longer a wait lasts that finds its side in use: other threads hold one for microseconds, but for a thread that sends
/// one to a slow process.
const GRACE: Duration = Duration::from_millis(10);

/// The sides of a ring that this process has: the producer's and the consumer's. Each lock is held for a look at the ring, or
/// while a side is sent, which waits for the process that gets it: a thread that waits in `send` or `receive` does not block on
/// it.
type Sides = [Mutex<Option<Side>>; 2];

/// Sends one side to another process, or why it does not get the side. This process has the side no more, even if that fails.
///
/// # Errors
/// The channel's.
fn hand_over(sides: &Sides, is_producer: bool, channel: &mut Channel) -> Sent<()> {
    // In this order always.
    let [mut producer, mut consumer] = sides.each_ref().map(lock);
    let (side, other) = if is_producer {
        (&mut *producer, &mut *consumer)
    } else {
        (&mut *consumer, &mut *producer)
    };
    let Some(other) = other else {
        return channel.send_text("it has closed or handed over the other one");
    };
    *side = None;
    if !other.is_alone() {
        return channel.send_text("a third process has it, and has not ended");
    }
    channel.send_text(GRANTED)?;
    other.share_other(channel)
}

/// One side of a ring, made by `egmem.ring`. Any thread may use it. A side that has waited for 16 ms looks once a
/// millisecond, also for the end of the other process.
///
/// A pickled side goes to the process that unpickles it, at that moment, and is closed here; keep it until then. This process
/// keeps the other one.
/// After that process has ended, the side may be pickled again: the next process goes on where that one stopped.
#[pyclass(frozen, module = "egmem", name = "RingSide")]
pub struct RingSide {
    sides: Arc<Sides>,
    is_producer: bool,
    /// The size of a record in bytes.
    #[pyo3(get)]
    record_bytes: u64,
    /// The most records that the ring holds.
    #[pyo3(get)]
    records: usize,
    driver: Native,
}

impl RingSide {
    /// Wraps a side whose other one is in another process.
    pub fn of(driver: &Native, side: Side) -> Self {
        let shape = side.shape();
        let (sides, is_producer) = match side {
            Side::Producer(_) => ([Some(side), None], true),
            Side::Consumer(_) => ([None, Some(side)], false),
        };
        Self::new(driver, Arc::new(sides.map(Mutex::new)), is_producer, shape)
    }

    fn new(driver: &Native, sides: Arc<Sides>, is_producer: bool, shape: (u64, usize)) -> Self {
        let (record_bytes, records) = shape;
        Self {
            sides,
            is_producer,
            record_bytes,
            records,
            driver: driver.clone(),
        }
    }

    fn own(&self) -> &Mutex<Option<Side>> {
        &self.sides[usize::from(!self.is_producer)]
    }

    /// Asks this side until it has an answer, its other side is gone, or the time is over.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        mut ask: impl FnMut(&mut Side) -> egmem::Result<Option<T>> + Send,
    ) -> PyResult<Option<T>> {
        self.driver.expect_this_process("ring").or_raise()?;
        let side = self.own();
        let timeout = timeout.map(timeout_of).transpose()?;
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let answer = until(py, || {
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            let mut side = match side.try_lock() {
                Ok(side) => side,
                Err(TryLockError::WouldBlock) => {
                    let gives_up = end.is_some_and(|end| Instant::now() >= end + GRACE);
                    return gives_up.then_some(Some(Ok(None)));
                }
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
            };
            let Some(side) = side.as_mut() else {
                return Some(None);
            };
            match ask(side) {
                Ok(None) => {}
                answer => return Some(Some(answer)),
            }
            let is_last = is_over || side.is_alone();
            // Also what the other side did before it was gone.
            is_last.then(|| Some(ask(side)))
        })?;
        match answer {
            Some(answer) => answer.or_raise(),
            None => Err(self.not_here()),
        }
    }

    fn name(&self) -> &'static str {
        match self.is_producer {
            true => "producer's side of the ring",
            false => "consumer's side of the ring",
        }
    }

    fn not_here(&self) -> PyErr {
        closed(self.name())
    }

    /// # Errors
    /// `InvalidArgument` for the other side, which does what `does` says.
    fn expect(&self, is_producer: bool, does: &str) -> PyResult<()> {
        match self.is_producer == is_producer {
            true => Ok(()),
            false => Err(invalid(&format!("the {} {does}", self.name()))),
        }
    }

    fn drop_side(&self) {
        if self.driver.is_of_this_process() {
            // Also the lock is taken without the GIL: a side may be on its way to another process.
            detached(|| *lock(self.own()) = None);
        }
    }
}

impl Drop for RingSide {
    fn drop(&mut self) {
        self.drop_side();
    }
}

#[pymethods]
impl RingSide {
    /// Whether the other side is closed, or its process has ended. Records that it sent before are still there.
    #[getter]
    fn alone(&self, py: Python<'_>) -> PyResult<bool> {
        self.driver.expect_this_process("ring").or_raise()?;
        let is_alone = py.detach(|| lock(self.own()).as_ref().map(Side::is_alone));
        is_alone.ok_or_else(|| self.not_here())
    }

    /// Sends the records of a bytes-like object, whose size is a multiple of `record_bytes`. The consumer sees all or none.
    ///
    /// Waits at most `timeout` seconds for room, and 10 ms longer while another thread has the side. Returns `False`, and
    /// sends nothing, if there was none, or if the consumer is gone (`alone`). A signal handler that raises ends the wait.
    ///
    /// Raises `InvalidArgument` for the consumer's side.
    #[pyo3(signature = (data, *, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        let data = PyMemoryView::from(data)?.call_method0("tobytes")?;
        let data: PyBackedBytes = data.extract()?;
        let (bytes, record) = (data.len() as u64, self.record_bytes);
        if bytes % record != 0 {
            let why = format!("{bytes} bytes; valid: a multiple of record_bytes, {record}");
            return Err(invalid(&why));
        }
        let records = (bytes / record) as usize;
        self.expect(true, "receives; valid: the producer's")?;
        let sent = self.wait(py, timeout, |side| {
            let Side::Producer(side) = side else {
                return Ok(None);
            };
            let Some(mut batch) = side.try_reserve(records)? else {
                return Ok(None);
            };
            batch.write_bytes(&data)?;
            batch.commit().map(Some)
        })?;
        Ok(sent.is_some())
    }

    /// Receives the oldest records, at most `most`, as bytes.
    ///
    /// Waits at most `timeout` seconds for one, and 10 ms longer while another thread has the side. Returns `b""` if none
    /// came, or if the producer is gone (`alone`) and has left none. A signal handler that raises ends the wait.
    ///
    /// Raises `InvalidArgument` for the producer's side.
    #[pyo3(signature = (most=Count(1), *, timeout=None), text_signature = "($self, most=1, *, timeout=None)")]
    fn receive<'py>(
        &self,
        py: Python<'py>,
        most: Count,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if most.0 == 0 {
            return Err(invalid("most is 0; valid: 1 or more"));
        }
        let most = usize::try_from(most.0).unwrap_or(usize::MAX);
        self.expect(false, "sends; valid: the consumer's")?;
        let found = self.wait(py, timeout, |side| {
            let Side::Consumer(side) = side else {
                return Ok(None);
            };
            let records = side.peek(most)?;
            if records.is_empty() {
                return Ok(None);
            }
            let bytes = records.to_bytes()?;
            records.release()?;
            Ok(Some(bytes))
        })?;
        Ok(PyBytes::new(py, &found.unwrap_or_default()))
    }

    /// Closes the side: the other one is alone then.
    fn close(&self) -> PyResult<()> {
        self.driver.expect_this_process("ring").or_raise()?;
        self.drop_side();
        Ok(())
    }

    fn __copy__(slf: &Bound<'_, Self>) -> PyResult<()> {
        not_copied(slf)
    }

    fn __deepcopy__(slf: &Bound<'_, Self>, _memo: &Bound<'_, PyAny>) -> PyResult<()> {
        not_copied(slf)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let is_producer = self.is_producer;
        let kind = if is_producer { "producer" } else { "consumer" };
        let of = (&self.sides, None);
        pickled(py, kind, of, &self.driver, move |channel, sides| {
            hand_over(&sides, is_producer, channel)
        })
    }

    fn __repr__(&self) -> String {
        let side = ["consumer", "producer"][usize::from(self.is_producer)];
        let (records, bytes) = (self.records, self.record_bytes);
        format!("<egmem.RingSide {side}, {records} records of {bytes} bytes>")
    }
}

/// Makes a ring: a bounded queue of records of `record_bytes` bytes, in memory that CPUs and GPUs reach. Returns the producer's
/// side and the consumer's, each for a thread, or by pickling for another process.
///
/// It lies on the host node `node`, or near `near_gpu`, or else near GPU 0, and holds at most `records`; by default as many
/// as 2 MiB have room for.
///
/// Its memory can be shared: where the driver exports none as fds, no ring can be made, also none between threads.
#[pyfunction]
#[pyo3(
    signature = (record_bytes, records=None, *, node=None, near_gpu=None, label=None, driver=None),
    text_signature = "(record_bytes, records=None, *, node=None, near_gpu=None, label=None, driver=None)"
)]
pub fn ring(
    py: Python<'_>,
    record_bytes: Size,
    records: Option<Count>,
    node: Option<NodeArg>,
    near_gpu: Option<GpuArg>,
    label: Option<String>,
    driver: Option<&Bound<'_, Driver>>,
) -> PyResult<(RingSide, RingSide)> {
    let driver = given_or_default(py, driver)?;
    crate::frees::retry(py, &driver)?;
    let place = location(py, &driver, node, near_gpu, None)?;
    let records = records.map(|records| usize::try_from(records.0).unwrap_or(usize::MAX));
    let options = Ring::untyped(place, record_bytes.0)
        .shareable()
        .with(records, RingOptions::records)
        .with(label, RingOptions::label);
    let made = from_program(py, || py.detach(|| options.create(&driver)).or_raise())?;
    let (producer, consumer) = (Side::Producer(made.producer), Side::Consumer(made.consumer));
    let shape = producer.shape();
    let sides = Arc::new([producer, consumer].map(|side| Mutex::new(Some(side))));
    let side = |is_producer| RingSide::new(&driver, Arc::clone(&sides), is_producer, shape);
    Ok((side(true), side(false)))
}
