//! Events between processes. What the driver answers is printed as `seen: …`, for docs/driver-behaviour.md.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use egmem::driver::*;
use egmem::share::{Channel, Peers};
use egmem::{Buffer, Result};

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

const PATIENCE: Duration = Duration::from_secs(60);
/// How long the driver has to show that work of a killed process will never be done.
const HOPELESS: Duration = Duration::from_secs(5);
const BYTES: u64 = 64 << 20;

/// Another process, which runs a role of this suite, and a channel to it.
struct Other {
    child: Child,
    channel: Channel,
}

impl Other {
    fn start(ctx: &Ctx, role: &str) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = ctx
            .child(role)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .unwrap();
        let channel = channel_on(ours);
        Self { child, channel }
    }

    fn says(&mut self) -> String {
        let text = self.channel.receive_text(4096);
        text.unwrap_or_else(|error| panic!("{error}; the other process: {:?}", self.child.wait()))
    }

    fn tell(&mut self, text: &str) {
        self.channel.send_text(text).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn ends_well(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a stream when its work is done, also of a test that fails: nothing unmaps memory before.
struct Ended<'a>(&'a Ctx, StreamHandle);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let _ = self.0.stream_synchronize(self.1);
        let _ = self.0.destroy_stream(self.1);
    }
}

fn channel_on(socket: UnixStream) -> Channel {
    let mut channel = Channel::new(socket, &Peers::same_user()).unwrap();
    channel.set_timeout(PATIENCE);
    channel
}

/// In another process: the channel to the one that started it.
fn parent() -> Channel {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    channel_on(socket.into())
}

