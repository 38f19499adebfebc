"""The P2P attributes of each pair of GPUs; VMM memory is shared by an fd, and the driver has no cudaIpc handle for it."""

import ctypes

import egmem

try:
    driver = egmem.open()
except egmem.NoDriver:
    driver = egmem.simulated("h200x8")
    print("SIMULATED: there is no GPU here")

for gpu in driver.topology().to_dict()["gpus"]:
    for link in gpu["peer_links"]:
        atomics, rank = link["native_atomics"], link["performance_rank"]
        pair = f"GPU {gpu['ordinal']} to {link['gpu']}"
        print(f"{pair}: access {link['access']}, native atomics {atomics}, rank {rank}, {link['kind']}")
        assert link["access"] == (link["gpu"] in gpu["peers"])

buffer = egmem.Buffer("2MiB", device=0, shareable=True, driver=driver)
if driver.is_simulated:
    print("cuIpcGetMemHandle is not tried without a GPU")
else:
    cuda, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    handle = ctypes.create_string_buffer(64)
    code = cuda.cuIpcGetMemHandle(handle, ctypes.c_uint64(buffer.address))
    print(f"cuIpcGetMemHandle of VMM memory: error {code}")
    assert code != 0
    cuda.cuDevicePrimaryCtxRelease_v2(device)
