//! Events about allocations and spans of driver calls, with the names that docs/logging.md promises.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use egmem::{Buffer, Driver};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::ledger::{MIB, node};

/// An event's fields, by name.
type Fields = BTreeMap<String, String>;

/// Collects events about allocations, and the names of driver calls.
#[derive(Default)]
struct Collector {
    events: Mutex<Vec<Fields>>,
    calls: Mutex<Vec<&'static str>>,
    open: AtomicU64,
}

struct Read(Fields);

impl Visit for Read {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().into(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ["egmem::alloc", "egmem::driver"].contains(&metadata.target())
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Read(Fields::new());
        event.record(&mut fields);
        self.events.lock().unwrap().push(fields.0);
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.calls.lock().unwrap().push(span.metadata().name());
        Id::from_u64(1)
    }

    fn enter(&self, _: &Id) {
        self.open.fetch_add(1, Relaxed);
    }

    fn exit(&self, _: &Id) {
        self.open.fetch_sub(1, Relaxed);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
}

pub fn allocations_and_driver_calls_are_traced(driver: &Driver) {
    let node = node(driver);
    let collector = Arc::new(Collector::default());
    egmem_tests::with_subscriber(Arc::clone(&collector), || {
        let buffer = || Buffer::on(node).bytes(3 * MIB).label("traced");
        drop(buffer().allocate(driver).unwrap());
    });
    let calls = collector.calls.lock().unwrap();
    let mut last = 0;
    for call in [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
    ] {
        let at = calls.iter().position(|known| *known == call);
        let at = at.unwrap_or_else(|| panic!("{call} in {calls:?}"));
        assert!(at >= last, "{calls:?}");
        last = at;
    }
    assert_eq!(collector.open.load(Relaxed), 0, "each span was left");
    let events = collector.events.lock().unwrap();
    let [made, gone] = &events[..] else {
        panic!("{events:?}")
    };
    let names = |fields: &Fields| fields.keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(
        names(made),
        "bytes driver label location message number path site"
    );
    assert_eq!(
        names(gone),
        "age_ms bytes driver label location message number path"
    );
    assert_eq!(
        (made["message"].as_str(), gone["message"].as_str()),
        ("allocated", "released")
    );
    for (name, value) in [
        ("bytes", (4 * MIB).to_string()),
        ("driver", driver.name().into()),
        ("label", "traced".into()),
        ("location", egmem::driver::Location::from(node).to_string()),
        ("path", "vmm".into()),
    ] {
        assert_eq!((&made[name], &gone[name]), (&value, &value), "{name}");
    }
    assert_eq!(made["number"], gone["number"]);
    assert!(made["site"].contains("events.rs:"), "{}", made["site"]);
}
