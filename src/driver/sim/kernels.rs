//! The crate's own kernels, in Rust.

use std::ffi::CStr;

use super::access::Engine;
use super::fault::{Answer, fail};
use super::state::{Kernel, State, Work};
use crate::kernels::{CHECK_REWRITE, PTX, READ, WRITE, pattern};
use crate::*;

/// Words handled at a time.
const WORDS: usize = 8 << 10;

/// The kernels, with their names and numbers of arguments. The handle of a module's kernel is the module's, 1 and the
/// kernel's index here.
const KERNELS: [(&CStr, usize, Kernel); 3] = [
    (CHECK_REWRITE, 5, Kernel::CheckRewrite),
    (READ, 3, Kernel::Read),
    (WRITE, 3, Kernel::Write),
];

impl Kernel {
    pub fn run(self, state: &State, device: i32, args: [u64; 5]) -> Result<(), Code> {
        let [ptr, words, seed, new_seed, report] = args;
        match self {
            Self::CheckRewrite => {
                let (mut least, mut wrong) = (u64::MAX, 0_u64);
                each(state, device, ptr, words, Access::ReadWrite, |i, word| {
                    if *word == pattern(seed, i) {
                        *word = pattern(new_seed, i);
                    } else {
                        least = least.min(i);
                        wrong += 1;
                    }
                })?;
                if wrong == 0 {
                    return Ok(());
                }
                each(state, device, report, 2, Access::ReadWrite, |i, word| {
                    *word = match i {
                        0 => least.min(*word),
                        _ => word.wrapping_add(wrong),
                    }
                })
            }
            Self::Read => {
                let mut all = 0;
                each(state, device, ptr, words, Access::Read, |_, word| {
                    all ^= *word
                })?;
                each(state, device, seed, 1, Access::ReadWrite, |_, word| {
                    *word ^= all
                })
            }
            Self::Write => each(state, device, ptr, words, Access::ReadWrite, |i, word| {
                *word = pattern(seed, i);
            }),
        }
    }
}

/// Calls `f` for each word with its index, and writes the words back if `access` says so.
fn each(
    state: &State,
    device: i32,
    ptr: u64,
    words: u64,
    access: Access,
    mut f: impl FnMut(u64, &mut u64),
) -> Result<(), Code> {
    if !ptr.is_multiple_of(8) {
        return Err(Code::MISALIGNED_ADDRESS);
    }
    let bytes = words.checked_mul(8).ok_or(Code::ILLEGAL_ADDRESS)?;
    let mut buffer = vec![0_u64; WORDS.min(words as usize)];
    let mut index = 0;
    for piece in state.pieces(device, Engine::Kernel, ptr, bytes, access)? {
        let mut at = 0;
        while at < piece.len {
            let n = ((piece.len - at) / 8).min(WORDS as u64);
            let part = &mut buffer[..n as usize];
            let place = piece.after(at);
            place.read(bytemuck::cast_slice_mut(part))?;
            for word in part.iter_mut() {
                f(index, word);
                index += 1;
            }
            if access == Access::ReadWrite {
                // SAFETY: the caller that launched the kernel guarantees the range.
                unsafe { place.write(bytemuck::cast_slice(part)) }?;
            }
            at += n * 8;
        }
    }
    Ok(())
}

impl State {
    pub fn module_load(&mut self, device: i32, ptx: &CStr) -> Answer<ModuleHandle> {
        self.context(device)?;
        if ptx != PTX {
            return fail(Code::INVALID_PTX);
        }
        let module = self.number();
        self.modules.insert(module, device);
        Ok(ModuleHandle(module))
    }

    pub fn module_unload(&mut self, device: i32, module: ModuleHandle) -> Answer {
        self.device(device)?;
        if self.modules.get(&module.0) != Some(&device) {
            return fail(Code::INVALID_HANDLE);
        }
        self.modules.remove(&module.0);
        self.context(device).map(drop)
    }

    pub fn module_function(
        &mut self,
        device: i32,
        module: ModuleHandle,
        name: &CStr,
    ) -> Answer<FunctionHandle> {
        self.context(device)?;
        if self.modules.get(&module.0) != Some(&device) {
            return fail(Code::INVALID_HANDLE);
        }
        let index = KERNELS.iter().position(|(known, ..)| *known == name);
        let index = index.ok_or(Code::NOT_FOUND)?;
        Ok(FunctionHandle(module.0 + 1 + index as u64))
    }

    pub fn launch_kernel(
        &mut self,
        function: FunctionHandle,
        dims: LaunchDims,
        args: &[u64],
        stream: StreamHandle,
    ) -> Answer {
        let key = self.stream(stream)?;
        let index = (function.0 % 16)
            .checked_sub(1)
            .ok_or(Code::INVALID_HANDLE)?;
        let (_, arguments, kernel) = *KERNELS.get(index as usize).ok_or(Code::INVALID_HANDLE)?;
        if self.modules.get(&(function.0 - 1 - index)) != Some(&stream.device) {
            return fail(Code::INVALID_HANDLE);
        }
        let sane = dims.blocks > 0 && (1..=1024).contains(&dims.threads);
        if !sane || args.len() != arguments {
            return fail(Code::INVALID_VALUE);
        }
        let mut all = [0; 5];
        all[..args.len()].copy_from_slice(args);
        self.submit(key, Work::Kernel { kernel, args: all });
        Ok(())
    }
}
