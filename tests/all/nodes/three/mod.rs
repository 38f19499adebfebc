//! The machine `three`: nodes 0 and 1 with CPUs 0-1 and 2-3, node 2 with memory alone; distances 20 between the first
//! two, 30 to the third. PCI devices stand for the stub's GPUs: GPU 0 near node 0, GPU 1 near node 1.

mod cpusets;
mod discovery;
mod huge_pages;
mod offline;
mod placement;
mod registered;
mod touch;
