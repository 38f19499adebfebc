//! Copies by a kernel, and the list of a launch.

use std::collections::HashMap;
use std::ffi::CStr;
use std::mem::size_of_val;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use egmem_core::per_driver::lock;
use egmem_core::pinned::PinnedHost;
use egmem_core::proof::Module;

use crate::driver::{Code, DevicePtr, FunctionHandle, LaunchDims};
use crate::gpu::Place;
use crate::memory::{CpuView, Memory};
use crate::{Driver, MemoryError, Stream};

/// The threads of a block.
const THREADS: u32 = 512;
/// The bytes that a warp moves at a time: as in pages.cu.
const CHUNK: u64 = 4096;
/// The most blocks of a launch.
pub(crate) const MAX_BLOCKS: u32 = 1024;
/// The alignment of addresses and sizes, in bytes.
pub(crate) const ALIGN: u64 = 16;
/// How many lists are kept for later jobs of a GPU.
const SPARES: usize = 16;
/// The most bytes of a list that is kept: of a job of 2^18 pages.
const SPARE: u64 = 4 << 20;
/// The least bytes of a list.
const LIST: u64 = 64 << 10;

const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("pages.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("pages.ptx holds a NUL"),
    };
const NAME: &CStr = c"egmem_kv_copy";

/// The kernel on each GPU that has been asked for it, or why it cannot run there; and lists for its jobs.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    /// By GPU.
    loaded: Mutex<HashMap<i32, Loaded>>,
    /// Each with the GPU in whose context it is: if other code resets that one, it is unmapped, while jobs of other GPUs go on.
    spares: Mutex<Vec<(i32, Arc<PinnedHost>)>>,
}

type Loaded = Result<Arc<Kernel>, MemoryError>;

/// A kernel, loaded on one GPU. The tier keeps it, and jobs keep the tier until their launches have ended.
#[derive(Debug)]
pub(crate) struct Kernel {
    function: FunctionHandle,
    _module: Module,
}

impl Kernels {
    /// Returns the kernel on a GPU, loaded at the first call.
    ///
    /// # Errors
    /// [`PlatformUnsupported`](MemoryError::PlatformUnsupported) if the GPU or the driver cannot run it, the same at
    /// each call. The driver's errors otherwise: the next call loads it again.
    pub(crate) fn on(&self, driver: &Driver, device: i32) -> Result<Arc<Kernel>, MemoryError> {
        let mut loaded = lock(&self.loaded);
        if let Some(known) = loaded.get(&device) {
            return known.clone();
        }
        let kernel = match Kernel::load(driver, device) {
            Ok(kernel) => Ok(Arc::new(kernel)),
            Err(error) if never_runs(&error) => Err(no_kernel(driver, &error)),
            Err(error) => return Err(error),
        };
        loaded.insert(device, kernel.clone());
        kernel
    }

    /// Returns a list for a job of `bytes` bytes, which the kernel reads.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn list(
        &self,
        driver: &Driver,
        device: i32,
        bytes: u64,
    ) -> Result<Arc<PinnedHost>, MemoryError> {
        let mut spares = lock(&self.spares);
        let fits = |(of, list): &(i32, Arc<PinnedHost>)| *of == device && list.len() >= bytes;
        if let Some(at) = spares.iter().position(fits) {
            return Ok(spares.swap_remove(at).1);
        }
        drop(spares);
        let bytes = bytes.max(LIST).next_power_of_two();
        Ok(Arc::new(PinnedHost::new(driver, device, bytes)?))
    }

    /// Keeps the list of a job that has ended for a later one of the same GPU.
    pub(crate) fn keep(&self, device: i32, list: Arc<PinnedHost>) {
        let mut spares = lock(&self.spares);
        let of_device = spares.iter().filter(|(of, _)| *of == device).count();
        if of_device < SPARES && list.len() <= SPARE {
            spares.push((device, list));
        }
    }
}

/// Returns whether an error says that the driver or the platform has no such call.
pub(crate) fn is_missing(error: &MemoryError) -> bool {
    matches!(
        error,
        MemoryError::PlatformUnsupported { .. }
            | MemoryError::DriverTooOld { .. }
            | MemoryError::MissingSymbol { .. }
    )
}

