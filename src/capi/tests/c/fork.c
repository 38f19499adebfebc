/* A forked child destroys its copies of handles: nothing is given back, nothing waits, and the parent goes on. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static egm_driver *driver;
static egm_stream *stream;
static egm_pool *pool;
static egm_heap *heap;
static egm_buffer *own, *pooled, *left;
static void *block;

/* In the child. */
static void destroy(void)
{
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_free_on(pooled, stream));
    OK(egm_buffer_destroy(pooled)); /* it was not destroyed by the call that failed */
    OK(egm_buffer_destroy(left));
    OK(egm_buffer_destroy(own));
    OK(egm_heap_destroy(heap)); /* with a block in use, and another thread's cache */
    OK(egm_pool_destroy(pool));
    OK(egm_stream_destroy(stream));
    OK(egm_driver_destroy(driver));
}

struct thread {
    pthread_barrier_t barrier;
};

/* Keeps the heap busy until the second barrier. */
static void *keep_a_cache(void *arg)
{
    struct thread *thread = arg;
    void *cached;
    OK(egm_heap_alloc(heap, 64, 0, &cached));
    OK(egm_heap_free(heap, cached));
    pthread_barrier_wait(&thread->barrier);
    pthread_barrier_wait(&thread->barrier);
    return NULL;
}

int main(void)
{
    driver = simulated("gh200");
    OK(egm_stream_create(driver, 0, &stream));
    egm_pool_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, NULL, 0, 0, UINT64_MAX, 0, 0, "pool"};
    OK(egm_pool_create(driver, &options, &pool));
    OK(egm_pool_alloc(pool, 64 << 10, stream, &pooled));
    OK(egm_pool_alloc(pool, 64 << 10, stream, &left));
    OK(egm_buffer_near(driver, 0, 4096, &own));
    heap = heap_with(driver, 64 << 20, 0);
    OK(egm_heap_alloc(heap, 3000, 0, &block));

    struct thread thread;
    pthread_t id;
    CHECK(pthread_barrier_init(&thread.barrier, NULL, 2) == 0);
    CHECK(pthread_create(&id, NULL, keep_a_cache, &thread) == 0);
    pthread_barrier_wait(&thread.barrier);

    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60); /* ends a child that waits for a thread of its parent */
        destroy();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pthread_barrier_wait(&thread.barrier);
    CHECK(pthread_join(id, NULL) == 0);

    FAILS(EGM_STILL_HELD, egm_heap_destroy(heap));
    OK(egm_heap_free(heap, block));
    OK(egm_heap_destroy(heap));
    OK(egm_buffer_write(own, 0, "parent", 7));
    OK(egm_buffer_destroy(own));
    OK(egm_buffer_free_on(pooled, stream));
    OK(egm_buffer_destroy(left));
    OK(egm_pool_destroy(pool));
    OK(egm_stream_destroy(stream));
    OK(egm_driver_destroy(driver));
    return 0;
}
