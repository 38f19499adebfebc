/* Heaps: blocks, refusals, deferred frees, debug mode, and threads. */
#include <pthread.h>

#include "check.h"

static egm_heap_stats stats_of(const egm_heap *heap)
{
    egm_heap_stats stats;
    stats.struct_size = sizeof stats;
    OK(egm_heap_get_stats(heap, &stats));
    return stats;
}

static void blocks(void)
{
    egm_driver *driver = simulated("gh200");
    egm_heap *heap = heap_with(driver, 64 << 20, 0);
    OK(egm_driver_destroy(driver)); /* the heap keeps the driver */
    static const size_t sizes[] = {1, 16, 100, 2048, 2049, 64 << 10, 5 << 20};
    void *all[sizeof sizes / sizeof *sizes];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t align = i % 2 ? 4096 : 0, usable = 0;
        OK(egm_heap_alloc(heap, sizes[i], align, &all[i]));
        CHECK((uintptr_t)all[i] % (align ? align : 16) == 0);
        OK(egm_heap_usable_size(heap, all[i], &usable));
        CHECK(usable >= sizes[i]);
        memset(all[i], (int)i, usable);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK(((unsigned char *)all[i])[sizes[i] - 1] == i);
        OK(egm_heap_free(heap, all[i]));
        FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, all[i]));
    }
    CHECK(stats_of(heap).live_blocks == 0 && stats_of(heap).live == 0 && stats_of(heap).freed_blocks == 7);

    unsigned char *zeroed;
    OK(egm_heap_alloc_zeroed(heap, 5 << 20, 0, (void **)&zeroed));
    CHECK(zeroed[0] == 0 && zeroed[(5 << 20) - 1] == 0);
    OK(egm_heap_free(heap, zeroed));
    OK(egm_heap_free(heap, NULL));
    OK(egm_heap_reserve(heap, 8 << 20));
    uint64_t given = 0;
    OK(egm_heap_trim(heap, 0, &given));
    CHECK(given >= 8 << 20 && stats_of(heap).backed == 0);
    OK(egm_heap_trim(heap, 0, NULL));

    egm_heap_stats older; /* a program of a version with two fields */
    memset(&older, 0xee, sizeof older);
    older.struct_size = 16;
    OK(egm_heap_get_stats(heap, &older));
    CHECK(older.live_blocks == 0 && older.live == 0xeeeeeeeeeeeeeeee);
    char *json;
    OK(egm_heap_stats_json(heap, &json));
    CHECK(strstr(json, "\"classes\"") != NULL);
    OK(egm_string_free(json));
    OK(egm_heap_destroy(heap));
}

static void refused(void)
{
    egm_driver *driver = simulated("gh200");
    egm_heap *heap = heap_with(driver, 4 << 20, 0), *other = heap_with(driver, 4 << 20, 0);
    char on_the_stack[64], *block, *small;
    void *out = on_the_stack;
    bool resized;
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_alloc(NULL, 1, 0, &out));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_alloc(heap, 1, 0, NULL));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_alloc(heap, 0, 0, &out));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_alloc(heap, 1, 48, &out));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_alloc(heap, SIZE_MAX, 16, &out));
    FAILS(EGM_HEAP_FULL, egm_heap_alloc(heap, 5 << 20, 0, &out));
    CHECK(out == on_the_stack);

    OK(egm_heap_alloc(heap, 100 << 10, 0, (void **)&block));
    OK(egm_heap_alloc(heap, 100, 0, (void **)&small));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, on_the_stack));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, block + 256));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, block + 8));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, small + 16));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, block - ((size_t)1 << 40)));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(other, block));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(other, small));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_resize(heap, on_the_stack, 1, &resized));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_check(heap));
    FAILS(EGM_STILL_HELD, egm_heap_destroy(heap));
    CHECK(strstr(egm_last_error_message(), "2 of its blocks") != NULL);
    OK(egm_heap_free(heap, block));
    OK(egm_heap_free(heap, small));
    OK(egm_heap_destroy(heap));
    OK(egm_heap_destroy(other));
    OK(egm_heap_destroy(NULL));

    egm_heap_options options = {sizeof options, {0, 0}, NULL, 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0};
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_create(driver, &options, &heap));
    options.location.kind = EGM_LOCATION_HOST_NUMA;
    options.flags = 1u << 31;
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_create(driver, &options, &heap));
    OK(egm_driver_destroy(driver));
}

