//! The KV-cache tier, on a simulated machine and on CUDA.

mod attach;
mod background;
mod borders;
mod copies;
mod events;
mod hostile;
mod jobs;
#[cfg(feature = "portable")]
mod killed;
mod metrics;
mod model;
mod pages;
mod ranks;
mod setup;
mod silent;
mod verify;

use egmem_tests::drivers;

drivers::on_both! { egmem::Machine::gh200();
    attach {
        pages_are_found_again_in_their_order,
        tiers_of_several_members_are_one,
        members_elsewhere_are_taken_over,
        many_open_at_once,
        a_damaged_header_gives_no_tier_away,
        other_memory_is_refused,
        a_tier_takes_as_many_pages_as_fit,
    }
    background {
        threads_use_a_tier_that_grows,
        a_tier_that_stopped_is_a_smaller_one,
    }
    copies {
        blocks_come_back_through_pages,
        every_method_moves_the_same_bytes,
        a_job_of_many_pages_moves_all_of_them,
        parts_lie_where_the_cache_says,
        parts_of_a_page_may_have_different_sizes,
        what_does_not_fit_is_refused,
    }
    borders {
        pages_and_blocks_lie_over_borders,
        blocks_of_other_code_lie_over_borders,
    }
    jobs {
        copies_out_of_bounds_are_refused,
        a_page_that_has_another_key_by_now_is_refused,
        threads_share_a_tier,
        a_job_keeps_its_pages,
        a_page_under_a_copy_outlives_its_store,
        a_job_outlives_the_tier,
    }
    pages {
        keys_are_found_in_order,
        the_least_recently_used_page_makes_room,
        pinned_pages_stay,
        a_store_that_is_dropped_frees_its_pages,
        two_stores_of_one_key_share_nothing,
        the_cpu_writes_and_reads_pages,
        a_tier_gives_everything_back,
    }
    ranks {
        ranks_share_pages,
        parts_of_pages_lie_over_borders,
        a_block_lies_in_its_page,
    }
    verify {
        a_damaged_page_is_a_miss,
        a_damaged_page_that_others_have_is_freed_by_them,
    }
    silent {
        a_forgotten_job_keeps_its_pages,
    }
}
