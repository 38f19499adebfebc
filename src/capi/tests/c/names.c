/* Memory that `egmem serve` creates, and names at it. `names ADDRESS`: a server that simulates a GH200 and lets this user create
 * memory below its own name. */

#include "check.h"

static egm_client *connected(const egm_driver *driver, const char *address)
{
    egm_client *client = NULL;
    OK(egm_client_connect(driver, address, NULL, &client));
    return client;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    egm_driver *driver = simulated("gh200");
    egm_client *client = connected(driver, argv[1]);
    char *own, *list, name[300];
    OK(egm_client_peer_name(client, &own));
    CHECK(strncmp(own, "uid:", 4) == 0);
    snprintf(name, sizeof name, "%s/tier", own);
    OK(egm_string_free(own));

    /* Created once, and found again by the next process. */
    const char *peers[] = {"*"};
    egm_create_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, peers, 1, 0, 0};
    egm_entry entry = {0};
    OK(egm_client_create(client, name, 4 << 20, &options, &entry));
    CHECK(entry.bytes == 4 << 20 && entry.location.kind == EGM_LOCATION_HOST_NUMA && entry.leases == 0);
    FAILS(EGM_REFUSED, egm_client_create(client, name, 4 << 20, &options, NULL));
    CHECK(strstr(egm_last_error_message(), "exists already") && strstr(egm_last_error_remedy(), "another name"));
    options.flags = EGM_EXIST_OK;
    OK(egm_client_create(client, name, 4 << 20, &options, NULL));
    FAILS(EGM_MISMATCHED, egm_client_create(client, name, 2 << 20, &options, NULL));
    FAILS(EGM_REFUSED, egm_client_create(client, "of-nobody", 1 << 20, NULL, NULL));

    OK(egm_client_wait(client, name, 10000, &entry));
    CHECK(entry.bytes == 4 << 20);
    FAILS(EGM_TIMED_OUT, egm_client_wait(client, "later", 1, NULL));
    OK(egm_client_list_json(client, "", &list));
    CHECK(strstr(list, name) && strstr(list, "\"bytes\":4194304"));
    OK(egm_string_free(list));
    OK(egm_client_list_json(client, "none", &list));
    CHECK(strcmp(list, "[]") == 0);
    OK(egm_string_free(list));

    /* Its bytes outlive their writer. */
    egm_buffer *memory;
    OK(egm_client_fetch(client, name, &memory));
    OK(egm_buffer_write(memory, 100, "kept", 5));
    OK(egm_buffer_destroy(memory));
    OK(egm_client_destroy(client));
    client = connected(driver, argv[1]);
    char kept[5];
    OK(egm_client_fetch(client, name, &memory));
    OK(egm_buffer_read(memory, 100, kept, sizeof kept));
    CHECK(strcmp(kept, "kept") == 0);

    /* Memory that is held is not deleted. */
    FAILS(EGM_TIMED_OUT, egm_client_delete(client, name, 1));
    OK(egm_buffer_destroy(memory));
    egm_status deleted = egm_client_delete(client, name, 10000);
    CHECK(deleted == EGM_OK || deleted == EGM_REFUSED); /* it may have gone with its last lease */
    FAILS(EGM_REFUSED, egm_client_delete(client, name, 10000));
    FAILS(EGM_REFUSED, egm_client_fetch(client, name, &memory));
    OK(egm_client_destroy(client));
    OK(egm_driver_destroy(driver));
    return 0;
}
