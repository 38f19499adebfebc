//! A tier's counters as text for Prometheus.

use crate::Tier;

/// Returns numbers by type and name, with a help text and a value: a row each.
macro_rules! rows {
    ($($kind:ident $name:literal, $help:literal => $value:expr;)*) => {
        [$(($name, stringify!($kind), $help, $value)),*]
    };
}

impl Tier {
    /// Returns the tier's [`stats`](Self::stats) in Prometheus' text format, version 0.0.4: each number with its help and its type, and
    /// with these labels, which distinguish tiers. Names begin with `egmem_kv_`, and those of counters end in `_total`.
    ///
    /// Values of labels are escaped. In names of labels, `_` replaces each character that Prometheus does not allow; of two labels of one
    /// name the first one counts. A server's answer to Prometheus has each
    /// name once: do not join the texts of several tiers.
    ///
    /// ```
    /// use egmem::driver::NodeId;
    /// use egmem::kv::Tier;
    /// use egmem::{Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let tier = Tier::on(NodeId(0)).pages(4).page_bytes(4096).create(&driver)?;
    /// let text = tier.metrics(&[("engine", "0")]);
    /// assert!(text.contains("\negmem_kv_free_pages{engine=\"0\"} 4\n"));
    /// # Ok::<(), egmem::kv::Error>(())
    /// ```
    pub fn metrics(&self, labels: &[(&str, &str)]) -> String {
        let stats = self.stats();
        let labels = labels_of(labels);
        let rows = rows! {
            gauge "pages", "Pages of the tier" => stats.pages;
            gauge "page_bytes", "Bytes of a page" => stats.page_bytes;
            gauge "usable_pages", "Pages whose memory is there" => stats.usable;
            gauge "free_pages", "Pages that are free" => stats.free;
            gauge "writing_pages", "Pages that stores are writing" => stats.writing;
            gauge "ready_pages", "Pages that can be loaded" => stats.ready;
            gauge "pinned_pages", "Ready pages that loads and copies have" => stats.pinned;
            counter "hits_total", "Keys that look-ups found" => stats.hits;
            counter "misses_total", "Keys that look-ups did not find, or that came after one" => stats.misses;
            counter "stores_total", "Pages that commits made ready" => stats.stores;
            counter "evictions_total", "Ready pages that made room for others" => stats.evictions;
            counter "damaged_total", "Pages found with other bytes than were committed" => stats.damaged;
            counter "loaded_bytes_total", "Bytes copied to GPUs" => stats.loaded_bytes;
            counter "stored_bytes_total", "Bytes copied from GPUs" => stats.stored_bytes;
        };
        let text = |(name, kind, help, value)| {
            let name = format!("egmem_kv_{name}");
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {value}\n")
        };
        rows.map(text).concat()
    }
}

/// Returns labels in braces; nothing for none.
fn labels_of(labels: &[(&str, &str)]) -> String {
    let mut texts: Vec<String> = Vec::with_capacity(labels.len());
    for (name, value) in labels {
        let start = format!("{}=\"", label_name(name));
        if !texts.iter().any(|text| text.starts_with(&start)) {
            let value = value
                .replace('\\', r"\\")
                .replace('"', "\\\"")
                .replace('\n', r"\n");
            texts.push(format!("{start}{value}\""));
        }
    }
    match texts.is_empty() {
        true => String::new(),
        false => format!("{{{}}}", texts.join(",")),
    }
}

/// Returns a label's name with `_` for each character that is not allowed there, and before a digit at its beginning.
fn label_name(name: &str) -> String {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let allowed = name.replace(|character| !is_allowed(character), "_");
    match allowed.chars().next() {
        None | Some('0'..='9') => format!("_{allowed}"),
        Some(_) => allowed,
    }
}
