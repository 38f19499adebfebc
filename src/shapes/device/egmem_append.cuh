// Appending to an egmem::shapes::Appender from a kernel.
//
//     __global__ void keep(void *appender, const Item *items, unsigned char *done, int count) {
//         egmem_append to;
//         if (!egmem_append_open(&to, appender)) return;
//         for (int i = ...; i - lane < count; i += ...) { // whole warps
//             bool has = i < count && !done[i] && is_wanted(items[i]);
//             if (egmem_append_warp(&to, has, has ? record_of(items[i]) : Record(), 1000000000)) done[i] = 1;
//         }
//     }
//
// `appender` is Appender::device_ptr. Any number of threads of one GPU append at the same time. A thread whose record has
// no memory yet waits while the host maps more (Appender::pump_while), for the nanoseconds that it was told. Then it closes the
// limit: this record and all above the limit are missed. A kernel that is launched again, after Appender::collect,
// appends the missed records.
#ifndef EGMEM_APPEND_CUH
#define EGMEM_APPEND_CUH

#include "egmem_device.cuh"

// As src/shapes/appender/cells.rs lays them out.
struct egmem_append_control {
    egmem_u64 end; // records that have memory, and whether that is all; the host's
    egmem_u64 pad0[15];
    egmem_u64 wanted; // records reserved, at least; the kernels'
    egmem_u64 pad1[15];
    egmem_u64 magic; // from here on, constants
    egmem_u64 records; // their address
    egmem_u64 record_bytes;
    egmem_u64 cursor; // its address
    egmem_u64 shift;
};

struct egmem_append_cursor {
    egmem_u64 next; // records reserved
    egmem_u64 pad[15];
    egmem_u64 limit; // records that may be written, and whether the limit is closed
};

struct egmem_append {
    unsigned char *records;
    egmem_u64 record_bytes;
    egmem_u64 shift;
    egmem_append_control *control;
    egmem_append_cursor *cursor;
    egmem_u64 limit; // as last seen
};

#define EGMEM_APPEND_MAGIC 0x31444e50414d4745ull // "EGMAPND1"
#define EGMEM_APPEND_CLOSED (1ull << 63)

// Opens an appender; false if there is none at this address.
EGMEM_FN bool egmem_append_open(egmem_append *to, void *appender) {
    egmem_append_control *control = (egmem_append_control *)appender;
    to->records = (unsigned char *)control->records;
    to->record_bytes = control->record_bytes;
    to->shift = control->shift;
    to->control = control;
    to->cursor = (egmem_append_cursor *)control->cursor;
    if (control->magic != EGMEM_APPEND_MAGIC) {
        return false;
    }
    to->limit = egmem_load_acquire(&to->cursor->limit);
    return true;
}

// Tells the host that so many records are reserved, unless it knows of more. A store that overtakes another may be lost:
// threads that wait repeat theirs.
EGMEM_FN void egmem_append_want(const egmem_append *to, egmem_u64 records) {
    if (egmem_load_acquire(&to->control->wanted) < records) {
        egmem_store_release(&to->control->wanted, records);
    }
}

// Reserves `count` records side by side; returns the first one's index. Each is to be written, or missed, by
// egmem_append_at.
EGMEM_FN egmem_u64 egmem_append_reserve(const egmem_append *to, egmem_u64 count) {
    egmem_u64 first = egmem_atomic_add(&to->cursor->next, count);
    if (first >> to->shift != (first + count) >> to->shift) {
        egmem_append_want(to, first + count);
    }
    return first;
}

// Looks at how much the host has mapped: raises the limit to that, or closes it if there will be no more, or if `late`.
EGMEM_FN void egmem_append_look(const egmem_append *to, bool late) {
    egmem_u64 end = egmem_load_acquire(&to->control->end);
    egmem_u64 mapped = end & ~EGMEM_APPEND_CLOSED;
    if (mapped > to->limit) {
        // Does nothing to a limit that was closed meanwhile: the greatest bit is set there.
        egmem_atomic_max(&to->cursor->limit, mapped);
    } else if (end & EGMEM_APPEND_CLOSED || late) {
        egmem_atomic_or(&to->cursor->limit, EGMEM_APPEND_CLOSED);
    } else {
        egmem_append_want(to, egmem_load_acquire(&to->cursor->next));
    }
}

// Where the reserved record `index` is to be written; null if it is missed. Waits for memory for `ns` nanoseconds at most.
EGMEM_FN void *egmem_append_at(egmem_append *to, egmem_u64 index, egmem_u64 ns) {
    egmem_u64 start = 0;
    unsigned pause = 32;
    while (index >= (to->limit & ~EGMEM_APPEND_CLOSED)) {
        if (to->limit & EGMEM_APPEND_CLOSED) {
            return 0;
        }
        egmem_u64 now = egmem_nanoseconds();
        start = start ? start : now;
        bool late = now - start >= ns;
        // The thread with the first record above the limit looks across the link for all: the others read the cursor's
        // memory.
        if (index == to->limit || late) {
            egmem_append_look(to, late);
        } else {
            egmem_sleep(pause);
            pause = pause < 8192 ? 2 * pause : pause;
        }
        to->limit = egmem_load_acquire(&to->cursor->limit);
    }
    return to->records + index * to->record_bytes;
}

// Appends one record; false if it was missed, or if the appender's records have another size: none is reserved then.
template <class Record>
EGMEM_FN bool egmem_append_one(egmem_append *to, const Record &record, egmem_u64 ns) {
    if (sizeof(Record) != to->record_bytes) {
        return false;
    }
    void *at = egmem_append_at(to, egmem_append_reserve(to, 1), ns);
    if (at) {
        *(Record *)at = record;
    }
    return at != 0;
}

// Appends the records of those lanes that have one, reserved together and in the order of the lanes; tells each lane
// whether its record was written. All 32 lanes of a warp call it. Nothing is reserved if the appender's records have
// another size.
template <class Record>
EGMEM_FN bool egmem_append_warp(egmem_append *to, bool has, const Record &record, egmem_u64 ns) {
    unsigned lanes = egmem_warp_ballot(has);
    if (lanes == 0 || sizeof(Record) != to->record_bytes) {
        return false;
    }
    unsigned count = egmem_count_bits(lanes);
    egmem_u64 first = 0;
    if (egmem_lane() == 0) {
        first = egmem_append_reserve(to, count);
    }
    first = egmem_warp_first(first);
    egmem_u64 index = first + egmem_count_bits(lanes & egmem_lanes_before());
    // The vote keeps the lanes together: stores of lanes that the waiting loop has separated cross the link one by one.
    void *at = 0;
    if (egmem_warp_ballot(first + count > (to->limit & ~EGMEM_APPEND_CLOSED)) == 0) {
        at = has ? to->records + index * to->record_bytes : 0;
    } else if (has) {
        at = egmem_append_at(to, index, ns);
    }
    egmem_warp_barrier();
    if (at) {
        *(Record *)at = record;
    }
    egmem_warp_barrier();
    return at != 0;
}

#endif
