//! Memory that several ledgers have, counted once.

use std::collections::HashSet;

use egmem_share::Identity;

use crate::entries::Allocation;
use crate::ledger::Ledger;

/// Returns the entries without repetition: an import is left out if a ledger has the memory as its own, or if another
/// import of it came before. An import without identity may be any of that, and is left out.
pub(crate) fn drawn_once<'a>(
    entries: impl Iterator<Item = (&'a Ledger, &'a Allocation)> + Clone,
) -> impl Iterator<Item = (&'a Ledger, &'a Allocation)> {
    let own = entries.clone().filter(|(_, entry)| !entry.path.is_import());
    let mut seen: HashSet<Identity> = own.filter_map(|(_, entry)| entry.identity).collect();
    entries.filter(move |(_, entry)| match entry.path.is_import() {
        false => true,
        true => source(entry).is_some_and(|identity| seen.insert(identity)),
    })
}

/// Returns the identity of imported memory.
pub(crate) fn source(entry: &Allocation) -> Option<Identity> {
    entry.imported.as_ref()?.identity
}
