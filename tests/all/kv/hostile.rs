//! Memory with anything in its header and table.

use std::sync::Arc;

use egmem::Buffer;
use egmem::kv::{Key, Tier};
use fastrand::Rng;

use crate::kv::attach::{MEMBER, memory, read};
use crate::kv::setup::{key, keys};

const PAGE: u64 = 256;
const PAGES: u64 = 40;
/// The bytes of a slot of the table, and where the slots lie: behind the index, of 64 buckets.
const SLOT: usize = 128;
const SLOTS: usize = 4096 * 4;

/// A tier with some ready pages, whose bytes are those of their keys.
fn image(memory: &Arc<Buffer>) -> Vec<u8> {
    let tier = Tier::attach(memory.clone())
        .pages(PAGES)
        .page_bytes(PAGE)
        .open()
        .unwrap();
    let mut store = tier.prepare_store(&keys(0..30)).unwrap();
    for index in 0..30 {
        store
            .view(index)
            .unwrap()
            .fill(0, PAGE, index as u8)
            .unwrap();
    }
    store.commit().unwrap();
    // Pages that are free, and have other bytes than those of the last key that was ready there.
    tier.remove(&keys(25..30)).unwrap();
    let aborted = tier.prepare_store(&keys(35..40)).unwrap();
    for index in 0..5 {
        aborted.view(index).unwrap().fill(0, PAGE, 99).unwrap();
    }
    let _unfinished = tier.prepare_store(&keys(30..35)).unwrap();
    drop(aborted);
    let mut image = read(memory);
    image[MEMBER as usize..][..8].fill(0);
    image
}

/// Uses all pages of a tier: for any content of the memory, each page is the tier's own and is given out once.
fn exercise(tier: &Tier, memory: &Buffer) {
    let (start, end) = (memory.device_ptr().0, memory.device_ptr().0 + memory.len());
    let table_end = start + 12288 + SLOT as u64 * u64::from(tier.pages());
    let ready = tier.keys();
    let mut pages: Vec<u32> = ready.iter().map(|(_, page)| page.number()).collect();
    let mut names: Vec<Key> = ready.iter().map(|(key, _)| *key).collect();
    pages.sort_unstable();
    pages.dedup();
    names.sort_unstable();
    names.dedup();
    assert_eq!((pages.len(), names.len()), (ready.len(), ready.len()));
    assert_eq!(tier.found().ready as usize, ready.len());
    drop(tier.prepare_load(&names).unwrap());
    let all: Vec<Key> = (0..u64::from(tier.pages()).min(100))
        .map(|number| key(1 << 40 | number))
        .collect();
    let mut store = tier.prepare_store(&all).unwrap();
    for (index, &page) in store.pages().iter().enumerate() {
        let at = tier.page_ptr(page).unwrap().0;
        assert!(
            at >= table_end && at + tier.page_bytes() <= end,
            "page {page:?}"
        );
        store
            .view(index)
            .unwrap()
            .fill(0, tier.page_bytes(), 1)
            .unwrap();
    }
    store.commit().unwrap();
    assert_eq!(tier.lookup(&all), all.len());
    tier.touch(&all);
    assert_eq!(tier.remove(&all).unwrap(), all.len());
}

/// Changes some bytes of the header and the table.
fn damage(image: &mut [u8], random: &mut Rng) {
    let table = SLOTS..SLOTS + SLOT * PAGES as usize;
    match random.u32(0..7) {
        0 => random.fill(&mut image[table]),
        1 => random.fill(&mut image[..4096]),
        5 => random.fill(&mut image[4096..SLOTS]),
        2 => {
            // Any state, with the rest as it was.
            for slot in image[table].chunks_mut(SLOT) {
                slot[0] = random.u8(..);
            }
        }
        3 => {
            // Slots that are copies of others: keys twice, and stamps at the end of time.
            for _ in 0..20 {
                let [from, to] =
                    [(); 2].map(|()| table.start + SLOT * random.usize(0..PAGES as usize));
                image.copy_within(from..from + SLOT, to);
                image[to + 8..to + 16].fill(0xff);
            }
        }
        4 => {
            for _ in 0..random.usize(1..20) {
                image[random.usize(0..table.end)] = random.u8(..);
            }
        }
        _ => {
            // Sizes that are wrong with a check that is right.
            let word =
                |image: &[u8], at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap());
            let at = 8 * random.usize(1..6);
            let value = [
                0,
                1,
                41,
                u64::MAX,
                2,
                1 << 30,
                1 << 32,
                1 << 63,
                random.u64(..),
            ];
            let value = value[random.usize(0..value.len())];
            image[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let fields = (0..10).map(|field| 8 * field);
            let fields = fields.chain((0..64).map(|group| 8192 + 64 * group));
            let hash = fields.fold(0xcbf2_9ce4_8422_2325, |hash: u64, at| {
                let hash = (hash ^ word(image, at)).wrapping_mul(0x0000_0100_0000_01b3);
                hash ^ hash >> 29
            });
            image[80..88].copy_from_slice(&hash.to_le_bytes());
        }
    }
}

#[test]
fn damaged_tables_lead_nowhere() {
    let driver = crate::kv::drivers::grace();
    let memory = memory(&driver);
    let good = image(&memory);
    let seed = fastrand::u64(..);
    println!("seed {seed}"); // shown if the test fails
    let random = &mut Rng::with_seed(seed);
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..300 {
        let mut image = good.clone();
        for _ in 0..random.u32(1..3) {
            damage(&mut image, random);
        }
        memory.write_at(0, &image).unwrap();
        let options = || Tier::attach(memory.clone()).take_over(true);
        let tier = options().open();
        match tier {
            Ok(tier) => {
                opened += 1;
                exercise(&tier, &memory);
            }
            Err(_) => {
                refused += 1;
                if random.bool() {
                    let tier = options().reset(true).pages(PAGES).page_bytes(PAGE);
                    // A number of a living process may stand there by chance.
                    if let Ok(tier) = tier.open() {
                        exercise(&tier, &memory);
                    }
                }
            }
        }
    }
    println!("{opened} opened, {refused} refused");
    assert!(opened > 50 && refused > 50, "both ways were tried");
}

#[test]
fn a_page_that_is_kept_has_the_bytes_of_its_key() {
    let driver = crate::kv::drivers::grace();
    let memory = memory(&driver);
    let good = image(&memory);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let random = &mut Rng::with_seed(seed);
    // One bit of a slot: the entry is as before, or gone.
    let mut any = || {
        let at = SLOTS + random.usize(0..SLOT * PAGES as usize);
        (at, random.u32(0..8))
    };
    let mut flips: Vec<(usize, u32)> = (0..200).map(|_| any()).collect();
    let states = (0..PAGES as usize).flat_map(|page| [0, 1].map(|bit| (SLOTS + SLOT * page, bit)));
    flips.extend(states);
    for (at, bit) in flips {
        let mut image = good.clone();
        image[at] ^= 1 << bit;
        memory.write_at(0, &image).unwrap();
        let tier = Tier::attach(memory.clone()).open().unwrap();
        for (name, _) in tier.keys() {
            let number = name.as_bytes()[0];
            assert!(number < 25 && name == key(number.into()), "{name:?}");
            let load = tier.prepare_load(&[name]).unwrap();
            let mut bytes = [0; PAGE as usize];
            load.view(0).unwrap().read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == number), "{name:?}");
        }
    }
}
