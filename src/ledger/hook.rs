//! Starts the leak report and the ledger's socket that the environment asks for, once a process has its first
//! allocation.

use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::offer::{Offer, offer};
use crate::{entries, leaks};

/// The environment variable that makes a process offer its ledger: any value except an empty one and `0`.
pub const PS: &str = "EGMEM_PS";

/// The environment variable that makes a process report at its exit the memory that is still allocated.
pub const LEAKS: &str = "EGMEM_LEAKS";

/// The offer that lasts as long as the process: null, or a box that is never freed. A forked child replaces its
/// parent's, whose thread and socket it does not have. Without a lock, which a thread of the parent may have held.
static KEPT: AtomicPtr<Offer> = AtomicPtr::new(ptr::null_mut());

/// Sets the hook before `main`, so that a program need not call anything for the environment variables to work.
#[used]
// SAFETY: the section holds pointers to functions, which the C library calls with its own arguments before `main`;
// under the C calling convention a function may ignore them. This one stores a function pointer: it uses nothing of
// the standard library that needs to be set up before.
#[unsafe(link_section = ".init_array")]
static SET_HOOK: extern "C" fn() = set_hook;

extern "C" fn set_hook() {
    entries::on_first_entry(start);
}

fn is_on(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Called once in each process, after its first entry was made.
fn start() {
    if is_on(LEAKS) {
        leaks::report_leaks_at_exit();
    }
    if !is_on(PS) {
        return;
    }
    match offer() {
        Ok(offer) => {
            KEPT.store(Box::into_raw(Box::new(offer)), Release);
            leaks::at_exit(remove_socket);
        }
        Err(error) => tracing::warn!(%error, "this process's ledger is not offered"),
    }
}

extern "C" fn remove_socket() {
    // SAFETY: the pointer is null, or of a box that is never freed nor borrowed mutably.
    if let Some(offer) = unsafe { KEPT.load(Acquire).as_ref() } {
        offer.remove_file();
    }
}
