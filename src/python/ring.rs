//! `egmem.ring`: queues of records between threads and processes.

use std::sync::{Arc, Mutex, TryLockError};
use std::time::Instant;

use egmem::driver::Driver as Native;
use egmem::shapes::ring::Untyped;
use egmem::shapes::{Consumer, Producer, Ring};
use egmem::share::{Channel, Result as Sent};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::args::{Count, GpuArg, NodeArg, Size, timeout_of};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, closed, invalid};
use crate::gil::{detached, lock};
use crate::interrupts;
use crate::places::location;
use crate::site::from_program;

/// The sides of a ring that this process has. Each lock is held for a look at the ring, or while a side is sent, which
/// waits for the process that gets it: a thread that waits in `send` or `receive` does not block on it.
#[derive(Default)]
pub struct Sides {
    producer: Mutex<Option<Producer<Untyped>>>,
    consumer: Mutex<Option<Consumer<Untyped>>>,
}

impl Sides {
    /// Sends `granted` and one side to another process, or why it does not get the side. This process has the side no more,
    /// even if that fails.
    ///
    /// # Errors
    /// The channel's.
    pub fn hand_over(&self, is_producer: bool, granted: &str, channel: &mut Channel) -> Sent<()> {
        // In this order always.
        let (mut producer, mut consumer) = (lock(&self.producer), lock(&self.consumer));
        if is_producer {
            let (share, is_alone) = (Consumer::share_producer, Consumer::is_alone);
            hand_over(
                &mut producer,
                consumer.as_mut(),
                (granted, channel),
                is_alone,
                share,
            )
        } else {
            let (share, is_alone) = (Producer::share_consumer, Producer::is_alone);
            hand_over(
                &mut consumer,
                producer.as_mut(),
                (granted, channel),
                is_alone,
                share,
            )
        }
    }
}

fn hand_over<S, O>(
    side: &mut Option<S>,
    other: Option<&mut O>,
    (granted, channel): (&str, &mut Channel),
    is_alone: fn(&O) -> bool,
    share: fn(&mut O, &mut Channel) -> Sent<()>,
) -> Sent<()> {
    let Some(other) = other else {
        return channel.send_text("it has closed or handed over the other one");
    };
    *side = None;
    if !is_alone(other) {
        return channel.send_text("a third process has it, and has not ended");
    }
    channel.send_text(granted)?;
    share(other, channel)
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
    record_bytes: u64,
    records: usize,
    driver: Native,
}

impl RingSide {
    pub fn producer(driver: &Native, side: Producer<Untyped>) -> Self {
        let (record_bytes, records) = (side.record_bytes(), side.capacity());
        let sides = Sides::default();
        *lock(&sides.producer) = Some(side);
        Self::new(driver, Arc::new(sides), true, (record_bytes, records))
    }

    pub fn consumer(driver: &Native, side: Consumer<Untyped>) -> Self {
        let (record_bytes, records) = (side.record_bytes(), side.capacity());
        let sides = Sides::default();
        *lock(&sides.consumer) = Some(side);
        Self::new(driver, Arc::new(sides), false, (record_bytes, records))
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

    pub fn sides(&self) -> (&Arc<Sides>, bool) {
        (&self.sides, self.is_producer)
    }

    pub fn native(&self) -> &Native {
        &self.driver
    }

    /// Asks a side until it has an answer, its other side is gone, or the time is over.
    fn wait<S: Send, T: Send>(
        &self,
        py: Python<'_>,
        (side, timeout): (&Mutex<Option<S>>, Option<f64>),
        is_alone: fn(&S) -> bool,
        mut ask: impl FnMut(&mut S) -> egmem::Result<Option<T>> + Send,
    ) -> PyResult<Option<T>> {
        self.driver.expect_this_process("ring").or_raise()?;
        let timeout = timeout.map(timeout_of).transpose()?;
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let answer = interrupts::until(py, || {
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            let mut side = match side.try_lock() {
                Ok(side) => side,
                // The process that gets the other side may be slow.
                Err(TryLockError::WouldBlock) => return is_over.then_some(Some(Ok(None))),
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
            };
            let Some(side) = side.as_mut() else {
                return Some(None);
            };
            match ask(side) {
                Ok(None) => {}
                answer => return Some(Some(answer)),
            }
            let is_last = is_over || is_alone(side);
            // Also what the other side did before it was gone.
            is_last.then(|| Some(ask(side)))
        })?;
        match answer {
            Some(answer) => answer.or_raise(),
            None => Err(self.not_here()),
        }
    }

    fn not_here(&self) -> PyErr {
        closed(match self.is_producer {
            true => "producer's side of the ring",
            false => "consumer's side of the ring",
        })
    }

    fn drop_side(&self) {
        if self.driver.is_of_this_process() {
            // Also the lock is taken without the GIL: a side may be on its way to another process.
            detached(|| match self.is_producer {
                true => *lock(&self.sides.producer) = None,
                false => *lock(&self.sides.consumer) = None,
            });
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
    /// The size of a record in bytes.
    #[getter]
    fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// The most records that the ring holds.
    #[getter]
    fn records(&self) -> usize {
        self.records
    }

    /// Whether the other side is closed, or its process has ended. Records that it sent before are still there.
    #[getter]
    fn alone(&self, py: Python<'_>) -> PyResult<bool> {
        self.driver.expect_this_process("ring").or_raise()?;
        let is_alone = py.detach(|| match self.is_producer {
            true => lock(&self.sides.producer).as_ref().map(Producer::is_alone),
            false => lock(&self.sides.consumer).as_ref().map(Consumer::is_alone),
        });
        is_alone.ok_or_else(|| self.not_here())
    }

    /// Sends the records of a bytes-like object, whose size is a multiple of `record_bytes`. The consumer sees all or none.
    ///
    /// Waits at most `timeout` seconds for room. Returns `False`, and sends nothing, if there was none, or if the consumer
    /// is gone (`alone`). A signal handler that raises ends the wait.
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
        let side = (&self.sides.producer, timeout);
        let sent = self.wait(py, side, Producer::is_alone, |side| {
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
    /// Waits at most `timeout` seconds for one. Returns `b""` if none came, or if the producer is gone (`alone`) and has left
    /// none. A signal handler that raises ends the wait.
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
        let side = (&self.sides.consumer, timeout);
        let found = self.wait(py, side, Consumer::is_alone, |side| {
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

    fn __reduce__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let module = slf.py().import("egmem._egmem")?;
        module.getattr("_reduce_ring")?.call1((slf,))
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
    let mut options = Ring::untyped(place, record_bytes.0).shareable();
    if let Some(records) = records {
        options = options.records(usize::try_from(records.0).unwrap_or(usize::MAX));
    }
    if let Some(label) = label {
        options = options.label(label);
    }
    let made = from_program(py, || py.detach(|| options.create(&driver))).or_raise()?;
    let Ring { producer, consumer } = made;
    let shape = (producer.record_bytes(), producer.capacity());
    let sides = Arc::new(Sides {
        producer: Mutex::new(Some(producer)),
        consumer: Mutex::new(Some(consumer)),
    });
    let side = |is_producer| RingSide::new(&driver, Arc::clone(&sides), is_producer, shape);
    Ok((side(true), side(false)))
}