/// Returns whether an error of loading a kernel says that this GPU or this driver cannot run it, now or later.
fn never_runs(error: &MemoryError) -> bool {
    const REFUSALS: [Code; 7] = [
        Code::NOT_SUPPORTED,
        Code::INVALID_IMAGE,
        Code::NO_BINARY_FOR_GPU,
        Code::INVALID_PTX,
        Code::JIT_COMPILER_NOT_FOUND,
        Code::UNSUPPORTED_PTX_VERSION,
        Code::JIT_COMPILATION_DISABLED,
    ];
    is_missing(error) || error.code().is_some_and(|code| REFUSALS.contains(&code))
}

fn no_kernel(driver: &Driver, error: &MemoryError) -> MemoryError {
    let what = match driver.is_simulated() {
        true => "a simulated GPU runs no kernels",
        false => "the GPU or its driver cannot run the kernel that copies pages",
    };
    let source = error.driver_error();
    MemoryError::PlatformUnsupported { what, source }
}

impl Kernel {
    fn load(driver: &Driver, device: i32) -> Result<Self, MemoryError> {
        // SAFETY: the text is the crate's own PTX.
        let module = unsafe { Module::load(driver, device, PTX)? };
        Ok(Self {
            function: module.function(NAME)?,
            _module: module,
        })
    }

    /// Starts the copies.
    ///
    /// # Errors
    /// The driver's. Some of the copies may have begun then.
    ///
    /// # Safety
    /// - The stream is of this kernel's GPU and driver. The GPU may access
    ///   pages and blocks: read those that are copied from, and write the others.
    /// - Each pair's page and block have all parts of all groups, of `part_bytes` bytes each. They, `list` and this
    ///   kernel live until the work has ended.
    /// - Addresses and sizes are multiples of [`ALIGN`]; `list` has room for [`Launch::list_bytes`].
    pub(crate) unsafe fn launch(
        &self,
        launch: &Launch<'_>,
        list: &PinnedHost,
    ) -> Result<(), MemoryError> {
        let (view, list) = (list.cpu(), list.device_ptr());
        let mut at = 0;
        for group in &launch.groups {
            // The bases come after the entries of all pairs.
            let bases_at = at + group.entries(launch.pairs.len()) * 16;
            view.write_at(bases_at, &group.bases)?;
            let parts = group.bases.len() as u64;
            for pairs in group.launches(launch.pairs.len()) {
                let entries = group.entries(pairs.len());
                let list_at = at + group.entries(pairs.start) * 16;
                launch.write(&view, list_at, group, pairs)?;
                let args = [
                    list.add(list_at).0,
                    entries,
                    list.add(bases_at).0,
                    parts,
                    group.part_bytes,
                    launch.is_load.into(),
                ];
                // At most 2^24 × 2^32 / 2^4.
                let chunks = entries * parts * group.part_bytes.div_ceil(CHUNK);
                let useful = chunks.div_ceil(u64::from(THREADS / 32));
                let dims = LaunchDims {
                    blocks: useful.clamp(1, u64::from(launch.blocks.clamp(1, MAX_BLOCKS))) as u32,
                    threads: THREADS,
                };
                let (driver, stream) = (launch.stream.driver(), launch.stream.handle());
                // SAFETY: the arguments are the kernel's: it reads this part of the list and the bases, which are written and stay
                // unchanged until the work has ended, and copies `part_bytes` bytes for each entry and base, which by the caller's
                // promise lie in live memory that the GPU may access, at multiples of 16. The CPU's writes to the list come before
                // the launch.
                unsafe { driver.launch_kernel(self.function, dims, &args, stream)? };
            }
            at = (bases_at + size_of_val(&*group.bases) as u64).next_multiple_of(16);
        }
        Ok(())
    }
}

/// The pairs of the first of two launches.
const FIRST: usize = 2048;

/// A job's copies, for a kernel.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    /// Where in the tier's memory a block's bytes lie, and the block.
    pub(crate) pairs: &'a [(u64, u64)],
    /// The address of the tier's memory.
    pub(crate) tier_at: u64,
    /// One or two launches for each.
    pub(crate) groups: Vec<Group>,
    /// From pages to blocks.
    pub(crate) is_load: bool,
    pub(crate) blocks: u32,
    pub(crate) stream: &'a Stream,
}

/// The parts of one size, which one launch copies. The list has two words for each entry of each page: the address in
/// the page, and where the block lies, to which each of `bases` is added.
///
/// Parts of one shape that are the whole page have one entry, and their bases. Others have an entry each, with the
/// address of the block itself: they need not lie side by side in the page.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) part_bytes: u64,
    pub(crate) bases: Vec<u64>,
    entries: Vec<Place>,
}

