//! The memory of all ranks of a job.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use egmem::exchange::group::{self, AllGather, GroupSecret, MAX_RANKS, Sealed};
use egmem::exchange::{Error, Result};
use egmem::share::Shared;

use crate::args::object;
use crate::failure::Failure;
use crate::{args, egm_buffer, egm_driver, egm_status, noted, on};

/// The ranks of a job: see egm_group_gather().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct egm_ranks {
    /// This process's rank, below `size`.
    pub rank: u32,
    /// The number of ranks, at most 1024.
    pub size: u32,
    /// Sends `bytes` bytes at `own` to all ranks, and writes those of all ranks to `all`, in the order of ranks, as
    /// `MPI_Allgather` does. All ranks call it equally often, with the same `bytes`. Returns 0, or another number for a
    /// failure; an exception of C++ that leaves it ends the process. Called by the thread that calls egm_group_gather().
    pub all_gather: Option<
        unsafe extern "C-unwind" fn(
            context: *mut c_void,
            own: *const c_void,
            all: *mut c_void,
            bytes: usize,
        ) -> i32,
    >,
    /// The first argument of each call.
    pub context: *mut c_void,
    /// A secret of all ranks, of 16 bytes or more, with which each gather is sealed; or null: then whoever reads what
    /// `all_gather` sends can map fabric memory.
    pub secret: *const c_char,
}

/// The ranks of a C program, whose gathers have one length.
struct Ranks(egm_ranks);

impl Ranks {
    /// Gathers as many bytes of each rank.
    fn gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let null = || Error::all_gather("the function is a null pointer");
        let function = self.0.all_gather.ok_or_else(null)?;
        let mut all = vec![0_u8; own.len() * self.0.size as usize];
        let (from, to) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: the program's promise: the function takes its context, reads as many bytes as `own` has and writes as
        // many for each rank, for which `all` has room.
        match unsafe { function(self.0.context, from, to, own.len()) } {
            0 => Ok(all.chunks_exact(own.len()).map(<[u8]>::to_vec).collect()),
            code => Err(Error::all_gather(format!("the function returned {code}"))),
        }
    }
}

impl AllGather for Ranks {
    fn rank(&self) -> u32 {
        self.0.rank
    }

    fn size(&self) -> u32 {
        self.0.size
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        // First the lengths, then the bytes and zeros up to the longest.
        let lengths = self.gather(&(own.len() as u64).to_be_bytes())?;
        let length = |bytes: &Vec<u8>| {
            bytes
                .iter()
                .fold(0, |sum, byte| sum << 8 | usize::from(*byte))
        };
        let lengths: Vec<usize> = lengths.iter().map(length).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        // A seal is longer than what it seals.
        if longest > 2 * group::MAX_CONTRIBUTION || longest < own.len() {
            return Err(Error::all_gather(format!("a rank gives {longest} bytes")));
        }
        let mut padded = own.to_vec();
        padded.resize(longest.max(1), 0);
        let mut all = self.gather(&padded)?;
        for (bytes, length) in all.iter_mut().zip(lengths) {
            bytes.truncate(length);
        }
        Ok(all)
    }
}

/// Gives this rank's memory to all ranks of a job, and maps that of all others. All ranks call it together.
///
/// `buffer` was made by egm_buffer_create() or egm_buffer_near() and is shareable, or is null: then the rank only maps the
/// others' memory. `out` has room for as many pointers as there are ranks. It gets a buffer for each, in the order of
/// ranks, to be destroyed by egm_buffer_destroy(); null for this rank and for ranks without memory.
///
/// Ranks of one machine exchange file descriptors over Unix sockets, ranks of several machines fabric handles by
/// `all_gather`. Fails in all ranks with ::EGM_NO_COMMON_HANDLE if no handle type does for all. If one rank fails, the others
/// fail with ::EGM_OTHER and its reason. With a secret, ::EGM_NOT_TRUSTED for a contribution that is not sealed with it.
///
/// # Safety
/// `driver` is null or a driver; `buffer` is null or a buffer; `ranks` is null or ranks whose function may be called with
/// its context and keeps to its description, and whose secret is null or a string; `out` is null or has that room. Any
/// thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_group_gather(
    driver: Option<&egm_driver>,
    buffer: Option<&egm_buffer>,
    ranks: *const egm_ranks,
    out: *mut *mut egm_buffer,
) -> egm_status {
    let gather = |driver: &egm_driver| {
        // SAFETY: the caller's promise. It is copied, because the program's function may change its own.
        let ranks = *object(unsafe { ranks.as_ref() }, "ranks")?;
        if out.is_null() {
            return Err(Failure::invalid("out", "it is a null pointer"));
        }
        let own = buffer.map(egm_buffer::own_memory);
        let own = own.transpose()?.map(|own| Shared::from(Arc::clone(own)));
        // SAFETY: the caller's promise.
        let secret = unsafe { args::optional_text(ranks.secret, "secret")? };
        let secret = secret.map(GroupSecret::new).transpose()?;
        let (rank, size) = (ranks.rank, ranks.size);
        if rank >= size || size > MAX_RANKS {
            let why = format!("rank {rank} of {size}, of at most {MAX_RANKS}");
            return Err(Failure::invalid("ranks", why));
        }
        if ranks.all_gather.is_none() {
            return Err(Failure::invalid("all_gather", "it is a null pointer"));
        }
        let mut all: Box<dyn AllGather> = Box::new(Ranks(ranks));
        if let Some(secret) = &secret {
            all = Box::new(Sealed::new(all, secret)?);
        }
        let gathered = group::gather_memory(&mut *all, own, &driver.0)?;
        for rank in 0..size {
            let buffer = gathered
                .rank(rank)
                .map_or(std::ptr::null_mut(), |imported| {
                    args::given(egm_buffer::Imported(imported.clone()))
                });
            // SAFETY: the caller's promise: there is room for a pointer for each rank.
            unsafe { out.add(rank as usize).write(buffer) };
        }
        Ok(())
    };
    noted(|| on(driver, gather))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two ranks, of which the other gives what this one gives, and a byte more in its length.
    unsafe extern "C-unwind" fn twice(
        context: *mut c_void,
        own: *const c_void,
        all: *mut c_void,
        bytes: usize,
    ) -> i32 {
        // SAFETY: as many bytes are at `own`, twice as many at `all`; the context is a number.
        unsafe {
            std::ptr::copy_nonoverlapping(own.cast::<u8>(), all.cast(), bytes);
            std::ptr::copy_nonoverlapping(own.cast::<u8>(), all.cast::<u8>().add(bytes), bytes);
            let calls = context.cast::<i32>();
            *calls += 1;
            if *calls == 1 {
                *all.cast::<u8>().add(2 * bytes - 1) += 1;
            }
            if *calls > 2 { 17 } else { 0 }
        }
    }

    #[test]
    fn contributions_of_several_lengths_are_gathered_as_ones_of_one_length() {
        let mut calls = 0;
        let mut ranks = Ranks(egm_ranks {
            rank: 0,
            size: 2,
            all_gather: Some(twice),
            context: (&raw mut calls).cast(),
            secret: std::ptr::null(),
        });
        assert_eq!(ranks.all_gather(b"abc").unwrap(), [&b"abc"[..], b"abc\0"]);
        let error = ranks.all_gather(b"abc").unwrap_err();
        assert!(error.to_string().contains("17"), "{error}");
    }
}
