/* Drivers, topology, buffers, the report, and the refusals of each. */
#include "check.h"

static void versions(void)
{
    CHECK(egm_abi_version() == EGM_ABI_VERSION);
    CHECK(strchr(egm_version(), '.') != NULL);
    CHECK(strcmp(egm_status_name(EGM_HEAP_FULL), "EGM_HEAP_FULL") == 0);
    CHECK(strcmp(egm_status_name(-7), "EGM_OTHER") == 0);
    CHECK(strcmp(egm_last_error_message(), "") == 0 && strcmp(egm_last_error_remedy(), "") == 0);
    CHECK(egm_last_error_cuda_code() == 0);
}

static void drivers(void)
{
    egm_driver *driver = (egm_driver *)&driver;
    egm_driver *before = driver;
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_simulated("gh300", &driver));
    CHECK(strstr(egm_last_error_message(), "gh200x4") != NULL);
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_simulated(NULL, &driver));
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_simulated("\xff", &driver));
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_simulated("{\"gpus\": 7}", &driver));
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_simulated("gh200", NULL));
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_open(NULL));
    CHECK(driver == before);

    bool is = false;
    OK(egm_driver_simulated("gh200", &driver));
    OK(egm_driver_is_simulated(driver, &is));
    CHECK(is);
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_is_simulated(NULL, &is));
    FAILS(EGM_INVALID_ARGUMENT, egm_driver_is_simulated(driver, NULL));
    OK(egm_driver_destroy(driver));
    OK(egm_driver_destroy(NULL));
}

static void topology(void)
{
    egm_driver *driver = simulated("gh200x4");
    egm_topology *topology;
    OK(egm_topology_discover(driver, &topology));
    OK(egm_driver_destroy(driver)); /* the topology keeps what it needs */

    size_t gpus, nodes;
    OK(egm_topology_gpu_count(topology, &gpus));
    OK(egm_topology_node_count(topology, &nodes));
    CHECK(gpus == 4 && nodes == 4);
    egm_gpu gpu;
    OK(egm_topology_gpu(topology, 2, &gpu));
    CHECK(gpu.ordinal == 2 && gpu.host_node == 2 && gpu.memory_node == 20 && gpu.link == EGM_LINK_NVLINK_C2C);
    CHECK(gpu.compute_major == 9 && gpu.coherent == 1 && gpu.memory == (uint64_t)96 << 30);
    FAILS(EGM_NO_SUCH_GPU, egm_topology_gpu(topology, 4, &gpu));
    FAILS(EGM_NO_SUCH_GPU, egm_topology_gpu(topology, -1, &gpu));
    egm_node node;
    OK(egm_topology_node(topology, 3, &node));
    CHECK(node.id == 3 && node.gpus == 1 && node.memory_free <= node.memory_total);
    FAILS(EGM_INVALID_ARGUMENT, egm_topology_node(topology, 4, &node));
    CHECK(node.id == 3);

    char *json;
    OK(egm_topology_json(topology, &json));
    CHECK(strstr(json, "NVIDIA GH200") != NULL);
    OK(egm_string_free(json));
    OK(egm_string_free(NULL));
    OK(egm_topology_destroy(topology));
}

static void buffers(void)
{
    egm_driver *driver = simulated("gh200x4");
    egm_buffer *buffer = NULL;
    egm_buffer_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 1}, 3 << 20, NULL, 0, 0, 0, 0, "weights", 0, 0};
    OK(egm_buffer_create(driver, &options, &buffer));
    uint64_t size;
    OK(egm_buffer_size(buffer, &size));
    CHECK(size == 3 << 20);
    egm_location where;
    OK(egm_buffer_location(buffer, &where));
    CHECK(where.kind == EGM_LOCATION_HOST_NUMA && where.id == 1);

    void *pointer;
    OK(egm_buffer_ptr(buffer, &pointer));
    OK(egm_buffer_fill(buffer, 0, size, 7));
    CHECK(((unsigned char *)pointer)[size - 1] == 7);
    memcpy(pointer, "by the CPU", 11);
    char text[11];
    OK(egm_buffer_read(buffer, 0, text, sizeof text));
    CHECK(strcmp(text, "by the CPU") == 0);
    OK(egm_buffer_write(buffer, size - 4, "end", 4));
    CHECK(strcmp((char *)pointer + size - 4, "end") == 0);
    FAILS(EGM_OUT_OF_RANGE, egm_buffer_write(buffer, size - 3, "end", 4));
    FAILS(EGM_OUT_OF_RANGE, egm_buffer_read(buffer, UINT64_MAX, text, 4));
    FAILS(EGM_OUT_OF_RANGE, egm_buffer_read(buffer, 0, text, SIZE_MAX));
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_write(buffer, 0, NULL, 4));
    OK(egm_buffer_write(buffer, 0, NULL, 0));

    int32_t access;
    egm_location gpu = {EGM_LOCATION_DEVICE, 3};
    OK(egm_buffer_access(buffer, gpu, &access));
    CHECK(access == EGM_ACCESS_READ_WRITE);
    egm_grant grants[] = {{{EGM_LOCATION_DEVICE, 3}, EGM_ACCESS_READ}, {{EGM_LOCATION_HOST, 0}, EGM_ACCESS_READ}};
    OK(egm_buffer_set_access(buffer, grants, 2));
    OK(egm_buffer_access(buffer, gpu, &access));
    CHECK(access == EGM_ACCESS_READ);
    FAILS(EGM_NOT_ACCESSIBLE, egm_buffer_write(buffer, 0, "x", 1));
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_use_on(buffer, NULL));
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_free_on(buffer, NULL));
    OK(egm_driver_destroy(driver)); /* the buffer keeps the driver */
    OK(egm_buffer_destroy(buffer));
    OK(egm_buffer_destroy(NULL));
}

