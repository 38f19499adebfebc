//! The conformance suite: one table of cases, run on every preset of the simulator and on CUDA.
//!
//! Each row of the table of measured answers (docs/driver-behaviour.md) is a case, which names it.
//! Without a CUDA driver the cases of `cuda` say that they are skipped; with EGMEM_REQUIRE_CUDA set
//! they fail.

mod access;
mod attributes;
mod context;
mod details;
mod events;
mod forks;
mod harness;
mod kernels;
mod mapping;
mod physical;
mod pointers;
mod pools;
mod raw;
mod references;
mod registered;
mod runtime_pools;
mod sharing;
mod streams;

const MODULE: &str = module_path!();

/// One test per case and backend.
macro_rules! cases {
    ($($module:ident { $($case:ident,)* })*) => {
        cases!(@on h200x8, Backend::Preset("h200x8"), $($module { $($case,)* })*);
        cases!(@on gh200, Backend::Preset("gh200"), $($module { $($case,)* })*);
        cases!(@on gh200x4, Backend::Preset("gh200x4"), $($module { $($case,)* })*);
        cases!(@on gb200, Backend::Preset("gb200"), $($module { $($case,)* })*);
        cases!(@on cuda, Backend::Cuda, $($module { $($case,)* })*);
    };
    (@on $name:ident, $backend:expr, $($module:ident { $($case:ident,)* })*) => {
        mod $name {
            use crate::conformance::harness::{Backend, run};
            $($(
                #[test]
                fn $case() {
                    run($backend, crate::conformance::$module::$case);
                }
            )*)*
        }
    };
}

