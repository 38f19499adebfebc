// The kernel that copies pages of a tier by bulk copies, for GPUs from sm_90 on: src/kv/copy/kernel.rs says how it is launched.
// `ci/ptx` compiles it to bulk.ptx with clang alone; nvcc takes it too.
//
// The copies are made by the multiprocessor's copy unit, from global memory to a ring in shared memory and from there back to
// global memory. One thread of each warp starts them; the warp's other threads only read the list. So the bytes on their way
// take shared memory, and neither registers nor threads.

typedef unsigned long long u64;
typedef unsigned u32;

#ifndef __CUDA_RUNTIME_H__ // clang without CUDA's headers: builtins instead.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
#define SHARED(at) (u32)(u64)(__attribute__((address_space(3))) const void *)(at)
#else
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define SHARED(at) (u32)__cvta_generic_to_shared(at)
#endif

// kernel.rs has these numbers too.
#define WARPS 4u       // the most of a block
#define STAGES 32u     // the most of a warp's ring
#define RING 45056u    // the bytes of all rings of a block: with the slots 48 KiB, the most that a kernel gets unasked

// One copy in a ring.
struct Slot {
    u64 barrier; // a phase ends when all bytes are in shared memory
    u64 to;
    u64 bytes;
    u64 unused;
};

// Bulk copies need multiples of 16.
static __shared__ __attribute__((aligned(128))) unsigned char ring[RING];
static __shared__ __attribute__((aligned(32))) Slot slots[WARPS * STAGES];
static_assert(sizeof(ring) + sizeof(slots) <= (48 << 10), "more than a kernel gets unasked");

static __device__ inline u32 shared(const void *at) {
    return SHARED(at);
}

static __device__ inline void init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Orders this thread's accesses of shared memory before the bulk copies that it starts afterwards.
static __device__ inline void fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy to shared memory, which ends the barrier's phase.
static __device__ inline void fetch(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Waits for the end of a phase. The bytes are visible to this thread then.
static __device__ inline void await(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n\t.reg .pred over;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, over;\n\t}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// Starts a copy from shared memory, as a group of its own.
static __device__ inline void put(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The job's own list, which nothing writes while the kernel runs. Volatile: asked for where it is written, ahead of the copies.
static __device__ inline u64 constant(const u64 *at) {
    u64 value;
    asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(at));
    return value;
}

static __device__ inline u32 of_lane(u32 value, u32 lane) {
    u32 result;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(result) : "r"(value), "r"(lane));
    return result;
}

static __device__ inline u64 of_lane(u64 value, u32 lane) {
    return (u64)of_lane((u32)(value >> 32), lane) << 32 | of_lane((u32)value, lane);
}

// What is to be copied.
struct Job {
    const u64 *list, *bases; // for each pair the page's address and the offset of its block in every part
    u64 parts, part_bytes, loads, stage;
    u64 chunks; // of a part
};

struct Place {
    u64 from, to;
    u32 bytes;
};

static __device__ inline Place locate(const Job &job, u64 chunk) {
    u64 piece = chunk / job.chunks;
    u64 at = (chunk - piece * job.chunks) * job.stage;
    u64 pair = piece / job.parts;
    u64 part = piece - pair * job.parts;
    u64 page = constant(job.list + 2 * pair) + part * job.part_bytes + at;
    u64 block = constant(job.bases + part) + constant(job.list + 2 * pair + 1) + at;
    u64 rest = job.part_bytes - at;
    return {job.loads ? page : block, job.loads ? block : page, (u32)(rest < job.stage ? rest : job.stage)};
}

// A warp's ring, in the thread that starts the copies. Copy `n` goes through stage `n % stages`. It is sent on from there once
// `ahead` = `stages` - 2 later ones have begun. So when a stage is used again, its last copy is the one before the last
// that was sent, and the last one may still read its own stage.
struct Ring {
    u32 ring, slots, stage, stages, ahead;
    u64 fetched, sent;
    u32 fetch_stage, send_stage, send_parity;