static void backings(void)
{
    egm_driver *driver = simulated("h200x8");
    egm_heap *heap = NULL;
    void *block = NULL;
    egm_heap_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, NULL, 0, 64 << 20, 0, 0, 0, 0, 0, 0, NULL, 0, 0};
    static const struct {
        int32_t asked, chosen;
        const char *reason;
    } cases[] = {{EGM_BACKING_DEFAULT, EGM_BACKING_REGISTERED, "pinned faster"},
                 {EGM_BACKING_DRIVER, EGM_BACKING_DRIVER, "asked for it"},
                 {EGM_BACKING_REGISTERED, EGM_BACKING_REGISTERED, "asked for it"},
                 {EGM_BACKING_AUTO, EGM_BACKING_REGISTERED, "pinned faster"}};
    int32_t chosen = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *reason = NULL;
        options.backing = cases[i].asked;
        OK(egm_heap_create(driver, &options, &heap));
        OK(egm_heap_backing(heap, &chosen, &reason));
        CHECK(chosen == cases[i].chosen && strstr(reason, cases[i].reason) != NULL);
        OK(egm_string_free(reason));
        OK(egm_heap_alloc(heap, 3 << 20, 0, &block));
        memset(block, 7, 3 << 20);
        OK(egm_heap_free(heap, block));
        OK(egm_heap_destroy(heap));
    }
    /* A program of a version without the field. */
    options.struct_size = offsetof(egm_heap_options, backing);
    options.backing = EGM_BACKING_DRIVER;
    OK(egm_heap_create(driver, &options, &heap));
    OK(egm_heap_backing(heap, &chosen, NULL));
    CHECK(chosen == EGM_BACKING_REGISTERED);
    OK(egm_heap_destroy(heap));
    OK(egm_driver_destroy(driver));
}

static void resizes(void)
{
    egm_driver *driver = simulated("gh200");
    egm_heap *heap = heap_with(driver, 64 << 20, 0);
    void *block;
    bool resized;
    size_t usable;
    OK(egm_heap_alloc(heap, 1 << 20, 0, &block));
    OK(egm_heap_resize(heap, block, 3 << 20, &resized));
    OK(egm_heap_usable_size(heap, block, &usable));
    CHECK(resized && usable == 3 << 20);
    memset(block, 1, usable);
    OK(egm_heap_resize(heap, block, 0, &resized));
    CHECK(!resized);
    OK(egm_heap_resize(heap, block, 4096, &resized));
    CHECK(resized && stats_of(heap).live == 4096);
    OK(egm_heap_free(heap, block));
    OK(egm_heap_alloc(heap, 100, 0, &block));
    OK(egm_heap_resize(heap, block, 112, &resized));
    CHECK(resized);
    OK(egm_heap_resize(heap, block, 113, &resized));
    CHECK(!resized);
    OK(egm_heap_free(heap, block));
    CHECK(stats_of(heap).live == 0);
    OK(egm_heap_destroy(heap));
    OK(egm_driver_destroy(driver));
}

