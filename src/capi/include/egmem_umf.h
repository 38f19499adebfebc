/*
 * A memory provider for UMF, the Unified Memory Framework 1.x, on a heap of egmem: egm_umf_provider_ops() has
 * the functions for umfMemoryProviderCreate(), whose parameters are the egm_heap*. Needs UMF's headers.
 *
 * The provider borrows the heap: destroy the provider first. Any thread may use it, several at a time. Its memory is the
 * CPU's and every GPU's that the heap was made for.
 */
#ifndef EGMEM_UMF_H
#define EGMEM_UMF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <umf/memory_provider_ops.h>

#include "egmem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Pools ask for pieces of at least this many bytes; every block is aligned to a granule of the heap. */
enum { EGM_UMF_PAGE = 4096 };

static inline umf_result_t egm_umf_result(egm_status status)
{
    switch (status) {
    case EGM_OK: return UMF_RESULT_SUCCESS;
    case EGM_INVALID_ARGUMENT: return UMF_RESULT_ERROR_INVALID_ARGUMENT;
    case EGM_UNSUPPORTED: return UMF_RESULT_ERROR_NOT_SUPPORTED;
    case EGM_OUT_OF_MEMORY:
    case EGM_NODE_TOO_FULL:
    case EGM_HEAP_FULL: return UMF_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    default: return UMF_RESULT_ERROR_MEMORY_PROVIDER_SPECIFIC; /* egm_umf_last_error() has the message */
    }
}

static inline umf_result_t egm_umf_initialize(const void *params, void **provider)
{
    if (!params)
        return UMF_RESULT_ERROR_INVALID_ARGUMENT;
    *provider = (void *)(uintptr_t)params;
    return UMF_RESULT_SUCCESS;
}

static inline umf_result_t egm_umf_finalize(void *provider)
{
    (void)provider;
    return UMF_RESULT_SUCCESS;
}

static inline umf_result_t egm_umf_alloc(void *provider, size_t size, size_t align, void **out)
{
    return egm_umf_result(egm_heap_alloc((egm_heap *)provider, size, align ? align : EGM_UMF_PAGE, out));
}

static inline umf_result_t egm_umf_free(void *provider, void *block, size_t size)
{
    (void)size;
    return egm_umf_result(egm_heap_free((egm_heap *)provider, block));
}

static inline umf_result_t egm_umf_last_error(void *provider, const char **message, int32_t *code)
{
    (void)provider;
    if (message)
        *message = egm_last_error_message();
    if (code)
        *code = egm_last_error_cuda_code();
    return UMF_RESULT_SUCCESS;
}

static inline umf_result_t egm_umf_recommended_page_size(void *provider, size_t size, size_t *page)
{
    (void)provider, (void)size;
    *page = EGM_UMF_PAGE;
    return UMF_RESULT_SUCCESS;
}

static inline umf_result_t egm_umf_min_page_size(void *provider, const void *block, size_t *page)
{
    (void)provider, (void)block;
    *page = EGM_UMF_PAGE;
    return UMF_RESULT_SUCCESS;
}

static inline umf_result_t egm_umf_name(void *provider, const char **name)
{
    (void)provider;
    *name = "EGMEM";
    return UMF_RESULT_SUCCESS;
}

static inline umf_result_t egm_umf_cache_line_size(void *provider, size_t *size)
{
    (void)provider;
    *size = 128; /* a GPU's; a Grace CPU has 64 */
    return UMF_RESULT_SUCCESS;
}

/* Returns the provider's functions, in the version of the headers that the program is compiled with. */
static inline umf_memory_provider_ops_t egm_umf_provider_ops(void)
{
    umf_memory_provider_ops_t ops;
    memset(&ops, 0, sizeof ops); /* the optional functions stay null */
    ops.version = UMF_PROVIDER_OPS_VERSION_CURRENT;
    ops.initialize = egm_umf_initialize;
    ops.finalize = egm_umf_finalize;
    ops.alloc = egm_umf_alloc;
    ops.free = egm_umf_free;
    ops.get_last_native_error = egm_umf_last_error;
    ops.get_recommended_page_size = egm_umf_recommended_page_size;
    ops.get_min_page_size = egm_umf_min_page_size;
    ops.get_name = egm_umf_name;
#if UMF_PROVIDER_OPS_VERSION_CURRENT >= UMF_MAKE_VERSION(1, 2)
    ops.get_cache_line_size = egm_umf_cache_line_size;
#endif
    return ops;
}

#ifdef __cplusplus
}
#endif

#endif
