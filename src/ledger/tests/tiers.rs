//! KV-cache tiers in ledgers.

use std::sync::Arc;

use egmem_core::{GrowthState, Memory};

use super::*;
use crate::Ledger;
use crate::entries::{MAX_TIERS, ShowTier, TierUse, add_tier};
use crate::offer::encode;

struct Tier(TierUse);

impl ShowTier for Tier {
    fn show(self: Arc<Self>) -> TierUse {
        self.0.clone()
    }
}

/// A tier in the second half of a buffer.
fn tier(driver: &Driver, buffer: &Buffer) -> Arc<Tier> {
    let at = buffer.device_ptr().add(buffer.len() / 2);
    let mut shown = TierUse::new(buffer.location(), at);
    shown.stats.page_bytes = 64 << 10;
    (shown.stats.pages, shown.stats.usable, shown.stats.free) = (100, 100, 60);
    (shown.stats.ready, shown.stats.pinned) = (40, 3);
    (shown.stats.hits, shown.stats.misses, shown.stats.evictions) = (199, 1, 7);
    let tier = Arc::new(Tier(shown));
    add_tier(driver, &tier);
    tier
}

fn line<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let lines = text.lines().skip_while(|line| *line != "KV-cache tiers:");
    let line = lines.skip(1).find(|line| line.contains(word));
    let line = line.unwrap_or_else(|| panic!("{word} in\n{text}"));
    line.split_whitespace().collect()
}

#[test]
fn tiers_are_shown_with_the_labels_of_their_memory() {
    let driver = machine();
    let [cache, other] = ["cache", "other"].map(|label| buffer(&driver, label, 4 * MIB));
    assert!(!Ledger::of(&driver).to_text().contains("KV-cache"));
    let kept = tier(&driver, &cache);
    let mut ledger = Ledger::of(&driver);
    assert_eq!(ledger.tiers.len(), 1);
    assert_eq!(ledger.tiers[0].label.as_deref(), Some("cache"));
    let address = format!("{:#x}", ledger.tiers[0].address);

    let text = ledger.to_text();
    assert!(!text.contains(&address), "{text}");
    let heads = "LABEL WHERE PAGE PAGES FREE READY PINNED HIT RATE EVICTED";
    assert_eq!(line(&text, "LABEL").join(" "), heads);
    let cells = "cache node 1 64 KiB 100 60 40 3 99 % 7";
    assert_eq!(line(&text, "cache").join(" "), cells);
    ledger.tiers[0].stats.growth = GrowthState::Growing;
    ledger.tiers[0].stats.usable = 50;
    ledger.tiers[0].stats.writing = 2;
    let wide = ledger.to_wide_text();
    let cells = format!("cache node 1 {address} 64 KiB 100 50 growing 60 2 40 3 99 % 199 1 7");
    assert_eq!(line(&wide, "cache").join(" "), cells);

    let own = Ledger::of_this_process();
    assert!(
        own.tiers
            .iter()
            .any(|tier| tier.label.as_deref() == Some("cache"))
    );
    drop((kept, cache, other));
}

#[test]
fn tiers_are_sent_and_older_processes_have_none() {
    let driver = machine();
    let buffers = several(&driver, "many", 20);
    let kept: Vec<_> = buffers.iter().map(|buffer| tier(&driver, buffer)).collect();
    let ledger = Ledger::of(&driver);
    let text = encode(ledger.clone(), usize::MAX).unwrap();
    let read: Ledger = serde_json::from_str(&text).unwrap();
    assert_eq!(read.tiers, ledger.tiers);
    assert!(text.contains("\"growth\":\"complete\""), "{text}");
    // Their bytes count among those of a ledger that is sent.
    let whole = serde_json::to_string(&ledger.allocations).unwrap().len();
    let sent: Ledger = serde_json::from_str(&encode(ledger.clone(), whole).unwrap()).unwrap();
    assert!(
        sent.omitted > 0 && sent.tiers.len() == 20,
        "{}",
        sent.omitted
    );

    let mut older: serde_json::Value = serde_json::from_str(&text).unwrap();
    older.as_object_mut().unwrap().remove("tiers").unwrap();
    let read: Ledger = serde_json::from_value(older).unwrap();
    assert_eq!(read.allocations.len(), 20);
    assert!(read.tiers.is_empty());
    drop((kept, buffers));
}

#[test]
fn lines_of_tiers_have_at_most_100_characters() {
    let driver = machine();
    let kept = buffer(&driver, "one", 2 * MIB);
    let mut ledger = Ledger::of(&driver);
    let mut shown = TierUse::new(Location::HostNuma(i32::MAX), kept.device_ptr());
    shown.label = Some(format!("\u{1b}{}", "layers ".repeat(9)));
    shown.stats.page_bytes = 1 << 32;
    // As many pages as a tier of 480 GiB with the smallest usual pages has.
    (shown.stats.pages, shown.stats.free, shown.stats.ready) = (31_457_280, 31_457_280, 31_457_280);
    (shown.stats.hits, shown.stats.misses, shown.stats.evictions) = (u64::MAX, 1, 99_999_999);
    ledger.tiers = vec![shown.clone()];
    let text = ledger.to_text();
    let cells = line(&text, "GiB").join(" ");
    assert!(cells.ends_with("99 % 99999999"), "{text}");
    for number in [
        &mut shown.stats.pages,
        &mut shown.stats.free,
        &mut shown.stats.writing,
    ] {
        *number = u64::MAX;
    }
    ledger.tiers = vec![shown; MAX_TIERS];
    let text = ledger.to_text();
    let longest = text.lines().map(|line| line.chars().count()).max();
    assert!(longest <= Some(100) && !text.contains('\u{1b}'), "{text}");
}