cases! {
    attributes {
        attributes_of_the_devices_are_as_measured,
        devices_are_told_apart,
        unknown_devices_and_attributes_are_refused,
        links_between_gpus_are_described,
    }
    physical {
        granularity_is_2_mib_even_for_ids_that_do_not_exist,
        mem_create_on_each_node_succeeds_and_exports_as_posix_fd,
        mem_create_fabric_is_not_permitted_without_an_imex_channel,
        mem_create_on_missing_nodes_is_invalid,
        mem_create_on_host_succeeds_unshareable_only,
        mem_create_refuses_unaligned_empty_and_rdma_memory,
        mem_create_of_64_tib_is_out_of_memory,
        mem_create_on_each_device_succeeds,
        properties_are_those_asked_for,
        vmm_calls_succeed_in_a_thread_without_a_context,
        a_mapping_keeps_released_memory_and_fresh_memory_is_zero,
        mem_release_twice_is_invalid,
        mem_retain_gives_the_same_handle_to_be_released_once_more,
    }
    mapping {
        address_reserve_takes_whole_granules_up_to_64_tib,
        mem_map_takes_whole_handles_only,
        mem_map_over_a_mapping_is_invalid,
        a_handle_mapped_twice_shows_the_same_bytes,
        address_free_while_mapped_or_twice_is_invalid,
        mem_unmap_twice_succeeds,
        an_unmapped_range_can_be_mapped_again,
    }
    access {
        set_access_to_host_and_device_reads_back_as_3,
        access_starts_with_none_and_can_be_taken_back,
        set_access_over_part_of_a_mapping_is_invalid,
        set_access_covers_whole_neighbours_but_no_gap,
        set_access_for_an_unknown_device_is_invalid,
        set_access_for_a_missing_node_succeeds,
        a_cpu_touch_without_access_faults,
        a_gpu_write_with_read_access_loses_the_context,
        a_gpu_access_without_a_grant_loses_the_context,
    }
    sharing {
        export_without_the_handle_type_is_invalid,
        import_of_garbage_is_refused,
        import_in_the_same_process_shows_the_same_bytes,
        import_in_a_second_process_shares_the_bytes,
        an_import_outlives_its_killed_exporter,
    }
    forks {
        a_forked_child_shares_host_memory,
        a_forked_child_has_no_managed_memory,
    }
    references {
        one_handle_is_mapped_for_the_cpu_254_times,
        an_imported_handle_is_mapped_for_the_cpu_252_times,
        imports_of_one_fd_are_mapped_for_the_cpu_126_times,
        a_gpu_is_granted_what_the_cpu_is_refused,
        exports_that_are_closed_do_not_count,
        separate_exports_count_and_duplicates_do_not,
    }
    pointers {
        pointer_attributes_of_a_host_numa_mapping,
        address_range_of_a_host_numa_mapping_has_base_0,
        dma_buf_of_a_host_numa_mapping_is_invalid,
        smaps_shows_a_mapping_of_nvidiactl,
        questions_about_no_memory_fail,
    }
    streams {
        an_event_orders_two_streams,
        elapsed_time_needs_recorded_events_with_timing,
        the_default_stream_works,
        copies_go_in_all_directions,
        a_copy_stays_in_its_range,
        a_batch_makes_each_of_its_copies,
        null_is_refused,
    }
    events {
        an_event_orders_two_processes,
        an_imported_event_that_was_never_recorded_is_done,
        an_ordinary_event_has_no_handle,
        an_event_is_not_opened_where_it_was_made,
        garbage_is_no_event,
        the_event_of_an_ended_process_is_opened,
        a_stream_of_another_gpu_waits_for_an_event,
        a_destroyed_event_is_not_opened,
        an_importer_sees_the_death_of_its_exporter,
    }
    kernels {
        kernels_check_and_rewrite_host_memory_from_each_gpu,
        kernels_check_and_rewrite_device_memory,
        peers_reach_device_memory_that_is_granted_to_them,
        a_wrong_word_is_named,
        impossible_launches_are_refused,
    }
    registered {
        a_copy_across_two_registrations_is_invalid,
        registered_pages_are_registered_once,
    }
    pools {
        pool_create_on_nodes_that_exist,
        pool_access_starts_with_the_host_alone,
        pool_set_access_for_device_node_and_host_succeeds,
        a_pool_keeps_to_its_max_size_and_counts_what_is_used,
        a_host_pool_becomes_a_devices_pool_only_where_the_platform_lets_it,
        a_pool_and_its_pointers_export_as_posix_fd,
        a_pool_pointer_is_imported_once_at_a_time,
        pool_export_as_fabric_is_not_permitted_without_an_imex_channel,
        memset_of_pool_memory_without_access_is_invalid,
        pool_memory_is_shared_by_host_and_every_gpu,
        pool_attributes_read_back,
        the_release_threshold_keeps_memory_until_it_is_trimmed,
        alloc_async_draws_from_the_devices_pool,
        an_empty_allocation_is_null,
    }
    runtime_pools {
        the_two_apis_are_interchangeable,
        the_default_pool_is_the_same_object,
        malloc_async_draws_from_the_devices_pool,
        cuda_device_set_mem_pool_refuses_host_pools_where_the_driver_does,
    }
    details {
        host_access_is_that_of_cpu_or_gpu_0_changed_last,
        a_failed_grant_leaves_what_came_before_it,
        a_grant_to_nobody_changes_nothing,
        a_pointer_is_asked_about_for_gpu_0,
        range_start_of_host_pool_memory_is_an_offset,
        a_pool_fills_the_smallest_hole_first,
        pool_grants_are_checked_in_order,
        a_hint_is_where_the_search_for_addresses_starts,
        dma_bufs_of_device_memory,
        an_allocation_ends_with_its_last_byte,
        a_grant_stops_at_one_reference_too_many,
    }
    context {
        no_call_changes_the_current_context,
    }
}

/// Does nothing by itself: cases that fault, crash or need a second process start this test in a
/// child process, with the part to run in the environment.
#[test]
fn child_process() {
    harness::run_role(&[
        ("release_twice", physical::release_twice),
        ("address_free_twice", mapping::address_free_twice),
        ("touch_ungranted", access::touch_ungranted),
        (
            "touch_granted_to_gpu_only",
            access::touch_granted_to_gpu_only,
        ),
        ("gpu_writes_read_only", access::gpu_writes_read_only),
        ("gpu_reads_ungranted", access::gpu_reads_ungranted),
        ("importer", sharing::importer),
        ("exporter", sharing::exporter),
        ("orphan", sharing::orphan),
        ("event_importer", events::event_importer),
        ("event_exporter", events::event_exporter),
        ("event_worker", events::event_worker),
        ("event_waiter", events::event_waiter),
        ("event_crosser", events::event_crosser),
        ("event_own_crosser", events::event_own_crosser),
        ("forks", forks::forks),
        (
            "forks_with_managed_memory",
            forks::forks_with_managed_memory,
        ),
        ("maps_an_import", references::maps_an_import),
        ("maps_imports", references::maps_imports),
        ("imports_for_a_gpu", references::imports_for_a_gpu),
        ("exports_and_duplicates", references::exports_and_duplicates),
        ("imports_a_pointer_twice", pools::imports_a_pointer_twice),
        ("memset_ungranted_pool", pools::memset_ungranted_pool),
    ]);
}