    __device__ u32 slot(u32 at) const { return slots + at * (u32)sizeof(Slot); }

    __device__ void send() {
        u32 at = slot(send_stage);
        await(at, send_parity);
        u64 to, bytes;
        // Not as a vector, which would have to lie at a multiple of 16.
        asm volatile("ld.shared.u64 %0, [%1 + 8];" : "=l"(to) : "r"(at) : "memory");
        asm volatile("ld.shared.u64 %0, [%1 + 16];" : "=l"(bytes) : "r"(at) : "memory");
        // What the copy unit has written and this thread has seen comes before what it reads from now on.
        fence();
        put(to, ring + send_stage * stage, (u32)bytes);
        sent++;
        if (++send_stage == stages) {
            send_stage = 0;
            send_parity ^= 1;
        }
    }

    __device__ void push(const Place &place) {
        if (fetched >= stages) {
            // The stage's last copy has read it; the copy behind that one may still read another stage.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        }
        u32 at = slot(fetch_stage);
        asm volatile("st.shared.u64 [%0 + 8], %1;" ::"r"(at), "l"(place.to) : "memory");
        asm volatile("st.shared.u64 [%0 + 16], %1;" ::"r"(at), "l"((u64)place.bytes) : "memory");
        fetch(ring + fetch_stage * stage, place.from, place.bytes, at);
        fetched++;
        if (++fetch_stage == stages) {
            fetch_stage = 0;
        }
        if (fetched > ahead) {
            send();
        }
    }

    __device__ void finish() {
        while (sent < fetched) {
            send();
        }
        // Until the bytes are written, not only read: the ring ends with the block.
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
};

// Any grid of one to four whole warps a block. Addresses, sizes and `chunk` are multiples of 16; `chunk`, the bytes of a copy, is at
// most a third of a warp's ring. `loads`: from pages to blocks, else the other way.
extern "C" __global__ void egmem_kv_bulk(const u64 *list, u64 pairs, const u64 *bases, u64 parts, u64 part_bytes,
                                         u64 loads, u64 chunk) {
    u32 here = THREAD / 32, lane = THREAD % 32;
    u64 stage = part_bytes < chunk ? part_bytes : chunk;
    Job job = {list, bases, parts, part_bytes, loads, stage, (part_bytes + stage - 1) / stage};
    u64 warp = ((u64)BLOCK * THREADS + THREAD) / 32;
    u64 warps = (u64)BLOCKS * THREADS / 32;
    u64 total = pairs * parts * job.chunks;
    u64 count = warp < total ? (total - warp - 1) / warps + 1 : 0;

    u32 room = RING / (THREADS / 32) / 128 * 128;
    u32 stages = room / (u32)stage < STAGES ? room / (u32)stage : STAGES;
    Ring mine = {shared(ring) + here * room, shared(slots) + here * STAGES * (u32)sizeof(Slot), (u32)stage, stages,
                 stages - 2, 0, 0, 0, 0, 0};
    if (lane == 0) {
        for (u32 at = 0; at < stages; at++) {
            init(mine.slot(at));
        }
        fence();
    }
    // Each thread finds a place; 32 more are asked for before these are copied, so that the list's way is part of the copies'.
    Place places = {};
    if (lane < count) {
        places = locate(job, warp + lane * warps);
    }
    for (u64 first = 0; first < count; first += 32) {
        Place next = {};
        if (first + 32 + lane < count) {
            next = locate(job, warp + (first + 32 + lane) * warps);
        }
        u32 now = count - first < 32 ? (u32)(count - first) : 32;
        for (u32 at = 0; at < now; at++) {
            Place place = {of_lane(places.from, at), of_lane(places.to, at), of_lane(places.bytes, at)};
            if (lane == 0) {
                mine.push(place);
            }
        }
        places = next;
    }
    if (lane == 0) {
        mine.finish();
    }
}
