//! The table against a plain model, by random steps.

use std::collections::HashMap;

use egmem::kv::{Error, Key, Load, Store, Tier};
use fastrand::Rng;

use crate::kv::setup::{key, tier};

const PAGES: usize = 12;
const KEYS: u64 = 24;
const PAGE_BYTES: u64 = 16;

/// The expected state of a tier.
#[derive(Default)]
struct Model {
    /// Ready keys, the least recently used first.
    ready: Vec<Key>,
    /// How many loads have each key.
    pins: HashMap<Key, u32>,
    /// The keys that stores are writing.
    writing: Vec<Key>,
    evictions: u64,
}

impl Model {
    fn touch(&mut self, keys: &[Key]) {
        for key in keys.iter().rev() {
            if let Some(at) = self.ready.iter().position(|ready| ready == key) {
                let key = self.ready.remove(at);
                self.ready.push(key);
            }
        }
    }

    fn is_pinned(&self, key: &Key) -> bool {
        self.pins.get(key).is_some_and(|&pins| pins > 0)
    }

    /// The keys to be written and the keys evicted for them; `None`: there is no room.
    fn reserve(&mut self, keys: &[Key]) -> Option<(Vec<Key>, Vec<Key>)> {
        let mut new = Vec::new();
        for key in keys {
            let is_there =
                self.ready.contains(key) || self.writing.contains(key) || new.contains(key);
            if !is_there {
                new.push(*key);
            }
        }
        let free = PAGES - self.ready.len() - self.writing.len();
        let evictable = self
            .ready
            .iter()
            .filter(|key| !self.is_pinned(key) && !keys.contains(key));
        let evicted: Vec<Key> = evictable
            .copied()
            .take(new.len().saturating_sub(free))
            .collect();
        if free + evicted.len() < new.len() {
            return None;
        }
        self.ready.retain(|key| !evicted.contains(key));
        self.evictions += evicted.len() as u64;
        self.writing.extend(&new);
        Some((new, evicted))
    }

    fn commit(&mut self, keys: &[Key]) {
        self.writing.retain(|key| !keys.contains(key));
        self.ready.extend(keys.iter().rev());
    }

    fn pin(&mut self, keys: &[Key]) -> bool {
        let all = keys.iter().all(|key| self.ready.contains(key));
        if all {
            keys.iter()
                .for_each(|key| *self.pins.entry(*key).or_default() += 1);
        }
        all
    }

    fn unpin(&mut self, keys: &[Key]) {
        for key in keys.iter().rev() {
            let pins = self.pins.entry(*key).or_default();
            *pins -= 1;
            if *pins == 0 {
                self.touch(&[*key]);
            }
        }
    }

    fn remove(&mut self, keys: &[Key]) -> usize {
        let before = self.ready.len();
        let pins = std::mem::take(&mut self.pins);
        let is_pinned = |key: &Key| pins.get(key).is_some_and(|&pins| pins > 0);
        self.ready
            .retain(|key| is_pinned(key) || !keys.contains(key));
        self.pins = pins;
        before - self.ready.len()
    }
}

fn write(store: &Store) {
    for (index, key) in store.keys().iter().enumerate() {
        store
            .view(index)
            .unwrap()
            .write_at(0, &key.as_bytes()[..16])
            .unwrap();
    }
}

fn check(load: &Load, keys: &[Key]) {
    for (index, key) in keys.iter().enumerate() {
        let mut bytes = [0; 16];
        load.view(index).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, key.as_bytes()[..16], "another key's bytes");
    }
}

fn compare(tier: &Tier, model: &Model) {
    let stats = tier.stats();
    assert_eq!(stats.ready as usize, model.ready.len());
    assert_eq!(stats.writing as usize, model.writing.len());
    assert_eq!(
        stats.free as usize,
        PAGES - model.ready.len() - model.writing.len()
    );
    let pinned = model
        .ready
        .iter()
        .filter(|key| model.is_pinned(key))
        .count();
    assert_eq!(
        (stats.pinned as usize, stats.evictions),
        (pinned, model.evictions)
    );
    let order: Vec<Key> = tier.keys().into_iter().map(|(key, _)| key).collect();
    let unpinned = model.ready.iter().filter(|key| !model.is_pinned(key));
    assert!(
        order[..order.len() - pinned].iter().eq(unpinned),
        "{order:?}"
    );
}

fn some_keys(random: &mut Rng) -> Vec<Key> {
    (0..random.usize(0..6))
        .map(|_| key(random.u64(0..KEYS)))
        .collect()
}

fn run(seed: u64) {
    let random = &mut Rng::with_seed(seed);
    let driver = crate::kv::drivers::grace();
    let tier = tier(&driver, PAGES as u64, PAGE_BYTES);
    let mut model = Model::default();
    let (mut stores, mut loads) = (Vec::<Store>::new(), Vec::<(Load, Vec<Key>)>::new());
    for _ in 0..400 {
        let mut keys = some_keys(random);
        match random.u32(0..9) {
            0..=2 => match (tier.prepare_store(&keys), model.reserve(&keys)) {
                (Ok(store), Some((new, evicted))) => {
                    assert_eq!(store.keys(), new);
                    assert!(store.evicted().iter().map(|gone| gone.key).eq(evicted));
                    write(&store);
                    stores.push(store);
                }
                (Err(Error::Full { .. }), None) => {}
                (result, expected) => panic!("{result:?}, and not {expected:?}"),
            },
            3 | 4 if !stores.is_empty() => {
                let mut store = stores.swap_remove(random.usize(0..stores.len()));
                if random.u32(0..4) > 0 {
                    store.commit().unwrap();
                    model.commit(store.keys());
                } else {
                    model.writing.retain(|key| !store.keys().contains(key));
                }
            }
            5 => {
                keys.sort_unstable();
                keys.dedup();
                match tier.prepare_load(&keys) {
                    Ok(load) if model.pin(&keys) => {
                        check(&load, &keys);
                        loads.push((load, keys));
                    }
                    Err(Error::NotReady { .. }) if !model.pin(&keys) => {}
                    other => panic!("{other:?}"),
                }
            }
            6 if !loads.is_empty() => {
                let (load, keys) = loads.swap_remove(random.usize(0..loads.len()));
                check(&load, &keys);
                drop(load);
                model.unpin(&keys);
            }
            7 => {
                tier.touch(&keys);
                model.touch(&keys);
                let found = keys
                    .iter()
                    .take_while(|key| model.ready.contains(key))
                    .count();
                assert_eq!(tier.lookup(&keys), found);
            }
            8 if random.u32(0..3) == 0 => {
                assert_eq!(tier.remove(&keys).unwrap(), model.remove(&keys))
            }
            _ => {}
        }
        compare(&tier, &model);
    }
}

#[test]
fn the_tier_is_the_model() {
    for _ in 0..30 {
        let seed = fastrand::u64(..);
        println!("seed {seed}"); // shown if the test fails
        run(seed);
    }
}