impl Group {
    /// Groups the parts of a page by size.
    pub(crate) fn of(places: impl Iterator<Item = Place> + Clone) -> Vec<Self> {
        let group = |bases, entry: Place| Self {
            part_bytes: entry.shape.bytes,
            bases,
            entries: vec![entry],
        };
        let first = places.clone().next();
        if let Some(first) =
            first.filter(|first| places.clone().all(|place| place.shape == first.shape))
        {
            let bases = places.map(|place| place.base.0).collect();
            let base = DevicePtr(0);
            return vec![group(bases, Place { base, ..first })];
        }
        let mut groups: Vec<Self> = Vec::new();
        for place in places {
            let mut same = groups.iter_mut();
            match same.find(|group| group.part_bytes == place.shape.bytes) {
                Some(group) => group.entries.push(place),
                None => groups.push(group(vec![0], place)),
            }
        }
        groups
    }

    /// Returns the entries that `pairs` pages have in the list.
    pub(crate) const fn entries(&self, pairs: usize) -> u64 {
        pairs as u64 * self.entries.len() as u64
    }

    /// Returns the bytes that `pairs` pages and the bases take in the list.
    pub(crate) const fn list_bytes(&self, pairs: usize) -> u64 {
        self.entries(pairs) * 16 + self.bases.len() as u64 * 8
    }

    /// Returns the pairs of each launch. The first launch begins while the CPU writes the rest of a long list.
    pub(crate) fn launches(&self, pairs: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let first = (FIRST / self.entries.len().max(1)).max(1);
        let first = if pairs > 2 * first { first } else { pairs };
        let ranges = [0..first, first..pairs].into_iter();
        ranges.filter(|range| !range.is_empty())
    }
}

impl Launch<'_> {
    /// Returns the bytes of the whole list, of which each group's part begins at a multiple of 16.
    pub(crate) fn list_bytes(&self) -> u64 {
        let bytes = self.groups.iter();
        bytes
            .map(|group| group.list_bytes(self.pairs.len()).next_multiple_of(16))
            .sum()
    }

    /// Writes the entries of a group for a range of pairs.
    ///
    /// # Errors
    /// Those of the view.
    pub(crate) fn write(
        &self,
        view: &CpuView<'_>,
        mut at: u64,
        group: &Group,
        pairs: Range<usize>,
    ) -> Result<(), MemoryError> {
        let mut words = [[0; 2]; 128];
        let mut count = 0;
        for &(page_at, block) in self.pairs.get(pairs).unwrap_or_default() {
            // In the tier, and below the blocks' end.
            let page = self.tier_at + page_at;
            for entry in &group.entries {
                words[count] = [page + entry.at, entry.base.0 + block * entry.shape.stride];
                count += 1;
                if count == words.len() {
                    view.write_at(at, words.as_flattened())?;
                    at += size_of_val(&words) as u64;
                    count = 0;
                }
            }
        }
        view.write_at(at, words[..count].as_flattened())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Call;
    use egmem_core::Machine;

    /// The simulator knows no kernel of the tier's: once it is asked, it refuses for good.
    #[test]
    fn a_kernel_that_could_not_be_loaded_for_want_of_memory_is_loaded_again() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let kernels = Kernels::default();
        sim.fail(Call::ModuleLoadData, 1, Code::OUT_OF_MEMORY);
        let code = || kernels.on(&driver, 0).unwrap_err().code();
        assert_eq!(code(), Some(Code::OUT_OF_MEMORY));
        for _ in 0..2 {
            assert_eq!(code(), Some(Code::INVALID_PTX));
            assert_eq!(sim.count(Call::ModuleLoadData), 2, "a refusal is kept");
        }
    }

    #[test]
    fn few_and_small_lists_are_kept() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let kernels = Kernels::default();
        let list = |bytes| kernels.list(&driver, 0, bytes).unwrap();
        let keep = |list| kernels.keep(0, list);
        keep(list(SPARE + 1));
        assert_eq!(lock(&kernels.spares).len(), 0);
        let lists: Vec<_> = (0..=SPARES).map(|_| list(SPARE)).collect();
        lists.into_iter().for_each(keep);
        assert_eq!(lock(&kernels.spares).len(), SPARES);
        assert!(list(1).len() >= SPARE, "one that was kept");
    }

    /// Other code may reset one of the GPUs, which unmaps its lists.
    #[test]
    fn a_list_stays_with_its_gpu() {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        let kernels = Kernels::default();
        let list = |device| kernels.list(&driver, device, 1).unwrap();
        kernels.keep(0, list(0));
        let first = lock(&kernels.spares)[0].1.device_ptr();
        kernels.keep(1, list(1));
        assert_eq!(lock(&kernels.spares).len(), 2);
        assert_eq!(list(0).device_ptr(), first);
        assert_ne!(list(1).device_ptr(), first);
    }
}

