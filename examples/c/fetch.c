/*
 * Memory that `egmem serve` keeps is fetched by its name, read and written, and released.
 *
 *     cc examples/c/fetch.c $(pkg-config --cflags --libs egmem) -o fetch
 *     ./fetch unix:/run/egmem/egmem.sock weights [MACHINE]
 *
 * With MACHINE ("gh200") the program simulates one, as `egmem serve --sim` does.
 */
#include <egmem.h>
#include <stdio.h>
#include <stdlib.h>

static void check(egm_status status)
{
    if (status != EGM_OK) {
        fprintf(stderr, "%s: %s; %s\n", egm_status_name(status), egm_last_error_message(), egm_last_error_remedy());
        exit(1);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return fprintf(stderr, "usage: %s ADDRESS NAME [MACHINE]\n", argv[0]), 2;
    egm_driver *driver;
    check(argc > 3 ? egm_driver_simulated(argv[3], &driver) : egm_driver_open(&driver));
    egm_client *client;
    check(egm_client_connect(driver, argv[1], NULL, &client));
    egm_buffer *memory;
    check(egm_client_fetch(client, argv[2], &memory));

    uint64_t size, word;
    void *at;
    check(egm_buffer_size(memory, &size));
    check(egm_buffer_ptr(memory, &at));
    check(egm_buffer_read(memory, 0, &word, sizeof word));
    printf("%s: %llu bytes at %p; the first word was %llu\n", argv[2], (unsigned long long)size, at,
           (unsigned long long)word);
    word++;
    check(egm_buffer_write(memory, 0, &word, sizeof word));

    check(egm_buffer_destroy(memory)); /* ends the lease */
    check(egm_client_destroy(client));
    check(egm_driver_destroy(driver));
    return 0;
}
