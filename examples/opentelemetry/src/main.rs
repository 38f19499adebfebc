//! Allocations and driver calls as OpenTelemetry spans: each call of the driver with its duration, below the
//! program's own span, and each allocation as an event with the fields that docs/logging.md lists.
//!
//! ```text
//! cargo run -p egmem-opentelemetry
//! ```
//! It prints the spans. A service gives `with_batch_exporter` the exporter of the crate opentelemetry-otlp instead.

use std::error::Error;

use egmem::{Buffer, Driver, Machine, Topology};
use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanId, TracerProvider};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// Prints each span when it ends, so calls come before the span that made them.
#[derive(Debug)]
struct Printer;

impl SpanExporter for Printer {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        batch.iter().for_each(print);
        Ok(())
    }
}

fn print(span: &SpanData) {
    let time = span.end_time.duration_since(span.start_time);
    let indent = match span.parent_span_id {
        SpanId::INVALID => "",
        _ => "  ",
    };
    let (name, us) = (&span.name, time.unwrap_or_default().as_micros());
    println!("{indent}{name}: {us} µs {}", words(&span.attributes));
    for event in span.events.iter() {
        println!("{indent}  + {} {}", event.name, words(&event.attributes));
    }
}

fn words(attributes: &[KeyValue]) -> String {
    let words = attributes
        .iter()
        .map(|pair| format!("{}={}", pair.key, pair.value));
    words.collect::<Vec<_>>().join(" ")
}

fn main() -> Result<(), Box<dyn Error>> {
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(Printer)
        .build();
    // The library's two targets, whose names are stable, and this program's spans. The level `trace` of other targets
    // has much more.
    let targets = Targets::new()
        .with_target("egmem::driver", LevelFilter::TRACE)
        .with_target("egmem::alloc", LevelFilter::TRACE)
        .with_target(module_path!(), LevelFilter::INFO);
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("egmem"))
        .with_location(false)
        .with_threads(false);
    tracing_subscriber::registry()
        .with(layer.with_filter(targets))
        .init();

    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, and no time means anything");
    }
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;

    let step = tracing::info_span!("load weights", model = "example").entered();
    let weights = Buffer::on(node).bytes(64 << 20).label("weights");
    let weights = weights.allocate(&driver)?;
    weights.fill(0)?;
    drop(weights);
    drop(step);

    provider.shutdown()?;
    Ok(())
}