#[cfg(test)]
mod launch_tests {
    use super::*;
    use crate::gpu::PartShape;
    use egmem_core::pinned::PinnedHost;
    use egmem_core::{Driver, Machine};

    fn place(base: u64, stride: u64, bytes: u64, at: u64) -> Place {
        let (base, shape) = (DevicePtr(base), PartShape { stride, bytes });
        Place { base, shape, at }
    }

    /// Returns the list of a group for pairs of page n, which lies at `page_at(n)`, and block n + 7.
    fn list_of(group: &Group, pages: u64, page_at: impl Fn(u64) -> u64) -> Vec<[u64; 2]> {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let pairs: Vec<_> = (0..pages)
            .map(|number| (page_at(number), number + 7))
            .collect();
        let launch = Launch {
            pairs: &pairs,
            tier_at: 1 << 40,
            groups: Vec::new(),
            is_load: true,
            blocks: 1,
            stream: &stream,
        };
        let list = PinnedHost::new(&driver, 0, 32 << 10).unwrap();
        launch
            .write(&list.cpu(), 16, group, 0..pairs.len())
            .unwrap();
        let mut words = vec![[0_u64; 2]; group.entries(pairs.len()) as usize + 2];
        list.cpu().read_at(0, words.as_flattened_mut()).unwrap();
        assert_eq!(words[0], [0; 2]);
        assert_eq!(words.pop(), Some([0; 2]), "nothing is written beyond");
        words.split_off(1)
    }

    #[test]
    fn a_list_has_each_page_and_its_block() {
        let places = [place(32, 4096, 48, 0), place(1 << 20, 4096, 48, 48)];
        let groups = Group::of(places.into_iter());
        assert_eq!(groups.len(), 1);
        assert_eq!((groups[0].part_bytes, groups[0].entries(3)), (48, 3));
        assert_eq!(groups[0].bases, [32, 1 << 20]);
        // Pages with gaps between them, and not in the order of their numbers.
        let page_at = |page: u64| page % 7 * (1 << 32) + page * 112;
        let expected: Vec<_> = (0..300_u64)
            .map(|page| [(1 << 40) + page_at(page), (page + 7) * 4096])
            .collect();
        assert_eq!(list_of(&groups[0], 300, page_at), expected);
    }

    #[test]
    fn parts_of_different_sizes_have_their_own_place_in_page_and_block() {
        // In turn, as the caches of attention and of its index.
        let places = [
            place(1000, 64, 32, 0),
            place(5000, 16, 16, 32),
            place(2000, 32, 32, 48),
        ];
        let groups = Group::of(places.into_iter());
        let sizes: Vec<_> = groups
            .iter()
            .map(|group| (group.part_bytes, group.entries(1)))
            .collect();
        assert_eq!(sizes, [(32, 2), (16, 1)]);
        assert!(groups.iter().all(|group| group.bases == [0]));
        let page = |number: u64| (1_u64 << 40) + number * 80;
        let expected: Vec<_> = (0..100)
            .flat_map(|n| {
                [
                    [page(n), 1000 + (n + 7) * 64],
                    [page(n) + 48, 2000 + (n + 7) * 32],
                ]
            })
            .collect();
        assert_eq!(list_of(&groups[0], 100, |n| n * 80), expected);
        assert_eq!(
            list_of(&groups[1], 1, |n| n * 80),
            [[page(0) + 32, 5000 + 7 * 16]]
        );
    }

    #[test]
    fn every_pair_is_in_one_launch() {
        let group = &Group::of([place(0, 16, 16, 0)].into_iter())[0];
        let launches = |pairs| {
            let ranges = group.launches(pairs);
            ranges
                .map(|range| (range.start, range.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(launches(FIRST), [(0, FIRST)]);
        let last = (FIRST, 2 * FIRST + 1);
        assert_eq!(launches(last.1), [(0, FIRST), last]);
        assert_eq!(launches(1), [(0, 1)]);
    }
}
