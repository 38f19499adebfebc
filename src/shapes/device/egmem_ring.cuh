// The sides of an egmem::shapes::Ring on a GPU.
//
//     __global__ void produce(void *ring, const Record *from, int count) { // one thread
//         egmem_ring_side side;
//         if (!egmem_ring_open_producer(&side, ring)) return;
//         for (int i = 0; i < count; i++)
//             if (!egmem_ring_push(&side, from[i], 1000000000)) return; // full for a second
//     }
//
// `ring` is GpuProducer::device_ptr or GpuConsumer::device_ptr. A side belongs to one kernel at a time. In it the
// functions without `warp` in their name are for one thread, which keeps the side in its registers. Threads of its
// block may write a batch's records, or read them: a barrier (__syncthreads) then lies between them and the thread's
// calls. Read records with plain loads, not through `const __restrict__` pointers: other caches are not coherent.
//
// The records are mapped twice, and a batch that goes past the end of the first mapping uses the second one. The bytes
// there have two addresses, which only a fence orders. egmem_ring_fence issues it for such a batch, and nothing for the
// others. egmem_ring_wait and egmem_ring_advance call it, for the records that they are told of and for the thread that
// calls them. A thread that writes or reads more records than it waited for, and each other thread that writes or reads
// some, calls egmem_ring_fence itself: before its first record of the batch, behind the barrier if there is one, and
// after its last, before the barrier. One fence between two accesses is enough, so the side whose batch lies in the
// first mapping alone needs none.
//
// Nothing waits for ever: a function that waits is told how long, in nanoseconds.
#ifndef EGMEM_RING_CUH
#define EGMEM_RING_CUH

#include "egmem_device.cuh"

// As src/shapes/ring/memory.rs lays them out.
struct egmem_ring_control {
    egmem_u64 head; // records committed; the producer's
    egmem_u64 pad0[15];
    egmem_u64 tail; // records released; the consumer's
    egmem_u64 pad1[15];
    egmem_u64 magic; // from here on, constants
    egmem_u64 records; // where they begin, in bytes from the start of this
    egmem_u64 capacity;
    egmem_u64 mask;
    egmem_u64 record_bytes;
    egmem_u64 counters; // where the counters are: another such struct, in bytes from the start of this; 0: here
};

struct egmem_ring_side {
    unsigned char *records;
    egmem_u64 mask;
    egmem_u64 record_bytes;
    egmem_u64 capacity;
    egmem_u64 *own;
    const egmem_u64 *others;
    egmem_u64 next;  // the own counter
    egmem_u64 limit; // where it must stop, as last seen
    egmem_u64 ahead; // how far the limit is ahead of the other's counter
};

#define EGMEM_RING_MAGIC 0x32474e49524d4745ull // "EGMRING2"

EGMEM_FN bool egmem_ring_open(egmem_ring_side *side, void *ring, bool produces) {
    const egmem_ring_control *control = (const egmem_ring_control *)ring;
    if (control->magic != EGMEM_RING_MAGIC) {
        return false;
    }
    egmem_ring_control *counters = (egmem_ring_control *)((unsigned char *)ring + control->counters);
    side->records = (unsigned char *)ring + control->records;
    side->mask = control->mask;
    side->record_bytes = control->record_bytes;
    side->capacity = control->capacity;
    side->own = produces ? &counters->head : &counters->tail;
    side->others = produces ? &counters->tail : &counters->head;
    side->ahead = produces ? side->capacity : 0;
    side->next = egmem_load_acquire(side->own);
    side->limit = egmem_load_acquire(side->others) + side->ahead;
    return true;
}

// Opens a side; false if there is no ring at this address.
EGMEM_FN bool egmem_ring_open_producer(egmem_ring_side *side, void *ring) {
    return egmem_ring_open(side, ring, true);
}
EGMEM_FN bool egmem_ring_open_consumer(egmem_ring_side *side, void *ring) {
    return egmem_ring_open(side, ring, false);
}

// How many records the producer has room for, or are there for the consumer, by the last look: at most the capacity, and
// none if the other's counter has a value that it cannot have.
EGMEM_FN egmem_u64 egmem_ring_known(const egmem_ring_side *side) {
    egmem_u64 known = side->limit - side->next;
    return known <= side->capacity ? known : 0;
}

