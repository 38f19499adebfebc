"""Read duplication without managed memory: a copy of a table on each GPU, placed before the first kernel reads it."""

import egmem

try:
    driver = egmem.open()
except egmem.NoDriver:
    driver = egmem.simulated("h200x8")
    print("SIMULATED: there is no GPU here")

table = bytes(range(256)) * 4096
source = egmem.Buffer(len(table), near_gpu=0, label="table", driver=driver)
source.write(table)

# One copy for each GPU, which that GPU alone may use.
gpus = driver.topology().gpus
copies = {}
for gpu in gpus:
    copies[gpu.ordinal] = egmem.Buffer(len(table), device=gpu, access_by=[gpu], label=f"table of GPU {gpu.ordinal}", driver=driver)
streams = {gpu.ordinal: egmem.Stream(gpu, driver=driver) for gpu in gpus}
for ordinal, copy in copies.items():
    source.copy_to(copy, streams[ordinal])  # all GPUs at once
for stream in streams.values():
    stream.synchronize()

# Kernels of GPU n take copies[n].address, or copies[n].view("uint8", device=f"cuda:{n}") by DLPack. Here each GPU reads its own:
for ordinal, copy in copies.items():
    seen = egmem.Buffer(len(table), near_gpu=ordinal, driver=driver)
    copy.copy_to(seen, streams[ordinal])
    streams[ordinal].synchronize()
    assert seen.read() == table
    print(f"{copy.nbytes} bytes in {copy.location} at {copy.address:#x}")
assert len({copy.address for copy in copies.values()}) == len(gpus)
