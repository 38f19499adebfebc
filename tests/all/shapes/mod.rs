//! Shapes of memory, on simulated machines and on CUDA.

mod access_model;
mod append_cursor;
mod append_model;
mod append_on_gpu;
mod append_threads;
mod appender;
mod growable;
mod growable_on_gpu;
#[cfg(feature = "portable")]
mod growable_shared;
mod kernels;
mod leaked;
mod linked;
mod model;
mod replicated;
#[cfg(feature = "portable")]
mod replicated_shared;
mod ring;
#[cfg(feature = "portable")]
mod ring_deaths;
mod ring_model;
mod ring_on_gpu;
#[cfg(feature = "portable")]
mod ring_shared;
#[cfg(feature = "portable")]
mod stage;
mod striped;
mod striped_model;
mod two_gpus;
#[cfg(feature = "portable")]
mod view_model;

use egmem_tests::drivers;

use drivers::{grace, node, nothing_held, on_both};

const MIB: u64 = 1 << 20;

on_both! {
    egmem::Machine::gh200x4();
    appender {
        threads_append_without_holes,
        what_has_no_memory_is_missed_and_comes_later,
        the_greatest_length_is_never_exceeded,
        the_cpu_appends_between_kernels,
        a_damaged_cursor_is_an_error,
        no_memory_is_mapped_for_a_damaged_count,
        pumping_ends_with_the_streams_work,
        records_may_be_in_a_gpus_memory,
        appenders_that_cannot_be_are_refused,
    }
    append_cursor {
        the_cursor_may_be_in_a_gpus_memory,
        a_damaged_count_maps_only_what_is_kept_ahead,
        a_count_that_the_cursor_confirms_is_believed,
    }
    append_on_gpu {
        kernels_append_while_the_host_maps,
        kernels_append_later_what_had_no_memory,
        kernels_stop_at_the_greatest_length,
    }
    growable {
        it_grows_in_place,
        a_gpu_reads_what_is_there_while_more_is_added,
        a_gpu_writes_elements_that_others_read,
        a_prefix_keeps_its_memory,
        what_is_behind_the_elements_is_given_back,
        access_is_changed_for_all_chunks_or_for_one,
        what_cannot_be_is_refused,
    }
    growable_on_gpu {
        kernels_read_a_prefix_while_more_is_added,
        a_kernel_reads_elements_that_come_while_it_runs,
    }
    linked {
        functions_are_linked_with_other_ptx,
        headers_and_functions_work_with_nvrtc,
    }
    replicated {
        every_place_has_its_copy_of_each_version,
        a_version_stays_while_it_has_readers,
        gpu_work_in_flight_reads_its_version,
        no_reader_sees_a_torn_version,
        a_thread_reads_the_copy_of_its_node,
        a_replica_is_read_only,
        what_cannot_be_replicated_is_refused,
    }
    ring {
        records_come_out_as_they_went_in,
        a_full_ring_refuses_and_an_empty_one_has_none,
        threads_pass_batches_untorn,
        what_was_not_committed_or_released_did_not_happen,
        both_mappings_are_the_same_memory,
        a_damaged_counter_is_an_error,
        a_damaged_counter_is_set_right_for_a_gpu,
        sides_go_to_a_gpu_and_come_back,
        a_ring_in_a_gpus_memory_is_not_the_cpus,
        either_side_keeps_the_memory,
        rings_that_cannot_be_are_refused,
    }
    ring_on_gpu {
        a_gpu_pushes_what_the_cpu_pops,
        a_gpu_pops_what_the_cpu_pushes,
        kernels_pass_records_to_each_other,
        a_block_pushes_batches,
        a_full_ring_ends_a_kernel_that_waits_no_longer,
    }
    striped {
        stripes_on_all_nodes_are_one_range,
        a_front_is_on_the_gpu,
        stripes_between_granules_are_refused,
    }
    two_gpus {
        stripes_on_two_gpus_are_one_range,
        one_gpu_writes_a_vector_and_another_reads_it,
        two_gpus_reach_both_mappings_of_a_ring,
        kernels_of_two_gpus_pass_records,
    }
}

#[cfg(feature = "portable")]
mod shared {
    use super::{growable_shared, on_both, replicated_shared, ring_shared};

    on_both! {
        egmem::Machine::gh200x4();
        growable_shared {
            a_view_follows_the_growth,
            many_chunks_come_in_batches,
            a_gpu_reads_a_view_while_it_follows,
            collected_records_are_followed,
            a_reader_gets_no_right_to_write,
            what_cannot_be_followed_is_refused,
        }
        replicated_shared {
            another_process_reads_every_version,
            a_version_that_another_process_reads_stays,
            gpu_work_of_another_process_reads_its_version,
            no_reader_elsewhere_sees_a_torn_version,
            a_reader_that_writes_garbage_is_waited_for,
            data_that_cannot_be_are_not_received,
        }
        ring_shared {
            a_side_is_handed_on,
            an_importer_hands_on_the_creators_side,
            a_wait_ends_with_the_other_side,
            sides_in_two_processes_go_to_gpus,
            a_ring_in_a_gpus_memory_is_shared,
            records_of_any_size_are_passed,
            a_peer_that_writes_garbage_is_an_error,
            rings_that_cannot_be_are_not_received,
            a_side_with_damaged_counters_is_not_received,
            rings_that_are_not_shareable_are_not_sent,
        }
    }
}