static void after_gpu_work(void)
{
    egm_driver *driver = simulated("gh200"), *stranger = simulated("gh200");
    egm_heap *heap = heap_with(driver, 64 << 20, 0);
    egm_stream *stream, *foreign;
    egm_event *event;
    OK(egm_stream_create(driver, 0, &stream));
    OK(egm_stream_create(stranger, 0, &foreign));
    OK(egm_event_create(driver, 0, &event));
    OK(egm_event_record(event, stream));
    void *blocks[3], *handle;
    for (int i = 0; i < 3; i++)
        OK(egm_heap_alloc(heap, 64 << 10, 256, &blocks[i]));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free_after(heap, blocks[0], foreign));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free_after(heap, blocks[0], NULL));
    CHECK(stats_of(heap).live_blocks == 3);
    OK(egm_heap_free_after(heap, blocks[0], stream));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free_after(heap, blocks[0], stream));
    OK(egm_heap_free_after_event(heap, blocks[1], event));
    OK(egm_stream_handle(stream, &handle));
    OK(egm_heap_free_after_cuda_stream(heap, blocks[2], 0, handle));
    OK(egm_heap_free_after(heap, NULL, stream));
    CHECK(stats_of(heap).live_blocks == 0 && stats_of(heap).deferred_blocks == 3);
    OK(egm_heap_collect(heap, true));
    CHECK(stats_of(heap).deferred_blocks == 0);
    OK(egm_event_synchronize(event));
    bool done = false;
    OK(egm_stream_is_done(stream, &done));
    CHECK(done);

    egm_stream *borrowed;
    OK(egm_stream_borrow(driver, 0, handle, &borrowed));
    OK(egm_stream_synchronize(borrowed));
    OK(egm_stream_destroy(borrowed));
    OK(egm_stream_synchronize(stream));
    FAILS(EGM_NO_SUCH_GPU, egm_stream_create(driver, 9, &borrowed));
    OK(egm_event_destroy(event));
    OK(egm_stream_destroy(stream));
    OK(egm_stream_destroy(foreign));
    OK(egm_heap_destroy(heap));
    OK(egm_driver_destroy(driver));
    OK(egm_driver_destroy(stranger));
}

static void debug_mode(void)
{
    egm_driver *driver = simulated("gh200");
    egm_heap *heap = heap_with(driver, 64 << 20, EGM_DEBUG);
    unsigned char *block;
    bool resized;
    OK(egm_heap_alloc(heap, 100, 0, (void **)&block));
    OK(egm_heap_check(heap));
    OK(egm_heap_resize(heap, block, 50, &resized));
    CHECK(!resized);
    unsigned char kept = block[112];
    block[112] = 0;
    FAILS(EGM_DAMAGED, egm_heap_check(heap));
    CHECK(block[112] == kept); /* a check restores the bytes */
    OK(egm_heap_check(heap));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, block + 16));
    OK(egm_heap_free(heap, block));
    FAILS(EGM_INVALID_ARGUMENT, egm_heap_free(heap, block));
    block[3] = 0; /* after the free */
    FAILS(EGM_DAMAGED, egm_heap_check(heap));
    OK(egm_heap_destroy(heap));
    OK(egm_driver_destroy(driver));
}

enum { THREADS = 4, ROUNDS = 2000, HELD = 64 };

struct shared {
    egm_heap *heap;
    pthread_mutex_t lock;
    void *handed[HELD]; /* blocks that one thread allocates and another frees */
};

static void *work(void *argument)
{
    struct shared *shared = argument;
    unsigned state = (unsigned)(uintptr_t)&state;
    for (int round = 0; round < ROUNDS; round++) {
        state = state * 1664525 + 1013904223;
        size_t size = (state >> 8) % (round % 2 ? 3000 : 40000) + 1;
        unsigned char *block;
        OK(egm_heap_alloc(shared->heap, size, 0, (void **)&block));
        block[0] = block[size - 1] = (unsigned char)size;
        pthread_mutex_lock(&shared->lock);
        void **place = &shared->handed[(state >> 4) % HELD], *other = *place;
        *place = block;
        pthread_mutex_unlock(&shared->lock);
        OK(egm_heap_free(shared->heap, other));
        if (round % 100 == 0) {
            FAILS(EGM_INVALID_ARGUMENT, egm_heap_alloc(shared->heap, 0, 0, (void **)&block));
            CHECK(strstr(egm_last_error_message(), "0 bytes") != NULL);
        }
    }
    return NULL;
}

static void threads(void)
{
    egm_driver *driver = simulated("gh200");
    struct shared shared = {heap_with(driver, 64 << 20, 0), PTHREAD_MUTEX_INITIALIZER, {NULL}};
    pthread_t all[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&all[i], NULL, work, &shared) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(all[i], NULL) == 0);
    for (int i = 0; i < HELD; i++)
        OK(egm_heap_free(shared.heap, shared.handed[i]));
    CHECK(stats_of(shared.heap).live_blocks == 0);
    OK(egm_heap_destroy(shared.heap));
    OK(egm_driver_destroy(driver));
}

int main(void)
{
    blocks();
    refused();
    backings();
    resizes();
    after_gpu_work();
    debug_mode();
    threads();
    return 0;
}