// Looks at the other side's counter: a read across the bus if the ring is not in this GPU's memory.
EGMEM_FN egmem_u64 egmem_ring_look(egmem_ring_side *side) {
    side->limit = egmem_load_acquire(side->others) + side->ahead;
    return egmem_ring_known(side);
}

// Whether the next `count` records, at most the capacity, go past the end of the first mapping.
EGMEM_FN bool egmem_ring_wraps(const egmem_ring_side *side, egmem_u64 count) {
    return ((side->next * side->record_bytes) & side->mask) + count * side->record_bytes > side->mask + 1;
}

// Orders this thread's accesses to the next `count` records, if they lie in both mappings, with those through the other
// mapping.
EGMEM_FN void egmem_ring_fence(const egmem_ring_side *side, egmem_u64 count) {
    if (egmem_ring_wraps(side, count)) {
        egmem_fence_alias();
    }
}

// Waits until there is room for `count` records, or until as many are there, at most `ns` nanoseconds. It looks at least
// once. `count` is at most the capacity.
EGMEM_FN bool egmem_ring_wait(egmem_ring_side *side, egmem_u64 count, egmem_u64 ns) {
    bool came = egmem_ring_known(side) >= count || egmem_ring_look(side) >= count;
    for (egmem_u64 start = came ? 0 : egmem_nanoseconds(); !came && egmem_nanoseconds() - start < ns;) {
        came = egmem_ring_look(side) >= count;
    }
    if (came) {
        egmem_ring_fence(side, count);
    }
    return came;
}

// The address of the side's next record; as many as were waited for follow it without a gap.
EGMEM_FN void *egmem_ring_at(const egmem_ring_side *side) {
    return side->records + ((side->next * side->record_bytes) & side->mask);
}

// Lets the other side have the next `count` records: it sees all of them at once, and whatever this thread wrote before.
EGMEM_FN void egmem_ring_advance(egmem_ring_side *side, egmem_u64 count) {
    egmem_ring_fence(side, count);
    side->next += count;
    egmem_store_release(side->own, side->next);
}

// Whether the consumer has released all that this producer committed.
EGMEM_FN bool egmem_ring_is_drained(egmem_ring_side *side) {
    return egmem_ring_look(side) == side->capacity;
}

// Writes and commits one record; false also if the ring's records have another size.
template <class Record>
EGMEM_FN bool egmem_ring_push(egmem_ring_side *side, const Record &record, egmem_u64 ns) {
    if (sizeof(Record) != side->record_bytes || !egmem_ring_wait(side, 1, ns)) {
        return false;
    }
    *(Record *)egmem_ring_at(side) = record;
    egmem_ring_advance(side, 1);
    return true;
}

// Takes one record; false also if the ring's records have another size.
template <class Record>
EGMEM_FN bool egmem_ring_pop(egmem_ring_side *side, Record *record, egmem_u64 ns) {
    if (sizeof(Record) != side->record_bytes || !egmem_ring_wait(side, 1, ns)) {
        return false;
    }
    *record = *(const Record *)egmem_ring_at(side);
    egmem_ring_advance(side, 1);
    return true;
}

// Writes and commits the records of those lanes that have one, together and in the order of the lanes. All 32 lanes of
// a warp call it, each with the same side. The capacity is at least 32: a warp with more records than that never has room.
// False also if the ring's records have another size.
template <class Record>
EGMEM_FN bool egmem_ring_push_warp(egmem_ring_side *side, bool has, const Record &record, egmem_u64 ns) {
    if (sizeof(Record) != side->record_bytes) {
        return false;
    }
    unsigned lanes = egmem_warp_ballot(has);
    unsigned count = egmem_count_bits(lanes);
    bool first = egmem_lane() == 0;
    bool room = first ? egmem_ring_wait(side, count, ns) : false;
    room = egmem_warp_ballot(room) != 0;
    if (!room) {
        return false;
    }
    // Behind a barrier, the first lane's acquire counts for the others too.
    egmem_warp_barrier();
    egmem_ring_fence(side, count);
    egmem_u64 number = side->next + egmem_count_bits(lanes & egmem_lanes_before());
    if (has) {
        *(Record *)(side->records + ((number * side->record_bytes) & side->mask)) = record;
    }
    egmem_ring_fence(side, count);
    egmem_warp_barrier();
    if (first) {
        egmem_ring_advance(side, count);
    } else {
        side->next += count;
    }
    return true;
}

#endif
