#[cfg(not(loom))]
mod threads;
#[cfg(loom)]
mod under_loom;
