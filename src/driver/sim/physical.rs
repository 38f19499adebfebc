//! Physical memory: creating, releasing, querying, exporting and importing it.

use std::sync::Arc;

use super::capacity::Counted;
use super::fault::{Answer, fail};
use super::memory::{Memory, Purpose};
use super::share;
use super::space::is_granular;
use super::state::{Physical, Reference, State};
use crate::*;

impl State {
    pub fn mem_create(&mut self, size: u64, props: &AllocationProps) -> Answer<PhysicalHandle> {
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        self.check_location(props.location, props.handle_types)?;
        match props.location {
            Location::Host if props.handle_types != HandleTypes::NONE => {
                return fail(Code::INVALID_VALUE);
            }
            Location::Device(_) => {}
            _ if props.gpu_direct_rdma => return fail(Code::INVALID_VALUE),
            _ => {}
        }
        if size > self.capacity.largest(props.location) {
            return fail(Code::OUT_OF_MEMORY); // the driver checks this before the handle types
        }
        self.check_fabric(props.location, props.handle_types)?;
        let memory =
            self.new_memory(Purpose::Physical, props.location, props.handle_types, size)?;
        Ok(self.hand_out(memory, size, *props, None))
    }

    /// Checks that memory can lie at a location and that the handle types exist.
    pub fn check_location(&self, location: Location, types: HandleTypes) -> Answer {
        let version = self.machine.driver_version;
        let known = match version {
            CudaVersion(12030..) => HandleTypes::POSIX_FD | HandleTypes::FABRIC,
            _ => HandleTypes::POSIX_FD,
        };
        if !known.contains(types) {
            return fail(Code::INVALID_VALUE);
        }
        match location {
            Location::Device(device) => self.device(device).map(drop),
            Location::HostNuma(node) if self.machine.gives_memory_on(NodeId(node)) => Ok(()),
            Location::Host if version >= CudaVersion(13000) => Ok(()),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    /// Checks that FABRIC is available if requested.
    pub fn check_fabric(&self, location: Location, types: HandleTypes) -> Answer {
        if !types.contains(HandleTypes::FABRIC) {
            Ok(())
        } else if !self.machine.imex_channel {
            fail(Code::NOT_PERMITTED)
        } else if location.is_host() && !self.machine.gpus.iter().all(|gpu| gpu.coherent) {
            fail(Code::NOT_SUPPORTED)
        } else {
            Ok(())
        }
    }

    fn hand_out(
        &mut self,
        memory: Arc<Memory>,
        size: u64,
        props: AllocationProps,
        counted: Option<Counted>,
    ) -> PhysicalHandle {
        let handle = PhysicalHandle(self.number());
        let physical = Arc::new(Physical {
            handle,
            memory,
            props,
            size,
            _counted: counted,
        });
        self.references
            .insert(handle.0, Reference { physical, count: 1 });
        handle
    }

    pub fn physical(&self, handle: PhysicalHandle) -> Answer<&Arc<Physical>> {
        let reference = self.references.get(&handle.0);
        Ok(&reference.ok_or(Code::INVALID_VALUE)?.physical)
    }

    pub fn mem_release(&mut self, handle: PhysicalHandle) -> Answer {
        let reference = self.references.get_mut(&handle.0);
        let reference = reference.ok_or(Code::INVALID_VALUE)?;
        reference.count -= 1;
        if reference.count == 0 {
            self.references.remove(&handle.0);
        }
        Ok(())
    }

    pub fn mem_retain(&mut self, ptr: DevicePtr) -> Answer<PhysicalHandle> {
        let (_, region) = self.region(ptr.0).ok_or(Code::INVALID_VALUE)?;
        let mapping = region.mapping().ok_or(Code::INVALID_VALUE)?;
        let physical = Arc::clone(&mapping.physical);
        let handle = physical.handle;
        self.references
            .entry(handle.0)
            .or_insert(Reference { physical, count: 0 })
            .count += 1;
        Ok(handle)
    }

    pub fn mem_properties(&self, handle: PhysicalHandle) -> Answer<AllocationProps> {
        let physical = self.physical(handle)?;
        // Memory of the host as a whole reports its first node.
        let location = match physical.props.location {
            Location::Host => Location::HostNuma(self.machine.nodes[0].id),
            location => location,
        };
        Ok(AllocationProps {
            location,
            ..physical.props
        })
    }

    pub fn mem_export(
        &mut self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Answer<ShareableHandle> {
        let physical = Arc::clone(self.physical(handle)?);
        if !physical.props.handle_types.contains(kind.into()) {
            return fail(Code::INVALID_VALUE);
        }
        let shareable = share::export(&physical.memory, kind)?;
        self.remember(&physical.memory);
        Ok(shareable)
    }

    pub fn mem_import(&mut self, handle: &ShareableHandle) -> Answer<PhysicalHandle> {
        let imported = share::import(handle, Purpose::Physical, self.machine.imex_channel)?;
        let known = self
            .exported
            .get(&imported.label.id)
            .and_then(|m| m.upgrade());
        let memory = known.unwrap_or_else(|| Arc::new(imported));
        self.remember(&memory);
        let size = memory.size();
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        let counted = Counted::new(&memory);
        let props = AllocationProps::at(memory.label.location);
        Ok(self.hand_out(memory, size, props, Some(counted)))
    }
}
