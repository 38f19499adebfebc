//! Memory's life through the public API: rules of access, any drop order, nothing left behind.

#[cfg(feature = "portable")]
mod awaiting;
mod buffers;
mod grants;
mod growth;
mod host_memory;
mod host_model;
mod leaked;
mod objects;
mod peers;
mod pools;
mod registered;
mod streams;
mod transfers;
mod vmm;

use egmem::Driver;
use egmem::driver::{Access, AccessDesc, Location};

use egmem_tests::drivers::{grace, node_of as node, nothing_held, on_both};

const MIB: u64 = 1 << 20;

/// The last GPU: another than the first where there are two.
fn last(driver: &Driver) -> i32 {
    driver.device_count().unwrap() - 1
}

#[cfg(feature = "portable")]
mod awaited {
    use super::{awaiting, on_both};

    on_both! {
        egmem::Machine::gh200x4();
        awaiting {
            a_task_awaits_copies_and_fills,
            many_tasks_are_woken,
            a_ticket_can_be_polled_and_waited_for_later,
        }
    }
}

on_both! {
    egmem::Machine::gh200x4();
    buffers {
        one_call_grants_the_host_and_every_gpu,
        cpu_and_gpus_see_the_same_bytes,
        a_wrong_word_is_found_and_named,
        a_spread_buffer_is_one_range,
        a_front_on_the_gpu_and_the_rest_on_its_node_are_one_range,
        a_copy_from_a_later_part_on_the_host_counts_as_one,
        access_changes_and_reads_back,
        device_memory_is_shared_with_chosen_peers,
        a_slice_is_lent_only_of_memory_that_the_host_alone_reaches,
    }
    registered {
        registered_chunks_are_one_range,
        copies_end_at_borders_of_registrations,
        private_pages_have_one_mapping,
        each_of_several_mappings_has_the_access_that_was_granted,
        shareable_pages_have_many_mappings_and_importers,
        what_registered_memory_cannot_be_is_refused,
        registered_memory_that_is_not_wanted_is_given_back,
        addresses_are_for_one_kind_of_memory,
    }
    grants {
        a_gpu_that_may_only_read_is_refused_writes,
        a_gpu_without_access_is_refused_reads,
        each_part_of_a_spread_buffer_counts,
        access_that_was_changed_counts,
        a_copy_that_the_cpu_would_fault_at_is_refused,
        blocks_of_a_heap_keep_to_its_grants,
        #[cfg(feature = "portable")]
        imported_memory_keeps_to_the_importers_grants,
        kernels_keep_to_a_pools_grants,
        kernels_leave_plain_memory_of_other_gpus_alone,
    }
    growth {
        chunks_are_one_range,
        chunks_are_one_entry_of_the_ledger,
        progress_is_told_and_a_break_gives_everything_back,
        #[cfg(feature = "portable")]
        chunks_are_shared_together,
    }
    host_memory {
        registered_memory_is_shared,
        a_registered_file_gets_what_a_gpu_writes,
        a_file_registered_for_reading_is_read,
            a_sealed_file_is_registered_without_unsafe,
        managed_memory_is_shared,
        system_memory_is_shared_on_coherent_machines,
    }
    peers {
        a_gpus_memory_is_its_peers_to_use_as_granted,
        a_ring_of_gpus_passes_on_what_each_wrote,
    }
    vmm {
        exported_memory_outlives_its_maker,
        import_of_the_wrong_size_is_refused,
        mappings_lie_side_by_side_in_one_reservation,
    }
    streams {
        streams_copy_in_all_directions,
        events_order_streams,
    }
    transfers {
        tickets_copy_and_fill_and_give_their_operands_back,
        a_ticket_for_no_bytes_is_done,
        many_tickets_live_at_once,
        a_ticket_tells_of_the_end,
        a_pools_access_is_not_taken_from_a_ticket,
        a_refused_ticket_gives_its_operands_back,
    }
    pools {
        pool_memory_is_ordered_across_streams,
        pools_keep_to_their_largest_size_and_their_grants,
    }
    objects {
        objects_go_back_in_any_order,
        functions_take_any_memory_of_the_cpu,
    }
}

fn grant(location: Location, access: Access) -> AccessDesc {
    AccessDesc { location, access }
}