fn to_text(handle: &IpcEventHandle) -> String {
    let bytes = handle.expose_bytes();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_text(text: &str) -> IpcEventHandle {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    IpcEventHandle::from_bytes(&std::array::from_fn(byte))
}

fn answer<T>(result: &Result<T>) -> String {
    match result {
        Ok(_) => "success".into(),
        Err(error) => error
            .code()
            .map_or(error.to_string(), |code| code.to_string()),
    }
}

fn seen(what: &str, answer: &str) {
    println!("\nseen: {what}: {answer}");
}

fn host_memory(ctx: &Ctx) -> Buffer {
    let node = NodeId(ctx.expect.home);
    let buffer = Buffer::on(node).bytes(BYTES).shareable();
    buffer.allocate(&ctx.driver).unwrap()
}

/// Submits GPU work that takes a while: some hundred milliseconds for 100 rounds over PCIe.
fn long_work(ctx: &Ctx, at: DevicePtr, rounds: u32, last: u8, stream: StreamHandle) {
    for round in (0..rounds).rev() {
        let value = last.wrapping_add(round as u8);
        ctx.memset(at, value, BYTES, stream).unwrap();
    }
}

/// One process's long work, then another's, then the first one's again: by events alone, both of which are recorded in
/// both processes.
pub fn an_event_orders_two_processes(ctx: &Ctx) {
    let gpu = ctx.expect.gpus - 1;
    let mut other = Other::start(ctx, "event_importer");
    let buffer = host_memory(ctx);
    let ptr = buffer.device_ptr();
    let shared = egmem::share::Shared::from(buffer);
    other.channel.send(&shared, Access::ReadWrite).unwrap();
    let event = ctx.event_create_interprocess(gpu).unwrap();
    let handle = ctx.event_handle(event).unwrap();
    assert_eq!(ctx.event_handle(event).unwrap(), handle);
    other.tell(&to_text(&handle));
    let stream = ctx.stream_create(gpu).unwrap();
    let _last = Ended(ctx, stream);
    assert_eq!(other.says(), "ready");
    for round in 0..4 {
        long_work(ctx, ptr, 20, 2 * round, stream);
        ctx.event_record(event, stream).unwrap();
        other.tell("recorded");
        // It checks the bytes, writes others, and records the same event.
        assert_eq!(other.says(), "recorded too");
        ctx.stream_wait_event(stream, event).unwrap();
        let back = ctx.mem_host_alloc(gpu, 4096).unwrap();
        ctx.copy(back, ptr.add(BYTES - 4096), 4096, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
        assert_eq!(peek(back), u64::from_ne_bytes([2 * round + 1; 8]));
        ctx.event_synchronize(event).unwrap();
        assert!(ctx.event_query(event).unwrap());
        ctx.free_host(gpu, back).unwrap();
    }
    other.tell("end");
    other.ends_well();
    ctx.destroy_event(event).unwrap();
}

pub fn event_importer(ctx: &Ctx) {
    let gpu = ctx.expect.gpus - 1;
    let mut channel = parent();
    let offer = channel.receive().unwrap();
    let memory = offer
        .import(&ctx.driver, egmem::share::ImportOptions::new())
        .unwrap();
    let handle = of_text(&channel.receive_text(4096).unwrap());
    let event = ctx.open_event(gpu, &handle).unwrap();
    let [stream, own] = [(); 2].map(|()| ctx.stream_create(gpu).unwrap());
    let back = ctx.mem_host_alloc(gpu, 4096).unwrap();
    channel.send_text("ready").unwrap();
    for round in 0..4_u8 {
        assert_eq!(channel.receive_text(4096).unwrap(), "recorded");
        for stream in [stream, own] {
            ctx.stream_wait_event(stream, event).unwrap();
        }
        let end = memory.device_ptr().add(BYTES - 4096);
        ctx.copy(back, end, 4096, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
        assert_eq!(peek(back), u64::from_ne_bytes([2 * round; 8]));
        long_work(ctx, memory.device_ptr(), 20, 2 * round + 1, own);
        ctx.event_record(event, own).unwrap();
        channel.send_text("recorded too").unwrap();
    }
    assert_eq!(channel.receive_text(4096).unwrap(), "end");
    ctx.stream_synchronize(own).unwrap();
    let again = ctx.open_event(gpu, &handle);
    seen(
        "an event's handle opened twice in one process",
        &answer(&again),
    );
    seen(
        "a handle of an imported event",
        &answer(&ctx.event_handle(event)),
    );
    for event in [Ok(event), again].into_iter().flatten() {
        ctx.destroy_event(event).unwrap();
    }
}

/// A wait for an event that nobody has recorded has nothing to wait for.
pub fn an_imported_event_that_was_never_recorded_is_done(ctx: &Ctx) {
    let mut other = Other::start(ctx, "event_exporter");
    let handle = of_text(&other.says());
    let event = ctx.open_event(0, &handle).unwrap();
    let stream = ctx.stream_create(0).unwrap();
    assert!(ctx.event_query(event).unwrap());
    ctx.stream_wait_event(stream, event).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    let timed = ctx.event_create(0, true).unwrap();
    ctx.event_record(timed, stream).unwrap();
    fails(ctx.event_elapsed_ms(event, timed), Code::INVALID_HANDLE);
    ctx.destroy_event(timed).unwrap();
    ctx.destroy_event(event).unwrap();
    ctx.destroy_stream(stream).unwrap();
    other.kill();
}

/// Makes an event, says its handle, and lives until it is killed.
pub fn event_exporter(ctx: &Ctx) {
    let mut channel = parent();
    let event = ctx.event_create_interprocess(0).unwrap();
    channel
        .send_text(&to_text(&ctx.event_handle(event).unwrap()))
        .unwrap();
    if channel
        .receive_text(4096)
        .is_ok_and(|text| text == "destroy")
    {
        ctx.destroy_event(event).unwrap();
        channel.send_text("destroyed").unwrap();
    }
    let _ = channel.receive_text(4096);
}

/// Events without the flag have no handle, with and without timing.
pub fn an_ordinary_event_has_no_handle(ctx: &Ctx) {
    for timing in [true, false] {
        let event = ctx.event_create(0, timing).unwrap();
        let handle = ctx.event_handle(event);
        seen(
            &format!("the handle of an ordinary event, timing {timing}"),
            &answer(&handle),
        );
        fails(handle, Code::INVALID_HANDLE);
        ctx.destroy_event(event).unwrap();
    }
}

/// The process that made an event cannot open it.
pub fn an_event_is_not_opened_where_it_was_made(ctx: &Ctx) {
    let event = ctx.event_create_interprocess(0).unwrap();
    let handle = ctx.event_handle(event).unwrap();
    let opened = ctx.open_event(0, &handle);
    seen(
        "an event opened by the process that made it",
        &answer(&opened),
    );
    fails(opened, Code::INVALID_CONTEXT);
    ctx.destroy_event(event).unwrap();
}

/// 64 bytes of no handle.
pub fn garbage_is_no_event(ctx: &Ctx) {
    for byte in [0, 0x5a, 0xff] {
        let opened = ctx.open_event(0, &IpcEventHandle::from_bytes(&[byte; 64]));
        seen(
            &format!("64 bytes {byte:#x} opened as an event"),
            &answer(&opened),
        );
        fails(opened, Code::MAP_FAILED);
    }
}

/// What happens to a process that has a stream of the first GPU wait for an event of the last one, which another process
/// made or it made itself. It is printed alone: driver 580 ends both by SIGSEGV.
pub fn a_stream_of_another_gpu_waits_for_an_event(ctx: &Ctx) {
    let event = ctx.event_create_interprocess(ctx.expect.gpus - 1).unwrap();
    let handle = to_text(&ctx.event_handle(event).unwrap());
    for role in ["event_crosser", "event_own_crosser"] {
        let mut other = Other::start(ctx, role);
        other.tell(&handle);
        let ended = other.child.wait().unwrap();
        let gpus = ctx.expect.gpus;
        seen(&format!("{role}, {gpus} GPUs"), &ended.to_string());
        assert!(!ctx.simulated() || ended.success());
    }
    ctx.destroy_event(event).unwrap();
}

pub fn event_crosser(ctx: &Ctx) {
    let handle = of_text(&parent().receive_text(4096).unwrap());
    let event = ctx.open_event(ctx.expect.gpus - 1, &handle).unwrap();
    let stream = ctx.stream_create(0).unwrap();
    ctx.stream_wait_event(stream, event).unwrap();
    ctx.stream_synchronize(stream).unwrap();
}

pub fn event_own_crosser(ctx: &Ctx) {
    let gpu = ctx.expect.gpus - 1;
    let event = ctx.event_create_interprocess(gpu).unwrap();
    let stream = ctx.stream_create(gpu).unwrap();
    ctx.event_record(event, stream).unwrap();
    let stream = ctx.stream_create(0).unwrap();
    ctx.stream_wait_event(stream, event).unwrap();
    ctx.stream_synchronize(stream).unwrap();
}

/// The driver opens the event of a process that has ended; the simulator, whose events end with their process, does not.
pub fn the_event_of_an_ended_process_is_opened(ctx: &Ctx) {
    let mut other = Other::start(ctx, "event_exporter");
    let handle = of_text(&other.says());
    other.kill();
    let opened = ctx.open_event(0, &handle);
    seen("the event of a killed process opened", &answer(&opened));
    if ctx.simulated() {
        return fails(opened, Code::INVALID_HANDLE);
    }
    ctx.destroy_event(opened.unwrap()).unwrap();
}

/// CUDA leaves this undefined: the simulator's answer alone is fixed.
pub fn a_destroyed_event_is_not_opened(ctx: &Ctx) {
    let mut other = Other::start(ctx, "event_exporter");
    let handle = of_text(&other.says());
    other.tell("destroy");
    assert_eq!(other.says(), "destroyed");
    let opened = ctx.open_event(0, &handle);
    seen("a destroyed event opened", &answer(&opened));
    if ctx.simulated() {
        fails(opened, Code::INVALID_HANDLE);
    } else if let Ok(event) = opened {
        ctx.destroy_event(event).unwrap();
    }
    other.kill();
}

/// The exporter is killed after it has recorded its event, with its work done and with its work in flight. What the
/// importer's calls answer is printed; a wait for work in flight may last for ever.
pub fn an_importer_sees_the_death_of_its_exporter(ctx: &Ctx) {
    for rounds in [1, 100] {
        let mut importer = Other::start(ctx, "event_waiter");
        assert_eq!(importer.says(), "ready");
        let mut exporter = Other::start(ctx, "event_worker");
        importer.tell(&exporter.says());
        assert_eq!(importer.says(), "opened");
        exporter.tell(&rounds.to_string());
        assert_eq!(exporter.says(), "recorded");
        importer.tell("wait");
        assert_eq!(importer.says(), "waiting");
        if rounds == 1 {
            exporter.tell("synchronize");
            assert_eq!(exporter.says(), "synchronized");
        }
        exporter.kill();
        importer.tell("killed");
        let answers = importer.says();
        let when = if rounds == 1 { "after" } else { "before" };
        seen(
            &format!("exporter killed {when} its work was done"),
            &answers,
        );
        if ctx.simulated() {
            assert_eq!(
                answers,
                "stream done, query success, wait success, record success, destroy success"
            );
        }
    }
}

/// Records an event behind as much work as it is told to do.
pub fn event_worker(ctx: &Ctx) {
    let mut channel = parent();
    let buffer = host_memory(ctx);
    let event = ctx.event_create_interprocess(0).unwrap();
    let stream = ctx.stream_create(0).unwrap();
    channel
        .send_text(&to_text(&ctx.event_handle(event).unwrap()))
        .unwrap();
    let rounds = channel.receive_text(4096).unwrap().parse().unwrap();
    long_work(ctx, buffer.device_ptr(), rounds, 0, stream);
    ctx.event_record(event, stream).unwrap();
    channel.send_text("recorded").unwrap();
    if channel
        .receive_text(4096)
        .is_ok_and(|text| text == "synchronize")
    {
        ctx.stream_synchronize(stream).unwrap();
        channel.send_text("synchronized").unwrap();
    }
    let _ = channel.receive_text(4096);
}

/// Waits for another process's event on a stream, and says how that and other calls end after that process was killed.
pub fn event_waiter(ctx: &Ctx) {
    let mut channel = parent();
    let [stream, other] = [(); 2].map(|()| ctx.stream_create(0).unwrap());
    channel.send_text("ready").unwrap();
    let event = ctx
        .open_event(0, &of_text(&channel.receive_text(4096).unwrap()))
        .unwrap();
    channel.send_text("opened").unwrap();
    assert_eq!(channel.receive_text(4096).unwrap(), "wait");
    ctx.stream_wait_event(stream, event).unwrap();
    channel.send_text("waiting").unwrap();
    assert_eq!(channel.receive_text(4096).unwrap(), "killed");
    let until = Instant::now() + HOPELESS;
    let ended = loop {
        match ctx.stream_query(stream) {
            Ok(false) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Ok(false) => break "not done in 5 s".to_owned(),
            Ok(true) => break "done".to_owned(),
            Err(error) => break answer::<()>(&Err(error)),
        }
    };
    let query = ctx.event_query(event);
    let query = if query == Ok(false) {
        "not done".into()
    } else {
        answer(&query)
    };
    let wait = answer(&ctx.stream_wait_event(other, event));
    let record = answer(&ctx.event_record(event, other));
    let destroy = answer(&ctx.destroy_event(event));
    let all =
        format!("stream {ended}, query {query}, wait {wait}, record {record}, destroy {destroy}");
    channel.send_text(&all).unwrap();
}