static void backings(void)
{
    egm_driver *driver = simulated("h200x8");
    egm_buffer *buffer = NULL;
    egm_buffer_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, 3 << 20, NULL, 0, 0, 0, 0, NULL, 0, 0};
    static const struct {
        int32_t asked, chosen;
        const char *reason;
    } cases[] = {{EGM_BACKING_DEFAULT, EGM_BACKING_DRIVER, "asked for it"},
                 {EGM_BACKING_DRIVER, EGM_BACKING_DRIVER, "asked for it"},
                 {EGM_BACKING_REGISTERED, EGM_BACKING_REGISTERED, "asked for it"},
                 {EGM_BACKING_AUTO, EGM_BACKING_REGISTERED, "pinned faster"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t chosen = 0;
        char *reason = NULL;
        options.backing = cases[i].asked;
        OK(egm_buffer_create(driver, &options, &buffer));
        OK(egm_buffer_backing(buffer, &chosen, &reason));
        CHECK(chosen == cases[i].chosen && strstr(reason, cases[i].reason) != NULL);
        OK(egm_string_free(reason));
        OK(egm_buffer_backing(buffer, &chosen, NULL));
        OK(egm_buffer_fill(buffer, 0, 3 << 20, 7));
        OK(egm_buffer_destroy(buffer));
    }
    /* A program of a version without the field. */
    options.struct_size = offsetof(egm_buffer_options, backing);
    OK(egm_buffer_create(driver, &options, &buffer));
    int32_t chosen = 0;
    OK(egm_buffer_backing(buffer, &chosen, NULL));
    CHECK(chosen == EGM_BACKING_DRIVER);
    OK(egm_buffer_destroy(buffer));
    OK(egm_driver_destroy(driver));
}

static void refused_buffers(void)
{
    egm_driver *driver = simulated("gh200x4");
    egm_buffer *buffer = NULL;
    egm_buffer_options good = {sizeof good, {EGM_LOCATION_HOST_NUMA, 0}, 2 << 20, NULL, 0, 0, 0, 0, NULL, 0, 0};
    egm_buffer_options options = good;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(NULL, &good, &buffer));
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, NULL, &buffer));
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &good, NULL));
    options.struct_size = 0;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &options, &buffer));
    options = good, options.bytes = 0;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &options, &buffer));
    options = good, options.bytes = UINT64_MAX;
    CHECK(egm_buffer_create(driver, &options, &buffer) != EGM_OK);
    options = good, options.location.kind = 9;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &options, &buffer));
    options = good, options.location.id = 77;
    FAILS(EGM_NO_SUCH_NODE, egm_buffer_create(driver, &options, &buffer));
    options = good, options.flags = EGM_DEBUG;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &options, &buffer));
    options = good, options.handle_types = 1u << 30;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &options, &buffer));
    options = good, options.grant_count = 1;
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_create(driver, &options, &buffer));
    options = good, options.bytes = (uint64_t)1 << 40;
    FAILS(EGM_NODE_TOO_FULL, egm_buffer_create(driver, &options, &buffer));
    CHECK(strstr(egm_last_error_remedy(), "ask for less") != NULL);
    FAILS(EGM_NO_SUCH_GPU, egm_buffer_near(driver, 9, 4096, &buffer));
    CHECK(buffer == NULL);
    OK(egm_buffer_near(driver, 3, 4096, &buffer));
    OK(egm_buffer_destroy(buffer));
    OK(egm_driver_destroy(driver));
}

static void report(void)
{
    egm_driver *driver = simulated("gh200");
    char *json;
    OK(egm_capabilities_json(driver, &json));
    CHECK(strstr(json, "\"works\":true") != NULL);
    OK(egm_string_free(json));
    OK(egm_driver_destroy(driver));
}

int main(void)
{
    versions();
    drivers();
    topology();
    buffers();
    backings();
    refused_buffers();
    report();
    return 0;
}
