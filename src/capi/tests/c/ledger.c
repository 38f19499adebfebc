/* EGMEM_LEAKS=1 and EGMEM_PS=1 work in programs in C, and show their lines. */
#define _GNU_SOURCE
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "self.h"

static egm_driver *driver;
static int line_of_heap, line_of_buffer, line_of_pool;

/* What the process still has at its exit, where a leak checker finds it. */
static struct {
    egm_heap *heap;
    void *block;
    egm_stream *stream;
    egm_pool *pool;
    egm_buffer *pooled, *without_a_line[2];
    int count;
} kept;

/* Allocates on lines that it notes. */
static egm_buffer *allocate(void)
{
    driver = simulated("gh200");
    egm_heap_options options = {0};
    options.struct_size = sizeof options;
    options.location.kind = EGM_LOCATION_HOST_NUMA;
    options.limit = 64 << 20;
    options.label = "a heap";
    line_of_heap = __LINE__ + 1;
    OK(egm_heap_create(driver, &options, &kept.heap));
    OK(egm_heap_alloc(kept.heap, 3000, 0, &kept.block)); /* the chunk has the line of the heap */

    egm_buffer *buffer = NULL;
    line_of_buffer = __LINE__ + 1;
    OK(egm_buffer_near(driver, 0, 4096, &buffer));
    egm_pool_options pool_options = {sizeof pool_options, {EGM_LOCATION_HOST_NUMA, 0}, NULL, 0, 0, 0, 0, 0, "a pool"};
    OK(egm_stream_create(driver, 0, &kept.stream));
    OK(egm_pool_create(driver, &pool_options, &kept.pool));
    line_of_pool = __LINE__ + 1;
    OK(egm_pool_alloc(kept.pool, 4096, kept.stream, &kept.pooled));
    return buffer;
}

/* By its address, as other languages call: no line is known. */
static void allocate_without_a_line(void)
{
    egm_status (*near)(const egm_driver *, int32_t, uint64_t, egm_buffer **) = egm_buffer_near;
    OK(near(driver, 0, 4096, &kept.without_a_line[kept.count++]));
}

static void act(const char *role)
{
    egm_buffer *buffer = allocate();
    if (strcmp(role, "leaves") == 0) {
        allocate_without_a_line();
        egm_call_site("generated.c", 7, NULL);
        FAILS(EGM_INVALID_ARGUMENT, (egm_buffer_near)(driver, 0, 4096, NULL));
        allocate_without_a_line(); /* the call that failed has taken the line */
        egm_call_site("generated.c", 8, NULL);
        allocate_without_a_line();
    }
    if (strcmp(role, "shows") == 0)
        fprintf(stderr, "ready\n");
    wait_for_end();
    OK(egm_buffer_destroy(buffer));
}

static void expect_lines(const char *text, const char *format, int but)
{
    const int lines[] = {line_of_heap, line_of_buffer, line_of_pool};
    for (int i = 0; i < 3; i++) {
        char line[100];
        snprintf(line, sizeof line, format, lines[i]);
        if (lines[i] == but)
            CHECK(!strstr(text, line));
        else
            expect_word(text, line);
    }
}

static char told[1 << 20];

static void what_is_left_at_the_exit_is_reported(void)
{
    struct self self = run_self("leaves", "EGMEM_LEAKS");
    end_self(&self, told, sizeof told);
    expect_word(told, "egmem: still allocated at exit: 5 allocations");
    expect_lines(told, "ledger.c:%d", line_of_buffer);
    expect_word(told, "(self leaves)");
    expect_word(told, "a heap");
    expect_word(told, "generated.c:8");
    CHECK(!strstr(told, "generated.c:7") && !strstr(told, ".rs"));
}

/* Reads a ledger as `egmem ps` does. */
static void the_ledger_is_offered(void)
{
    char folder[] = "/tmp/egmem-test-XXXXXX", path[300], word[100];
    CHECK(mkdtemp(folder) && setenv("XDG_RUNTIME_DIR", folder, 1) == 0);
    struct self self = run_self("shows", "EGMEM_PS");
    CHECK(read(self.errors, told, 6) == 6 && memcmp(told, "ready\n", 6) == 0);

    snprintf(path, sizeof path, "%s/egmem", folder);
    DIR *offers = opendir(path);
    CHECK(offers);
    struct sockaddr_un address = {0};
    address.sun_family = AF_UNIX;
    snprintf(word, sizeof word, "ps-%d-", (int)self.pid);
    for (struct dirent *entry; (entry = readdir(offers));)
        if (strncmp(entry->d_name, word, strlen(word)) == 0)
            CHECK(snprintf(address.sun_path, sizeof address.sun_path, "%s/%.60s", path, entry->d_name) > 0);
    closedir(offers);
    int from = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(from >= 0 && connect(from, (struct sockaddr *)&address, sizeof address) == 0);
    size_t have = 0;
    for (ssize_t got; have + 1 < sizeof told && (got = read(from, told + have, sizeof told - have - 1)) > 0;)
        have += (size_t)got;
    close(from);
    /* The text is a string in a message in JSON: without its escapes it is the ledger's own JSON. */
    size_t kept = 0;
    for (size_t at = 0; at < have; at++)
        if (told[at] != '\\')
            told[kept++] = told[at];
    have = kept;
    char *text = memmem(told, have, "{\"process\"", 10);
    CHECK(text);
    told[have] = 0;
    expect_lines(text, "\"line\":%d", 0);
    expect_word(text, "\"function\":\"allocate\"");
    expect_word(text, "\"command\":\"self shows\"");

    end_self(&self, told, sizeof told);
    CHECK(rmdir(path) == 0 && rmdir(folder) == 0); /* the socket is gone */
}

int main(int count, char **arguments)
{
    if (count > 1) {
        act(arguments[1]);
        return 0;
    }
    OK(egm_buffer_destroy(allocate())); /* for the lines */
    what_is_left_at_the_exit_is_reported();
    the_ledger_is_offered();
    return 0;
}
