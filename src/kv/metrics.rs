//! A tier's numbers: as text for Prometheus, and for this process's ledger.

use std::sync::Arc;

use egmem_core::ledger::{ShowTier, TierUse};

use crate::inner::Inner;
use crate::tier::Tier;

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

impl ShowTier for Inner {
    fn show(self: Arc<Self>) -> TierUse {
        let mut shown = TierUse::new(self.memory.location(), self.memory.device_ptr());
        shown.stats = self.glance();
        shown.stats.growth = Tier(self).growth();
        shown
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use egmem_core::ledger::{self, TierUse};
    use egmem_core::{Buffer, Machine, Memory};

    use crate::{Driver, Key, Tier};

    fn shown(driver: &Driver) -> TierUse {
        let [tier] = &ledger::tiers(driver)[..] else {
            panic!("one tier is open");
        };
        tier.clone()
    }

    #[test]
    fn the_ledger_shows_a_tiers_numbers_while_it_is_open() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
        let attach = || Tier::attach(Arc::clone(&buffer)).pages(4).page_bytes(4096);
        let tier = attach().open().unwrap();
        let keys: Vec<Key> = (0..7).map(|n| Key::new([n; 32])).collect();
        tier.prepare_store(&keys[..4]).unwrap().commit().unwrap();
        tier.prepare_store(&keys[4..5]).unwrap().commit().unwrap();
        let store = tier.prepare_store(&keys[5..6]).unwrap();
        drop(tier.prepare_store(&keys[6..]).unwrap());
        let load = tier.prepare_load(&keys[4..5]).unwrap();
        assert_eq!(tier.lookup(&[keys[4], keys[5], keys[4]]), 1);

        let found = shown(&driver);
        let at = (found.address, found.location);
        assert_eq!(at, (buffer.device_ptr().0, buffer.location()));
        let found = found.stats;
        assert_eq!((found.page_bytes, found.pages, found.usable), (4096, 4, 4));
        let states = (found.free, found.writing, found.ready, found.pinned);
        assert_eq!(states, (1, 1, 2, 1));
        let counts = (found.hits, found.misses, found.evictions);
        assert_eq!(counts, (1, 2, 3));
        assert_eq!(found.growth, tier.growth());

        let other = tier.clone();
        drop((tier, store, load));
        assert_eq!(shown(&driver).stats.pinned, 0, "a handle is left");
        drop(other);
        assert!(ledger::tiers(&driver).is_empty());
        let again = attach().open().unwrap();
        assert_eq!(shown(&driver).stats.hits, 0);
        drop(again);
    }
}
