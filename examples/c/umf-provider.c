/*
 * UMF's pools take their memory from a heap of egmem, so that a program written for UMF gets Extended GPU Memory.
 *
 *     cc examples/c/umf-provider.c $(pkg-config --cflags --libs egmem) -lumf -o umf-provider
 *
 * On the first GPU's node; where there is no GPU, on a simulated machine.
 */
#include <stdio.h>
#include <string.h>

#include <egmem_umf.h>
#include <umf/memory_pool.h>
#include <umf/memory_provider.h>
#include <umf/pools/pool_disjoint.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s failed; egmem: %s; %s\n", what, egm_last_error_message(), egm_last_error_remedy());
    return 1;
}

/* Allocates blocks from UMF's disjoint pool, and frees them. */
static int use(umf_memory_provider_handle_t provider, const egm_heap *heap)
{
    umf_disjoint_pool_params_handle_t params;
    umf_memory_pool_handle_t pool;
    if (umfDisjointPoolParamsCreate(&params) || umfDisjointPoolParamsSetSlabMinSize(params, 2 << 20))
        return failed("umfDisjointPoolParamsCreate");
    umf_result_t made = umfPoolCreate(umfDisjointPoolOps(), provider, params, 0, &pool);
    umfDisjointPoolParamsDestroy(params);
    if (made)
        return failed("umfPoolCreate");
    void *blocks[100];
    for (int i = 0; i < 100; i++) {
        if (!(blocks[i] = umfPoolMalloc(pool, 1000 * (i + 1))))
            return failed("umfPoolMalloc");
        memset(blocks[i], i, 1000 * (i + 1));
    }
    egm_heap_stats stats = {.struct_size = sizeof stats};
    if (egm_heap_get_stats(heap, &stats))
        return failed("egm_heap_get_stats");
    printf("100 blocks of UMF's pool lie in %llu of the heap, %llu KiB together\n",
           (unsigned long long)stats.live_blocks, (unsigned long long)stats.live >> 10);
    for (int i = 0; i < 100; i++) {
        if (((unsigned char *)blocks[i])[999] != i || umfPoolFree(pool, blocks[i]))
            return failed("umfPoolFree");
    }
    return umfPoolDestroy(pool) ? failed("umfPoolDestroy") : 0;
}

int main(void)
{
    egm_driver *driver;
    egm_topology *topology;
    egm_gpu gpu;
    egm_heap *heap;
    if (egm_driver_open(&driver) && egm_driver_simulated("gh200", &driver))
        return failed("egm_driver_simulated");
    if (egm_topology_discover(driver, &topology) || egm_topology_gpu(topology, 0, &gpu))
        return failed("egm_topology_discover");
    egm_heap_options options = {.struct_size = sizeof options, .location = {EGM_LOCATION_HOST_NUMA, gpu.host_node}};
    if (egm_heap_create(driver, &options, &heap))
        return failed("egm_heap_create");

    umf_memory_provider_ops_t ops = egm_umf_provider_ops();
    umf_memory_provider_handle_t provider;
    if (umfMemoryProviderCreate(&ops, heap, &provider))
        return failed("umfMemoryProviderCreate");
    int status = use(provider, heap);
    umfMemoryProviderDestroy(provider);
    if (egm_heap_destroy(heap)) /* fails if the pool kept a block */
        return failed("egm_heap_destroy");
    egm_topology_destroy(topology);
    egm_driver_destroy(driver);
    return status;
}
