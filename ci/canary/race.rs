//! Two threads write one variable with nothing between them. Few times: the other access of a race is
//! only reported while it is still in its thread's history.
static mut SHARED: u64 = 0;

fn write() {
    for _ in 0..10 {
        let shared = &raw mut SHARED;
        // SAFETY: none, on purpose.
        unsafe { shared.write_volatile(shared.read_volatile() + 1) };
    }
}

fn main() {
    let other = std::thread::spawn(write);
    write();
    other.join().unwrap();
}
