//! The crate's own kernels, in Rust.

use std::ffi::CStr;

use super::access::Engine;
use super::answer::{Answer, fail};
use super::state::State;
use super::work::{Function, Kernel, Work};
use crate::kernels::{CHECK_REWRITE, PTX, READ, WRITE, pattern};
use crate::{Access, Code, FunctionHandle, LaunchDims, ModuleHandle, StreamHandle};

/// Words handled at a time.
const WORDS: usize = 8 << 10;

impl Kernel {
    fn named(name: &CStr) -> Option<Self> {
        [
            (CHECK_REWRITE, Self::CheckRewrite),
            (READ, Self::Read),
            (WRITE, Self::Write),
        ]
        .into_iter()
        .find_map(|(known, kernel)| (known == name).then_some(kernel))
    }

    const fn arguments(self) -> usize {
        match self {
            Self::CheckRewrite => 5,
            Self::Read | Self::Write => 3,
        }
    }

    pub(super) fn run(self, state: &State, device: i32, args: [u64; 5]) -> Result<(), Code> {
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
    pub(super) fn module_load(&mut self, device: i32, ptx: &CStr) -> Answer<ModuleHandle> {
        self.context(device)?;
        if ptx != PTX {
            return fail(Code::INVALID_PTX);
        }
        let module = self.number();
        self.modules.insert(module, device);
        Ok(ModuleHandle(module))
    }

    pub(super) fn module_unload(&mut self, device: i32, module: ModuleHandle) -> Answer<()> {
        self.device(device)?;
        if self.modules.get(&module.0) != Some(&device) {
            return fail(Code::INVALID_HANDLE);
        }
        self.modules.remove(&module.0);
        self.functions
            .retain(|_, function| function.module != module.0);
        self.context(device).map(drop)
    }

    pub(super) fn module_function(
        &mut self,
        device: i32,
        module: ModuleHandle,
        name: &CStr,
    ) -> Answer<FunctionHandle> {
        self.context(device)?;
        if self.modules.get(&module.0) != Some(&device) {
            return fail(Code::INVALID_HANDLE);
        }
        let kernel = Kernel::named(name).ok_or(Code::NOT_FOUND)?;
        let same = |f: &Function| f.module == module.0 && f.kernel == kernel;
        if let Some((&handle, _)) = self.functions.iter().find(|(_, f)| same(f)) {
            return Ok(FunctionHandle(handle));
        }
        let handle = self.number();
        let module = module.0;
        let function = Function {
            device,
            module,
            kernel,
        };
        self.functions.insert(handle, function);
        Ok(FunctionHandle(handle))
    }

    pub(super) fn launch_kernel(
        &mut self,
        function: FunctionHandle,
        dims: LaunchDims,
        args: &[u64],
        stream: StreamHandle,
    ) -> Answer<()> {
        let key = self.stream(stream)?;
        let function = self.functions.get(&function.0);
        let function = *function.ok_or(Code::INVALID_HANDLE)?;
        if function.device != stream.device {
            return fail(Code::INVALID_HANDLE);
        }
        let sane = dims.blocks > 0 && (1..=1024).contains(&dims.threads);
        if !sane || args.len() != function.kernel.arguments() {
            return fail(Code::INVALID_VALUE);
        }
        let mut all = [0; 5];
        all[..args.len()].copy_from_slice(args);
        let (kernel, args) = (function.kernel, all);
        self.submit(key, Work::Kernel { kernel, args });
        Ok(())
    }
}
